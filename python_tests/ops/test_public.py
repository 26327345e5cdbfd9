"""The public functions: what they add to the raw ops."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from nmkernels import Pattern, dispatch, ops, testing
from nmkernels.reference.adamw import AdamWArgs
from python_tests.conformance import built
from python_tests.for_each import for_each
from python_tests.ops.samples import adamw, seed

W = torch.randn(8, 16, generator=torch.Generator().manual_seed(5))


@for_each("fn", [ops.mask, ops.prune, ops.soft_threshold, ops.compress, ops.pack, ops.mvue, ops.mvue_compress])
def test_text_and_pattern_are_the_same(fn) -> None:
    keywords = {"seed": 1} if "seed" in inspect.signature(fn).parameters else {}
    testing.assert_equal_bits(fn(W, "2:4", **keywords), fn(W, Pattern("2:4"), **keywords))
    testing.assert_equal_bits(fn(W, " 2 : 4 ", **keywords), fn(W, Pattern(2, 4), **keywords))


@for_each("fn", [ops.mask, ops.transposable_mask, ops.prune, ops.soft_threshold, ops.mvue])
def test_out_is_returned_and_may_be_strided(fn) -> None:
    keywords = {"seed": 1} if fn is ops.mvue else {}
    expected = fn(W, "2:4", **keywords)
    out = torch.empty(16, 8, dtype=expected.dtype).t()
    assert fn(W, "2:4", out=out, **keywords) is out
    testing.assert_equal_bits(out, expected)


def test_out_may_be_the_input() -> None:
    for fn in (ops.prune, ops.soft_threshold):
        w, expected = W.clone(), fn(W, "2:4")
        version = w._version
        assert fn(w, "2:4", out=w) is w and w._version > version
        testing.assert_equal_bits(w, expected)


def test_out_is_written_inside_inference_mode() -> None:
    with torch.inference_mode():
        out = torch.empty(8, 16)
        testing.assert_equal_bits(ops.prune(W, "2:4", out=out), ops.prune(W, "2:4"))


@for_each("backend", ["reference", "cpu"])
@for_each("tokens", [4, 20])
def test_autocast_changes_no_gemm(backend: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GEMMs are in their operands' dtype; what autocast wants is the layers' business."""
    monkeypatch.setenv(dispatch.ENV, backend)
    x, g, c = torch.randn(tokens, 16), torch.randn(tokens, 8), ops.compress(W, "2:4")
    gc = ops.mvue_compress(g, "2:4", dim=0, seed=1)
    for fn, args in ((ops.linear, (x, c)), (ops.linear_dgrad, (g, c)), (ops.linear_wgrad, (gc, x))):
        with torch.autocast("cpu", torch.bfloat16):
            inside = fn(*args)
        testing.assert_equal_bits(inside, fn(*args))


