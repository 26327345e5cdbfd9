"""Philox4x32-7: known answers, an implementation in Python integers, and which word each group takes."""

import torch

from nmkernels.reference import philox4x32, uniforms24, word_pairs
from python_tests.for_each import for_each

KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
]


def words(text):
    return [int(x, 16) for x in text.split()]


def in_python(counter, key):
    c, k = list(counter), list(key)
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@for_each("counter, key, answer", KNOWN)
def test_known_answers_of_random123(counter, key, answer):
    assert philox4x32(torch.tensor(words(counter)), tuple(words(key))).tolist() == words(answer)
    assert in_python(words(counter), words(key)) == words(answer)


@for_each("seed, offset", [(0, 0), (7, 3), (-1, -2), (2**62 + 5, 2**40 + 9), (-(2**63), 2**63 - 1)])
@for_each("first", [0, 1, 6, 2**34 - 2, 2**34 + 3])
def test_layout_of_key_counter_and_word(seed, offset, first):
    def split(x):
        return [x % 2**32, (x >> 32) % 2**32]

    tensor = torch.tensor([seed, offset])
    one = [in_python(split(j >> 2) + split(offset), split(seed))[j & 3] >> 8 for j in range(first, first + 11)]
    two = [in_python(split(j) + split(offset), split(seed))[:2] for j in range(first, first + 11)]
    assert uniforms24(tensor, 11, first).tolist() == one
    assert word_pairs(tensor, 11, first).tolist() == two
