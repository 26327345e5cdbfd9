"""The generic suite: everything that must hold for every op, from its sample inputs.

    class TestMask(Conformance):
        op = "nm_mask"
        samples = {"matrix": lambda: (torch.randn(6, 8), 2, 4)}
        out = True

A sample builds fresh arguments of the raw op, the same each time it is called after one seed.

It runs on the CPU and, marked ``gpu``, on the GPU, with whatever the dispatcher chooses there. Where Triton interprets its kernels
(TRITON_INTERPRET=1) the Triton backend is forced instead, and nothing else is run again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nmkernels import BackendError, dispatch, testing
from nmkernels.backends import triton
from nmkernels.ops.define import CALLS

Sample = Callable[[], tuple[Any, ...]]

INTERPRETED = triton.interpreted()
slow_interpreted = pytest.mark.slow if INTERPRETED else lambda test: test
"""For a test that takes a minute in Triton's interpreter, and else a moment."""
DEVICES = ["cpu"] if INTERPRETED else ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
"""Where a test of kernels runs: its parameters for ``device``."""


def compared(op: str) -> list[dispatch.Impl]:
    """The implementations of an op that are held against the reference: all others, or the one that is interpreted."""
    entries = [i for i in dispatch.implementations(op) if i.backend != "reference"]
    return [i for i in entries if i.backend == triton.NAME] if INTERPRETED else entries


def moved(tree: Any, device: str) -> Any:
    """The tensors of a tree on ``device``, with their strides, offset in memory and negation; themselves where they are there."""

    def move(x: Tensor) -> Tensor:
        if x.device.type == device:
            return x
        memory = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())  # type: ignore[call-overload]
        there = memory.to(device).as_strided(x.shape, x.stride(), x.storage_offset())
        return torch._neg_view(there) if x.is_neg() else there

    return pytree.tree_map_only(Tensor, move, tree)


def built(sample: Sample, device: str, seed: int = 0) -> tuple[Any, ...]:
    """A sample's arguments on a device; packed operands are made by the definition, whatever is forced."""
    torch.manual_seed(seed)
    with mock.patch.dict(os.environ, {dispatch.ENV: "reference"}):
        return moved(sample(), device)


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in order."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def strided(x: Tensor) -> Tensor:
    """The same values, every second element of a larger tensor along the last dimension, rows in reverse memory order."""
    if not x.dim():
        return x
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), 77, dtype=torch.float64, device=x.device).to(x.dtype)
    view = wide[..., 1::2]
    if x.dim() > 1:
        wide = torch.full((x.shape[-1], *x.shape[:-1], 2), 77, dtype=torch.float64, device=x.device).to(x.dtype)
        view = wide[..., 1].movedim(0, -1)
    view.copy_(x)
    return view


def like(results: Any, make: Callable[[Tensor], Tensor]) -> Any:
    """Poisoned buffers to write results into, as ``out`` takes them."""
    return pytree.tree_map_only(Tensor, lambda x: testing.fill_poison(make(x)), results)


