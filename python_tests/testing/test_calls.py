"""The table lists every op, its calls are valid, and the small call of a kind is of that kind and its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from nmkernels import dispatch, ops
from nmkernels.backends.shared import tensors
from nmkernels.ops import verify
from nmkernels.ops.define import CALLS
from nmkernels.reference.layouts import layout_of
from nmkernels.testing import assert_equal_bits
from nmkernels.testing.calls import DTYPES, LAYOUTS, MAKERS, PATTERNS, TOKENS, Draw, made, samples, small, table
from python_tests.for_each import for_each
from python_tests.ops.samples import adamw, seed


def test_every_op_has_one() -> None:
    assert set(MAKERS) == set(samples()) == set(table(64, 128)) == {op for op in dispatch._impls if op.startswith("nm_")}


def test_gemms_are_listed_in_every_dtype_pattern_and_layout() -> None:
    kinds = table(64, 128)
    wanted = {(dtype, n, m, "canonical") for dtype in DTYPES for n, m in PATTERNS}
    wanted |= {(dtype, 2, 4, layout) for dtype in DTYPES[1:] for layout in LAYOUTS}
    for op, first in (("nm_linear", 1), ("nm_linear_wgrad", 0)):
        calls = [args[first:] for args in kinds[op]]
        assert {(values.dtype, n, m, layout_of(indices)) for values, indices, n, m, *_ in calls} == wanted
    assert {(k[0].shape[0], k[-2]) for k in kinds["nm_linear"] if len(k) > 7} >= {(1, "gelu"), (64, "relu2")}
    assert {x.shape[0] for x, *_ in kinds["nm_linear_dgrad"]} == set(TOKENS)


def test_sizes_keep_their_powers_of_two() -> None:
    size_of, tokens_of = Draw(small=True).size, Draw(small=True).tokens
    for size in range(300):
        for m in (1, 2, 3, 4, 5, 32, 256):
            found = size_of(size, m)
            powers = [2**k for k in range(1, 8)] if m == 1 else []
            assert [found % k == 0 for k in powers] == [size % k == 0 for k in powers]
            assert 128 <= found <= 640 and (size % m or found % m == 0) and size_of(found, m) == found, (size, m, found)
    assert [tokens_of(n) for n in (0, 1, 4, 5, 8, 16, 17, 2048)] == [1, 1, 4, 13, 8, 8, 45, 64]
    assert all(tokens_of(tokens_of(n)) == tokens_of(n) for n in range(100))


def is_its_own(op: str, args: tuple[Any, ...]) -> None:
    found = small(op, args)
    assert_equal_bits(small(op, found), found, op)
    assert verify.words(op, found) == verify.words(op, small(op, found))


def test_a_small_call_is_its_own_and_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every layout and option: contracts take what is made, and of a kind the small call is that of its call."""
    monkeypatch.setenv(dispatch.ENV, "reference")
    seen = set()
    for op, kinds in table(128, 256, (torch.bfloat16,), ((2, 4), (3, 5)), (1, 64)).items():
        for kind in kinds:
            found, args = small(op, kind), made(op, kind)
            if verify.words(op, found) not in seen:
                seen.add(verify.words(op, found))
                assert_equal_bits(small(op, args), found, op)
                assert {x.shape for x in tensors(kind) if x.dim() > 1} <= {x.shape for x in tensors(args)}
                is_its_own(op, args)
                CALLS[op](*found)
                CALLS[op](*args)


@for_each(
    "shape, dim, small_shape, small_dim",
    [
        ((24, 64), 0, (136, 192), 0),
        ((24, 64), 1, (136, 192), 1),
        ((2, 3, 64), -1, (130, 192), 1),
        ((2, 24, 64), 1, (3, 136, 192), 1),
        ((1, 24, 64), 1, (136, 192), 0),
        ((2, 2, 24, 3, 5), -3, (3, 136, 129), 1),
        ((16,), 0, (129, 144), 1),
        ((7, 24, 3), 0, (129, 136), 0),
    ],
)
def test_gradients_of_any_rank(shape: tuple[int, ...], dim: int, small_shape: tuple[int, ...], small_dim: int) -> None:
    args = torch.randn(shape), 2, 4, dim, seed(), "exact"
    found = small("nm_mvue", args)
    assert found[0].shape == small_shape and found[3] == small_dim
    assert_equal_bits(small("nm_mvue", (*args[:4], seed(5), "exact")), found, "nm_mvue")
    CALLS["nm_mvue"](*found)
    is_its_own("nm_mvue", args)


