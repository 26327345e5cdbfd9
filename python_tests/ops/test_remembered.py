"""The second call of a kind skips contract, choice and torch's dispatcher, and nobody can tell but by the clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nmkernels import BackendError, ShapeError, dispatch, ops
from nmkernels.ops import define
from nmkernels.ops.define import CALLS
from nmkernels.testing import assert_equal_bits
from python_tests.for_each import for_each
from python_tests.ops.samples import adamw

W = torch.randn(8, 16, generator=torch.Generator().manual_seed(5))
C = ops.compress(W, "2:4")
scale, prune, step = CALLS["nm_soft_threshold_scale"], CALLS["nm_prune"], CALLS["nm_masked_adamw_"]


@contextmanager
def nothing_decided() -> Iterator[None]:
    with mock.patch.object(dispatch, "decide", side_effect=AssertionError("decided again")):
        yield


class Sub(Tensor):
    pass


def test_modes_see_the_op() -> None:
    expected = prune(W, 2, 4)
    with nothing_decided():
        assert_equal_bits(prune(W, 2, 4), expected)
    seen: list[str] = []

    def watch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(func))
        return func(*args, **(kwargs or {}))

    for base, hook in ((TorchDispatchMode, "__torch_dispatch__"), (TorchFunctionMode, "__torch_function__")):
        seen.clear()
        with type("Watch", (base,), {hook: watch})():
            assert_equal_bits(ops.prune(W, "2:4"), expected)
        assert any("nm_prune" in name for name in seen)
    with torch.profiler.profile() as profile:
        prune(W, 2, 4)
    assert any("nm_prune" in event.key for event in profile.key_averages())
    assert "nm_prune" in make_fx(lambda w: prune(w, 2, 4))(W).code
    assert_equal_bits(torch.func.vmap(lambda w: prune(w, 2, 4))(W[None]), expected[None])
    assert type(prune(W.as_subclass(Sub), 2, 4)) is Sub
    assert prune(W.to("meta"), 2, 4).is_meta
    with torch._subclasses.FakeTensorMode() as fake:
        assert type(prune(fake.from_tensor(W), 2, 4)) is not Tensor
    for autocast in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.no_grad()):
        with autocast, nothing_decided():
            assert_equal_bits(prune(W, 2, 4), expected)


def test_tensors_that_are_not_what_their_memory_holds() -> None:
    zeros, negated = torch._efficientzerotensor((8, 16)), torch._neg_view(W.clone())
    for _ in range(2):
        assert_equal_bits(prune(torch.zeros(8, 16), 2, 4), torch.zeros(8, 16))
        assert_equal_bits(prune(zeros, 2, 4), torch.zeros(8, 16))
        assert_equal_bits(prune(W, 2, 4), ops.prune(W, "2:4"))
        assert_equal_bits(prune(negated, 2, 4), -ops.prune(W, "2:4") + 0.0)
        with pytest.raises(RuntimeError):  # torch's own fallback knows no op that returns nothing
            prune(W, 2, 4, out=negated)


def params(*shapes: tuple[int, ...], expanded: bool = False, lists: bool = False) -> tuple[Any, ...]:
    """Arguments of an unmasked step; ``lists``: one step count too few, and a maximum instead."""
    args = list(adamw(shapes, n=0, m=0))
    if expanded:
        args[0][0] = torch.ones(1, 8).expand(2, 8)
    if lists:
        args[4] = [args[5].pop()]
    return tuple(args)


Call = Callable[[], Any]
PARTS: dict[str, tuple[Call, Call]] = {
    # a call; and another one, of which no other part of the kind differs
    "op": (lambda: CALLS["nm_mask"](W, 2, 4), lambda: prune(W, 2, 4)),
    "shape": (lambda: prune(W, 2, 4), lambda: prune(W[:, :10].contiguous(), 2, 4)),
    "dtype": (lambda: prune(W, 2, 4), lambda: prune(W.double(), 2, 4)),
    "device": (lambda: scale(W[:0], 2, 4), lambda: scale(W[:0].to("meta"), 2, 4)),
    "strides": (lambda: step(*params((2, 8))), lambda: step(*params((2, 8), expanded=True))),
    "numbers": (lambda: prune(W, 2, 4), lambda: prune(W, 2, 5)),
    "text": (lambda: linear("gelu"), lambda: linear("tanh")),
    "lengths": (lambda: step(*params((), ())), lambda: step(*params((), (), lists=True))),
    "out": (lambda: prune(W, 2, 4, out=W.clone()), lambda: prune(W, 2, 4, out=torch.empty(128))),
}


def linear(activation: str) -> Tensor:
    return CALLS["nm_linear"](torch.ones(1, 16), C.values, C.indices, 2, 4, 16, None, activation)


def outcome(call: Call) -> Any:
    """What a call gives, or how it fails."""
    torch.manual_seed(0)
    try:
        x = call()
        return x.dtype, x.shape, x.device, None if x.is_meta else x.tolist()
    except Exception as error:
        return type(error), str(error)


@for_each("part", PARTS)
def test_each_part_of_a_kind_is_needed(part: str) -> None:
    first, second = PARTS[part]
    expected = outcome(second)
    dispatch.forget()
    first()
    assert outcome(second) == expected


def test_what_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another forced backend, another registration, ``forget``, and always a backend that has to be ready."""
    monkeypatch.setattr(dispatch, "_impls", dict(dispatch._impls))
    asked, ready = [], [True]

    def mine(name: str, **how: Any) -> None:
        dispatch.impl("nm_prune", backend=name, priority=99 + (name == "moody"), **how)(
            lambda w, n, m, out=None: asked.append(name) or w.clone()
        )

    prune(W, 2, 4)
    mine("mine", supports=lambda w, *rest: (w.shape[0] == 8, "it wants 8 rows"))
    prune(W, 2, 4), prune(W, 2, 4), prune(W[:4], 2, 4)
    assert asked == ["mine"] * 2
    monkeypatch.setenv(dispatch.ENV, "reference")
    prune(W, 2, 4)
    assert asked == ["mine"] * 2
    monkeypatch.setenv(dispatch.ENV, "nobody")
    for _ in range(2):
        with pytest.raises(BackendError, match="names no backend"):
            prune(W, 2, 4)
    monkeypatch.delenv(dispatch.ENV)
    mine("moody", supports=lambda w, *rest: (w.shape[0] == 8, "it wants 8 rows"), ready=lambda *args: (ready[0], "it sleeps"))
    prune(W, 2, 4)
    ready[0] = False
    prune(W, 2, 4)
    ready[0] = True
    prune(W, 2, 4)
    assert asked[2:] == ["moody", "mine", "moody"]
    with pytest.raises(ShapeError), nothing_decided():
        prune(W[:, :10], 2, 4)  # a contract is asked before any backend
    prune(W[:4], 2, 4)
    with nothing_decided():
        prune(W[:4], 2, 4)  # it would be ready for another kind only
        dispatch.forget()
        with pytest.raises(AssertionError, match="decided again"):
            prune(W[:4], 2, 4)


def test_changing_shapes_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(define, "MOST_PLANS", 3)
    for rows in range(1, 9):
        prune(W[:rows], 2, 4)
        assert 0 < len(dispatch.plans) <= 3


def test_memory_that_inputs_use_is_not_written_early() -> None:
    buffer = torch.randn(9, 16)
    expected = ops.prune(buffer[:8].clone(), "2:4")
    ops.prune(buffer[:8].clone(), "2:4", out=torch.empty(8, 16))
    ops.prune(buffer[:8], "2:4", out=buffer[1:])
    assert_equal_bits(buffer[1:], expected)


def test_damaged_indices_are_seen_at_every_call() -> None:
    """What a tensor holds is the kernel's business, not of the kind of call."""
    c, x = ops.compress(torch.randn(6, 20), "3:5"), torch.randn(1, 20)
    ops.linear(x, c)
    c.indices.fill_(255)
    with nothing_decided(), pytest.raises(ShapeError, match="does not exist in a group of 5"):
        ops.linear(x, c)
