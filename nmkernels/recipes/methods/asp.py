"""ASP: prune once, keep the mask, retrain."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ...nn.chains import Chain, channel_parameters, find_chains, reorder_
from ...nn.weight import NMWeight
from ...pattern import RecipeError
from ..contract import About, Hooks, Setup, Stage, choice, count, flag, random_seed
from ..registry import recipe
from ..schedule import ScheduledRecipe, resolve_step
from .permutation import search_permutation

log = logging.getLogger("nmkernels.permutation")
log.addHandler(logging.NullHandler())

OTHERS = "experts that are stacked in one tensor"
"""The reason of layers that ``find_chains`` does not mention."""

Optimizers = Sequence[torch.optim.Optimizer]


class Channels(Hooks):
    """Reorders hidden channels just before masks are chosen, so that they keep more; ``report.channels`` says of each layer what that
    gained, or why its channels stay."""

    def begin(self) -> None:
        self.kept: dict[str, list[float]] = {}
        """For checkpoints, ``state["kept"]``: of each searched layer, the shares of the score that its mask kept before and keeps now."""
        self._previewed: list[tuple[Chain, Tensor]] = []
        chains, reasons = find_chains(self.run.model)
        outlook = {name: f"left alone: {reasons.get(name, OTHERS)}" for name in self.run.layers}
        for chain in chains:
            reason = f"to be reordered, with the outputs of {', '.join(chain.producers)}, when the layer is pruned"
            outlook.update(dict.fromkeys(outlook.keys() & chain.consumers, reason))
        self.run.report.channels = outlook

    def enter(self, stage: Stage) -> None:
        run = self.run
        while self._previewed:
            chain, order = self._previewed.pop()
            self._reorder(chain, order.argsort(), ())
        if not stage.held_mask:
            return
        if not run.held.masks:
            self.permute_(run.optimizers)
            run.state["kept"] = self.kept
        elif run.state.get("kept") is not self.kept:  # the weights of a checkpoint come in their new order
            self.kept = run.state.get("kept", {})
            run.report.channels = dict.fromkeys(run.layers, "left alone")
            for name, (before, after) in self.kept.items():
                run.report.channels[name] = f"{'reordered' if after > before else 'left alone'} earlier: {_gain(before, after)}"
        gains = [after / before - 1 for before, after in self.kept.values() if before]
        self.metrics = {"kept_gain": torch.tensor(sum(gains) / len(gains), dtype=torch.float64)} if gains else {}

    def use_final_form(self) -> None:
        if not self.run.state:  # with no optimizer attached, finish() is what prunes
            self._previewed = self.permute_()

    def _reorder(self, chain: Chain, order: Tensor, optimizers: Optimizers) -> None:
        for p, dim in channel_parameters(self.run.model, chain):
            moments = (value for _, value in _state_of(p, optimizers) if value.shape == p.shape)
            for tensor in itertools.chain([p.detach()], [] if p.grad is None else [p.grad], moments):
                reorder_(tensor, dim, order)
        for name in chain.consumers:
            self.run.held.reorder(name, order)
        for module in self.run.model.modules():
            if isinstance(module, NMWeight):
                module.effective.drop()

    def permute_(self, optimizers: Optimizers = ()) -> list[tuple[Chain, Tensor]]:
        """Reorder every chain that gains by it, in place, with gradients and optimizers' moments; returns these chains."""
        self.run.held.check_inputs()
        layers, report = self.run.layers, self.run.report
        # hooks and ties may have come since sparsify_
        chains, reasons = find_chains(self.run.model)
        report.channels = {name: f"left alone: {reasons.get(name, OTHERS)}" for name in layers}
        self.kept = {}
        if not all(bool(torch.isfinite(layer.weight).all()) for layer in layers.values()):
            report.channels = dict.fromkeys(layers, "left alone: a weight of the model is not finite")
            return []
        todo: list[tuple[Chain, Tensor]] = []
        for chain in chains:
            sparse = [name for name in chain.consumers if name in layers]
            if not sparse:
                continue
            outcome = self._obstacle(chain, sparse, optimizers)
            if not outcome:
                # of a convolution one row for each output and offset in the kernel
                scores = torch.cat([self.run.held.scores(name).reshape(-1, chain.channels) for name in sparse])
                progress = functools.partial(log.info, "%s: %s", ", ".join(sparse))
                result = search_permutation(scores, layers[sparse[0]].pattern, self.recipe.escapes, self.recipe.seed, progress)
                self.kept.update({name: [result.before, result.after] for name in sparse})
                if result.after > result.before:
                    todo.append((chain, result.order))
                    way = f"{result.efficacy:.0%} of the way to {result.bound:.4f}, the best without groups"
                    outcome = f"reordered with the outputs of {', '.join(chain.producers)}: {_gain(result.before, result.after)} ({way})"
                else:
                    outcome = f"left alone: no order was found that keeps more than the present one, {result.before:.4f} of the magnitude"
            report.channels.update(dict.fromkeys(sparse, outcome))
        for chain, order in todo:
            self._reorder(chain, order, optimizers)
        return todo

    def _obstacle(self, chain: Chain, sparse: list[str], optimizers: Optimizers) -> str:
        if len({str(self.run.layers[name].pattern) for name in sparse}) > 1:
            return f"left alone: {', '.join(sparse)} have different patterns"
        known = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        for p, _ in channel_parameters(self.run.model, chain):
            if optimizers and isinstance(p, nn.Parameter) and id(p) not in known:
                names = ", ".join(chain.producers + chain.consumers)
                return f"left alone: a parameter of {names} belongs to no optimizer that attach was given"
            for key, value in _state_of(p, optimizers):
                if value.numel() > 1 and value.shape != p.shape:
                    return f"left alone: the optimizer's {key!r} has a different shape from its weight, and cannot be reordered with it"
        return ""


