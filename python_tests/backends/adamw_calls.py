"""Arguments of ``nm_masked_adamw_`` that the tests of several backends build, and the comparison with the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nmkernels import reference
from nmkernels.ops import mask_bits
from nmkernels.testing import assert_equal_bits

EDGE_CASES = [0.0, -0.0, 1e-40, -1e-42, 1.0, -1.0, 65504.0, 3e38, float("inf"), -float("inf"), float("nan")]
COUNTS = (0, 3, 4, 7)  # statistics that are counts, exact in any order
FLAGS = ("frozen", "eps_inside", "maximize", "geometric")

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "sliced": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
}
"""Other places for the elements of a matrix, each with one stride between rows and one between columns."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(gen: torch.Generator, *shapes: tuple[int, ...], dtype=torch.float32, grad=torch.float32, amsgrad=False) -> dict[str, Any]:
    """One call's tensors."""

    def normal(scale: float, kind: torch.dtype) -> list[Tensor]:
        return [(torch.randn(s, generator=gen) * scale).to(kind) for s in shapes]

    squares = [x.square() for x in normal(0.1, torch.float32)]
    return {
        "params": normal(1.0, dtype),
        "grads": normal(0.1, grad),
        "exp_avgs": normal(0.1, torch.float32),
        "exp_avg_sqs": squares,
        "max_exp_avg_sqs": [x + 0.01 * torch.rand(x.shape, generator=gen) - 0.005 for x in squares] if amsgrad else [],
        "steps": [torch.tensor(float(i)) for i in range(len(shapes))],
    }


def hyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, wd=0.1, decay=2e-4, v_step=0.0, clamp=0.0) -> Tensor:
    return torch.tensor([lr, beta1, beta2, eps, wd, decay, v_step, clamp, 0.0], dtype=torch.float64)


def held(gen: torch.Generator, call: dict[str, Any], density: float = 0.5, spare: int = 0) -> list[Tensor]:
    """Random bits of a mask for each param; the spare bits of a row's last byte are set where ``spare`` has them."""
    bits = [mask_bits(torch.rand(p.shape, generator=gen) < density) for p in call["params"]]
    for x, p in zip(bits, call["params"], strict=True):
        if p.shape[-1] % 8:
            x[..., -1] |= spare & (0xFF << p.shape[-1] % 8) & 0xFF
    return bits


def edge(gen: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    """A call with a third of its elements out of ``EDGE_CASES``."""
    call = make(gen, (60, 24), amsgrad=True, dtype=dtype)
    for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"):
        x = call[name][0]
        chosen = torch.tensor(EDGE_CASES).to(x.dtype)[torch.randint(len(EDGE_CASES), x.shape, generator=gen)]
        call[name] = [torch.where(torch.rand(x.shape, generator=gen) < 0.3, chosen, x)]
    return call


def copied(call: dict[str, Any], device: str | None = None) -> dict[str, Any]:
    """The same tensors in memory of their own, strides kept (an expanded gradient is only read)."""

    def one(x: Tensor) -> Tensor:
        if 0 in x.stride():
            return x if device is None else x.to(device)
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device or x.device).copy_(x)

    return {k: [one(x) for x in v] for k, v in call.items()}


def shifted(call: dict[str, Any], by: int) -> dict[str, Any]:
    """The same tensors at addresses that are aligned to an element only, where ``by`` is odd."""

    def one(x: Tensor) -> Tensor:
        return torch.cat([x.new_full((by,), 7.0), x.reshape(-1)])[by:].view(x.shape)

    return {k: v if k == "steps" else [one(x) for x in v] for k, v in call.items()}


def same_as_reference(
    run: Callable[..., Tensor],
    ours: dict[str, Any],
    call: dict[str, Any],
    h: Tensor,
    n: int,
    m: int,
    *,
    scale=None,
    found=None,
    masks: list[Tensor] | None = None,
    fixed: bool = False,
    **flags: bool,
) -> Tensor:
    """``run`` steps ``ours``, the reference a copy of ``call``; everything they write must agree. Returns the statistics."""
    device, options, theirs = ours["params"][0].device if ours["params"] else h.device, [flags.get(k, False) for k in FLAGS], copied(call)
    scalars = (None if x is None else x.to(device) for x in (scale, found))
    placed = None if masks is None else [x.to(device) for x in masks]
    stats = run(*ours.values(), h.to(device), n, m, *options, *scalars, placed, fixed)
    expected = reference.masked_adamw_(*theirs.values(), h.cpu(), n, m, *options, scale, found, masks and [x.cpu() for x in masks], fixed)
    for name in call:
        assert_equal_bits(ours[name], theirs[name], name)
    stats = stats.cpu()
    assert [stats[i].item() for i in COUNTS] == [expected[i].item() for i in COUNTS]
    assert_equal_bits(stats[8], expected[8], "max|u|")
    torch.testing.assert_close(stats, expected, rtol=1e-6, atol=1e-12, equal_nan=True)
    return stats