def test_a_gradient_of_whole_groups_stays_one() -> None:
    assert small("nm_mvue", (torch.randn(15, 64), 3, 5, 0, seed(), "exact"))[0].shape == (135, 192)
    assert small("nm_mvue", (torch.randn(16, 64), 3, 5, 0, seed(), "exact"))[0].shape == (144, 192)


def test_a_matching_problem_has_two_tiles() -> None:
    for n, m, shape in [(2, 4, (192, 192)), (1, 4, (4, 8)), (3, 4, (4, 8)), (2, 8, (8, 16))]:
        assert small("nm_transposable_mask", (torch.randn(64, 64), n, m))[0].shape == shape


def test_what_lies_transposed_does_there_too() -> None:
    assert small("nm_prune", (torch.randn(64, 32).t(), 2, 4))[0].stride() == (1, 160)
    assert small("nm_prune", (torch.randn(32, 64), 2, 4))[0].is_contiguous()
    p = torch.randn(64, 32).t()
    step = adamw(shapes=((4, 4),))
    step[0][0], step[1][0] = p, p.clone()
    step[2][0], step[3][0] = p.clone(), p.abs()
    assert [x[0].is_contiguous() for x in small("nm_masked_adamw_", step)[:4]] == [False] * 4


def test_of_many_params_each_kind_once() -> None:
    step = adamw(shapes=((128, 128), (256, 384), (64,), (64,), ()), n=0, m=0)
    found = small("nm_masked_adamw_", step)
    assert [tuple(p.shape) for p in found[0]] == [(128, 128), (192,), (1,)] and len(found[5]) == 3
    assert len(small("nm_masked_adamw_", adamw(shapes=tuple((8 * k, 4 * k) for k in range(1, 40))))[0]) <= 8
    assert small("nm_masked_adamw_", adamw(shapes=()))[0] == []


def test_a_step_with_masks_and_random_words_has_such_ones() -> None:
    """A seed makes no family of its own."""
    step = *adamw(((64, 24), (3, 13)), 0, 0, held=True, fixed=True)[:-2], True, 11
    masks, fixed, stochastic, seed = small("nm_masked_adamw_", step)[-4:]
    assert [tuple(x.shape) for x in masks] == [(192, 17), (129, 17)] and fixed and stochastic and seed == 7
    assert all(x.is_contiguous() and x.count_nonzero() > 0 for x in masks)


def test_names_tell_families_apart() -> None:
    entry = dataclasses.replace(dispatch.implementations("nm_linear")[0], backend="mine")
    x, c = torch.randn(8, 64), ops.compress(torch.randn(64, 64), "2:4")
    calls = [
        (x, c.values, c.indices, 2, 4, 64),
        (x[:1], c.values, c.indices, 2, 4, 64),
        (x, c.values, c.indices, 2, 4, 64, torch.zeros(64)),
        (x, c.values, c.indices, 2, 4, 64, None, "gelu"),
        (x.bfloat16(), c.values.bfloat16(), c.indices, 2, 4, 64),
        (x.bfloat16(), c.values.bfloat16(), torch.ops.nmkernels.nm_metadata(c.indices, 64, "wgmma.sp"), 2, 4, 64),
        (x.bfloat16(), c.values.bfloat16(), torch.ops.nmkernels.nm_metadata(c.indices, 64, "mma.sp"), 2, 4, 64),
    ]
    assert len({verify.family(entry, call) for call in calls}) == len(calls)
    # with the defaults of the schema, or written out; and of other sizes with the same powers of two
    assert verify.family(entry, calls[0]) == verify.family(entry, (*calls[0], None, "", None))
    wide = ops.compress(torch.randn(320, 192), "2:4")
    assert verify.family(entry, calls[0]) == verify.family(entry, (torch.randn(16, 192), wide.values, wide.indices, 2, 4, 192))
