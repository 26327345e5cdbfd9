"""One optimizer step over one large weight, beside torch's fused AdamW alone and with the mask and decay that users add to it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nmkernels import Pattern
from nmkernels.optim import MaskedAdamW, Target, UpdateRule

from ..registry import Grid, Provider, Ratio, Spec, Work, family
from . import _ours, eager

LR, DECAY = 1e-3, 2e-4
OP = "nm_masked_adamw_"


@family(OP, grids=(Grid(matrices=("4096x11008",), dtypes=("float32", "bfloat16")), Grid(("4096x11008",), ("1:8",)), Grid(("1024x1024",))))
def adamw(spec: Spec, device: str) -> Work:
    """``MaskedAdamW.step`` with SR-STE's decay, new mask and statistics, without and with the masked weight written."""
    start = _ours.normal(spec.rows, spec.cols, device=device, dtype=spec.torch_dtype)
    grad = _ours.normal(spec.rows, spec.cols, device=device, dtype=spec.torch_dtype, seed=1)

    def parameter() -> nn.Parameter:
        p = nn.Parameter(start.clone())
        p.grad = grad.clone()
        return p

    mine = parameter()
    plain, writing = _masked(mine, spec, None), _masked(mine, spec, torch.empty_like(start))
    moved = start.nbytes * 2 + grad.nbytes + 16 * start.numel()

    theirs = parameter()
    fused = torch.optim.AdamW([theirs], lr=LR, fused=True)
    by_hand = _EagerSRSTE(theirs, fused, spec)

    def check() -> None:
        for part in _ours.ends(spec.rows, spec.cols):
            _gate(start[part], grad[part], spec)

    args: tuple[object, ...] = ([mine], [grad], [], [], [], [], [], torch.zeros(9, dtype=torch.float64), spec.n, spec.m)
    ours = _ours.ours(OP, args, lambda: Provider("", plain.step, moved, check=check))
    ours += _ours.ours(OP, args, lambda: Provider(", writes W̃", writing.step, moved + start.nbytes))
    alone, together = "torch AdamW(fused)", "torch AdamW(fused) + eager mask and decay"
    # weights move by all optimizers' steps in turn, which changes no time
    ratios = [Ratio("time over fused AdamW", p.name, (alone,), "time") for p in ours]
    ratios += [Ratio("x AdamW + eager mask", p.name, (together,)) for p in ours]
    return Work([*ours, Provider(alone, fused.step, moved), Provider(together, by_hand.step)], ratios)


def _masked(p: nn.Parameter, spec: Spec, sink: Tensor | None) -> MaskedAdamW:
    optimizer = MaskedAdamW([p], lr=LR)
    optimizer.targets = {p: Target(Pattern(spec.pattern), sink=lambda: sink)}
    optimizer.rule = UpdateRule(masked=True, decay=DECAY)
    return optimizer


class _EagerSRSTE:
    """SR-STE around any optimizer as its authors do it: one mask per step, kept for the next step's decay."""

    def __init__(self, p: nn.Parameter, optimizer: torch.optim.Optimizer, spec: Spec) -> None:
        self.p, self.optimizer, self.n, self.m = p, optimizer, spec.n, spec.m
        self.keep = eager.mask(p.detach(), self.n, self.m)

    @torch.no_grad()
    def step(self) -> None:
        assert self.p.grad is not None
        self.p.grad.add_(self.p * ~self.keep, alpha=DECAY)
        self.optimizer.step()
        self.keep = eager.mask(self.p, self.n, self.m)


def _gate(w: Tensor, g: Tensor, spec: Spec) -> None:
    """Three steps of ours and of the reference from the same state leave the same bits; sums agree to 1e-6."""
    hyper = torch.tensor([LR, 0.9, 0.999, 1e-8, 0.01, DECAY, 0, 0, 0], dtype=torch.float64, device=w.device)
    states = []
    for run in (_public, _ours.reference(OP)):
        p, out, step = w.clone(), torch.empty_like(w), torch.zeros((), device=w.device)
        moments = [torch.zeros_like(w, dtype=torch.float32) for _ in range(2)]
        for _ in range(3):
            stats = run(
                [p], [g], [moments[0]], [moments[1]], [], [step], [out], hyper, spec.n, spec.m, False, False, False, False, None, None
            )
        states.append(((p, out, step, *moments), stats))
    (mine, sums), (expected, reference_sums) = states
    _ours.same_bits(mine, expected, OP)
    torch.testing.assert_close(sums, reference_sums, rtol=1e-6, atol=0.0)


def _public(*args: object) -> object:
    return torch.ops.nmkernels.nm_masked_adamw_(*args)