def compiled(op: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(lambda *args, **keywords: op(*args, **keywords), fullgraph=True, backend="aot_eager")


QUICK = 2
"""Samples that are looked at by tests that are not slow."""


def for_each_sample(check: Callable[..., None]) -> Callable[..., None]:
    """A test of ``check(self, sample, monkeypatch)`` for the first samples on one device, and a slow one for the rest.

    In the interpreter it looks at those that Triton takes.
    """

    @pytest.mark.parametrize("which", [slice(QUICK), pytest.param(slice(QUICK, None), marks=pytest.mark.slow)], ids=["first", "rest"])
    @pytest.mark.parametrize("device", DEVICES)
    def test(self: Conformance, device: str, which: slice, monkeypatch: pytest.MonkeyPatch) -> None:
        looked_at, reason = 0, f"Triton has no {self.op}"
        for name, sample in list(self.samples.items())[which]:
            self.device = device
            dispatch.forget()
            with monkeypatch.context() as patch:
                if INTERPRETED and check.__name__ != "test_backend":
                    can, reason = next((i.supports(*self.args(sample)) for i in compared(self.op)), (False, reason))
                    if not can:
                        continue
                    patch.setenv(dispatch.ENV, triton.NAME)
                looked_at += 1
                try:
                    check(self, sample, patch)
                except Exception as error:
                    raise AssertionError(f"sample {name!r}: {error}") from error
        if not looked_at:
            pytest.skip(reason)

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test


class Conformance:
    """Subclass with ``op`` and ``samples``; see the module's docstring."""

    op: str
    samples: dict[str, Sample]
    exact: bool = True
    """Backends agree bit for bit; else they are no worse than the reference against float64."""
    rtol: float | None = None
    """For sums over a whole tensor: backends agree with the reference to this relative error instead."""
    out: tuple[str, ...] = ()
    """The names of the keyword-only arguments of ``<op>_out``; empty where there is no such op."""
    mutates: bool = False

    device: str = "cpu"
    """Where the arguments of the running test are."""

    def args(self, sample: Sample) -> tuple[Any, ...]:
        return built(sample, self.device)

    def raw(self, suffix: str = "") -> torch._ops.OpOverload:
        return getattr(torch.ops.nmkernels, self.op + suffix).default

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """What a call returns and, for ops that write in place, the arguments afterwards."""
        result = fn(*args)
        return (result, tensors(args)) if self.mutates else result

    @for_each_sample
    def test_opcheck(self, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of torch: fake results are as the real ones, nothing is written or shared that the schema does not say, graphs work."""
        torch.library.opcheck(self.raw(), self.args(sample))

    @for_each_sample
    def test_compiled_equals_eager(self, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = self.run(self.raw(), self.args(sample))
        testing.assert_equal_bits(self.run(compiled(self.raw()), self.args(sample)), expected, "compiled")
        if self.out:
            outs = [torch.zeros_like(x) for x in tensors(expected)]
            compiled(self.raw("_out"))(*self.args(sample), **dict(zip(self.out, outs, strict=True)))
            testing.assert_equal_bits(outs, tensors(expected), "compiled out=")

    @for_each_sample
    def test_strided_inputs(self, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
        args = pytree.tree_map_only(Tensor, strided, self.args(sample))
        expected = self.run(self.raw(), self.args(sample))
        testing.assert_equal_bits(self.run(self.raw(), args), expected, "strided")

    @for_each_sample
    def test_a_second_run_in_poisoned_memory(self, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = self.run(self.raw(), self.args(sample))
        with testing.poison():
            result = self.run(self.raw(), self.args(sample))
        testing.assert_equal_bits(result, expected, "unwritten memory shows")

    @for_each_sample
    def test_backend(self, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
        device = self.device
        for entry in compared(self.op):
            self.device = device
            args = self.args(sample)
            can, reason = entry.supports(*args)
            monkeypatch.setenv(dispatch.ENV, entry.backend)
            if not can:
                with pytest.raises(BackendError, match=re.escape(reason)):
                    self.raw()(*args)
                continue
            result = moved(self.run(self.raw(), args), "cpu")
            # the reference has the last word where it was written: on the CPU
            monkeypatch.setenv(dispatch.ENV, "reference")
            self.device = "cpu"
            self.check_backend(sample, result, self.run(self.raw(), self.args(sample)), entry.backend)

    def check_backend(self, sample: Sample, result: Any, expected: Any, backend: str) -> None:
        """Validator a backend's result by the reference's, both on the CPU; the reference is in force here."""
        if self.rtol is not None:
            torch.testing.assert_close(result, expected, rtol=self.rtol, atol=0, equal_nan=True)
        elif self.exact:
            testing.assert_equal_bits(result, expected, backend)
        else:
            args = pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, self.args(sample))
            args = pytree.tree_map_only(torch.dtype, lambda x: torch.float64 if x.is_floating_point else x, args)  # of the result
            # the op itself takes metadata for operands of 16 bits only
            exact = next(i for i in dispatch.implementations(self.op) if i.backend == "reference").fn(*args)
            testing.assert_no_worse(result, expected, exact, backend)

    @for_each_sample
    def test_remembered(self, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first call of a kind, and one that runs the remembered choice."""
        call, expected = CALLS[self.op], self.run(self.raw(), self.args(sample))
        dispatch.forget()
        ways: list[Callable[[], Any]] = [lambda: self.run(call, self.args(sample))]
        if self.out:
            ways.append(lambda: call(*self.args(sample), out=like(expected, torch.empty_like)))
            ways.append(lambda: call(*self.args(sample), out=like(expected, strided)))
        for way in ways:
            testing.assert_equal_bits(way(), expected, "first call")
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "decide", mock.Mock(side_effect=AssertionError("decided again")))
            for way in ways:
                testing.assert_equal_bits(way(), expected, "remembered call")
            args = self.args(sample)
            versions = [x._version for x in tensors(args)]
            call(*args)
            assert self.mutates == any(x._version > v for x, v in zip(tensors(args), versions, strict=True))

    @for_each_sample
    def test_out(self, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
        if not self.out:
            assert not hasattr(torch.ops.nmkernels, f"{self.op}_out")
            return
        expected = tensors(self.raw()(*self.args(sample)))
        for layout in (torch.clone, strided):
            outs = [testing.fill_poison(layout(x)) for x in expected]
            versions = [x._version for x in outs]
            keywords = dict(zip(self.out, outs, strict=True))
            assert self.raw("_out")(*self.args(sample), **keywords) is None
            testing.assert_equal_bits(outs, expected, f"out= ({layout.__name__})")
            assert all(x._version > v for x, v in zip(outs, versions, strict=True)), "a write was not counted"
