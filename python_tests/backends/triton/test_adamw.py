"""MaskedAdamW in Triton equals the reference: params and states to the bit, its sums to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nmkernels.backends import adamw_plan as shared
from nmkernels.backends.triton import adamw
from nmkernels.dispatch import implementations
from nmkernels.pattern import BackendError
from nmkernels.testing import assert_equal_bits
from python_tests.backends.adamw_calls import LAYOUTS, copied, hyper, make, same_as_reference, seeded, shifted
from python_tests.backends.adamw_suite import AdamWSuite

TRITON = next(i for i in implementations("nm_masked_adamw_") if i.backend == "triton")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def compare(device: str, call: dict[str, Any], h: Tensor, n: int, m: int, **options: Any) -> Tensor:
    """Run both on copies; everything they write must agree. Returns the statistics."""
    return same_as_reference(TRITON.fn, copied(call, device), call, h, n, m, **options)


def run(call: dict[str, Any], h: Tensor, n: int = 2, m: int = 4, geometric: bool = False, found: Tensor | None = None) -> Tensor:
    return TRITON.fn(*call.values(), h, n, m, False, False, False, geometric, None, found)


class TestAgainstTheReference(AdamWSuite):
    step = staticmethod(TRITON.fn)


def test_many_params_twice(device):
    """40 params of mixed sizes, some unaligned, transposed or in half precision: the same bits in every run."""
    shapes = [(8 * (i % 5 + 1),) if i % 3 else (i % 7 + 1, 16) for i in range(39)]
    call, h = make(seeded(10), *shapes, (40, 64), out=BF16), hyper().to(device)
    ours = copied(call, device)
    first = same_as_reference(TRITON.fn, ours, call, hyper(), 2, 4, geometric=True)
    again = copied(call, device)
    assert_equal_bits(run(again, h, geometric=True).cpu(), first)
    assert_equal_bits(again, ours)


def test_kinds_in_one_call(device):
    """Aligned, unaligned, transposed and half-precision params in one call."""
    parts = [make(seeded(i), (8, 16), out=BF16, dtype=dtype) for i, dtype in enumerate((F32, F32, F32, BF16))]
    parts[1] = shifted(parts[1], 1)
    parts[2] = {k: [LAYOUTS["transposed"](x) if x.dim() else x for x in v] for k, v in parts[2].items()}
    ours = [shifted(copied(x, device), 1) if i == 1 else copied(x, device) for i, x in enumerate(parts)]
    call, mixed = ({k: [x[k][0] for x in side for _ in x[k][:1]] for k in parts[0]} for side in (parts, ours))
    same_as_reference(TRITON.fn, mixed, call, hyper(), 2, 4, geometric=True)


@pytest.mark.parametrize("steps", [(7.0, 7.0, 7.0), (7.0, 8.0, 0.0)])
def test_counts_and_numbers_on_the_host(device, steps, monkeypatch):
    call = make(seeded(15), (8, 16), (3, 8), (4,), out=F32)
    call["steps"] = [torch.tensor(t) for t in steps]
    monkeypatch.setattr(adamw, "on_host", lambda x, device: x.numel() == 9 or (x.is_cpu and x.dim() == 0))
    for found in (None, torch.zeros(1), torch.ones(1)):
        for frozen in (False, True):
            ours = {**copied(call, device), "steps": copied(call)["steps"]}
            same_as_reference(TRITON.fn, ours, call, hyper(lr=-0.1, v_step=3.0, clamp=0.5), 2, 4, found=found, frozen=frozen)
    ours = {**copied(call, device), "steps": copied(call)["steps"]}
    monkeypatch.setattr(shared, "capturing", lambda device: True)
    with pytest.raises(BackendError, match="capturable=True"):
        run(ours, hyper().to(device))
    assert_equal_bits(ours, call)


def test_captured_steps_are_replayed(device):
    if device != "cuda":
        pytest.skip("a CUDA graph needs a GPU")
    call = make(seeded(16), (8, 16), (300, 40), out=BF16)
    ours, theirs, h = copied(call, device), copied(call, device), hyper().to(device)
    run(ours, h)  # compiles
    ours.update({k: [x.copy_(y) for x, y in zip(ours[k], call[k], strict=True)] for k in call})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours["grads"] = [g * 1.0 for g in ours["grads"]]
        stats = run(ours, h)
    for _ in range(3):
        graph.replay()
        expected = run(theirs, h)
        assert_equal_bits(stats, expected)
    ours.pop("grads"), theirs.pop("grads")
    assert_equal_bits(ours, theirs)


@pytest.mark.parametrize("columns", [0, 1, 5000])
def test_partial_sums(device, columns, monkeypatch):
    """In one launch, and in slices as for many; a NaN among the largest wins."""
    monkeypatch.setattr(adamw, "SLICES", 4)
    partials = torch.randn(9, columns, dtype=torch.float64, generator=seeded(17)).abs()
    want = partials.sum(1)
    want[0], want[3], want[8] = 1.0, 0.0, partials[8].max() if columns else 0.0
    for few in (columns, columns - 1):
        for bad in (False, True) if columns > 1 else (False,):
            if bad:
                partials[8, columns // 3] = want[8] = float("nan")
            stats = torch.full((9,), 5.0, dtype=torch.float64, device=device)
            adamw.add_partials(partials.to(device), stats, None, 0b111110110, few=few)
            torch.testing.assert_close(stats.cpu(), want, rtol=1e-14, atol=0, equal_nan=True)
            adamw.add_partials(partials.to(device), stats, torch.ones(1, device=device), 0b111110110, few=few)
            assert not stats.any()


def test_declines_float64(device):
    def ask(**kinds: torch.dtype) -> tuple[bool, str]:
        x = {name: [torch.zeros(4, dtype=kinds.get(name, F32), device=device)] for name in ("params", "grads", "outs")}
        state, options = [torch.zeros(4, device=device)], (hyper(), 2, 4, False, False, False, False, None, None)
        return TRITON.supports(x["params"], x["grads"], state, state, [], [torch.tensor(0.0)], x["outs"], *options)

    assert ask()[0]
    for name in ("params", "grads", "outs"):
        can, why = ask(**{name: torch.float64})
        assert not can
        assert "float64" in why
    assert TRITON.supports([], [], [], [], [], [], [], hyper().to(device), 2, 4, False, False, False, False, None, None)[0]
