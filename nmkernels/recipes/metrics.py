"""The metrics of ``handle.metrics()``, from the sums that the optimizers leave behind."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from .. import ops
from ..autograd import HardMask
from ..nn import NMWeight
from ..optim import merge_stats
from .attach import Attachment
from .base import State
from .run import Run


def metrics_of(run: Run, attachments: Iterable[Attachment]) -> dict[str, Tensor]:
    """What ``Handle.metrics`` tells, as 0-d tensors; nothing here waits for the device. λ is the recipe's own figure ``decay``, if any."""
    layers, stage, state = run.layers, run.stage, run.state
    phase = torch.tensor(stage.phase)
    parts = [a for a in attachments if a.stats is not None]
    if not parts:
        # without a state no optimizer was ever attached, and nobody counts
        nothing = torch.full((), 0.0 if state else torch.nan, dtype=torch.float64)
        return {"flip_rate": nothing, "density": _density(layers), "phase": phase, "decay_ratio": nothing.clone()}
    numel = sum(a.numel for a in parts)
    total: Tensor = functools.reduce(merge_stats, [a.stats for a in parts if a.stats is not None])
    s = dict(zip(ops.STATS, total, strict=True))
    grads = s["pruned_grad_abs"]
    own = {**run.recipe.values(state), **_watched(layers)}
    ratio = torch.where(grads > 0, own.get("decay", stage.rule.decay) * s["pruned_abs"] / grads, 0.0)
    # the optimizer counts what M(W) ⊙ W would leave; any other transform has to be asked
    density = s["nonzeros"] / numel if stage.transform is None or isinstance(stage.transform, HardMask) else _density(layers)
    common = {"flip_rate": s["flips"] / numel, "density": density, "phase": phase, "decay_ratio": ratio}
    told = any(a.masked is not None for a in parts)
    return {**common, **own, **_kept_gain(state), **({"max_update": s["max_update"]} if told else {})}


def _kept_gain(state: State) -> dict[str, Tensor]:
    gains = [after / before - 1 for before, after in state.get("kept", {}).values() if before]
    return {"kept_gain": torch.tensor(sum(gains) / len(gains), dtype=torch.float64)} if gains else {}


def _watched(layers: dict[str, NMWeight]) -> dict[str, Tensor]:
    """The transforms' own metrics, each the mean over all weights of the layers that have it."""
    seen: dict[str, list[tuple[Tensor, int]]] = {}
    for layer in layers.values():
        for name, value in layer.watched().items():
            seen.setdefault(name, []).append((value.double(), layer.weight.numel()))
    return {name: torch.stack([v * n for v, n in parts]).sum() / sum(n for _, n in parts) for name, parts in seen.items()}


def _density(layers: dict[str, NMWeight]) -> Tensor:
    used = [layer.effective_weight() for layer in layers.values()]
    return torch.stack([u.count_nonzero() for u in used]).sum().double() / sum(u.numel() for u in used)
