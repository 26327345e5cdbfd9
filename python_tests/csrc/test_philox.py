"""Philox4x32-10 in the core: the words of the reference, whose own tests have the known answers of Random123."""

from __future__ import annotations

import torch

from nmkernels import reference


def test_same_words_as_the_reference(core):
    gen = torch.Generator().manual_seed(0)
    draws = torch.randint(0, 2**32, (50, 6), generator=gen)
    for row in draws:
        expected = reference.philox4x32(row[:4], row[4:]).tolist()
        assert core.philox(row[:4].tolist(), *row[4:].tolist()) == expected
