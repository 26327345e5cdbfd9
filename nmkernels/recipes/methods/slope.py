"""SLoPe: static masks, a doubly pruned weight for the gradient of the input, and low-rank adapters in the last steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor

from ...arguments import as_int, as_number
from ...autograd.transforms import HardMask, WeightTransform, masked, pruned_along_out, reading
from ...nn.adapter import ADAPTER, set_adapter
from ...pattern import Pattern, RecipeError
from ..contract import About, Hooks, LayerSetup, Setup, Span, Stage, State, count, generator_of, random_seed, rank_for, setting
from ..registry import recipe
from ..schedule import ScheduledRecipe, resolve_step


@dataclass(frozen=True)
class DoublePruned(WeightTransform):
    """W̃ = W, which ``SLoPe``'s held row mask R keeps N:M, forward; W ⊙ C in ∂L/∂x; R ⊙ ∂L/∂W."""

    reads = reading(nm_rows="held", nm_columns="held")

    def renew(self, weight: Tensor, extras: Sequence[Tensor | None], generator: torch.Generator) -> dict[str, Tensor]:
        n, m = self.pattern.n, self.pattern.m
        rows = torch.ops.nmkernels.nm_mask(weight, n, m) if extras[0] is None else extras[0]
        # a weight that the row mask keeps may be 0 now and grow before the next renewal: it still goes before one that is pruned
        sizes = weight.abs().clamp_min(torch.finfo(weight.dtype).tiny).masked_fill(~rows, 0.0)
        return {"nm_rows": rows, "nm_columns": (pruned_along_out(sizes, n, m) != 0).contiguous()}

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        return extras[0]

    def for_dgrad(self, used: Tensor, *extras: Tensor) -> Tensor:
        return masked(used, extras[1])

    def gradient(self, g: Tensor, weight: Tensor, *extras: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        return masked(g, extras[0]), {}


@dataclass(frozen=True)
class AdapterStage(Stage):
    """A stage in which the layers add adapters of ``rank``."""

    rank: float | int = 0

    def span(self, steps: int, pattern: Pattern) -> Span:
        return replace(super().span(steps, pattern), rank=self.rank)


class Adapters(Hooks):
    """Gives every layer an adapter, R' = 0 and L ~ N(0, 1), the same on every device, rank and dtype."""

    def begin(self) -> None:
        for name, layer in self.run.layers.items():
            generator = generator_of(self.recipe.setup.first_seed, f"adapter/{name}")
            size = layer.shape[1], rank_for(self.recipe.rank, layer.shape)
            left = torch.randn(size, generator=generator, dtype=torch.float64).to(layer.weight)
            set_adapter(layer, left, left.new_zeros(size[1], layer.shape[0]), *layer.shape)
            for key in ADAPTER:
                layer.get_parameter(key).requires_grad_(layer.weight.requires_grad)

    def enter(self, stage: Stage) -> None:
        for layer in self.run.layers.values():
            layer.adapts = isinstance(stage, AdapterStage)
            # DistributedDataParallel waits for a gradient of every Parameter
            layer.idle = () if layer.adapts or not (dist.is_available() and dist.is_initialized()) else ADAPTER

    def use_final_form(self) -> None:
        for layer in self.run.layers.values():
            layer.adapts, layer.idle = True, ()


@recipe("slope")
@dataclass(frozen=True)
class SLoPe(ScheduledRecipe):
    """SLoPe (Mozaffari et al., "SLoPe: double-pruned sparse plus lazy low-rank adapter pretraining of LLMs", ICLR 2025, arXiv 2405.16325).

    The row mask R, N:M by magnitude along the inputs, is that of the weight as the optimizer is attached, and never changes. C, N:M by
    magnitude along the outputs of W^R = R ⊙ W, is chosen again after every ``every`` applied steps::

        y = x (W^R)ᵀ        ∂L/∂x = g (W^R ⊙ C)        ∂L/∂W = R ⊙ gᵀ x

    so weights and gradients (also before clipping) are zero outside R, and so are Adam's moments if it has not stepped before ``attach``.
    In the last steps, after ``start``, each layer also has an adapter of rank r that trains with the weight,
    y = x (W^R)ᵀ + x L R' / r, with L ~ N(0, 1) and R' = 0 at first. Where M does not divide the outputs, the last group of a column is
    short and keeps N.

    L ``(in, r)`` and R' ``(r, out)`` are the Parameters ``nm_left`` and ``nm_right`` of each layer from ``sparsify_`` on, so build the
    optimizer after it. Before their phase they do not change: they have no gradient, or where processes train together one of zeros, which
    the optimizer's step removes, so that DistributedDataParallel needs no ``find_unused_parameters=True``.
    ``finish`` leaves N:M weights and the adapters; ``save_dense`` and ``remove`` fold them into one dense weight W + (L R')ᵀ / r.

    Args:
        rank: of the adapters: a whole number, or as a share of the smaller side of each layer, at least 1; 0 for none.
        start: the step, or share of ``total_steps``, which must be given, after which the adapters train; the last step is theirs always.
        every: applied steps between two choices of C; 0 chooses once.
        max_aspect: leave layers dense whose longer side is more than so many times the shorter one, 5 in the authors' code; None: no.
        seed: of L; None takes torch's initial seed.

    Example:
        >>> [begin for begin, stage in SLoPe("2:4", total_steps=1000, rank=0.0625).stages]
        [0, 990]
    """

    rank: float | int = setting(
        0.0156,
        lambda x: x >= 0 if as_int(x) is not None else isinstance(x, float) and 0 <= x < 1,
        "must be a whole number, or a share of the width from 0.0 to below 1.0; 0 for no adapters",
    )
    start: float | int = 0.99
    every: int = count(100)
    max_aspect: float | None = setting(None, lambda x: as_number(x) is not None and x >= 1, "must be at least 1", none="for no limit")
    seed: int | None = random_seed()

    about = About(
        paper="Mozaffari et al., ICLR 2025, arXiv 2405.16325",
        extra_state="three masks per layer, R twice and C; A and B of the adapters",
        cost="fprop and dgrad at N/M, a mask every 100 steps; adapters in the last 1 %",
    )
    final = "nm+adapter"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "final", "nm+adapter" if self.rank else "nm")

    @property
    def setup(self) -> Setup:
        only = "prunes linear layers once more for the gradient of their inputs, and adds adapters"
        reason = "prunes the columns of each whole weight too"
        hooks = partial(Adapters, self) if self.rank else None
        return Setup(mask_score="magnitude", hooks=hooks, seed=self.seed, needs_whole=reason, linear_only=only)

    @cached_property
    def stages(self) -> tuple[tuple[int, Stage], ...]:
        """Phase 2, the row mask held; with adapters at the end."""
        plain = Stage(phase=2, transform=DoublePruned(Pattern(self.pattern)), held_mask=True, every=self.every)
        if not self.rank:
            return ((0, plain),)
        if self.total_steps is None:
            raise RecipeError("SLoPe: total_steps is needed, the steps of the whole run, to know its last ones; or rank=0 for no adapters.")
        start = resolve_step("SLoPe", "start", self.start, self.total_steps)
        if isinstance(self.start, int) and start >= self.total_steps:
            raise RecipeError(f"SLoPe: start={start} leaves the adapters none of total_steps={self.total_steps}.")
        before = replace(plain, not_ready="has not trained its adapters")
        return (0, before), (min(start, self.total_steps - 1), AdapterStage(**vars(plain), rank=self.rank))

    def stage(self, state: State) -> Stage:
        """Before an optimizer is attached the mask still follows the weight."""
        return super().stage(state) if state else Stage(phase=2, transform=HardMask(Pattern(self.pattern)))

    def layer(self, pattern: Pattern, shape: tuple[int, int], transform: WeightTransform | None = None) -> LayerSetup:
        aspect = max(shape) / max(1, min(shape))
        reason = f"its longer side is {aspect:.1f} times its shorter one" if aspect > (self.max_aspect or aspect) else ""
        return replace(super().layer(pattern, shape, transform), keep_dense_reason=reason)
