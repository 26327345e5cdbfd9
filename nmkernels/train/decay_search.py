"""The search for λ by flip rates: short runs from the model's present weights, which are put back afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import finite_number, whole_number
from ..gemm.plan import STRAIGHT_THROUGH
from ..pattern import RecipeError
from ..recipes.contract import Recipe
from .handle import Handle
from .sparsify import FilterFn, sparsify_

GRID = (6e-6, 2e-5, 6e-5, 2e-4, 6e-4, 2e-3, 6e-3)


@dataclass(frozen=True)
class DecayTrial:
    """One short sparse run: its λ, its flip rate r(λ), and μ = r(λ) / r₀; both NaN where it diverged."""

    decay: float
    flip_rate: float
    ratio: float


@dataclass(frozen=True)
class DecaySearch:
    """What ``search_decay`` measured and chose: ``dense_rate`` is r₀, ``feasible`` (lowest, highest μ); ``str`` of it is a table."""

    recipe: Recipe
    decay: float
    dense_rate: float
    trials: tuple[DecayTrial, ...]
    feasible: tuple[float, float]

    def __str__(self) -> str:
        return f"{_table(self.dense_rate, self.trials, self.feasible)}\nchosen: decay={self.decay:g}"


Step = Callable[[nn.Module, torch.optim.Optimizer, Any], object]
"""``step(model, optimizer, batch)``: zero the gradients, loss, backward, clip, ``optimizer.step()``."""


def search_decay(
    recipe: Recipe,
    model: nn.Module,
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer],
    step: Step,
    batches: Sequence[Any],
    *,
    grid: Sequence[float] = GRID,
    feasible: tuple[float, float] = (0.60, 0.95),
    measure: float = 0.5,
    stride: int = 1,
    filter_fn: FilterFn | None = None,
    progress: Callable[[str], object] | None = None,
) -> DecaySearch:
    """Choose λ so that the masks flip a little less often than those of dense weights (FST, arXiv 2404.01847, "determine λ in warm-up").

    A dense run gives r₀, the flip rate of the masks that its weights would have; a sparse run for each λ of the grid gives r(λ); and
    with μ = r(λ) / r₀ the λ is taken whose μ is nearest to the middle of the feasible interval, which could **not be verified** in the
    paper's text. All runs start from the present weights and random state, which are afterwards as they were, and see the same batches.

    r is Σ|M_j − M_{j−1}| / number of weights, averaged over the last part of a run, M_j the mask that step j·stride would choose from the
    master weights. It depends on the learning rate: give that of the real run's warm-up.

    Args:
        recipe: any with a ``decay`` that is sparse from its first step (``FST``, ``SRSTE``, ...); a dense end is left out of the runs.
        model: the dense model, not yet given to ``sparsify_``.
        optimizer: makes the optimizer from parameters, for instance ``lambda p: recipe.optimizer(p, lr=1e-3)``.
        step: ``step(model, optimizer, batch)`` does one optimizer step, with the clipping of the real run.
        batches: one per step of each run; a hundred or more, for rates that mean something.
        grid, feasible: the λ to try; lowest and highest μ.
        measure, stride: the share of a run, at its end, over which flips are averaged; steps between two masks that are compared.
        filter_fn, progress: as for ``sparsify_``; called with a line of text after every run, for instance ``print``.

    Raises:
        RecipeError: an argument is out of range, the dense run flips nothing, or no λ is feasible; the message has all numbers.

    Example:
        >>> from nmkernels.recipes import FST
        >>> def step(model, optimizer, batch):
        ...     optimizer.zero_grad()
        ...     (model(batch[0]) - batch[1]).square().mean().backward()
        ...     optimizer.step()
        >>> data = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(20)]
        >>> make = lambda p: torch.optim.AdamW(p, lr=1e-2)
        >>> search = search_decay(FST(end=None), nn.Linear(16, 16), make, step, data, grid=(1e-4, 1.0), feasible=(0.0, 2.0))
        >>> search.recipe.decay == search.decay
        True
    """
    # with hooks of its own a method's decay is not that of pruned weights (MaskLLM, ProxSparse)
    if recipe.setup.hooks is not None or "decay" not in {f.name for f in fields(recipe)}:
        raise RecipeError(f"search_decay: {type(recipe).__name__} has no decay to search; FST and SRSTE have one.")
    grid = [finite_number(RecipeError, "search_decay: a λ of grid", decay) for decay in grid]
    if not grid:
        raise RecipeError("search_decay: grid is empty; pass one or more λ.")
    low, high = (finite_number(RecipeError, "search_decay: a μ of feasible", bound) for bound in feasible)
    if low > high:
        raise RecipeError(f"search_decay: feasible={feasible} must be a lowest and a highest μ.")
    measure = finite_number(RecipeError, "search_decay: measure", measure, 0, 1)
    if measure == 0:
        raise RecipeError("search_decay: measure=0 compares no masks; it is the share of each run that is measured.")
    stride = whole_number(RecipeError, "search_decay: stride", stride)
    compared = range(len(batches) - round(measure * len(batches)), len(batches) + 1, stride)
    if len(compared) < 2:
        raise RecipeError(f"search_decay: {len(batches)} batches are too few to compare two masks {stride} steps apart; give more.")
    endless: dict[str, Any] = {"end": None} if recipe.final == "dense" else {}
    probes = [replace(recipe, decay=decay, **endless) for decay in grid]  # type: ignore[call-arg]
    if probes[0].stage({}).phase == 0:
        raise RecipeError(f"search_decay: {type(recipe).__name__} begins with dense steps, in which λ has no effect.")

    def run(probe: Recipe, dense: bool) -> float:
        """The flip rate of one run; afterwards the model, its gradients and the random state are what they were before."""
        tensors = {t: t.detach().clone() for t in (*model.parameters(), *model.buffers())}
        gradients = {p: p.grad for p in model.parameters()}
        for p in gradients:
            p.grad = None
        try:
            with torch.random.fork_rng():
                handle = sparsify_(model, probe, filter_fn)
                try:
                    return _flip_rate(handle, optimizer(handle.model.parameters()), step, batches, compared, dense)
                finally:
                    handle.remove()
        finally:
            with torch.no_grad():
                for t, value in tensors.items():
                    t.copy_(value)
            for p, grad in gradients.items():
                p.grad = grad

    tell = progress or (lambda line: None)
    dense_rate = run(probes[0], dense=True)
    tell(f"dense: flip rate {dense_rate:.3g}")
    if not 0 < dense_rate < math.inf:
        raise RecipeError(
            f"search_decay: the flip rate of the dense run is {dense_rate}, so there is nothing to compare with. Give more batches, a "
            "longer stride, or the learning rate of the real run; if it is NaN, the run diverged."
        )
    trials: list[DecayTrial] = []
    for decay, probe in zip(grid, probes, strict=True):
        rate = run(probe, dense=False)
        trials.append(DecayTrial(decay, rate, rate / dense_rate))
        tell(f"decay={decay:g}: flip rate {rate:.3g}, {trials[-1].ratio:.2f} of the dense run's")
    feasible_trials = [t for t in trials if low <= t.ratio <= high]
    if not feasible_trials:
        if all(t.ratio > high for t in trials):
            way_out = "with every decay of the grid the masks flip too often. Extend the grid upwards, or lower the learning rate."
        elif all(t.ratio < low for t in trials):
            way_out = "with every decay of the grid the masks flip too seldom. Extend the grid downwards."
        else:
            way_out = "no decay is feasible. Refine the grid where the ratio crosses the interval, or give more batches for less noise."
        raise RecipeError(f"search_decay: {way_out}\n{_table(dense_rate, trials, feasible)}")
    best = min(feasible_trials, key=lambda t: (abs(t.ratio - (low + high) / 2), t.decay))
    return DecaySearch(replace(recipe, decay=best.decay), best.decay, dense_rate, tuple(trials), (low, high))  # type: ignore[call-arg]


def _flip_rate(handle: Handle, optimizer: torch.optim.Optimizer, step: Step, batches: Sequence[Any], compared: range, dense: bool) -> float:
    """The mean flip rate of one run between the masks before the steps ``compared``."""
    if dense:
        for layer in handle.layers.values():
            layer.use(None, STRAIGHT_THROUGH)
    else:
        handle.attach(optimizer)
    transform = handle.recipe.final_transform()
    before: list[Tensor] = []
    rates: list[Tensor] = []
    for t in range(len(batches) + 1):
        if t in compared:
            now = []
            for layer in handle.layers.values():
                w = layer.master.detach()
                new = transform.renew(w, [None] * len(transform.reads), torch.Generator().manual_seed(0))
                now.append(transform.kept(w, *[new[name] for name in transform.reads if name in new]))
            if before:
                flips = torch.stack([(a ^ b).sum() for a, b in zip(before, now, strict=True)]).sum()
                rates.append(flips.double() / sum(a.numel() for a in now))
            before = now
        if t < len(batches):
            step(handle.model, optimizer, batches[t])
    if not all(bool(torch.isfinite(layer.weight).all()) for layer in handle.layers.values()):
        return math.nan
    return float(torch.stack(rates).mean())


def _table(dense_rate: float, trials: Sequence[DecayTrial], feasible: tuple[float, float]) -> str:
    rows = [("decay", "flip rate", "of dense"), ("dense", f"{dense_rate:.3g}", "1.00")]
    rows += [(f"{t.decay:g}", f"{t.flip_rate:.3g}", f"{t.ratio:.2f}") for t in trials]
    lines = [f"{a:>9}  {b:>9}  {c:>8}" for a, b, c in rows]
    return "\n".join([*lines, f"feasible: {feasible[0]:g} to {feasible[1]:g} of dense"])
