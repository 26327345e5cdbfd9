"""One optimizer step of a large weight, or of many, compared with torch's fused AdamW, alone and with an eager mask and decay."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nmkernels import Pattern, testing
from nmkernels.optim import MaskedAdamW, UpdateRule
from nmkernels.optim.rules import Target

from ..registry import Grid, Provider, Ratio, Spec, Work, family
from . import _ours, eager

LR, DECAY = 1e-3, 2e-4
OP = "nm_masked_adamw_"
MANY = 48
"""Weights of the step of many: at 1024x1024 as many elements as one weight of 4096x11008, or a transformer of 4 blocks."""


@family(OP, grids=(Grid(matrices=("4096x11008",), dtypes=("float32", "bfloat16")), Grid(("4096x11008",), ("1:8",)), Grid(("1024x1024",))))
def adamw(spec: Spec, device: str) -> Work:
    """``MaskedAdamW.step`` with SR-STE's decay, new mask and statistics."""
    return _step(spec, device, 1)


@family(f"{OP}(many)", grids=(Grid(matrices=("1024x1024",), on="cuda"),))
def adamw_many(spec: Spec, device: str) -> Work:
    """The same for ``MANY`` weights, which one call steps together."""
    return _step(spec, device, MANY)


def _step(spec: Spec, device: str, count: int) -> Work:
    start = _ours.normal(spec.rows, spec.cols, device=device, dtype=spec.torch_dtype)
    grad = _ours.normal(spec.rows, spec.cols, device=device, dtype=spec.torch_dtype, seed=1)

    def parameters() -> list[nn.Parameter]:
        params = [nn.Parameter(start.clone()) for _ in range(count)]
        for p in params:
            p.grad = grad.clone()
        return params

    mine, theirs = parameters(), parameters()
    plain = _masked(mine, spec)
    moved = count * (start.nbytes * 2 + grad.nbytes + 16 * start.numel())
    fused = torch.optim.AdamW(theirs, lr=LR, fused=True)
    by_hand = _EagerSRSTE(theirs, fused, spec)

    def check() -> None:
        for part in _ours.ends(spec.rows, spec.cols):
            _gate(start[part], grad[part], spec)

    ours = _ours.ours(OP, _arguments(start, grad, spec), lambda: Provider("", plain.step, moved, check=check))
    alone, together = "torch AdamW(fused)", "torch AdamW(fused) + eager mask and decay"
    ratios = [Ratio("time over fused AdamW", p.name, (alone,), "time") for p in ours]
    ratios += [Ratio("x AdamW + eager mask", p.name, (together,)) for p in ours]
    providers = [*ours, Provider(alone, fused.step, moved), Provider(together, by_hand.step)]
    copy, shares = _ours.copying(torch.ones(4096, 11008, device=device), ours)
    return Work([*providers, copy], [*ratios, *shares])


def _arguments(w: Tensor, g: Tensor, spec: Spec) -> tuple[object, ...]:
    """Arguments of the raw op, to ask backends whether they can run it."""
    state, counter = torch.empty_like(w, dtype=torch.float32), torch.zeros((), device=w.device)
    hyper = torch.zeros(9, dtype=torch.float64, device=w.device)
    return [w], [g], [state], [state], [], [counter], hyper, spec.n, spec.m, False, False, False, False, None, None


def _masked(ps: list[nn.Parameter], spec: Spec) -> MaskedAdamW:
    # like torch's, the fused one keeps the step counters on the device
    optimizer = MaskedAdamW(ps, lr=LR, fused=ps[0].is_cuda)
    optimizer.targets = {p: Target(Pattern(spec.pattern)) for p in ps}
    optimizer.rule = UpdateRule(masked=True, decay=DECAY)
    return optimizer


class _EagerSRSTE:
    """SR-STE around any optimizer as in the authors' code: one mask per step, kept for the next step's decay."""

    def __init__(self, ps: list[nn.Parameter], optimizer: torch.optim.Optimizer, spec: Spec) -> None:
        self.ps, self.optimizer, self.n, self.m = ps, optimizer, spec.n, spec.m
        self.keep = [eager.mask(p.detach(), self.n, self.m) for p in ps]

    @torch.no_grad()
    def step(self) -> None:
        for p, keep in zip(self.ps, self.keep, strict=True):
            assert p.grad is not None
            p.grad.add_(p * ~keep, alpha=DECAY)
        self.optimizer.step()
        self.keep = [eager.mask(p, self.n, self.m) for p in self.ps]


def _gate(w: Tensor, g: Tensor, spec: Spec) -> None:
    """Check that three steps of ours and of the reference from the same state give the same bits, and sums to 1e-6."""
    hyper = torch.tensor([LR, 0.9, 0.999, 1e-8, 0.01, DECAY, 0, 0, 0], dtype=torch.float64, device=w.device)
    states = []
    for run in (torch.ops.nmkernels.nm_masked_adamw_, _ours.reference(OP)):
        p, step = w.clone(), torch.zeros((), device=w.device)
        moments = [torch.zeros_like(w, dtype=torch.float32) for _ in range(2)]
        for _ in range(3):
            stats = run([p], [g], [moments[0]], [moments[1]], [], [step], hyper, spec.n, spec.m, False, False, False, False, None, None)
        states.append(((p, step, *moments), stats))
    (mine, sums), (expected, reference_sums) = states
    testing.assert_equal_bits(mine, expected, OP)
    torch.testing.assert_close(sums, reference_sums, rtol=1e-6, atol=0.0)
