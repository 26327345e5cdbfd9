"""Philox4x32-10 in the core: the known answers of Random123, and the same words as the reference."""

from __future__ import annotations

import pytest
import torch

from nmkernels import reference

FULL = 0xFFFFFFFF
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL,) * 4, (FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize("counter, key, words", KNOWN, ids=["zeros", "ones", "pi"])
def test_known_answers(core, counter, key, words):
    assert tuple(core.philox(counter, *key)) == words


def test_same_words_as_the_reference(core):
    gen = torch.Generator().manual_seed(0)
    draws = torch.randint(0, 2**32, (50, 6), generator=gen)
    for row in draws:
        expected = reference.philox4x32(row[:4], row[4:]).tolist()
        assert core.philox(row[:4].tolist(), *row[4:].tolist()) == expected
