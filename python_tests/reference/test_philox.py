"""Philox4x32-10: known answers, an implementation in Python integers, and which word each group takes."""

import torch

from nmkernels.reference import pairs24, philox4x32, uniforms24
from python_tests.each import each

KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(x, 16) for x in text.split()]


def in_python(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@each("counter, key, answer", KNOWN)
def test_known_answers_of_random123(counter, key, answer):
    assert philox4x32(torch.tensor(words(counter)), tuple(words(key))).tolist() == words(answer)
    assert in_python(words(counter), words(key)) == words(answer)


@each("seed, offset", [(0, 0), (7, 3), (-1, -2), (2**62 + 5, 2**40 + 9), (-(2**63), 2**63 - 1)])
@each("first", [0, 1, 6, 2**34 - 2, 2**34 + 3])
def test_layout_of_key_counter_and_word(seed, offset, first):
    def split(x):
        return [x % 2**32, (x >> 32) % 2**32]

    tensor = torch.tensor([seed, offset])
    one = [in_python(split(j >> 2) + split(offset), split(seed))[j & 3] >> 8 for j in range(first, first + 11)]
    two = [[w >> 8 for w in in_python(split(j) + split(offset), split(seed))[:2]] for j in range(first, first + 11)]
    assert uniforms24(tensor, 11, first).tolist() == one
    assert pairs24(tensor, 11, first).tolist() == two