def test_backends_get_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch drops trailing arguments that equal their defaults; backends see them all the same."""
    seen: list[int] = []
    for op in ("nm_compress", "nm_linear"):
        entry = dispatch.implementations(op)[-1]

        def supports(*args: Any) -> dispatch.Verdict:
            seen.append(len(args))
            return False, "only looks"

        monkeypatch.setitem(dispatch._impls, op, [dispatch.Impl(op, "spy", entry.fn, supports, 99), *dispatch._impls[op]])
    c = ops.compress(W, "2:4")
    ops.compress(W, "2:4", out=c)
    ops.linear(torch.ones(1, 16), c)
    assert seen == [4, 4, 9]


def test_the_three_gemms() -> None:
    c = ops.compress(W.double(), "2:4")
    w, x, g = c.dense(), torch.randn(2, 3, 16).double(), torch.randn(2, 3, 8).double()
    bias = torch.randn(8).double()
    torch.testing.assert_close(ops.linear(x, c, bias), x @ w.T + bias)
    torch.testing.assert_close(ops.linear_dgrad(g, c), g @ w)
    gc = ops.mvue_compress(g.reshape(6, 8), "2:4", dim=0, seed=0)
    assert gc.shape == (8, 6)
    torch.testing.assert_close(ops.linear_wgrad(gc, x), gc.dense() @ x.reshape(6, 16))


class TestSeeds:
    g = torch.randn(64, 16, generator=torch.Generator().manual_seed(6))

    def test_none_draws_from_torchs_generator(self) -> None:
        torch.manual_seed(3)
        first, second = ops.mvue(self.g, "2:4"), ops.mvue(self.g, "2:4")
        assert not testing.equal_bits(first, second)
        torch.manual_seed(3)
        testing.assert_equal_bits(ops.mvue(self.g, "2:4"), first)

    def test_an_int_is_the_tensor(self) -> None:
        for word, offset in [(0, 0), (-1, 7), (2**63 - 1, 2**63 - 1), (-(2**63), -3)]:
            testing.assert_equal_bits(ops.mvue(self.g, "2:4", seed=word, offset=offset), ops.mvue(self.g, "2:4", seed=seed(word, offset)))
        testing.assert_equal_bits(ops.mvue(self.g, "2:4", seed=2**64 - 1), ops.mvue(self.g, "2:4", seed=-1))

    def test_none_is_not_frozen_by_compile(self) -> None:
        torch._dynamo.reset()
        step = torch.compile(lambda: ops.mvue(self.g, "2:4"), fullgraph=True, backend="aot_eager")
        assert not testing.equal_bits(step(), step())


class TestMaskedAdamW:
    def test_the_wrapper_is_the_raw_op(self) -> None:
        raw, public = (built(lambda: adamw(amsgrad=True, scaled=True, frozen=True), "cpu") for _ in range(2))
        a = AdamWArgs(*public)
        stats = ops.masked_adamw_(
            a.params, a.grads, a.exp_avgs, a.exp_avg_sqs, a.steps, a.hyper, "2:4",
            max_exp_avg_sqs=a.max_exp_avg_sqs, frozen=True, grad_scale=a.grad_scale, found_inf=a.found_inf,
        )  # fmt: skip
        testing.assert_equal_bits(stats, torch.ops.nmkernels.nm_masked_adamw_(*raw))
        testing.assert_equal_bits([*public], [*raw])

    def test_the_schema_is_the_structure_of_arguments(self) -> None:
        schema = torch.ops.nmkernels.nm_masked_adamw_.default._schema.arguments
        assert tuple(argument.name for argument in schema) == AdamWArgs._fields
        assert {argument.name: argument.default_value for argument in schema if argument.has_default_value()} == AdamWArgs._field_defaults

    def test_versions_count_the_writes(self) -> None:
        a = AdamWArgs(*adamw(amsgrad=True))
        written = [x for xs in (a.params, a.exp_avgs, a.exp_avg_sqs, a.max_exp_avg_sqs, a.steps) for x in xs]
        read = [*a.grads, a.hyper]
        before, untouched = [x._version for x in written], [x._version for x in read]
        torch.ops.nmkernels.nm_masked_adamw_(*a)
        assert all(x._version > v for x, v in zip(written, before, strict=True))
        assert [x._version for x in read] == untouched


@pytest.mark.slow
def test_inductor() -> None:
    """One pass through the default compiler: the ops are opaque to it, but what surrounds them is not."""
    torch._dynamo.reset()

    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x.relu(), ops.compress(w * 2, "2:4")) + 1

    x = torch.randn(4, 16)
    testing.assert_equal_bits(torch.compile(step, fullgraph=True)(W, x), step(W, x))


def test_other_shapes_and_seeds_do_not_recompile() -> None:
    torch._dynamo.reset()
    count = CompileCounterWithBackend("aot_eager")

    def step(g: torch.Tensor, x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        return ops.linear_wgrad(ops.mvue_compress(g, "2:4", dim=0, seed=seed), x)

    compiled = torch.compile(step, fullgraph=True, backend=count, dynamic=True)
    for tokens in (12, 18, 27, 33):
        args = torch.randn(tokens, 8), torch.randn(tokens, 16), seed(tokens)
        testing.assert_equal_bits(compiled(*args), step(*args))
    assert count.frame_count == 1