def _state_of(p: Tensor, optimizers: Optimizers) -> Iterator[tuple[str, Tensor]]:
    for optimizer in optimizers:
        if p in optimizer.state:
            yield from ((str(key), value) for key, value in optimizer.state[p].items() if isinstance(value, Tensor))


def _gain(before: float, after: float) -> str:
    return f"the mask keeps {after:.4f} of the magnitude instead of {before:.4f}"


@recipe("asp")
@dataclass(frozen=True)
class ASP(ScheduledRecipe):
    """Automatic sparsity (Mishra et al., "Accelerating sparse deep neural networks", arXiv 2104.08378): prune once, then retrain.

    Around each step the mask is held: g ← g ⊙ M, optimizer step, W ← W ⊙ M.

    Args:
        score: ``"magnitude"`` |w|; ``"wanda"`` |w|·‖x‖₂ of its input feature (Sun et al., ICLR 2024, eq. 1), after ``handle.calibrate()``;
            ``"existing"`` adopts the zeros of a model pruned elsewhere, and refuses weights that are not N:M.
        start: when, in steps or as a share of ``total_steps``; 0 prunes as the optimizer is attached. An attached run that is finished
            earlier is pruned without ``permute``.
        permute: just before pruning, reorder hidden channels so that the mask keeps more of the score (``search_permutation``), with
            gradients and moments; the model's function is the same up to rounding. ``handle.report`` says what each chain of layers
            gained, or why it is pruned in the order that it has.
        escapes, seed: of that search.

    Raises:
        RecipeError: ``start`` > 0 with a score other than magnitude, or a share without ``total_steps``; ``permute`` with existing zeros.

    Example:
        >>> [(begin, stage.phase) for begin, stage in ASP("2:4", total_steps=100, start=0.5).stages]
        [(0, 0), (50, 2)]
    """

    score: str = choice("magnitude", "wanda", "existing")
    start: float | int = 0
    permute: bool = flag(False)
    escapes: int = count(100)
    seed: int = random_seed(0)

    about = About(
        paper="Mishra et al., 2021, arXiv 2104.08378",
        extra_state="a mask per layer, chosen once",
        cost="gradients and weights are masked around each step; fprop at N/M once pruned",
    )
    _resume = "any"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages[1][0] and self.score != "magnitude":
            raise RecipeError(f'ASP: score="{self.score}" prunes a model that is trained already; start={self.start} must be 0.')
        if self.permute and self.score == "existing":
            raise RecipeError('ASP: score="existing" adopts zeros where they are; permute=True would move them out of their groups.')

    @property
    def setup(self) -> Setup:
        hooks = functools.partial(Channels, self) if self.permute else None
        reason, only = "reorders the channels of whole weights" if self.permute else "", ""
        if self.score == "wanda":
            reason, only = "ranks weights by all inputs that their layers have seen", "ranks weights by what linear layers have seen"
        return Setup(mask_score=self.score, hooks=hooks, needs_whole=reason, linear_only=only)

    @cached_property
    def stages(self) -> tuple[tuple[int, Stage], ...]:
        """Phase 0 dense, then phase 2 with the mask held."""
        start = resolve_step("ASP", "start", self.start, self.total_steps)
        return (0, Stage(phase=0)), (start, Stage(phase=2, held_mask=True))
