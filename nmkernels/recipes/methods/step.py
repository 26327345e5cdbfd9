"""STEP: learn Adam's second moment densely, freeze it, then learn the mask.

When STEP's second moment is good enough to be frozen: AutoSwitch and the policies it was compared with.

Every policy keeps its memory in the recipe's state as tensors and decides on the device; the host only asks between
T_min and T_max. A step that was skipped (``applied`` = 0) leaves the memory untouched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...ops import STATS
from ...optim import MaskedAdamW, UpdateRule
from ...pattern import RecipeError
from ..base import About, Observed, Recipe, Setup, Span, Stage, State, first
from ..compose import Composite, first_stage, of_length
from ..registry import recipe, spec
from ..schedule import check_choice, check_number, packing, resolve_step
from .ste import SRSTE

APPLIED, CHANGE, LOG_CHANGE, UNCHANGED = (STATS.index(name) for name in ("applied", "v_change", "v_log_change", "v_unchanged"))
LOG_FLOOR = -149 * math.log(2)
"""What the optimizer counts as log|Δv| where v did not change: the logarithm of the smallest fp32 number."""


def window(beta2: float) -> int:
    """T_w = 1/(1 − β₂), rounded: in floating point the quotient may fall just below the whole number.

    Example:
        >>> window(0.999), window(0.95)
        (1000, 20)
    """
    return max(1, round(1 / (1 - beta2)))


def observe(state: State, switch: str, seen: Observed) -> None:
    """Take the statistics of one step into ``state``: t, the ring of past values, and the figure ``z_bar`` that is tested."""
    applied = seen.stats[APPLIED]
    for key in ("t", "z_bar", "ring"):
        if key in state and state[key].device != applied.device:
            state[key] = state[key].to(applied.device)
    if switch != "fixed":
        _POLICIES[switch](state, seen, applied)
    state["t"] = state["t"] + applied


def _push(state: State, value: Tensor, applied: Tensor) -> Tensor:
    """Write ``value`` at the ring's next place and return what stood there; the ring holds its last len(ring) values."""
    ring: Tensor = state["ring"]
    place = (state["t"] % ring.numel()).long().reshape(1)
    old = ring[place]
    # a copy, so that a state dict taken before this step keeps its own numbers
    state["ring"] = ring.scatter(0, place, torch.where(applied > 0, value.reshape(1), old))
    return old.reshape(())


def _auto(mean: Callable[[Observed], Tensor]) -> Callable[[State, Observed, Tensor], None]:
    def policy(state: State, seen: Observed, applied: Tensor) -> None:
        _push(state, mean(seen), applied)
        filled = torch.clamp(state["t"] + applied, max=state["ring"].numel()).clamp(min=1)
        state["z_bar"] = torch.where(applied > 0, state["ring"].sum() / filled, state["z_bar"])

    return policy


def _geometric(seen: Observed) -> Tensor:
    """exp of the mean of log|Δv| over the weights whose v changed.

    A dead unit's weights never change v. Counted at the floor, where the logarithm is -103, one dead weight in ten would shrink Z by
    e^-10 and fire the switch; they say nothing about how settled the others are.
    """
    moved = seen.numel - seen.stats[UNCHANGED]
    return torch.where(moved > 0, ((seen.stats[LOG_CHANGE] - seen.stats[UNCHANGED] * LOG_FLOOR) / moved.clamp(min=1)).exp(), 0.0)


def _relative_norm(state: State, seen: Observed, applied: Tensor) -> None:
    norm = torch.stack([v.double().square().sum() for v in seen.second_moments]).sum().sqrt()
    before = _push(state, norm, applied)
    change = torch.where(before > 0, (norm - before).abs() / before, torch.inf)
    state["z_bar"] = torch.where(applied > 0, change, state["z_bar"])


def _staleness(state: State, seen: Observed, applied: Tensor) -> None:
    norm = torch.stack([v.double().abs().sum() for v in seen.second_moments]).sum()
    lagged = _push(state, norm, applied)
    ready = (state["t"] >= state["ring"].numel()) & (lagged > 0)
    state["z_bar"] = torch.where(applied > 0, torch.where(ready, norm / lagged, 0.0), state["z_bar"])


_POLICIES: dict[str, Callable[[State, Observed, Tensor], None]] = {
    "arithmetic": _auto(lambda seen: seen.stats[CHANGE] / seen.numel),
    "geometric": _auto(_geometric),
    "relative_norm": _relative_norm,
    "staleness": _staleness,
}
SWITCHES = ("fixed", *_POLICIES)


THRESHOLDS = {"relative_norm": 0.5, "staleness": 0.96}


@recipe("step")
@dataclass(frozen=True)
class STEP(Composite):
    """STEP (Lu et al., "STEP: learning N:M structured sparsity masks from scratch with precondition", ICML 2023, algorithm 2).

    Phase 0, t ≤ T₀: dense AdamW. Phase 1, t > T₀: forward with M(W) ⊙ W, the straight-through gradient into
    m = β₁m + (1−β₁)g, and W ← W − lr · m̂ / (√v̂* + ε) with v* = v_{T₀} frozen. Parameters without a mask keep plain AdamW.

    AutoSwitch chooses T₀: with Z_t the mean of |v_t − v_{t−1}| over all maskable weights and Z̄ its mean over the last
    1/(1−β₂) steps, T₀ is the first t with (Z̄_t < ε and t > T_min) or t > T_max.

    Args:
        switch: ``"arithmetic"`` (option I), ``"geometric"`` (option II: Z_t is exp of the mean of log|Δv|, floored at the smallest
            fp32 number; weights whose v did not change at all are left out, or a few dead units would fire it), ``"fixed"`` (at
            ``start``), or the paper's rivals ``"relative_norm"`` (|‖v_t‖−‖v_{t−1}‖|/‖v_{t−1}‖ < 0.5) and ``"staleness"``
            (‖v_t‖₁/‖v_{t−1/(1−β₂)}‖₁ > 0.96).
        t_min, t_max: bounds on T₀: whole steps, or shares of ``total_steps`` as floats; None for no bound.
        start: T₀ for ``switch="fixed"``, in steps or as a share.
        threshold: of the policy's test; by default the optimizer's own ε, or the rivals' figure above.
        bias_corrected: freeze v̂* = v*/(1−β₂^T₀) (no jump of the step size at the switch); False keeps v* raw.
        eps_mode: ``"outside"`` √v̂* + ε, or ``"inside"`` √(v̂* + ε).
        clamp: bound on |m̂/D| in phase 1; None for none. Where phase 0 has driven gradients to zero, v* is tiny and the first masked
            gradients take huge steps; it matters at high sparsity (``bench/results/step_clamp.csv``).
        freeze: False goes on with Adam's own second moment in phase 1. Not STEP any more: it tells what the dense phase does from what
            the frozen moment does (``bench/accuracy``).
        decay: λ of SR-STE in phase 1; 0 for plain STE. The same as ``inner=SRSTE(pattern, decay=...)``.
        packed: how phase 1 multiplies, as for ``STE``; of an inner recipe it is that one's option.
        inner: the recipe of phase 1 in its place, ``MdGf("1:8", ...)`` or its text ``"mdgf(end=0.8)"``; the paper reports SR-STE,
            decaying masks and layer-wise N. It begins at the switch: its own schedule counts from there over the T − T₀ steps that are
            left of ``total_steps`` (shares in it are shares of those, a ``total_steps`` of its own is overruled), what it takes once
            from the weights (S-STE's β, layer-wise patterns) it takes from those of the switch, and all its updates have v frozen.

    Raises:
        RecipeError: shares without ``total_steps``, t_min > t_max, a value out of range; an inner recipe with a dense phase of its own
            or that trains no weights; or, at ``attach``, an optimizer whose second moment cannot be frozen.

    Example:
        >>> STEP("2:4", total_steps=1000).bounds()
        (100, 500)
        >>> STEP("1:8", total_steps=1000, switch="fixed", inner="mdgf(end=0.8)").sparse(250).stages[-1][0]
        600
    """

    switch: str = field(default="arithmetic", metadata={"resume": "until inner"})
    t_min: float | int | None = 0.1
    t_max: float | int | None = 0.5
    start: float | int = 0.25
    threshold: float | None = None
    bias_corrected: bool = True
    eps_mode: str = "outside"
    clamp: float | None = 2.0
    freeze: bool = True
    decay: float = 0.0
    packed: bool | str = False

    about = About(
        paper="Lu et al., ICML 2023, arXiv 2302.01172",
        extra_state="a window of 1/(1−β₂) numbers of the second moment until the switch",
        cost="dense until the switch, by default between 10 and 50 % of the steps; then as ste, or the inner recipe",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("STEP", "switch", self.switch, SWITCHES)
        check_choice("STEP", "eps_mode", self.eps_mode, ("outside", "inside"))
        if self.clamp is not None and not self.clamp > 0:
            raise RecipeError(f"STEP: clamp={self.clamp} must be positive, or None for no clamp.")
        check_number("STEP", "decay", self.decay)
        packing("STEP", self.packed, self.pattern)
        if self.threshold is not None and not self.threshold > 0:
            raise RecipeError(f"STEP: threshold={self.threshold} must be positive, or None for the policy's own.")
        low, high = self.bounds()
        if low is not None and high is not None and low > high:
            raise RecipeError(f"STEP: t_min ({low} steps) is later than t_max ({high} steps).")
        if self.switch == "fixed" and high == 0:
            raise RecipeError("STEP: start is step 0, before any second moment exists; use SRSTE, or switch later.")
        if self.inner is not None:
            for name, what in (("decay", "SR-STE"), ("packed", "phase 1")):
                if getattr(self, name):
                    raise RecipeError(
                        f"STEP: {name}={getattr(self, name)!r} is of {what} and there is an inner recipe; give it to that one."
                    )
            self._check_inner()

    def _check_inner(self) -> None:
        inner = self.sparse(0)
        said = f"STEP: {type(inner).__name__} cannot be its inner recipe: "
        stage = first_stage(inner)
        if stage.phase == 0:
            raise RecipeError(
                f"{said}it begins with a dense phase, and STEP has that one itself. Leave out what makes it dense at first "
                "(start=), or use the recipe without STEP."
            )
        if stage.plan.wgrad == "none" or (stage.transform is not None and "learned" in stage.transform.reads.values()):
            raise RecipeError(f"{said}it learns masks, from the first step on, which a dense phase cannot prepare. Use it without STEP.")
        if stage.rule.late:
            raise RecipeError(f"{said}its second moment is that of its own decay too, and cannot be frozen before. Use it without STEP.")
        if inner.setup.mask_score not in (None, "magnitude"):
            raise RecipeError(f'{said}its masks are of a model that is trained already. Use score="magnitude", or it without STEP.')
        earliest = (self.bounds()[0] or 0) + (self.switch != "fixed")
        for at in {earliest, self._latest() or earliest}:
            try:
                self.sparse(at)
            except RecipeError as error:
                raise RecipeError(f"STEP: after a switch at step {at} its inner recipe has too few steps left: {error}") from error

    def _latest(self) -> int | None:
        """The last step that can be T₀ and leaves one; None where the length of the run is not known."""
        _, high = self.bounds()
        last = None if self.total_steps is None else self.total_steps - 1
        late = None if high is None else high + (self.switch != "fixed")
        return min((at for at in (last, late) if at is not None), default=None)

    def sparse(self, switch_step: int) -> Recipe:
        """The recipe of phase 1 after a switch at T₀ = ``switch_step``: the inner one over the steps that are left."""
        if self.inner is None:
            return SRSTE(self.pattern, decay=self.decay, packed=self.packed)
        assert isinstance(self.inner, Recipe)
        if self.total_steps is None:
            return self.inner
        return of_length(self.inner, self.total_steps - min(switch_step, self._latest() or 0))

    def bounds(self) -> tuple[int | None, int | None]:
        """(T_min, T_max) in steps; both are T₀ itself for ``switch="fixed"``."""
        if self.switch == "fixed":
            at = resolve_step("STEP", "start", self.start, self.total_steps)
            return at, at
        return (
            resolve_step("STEP", "t_min", self.t_min, self.total_steps),
            resolve_step("STEP", "t_max", self.t_max, self.total_steps),
        )

    def profile(self, steps: int) -> list[Span]:
        """Dense until T_max, the latest T₀, or to the end where there is no bound; then what the inner recipe costs.

        Where T₀ of a run is known, ``switched_at`` makes the recipe whose profile is that run's.
        """
        _, high = self.bounds()
        # T₀ is the first t > T_max, unless it is given
        late = steps if high is None else high + (self.switch != "fixed")
        return first(steps, [Span(late), *self.sparse(late).profile(max(steps - late, 1))])

    def switched_at(self, step: int) -> STEP:
        """The same recipe with T₀ = ``step``, for counting the FLOPs of a run after it.

        Example:
            >>> [span.steps for span in STEP("2:4", total_steps=100).switched_at(20).profile(100)]
            [20, 80]
        """
        return replace(self, switch="fixed", start=step)

    @property
    def setup(self) -> Setup:
        return replace(super().setup, optimizer=MaskedAdamW, needs="freezes the second moment")

    def active(self, state: State) -> tuple[Recipe, State]:
        """The recipe of phase 1; its own state is empty until it begins."""
        return self.sparse(state.get("switch_step", 0)), state.get("inner", {})

    def first_state(self, group: dict[str, Any]) -> State:
        threshold = self.threshold if self.threshold is not None else THRESHOLDS.get(self.switch, group["eps"])
        state: State = {"switch_step": 0, "v_step": 0, "threshold": float(threshold)}
        state |= {"t": torch.zeros((), dtype=torch.float64), "z_bar": torch.zeros((), dtype=torch.float64)}
        if self.switch != "fixed":
            length = 1 if self.switch == "relative_norm" else window(float(group["betas"][1]))
            state["ring"] = torch.zeros(length, dtype=torch.float64)
        return state

    def stage(self, state: State) -> Stage:
        """Phase 0 until the switch, then the stages of the inner recipe with the second moment frozen."""
        if not state.get("switch_step"):
            return Stage(phase=0, rule=UpdateRule(geometric=self.switch == "geometric"), later=first_stage(self.sparse(0)).transform)
        stage = super().stage(state)
        if not self.freeze:
            return stage
        rule = replace(
            stage.rule,
            frozen=True,
            v_step=state["v_step"] if self.bias_corrected else 0,
            eps_inside=self.eps_mode == "inside",
            clamp=self.clamp or 0.0,
        )
        return replace(stage, rule=rule)

    def advance(self, state: State, observed: Observed) -> bool:
        """Watch the second moment; True at the step after which it is frozen, and when the stage of the inner recipe changes."""
        if state["switch_step"]:
            state["t"] = state["t"] + observed.stats[APPLIED].to(state["t"].device)
            return super().advance(state, replace(observed, calls=observed.calls - state["switch_step"]))
        observe(state, self.switch, observed)
        if self.switch == "geometric":
            state["v_unchanged"] = observed.stats[UNCHANGED]
        if not self._due(state, observed.calls):
            return False
        state["switch_step"] = int(state["t"].item())
        state["v_step"] = state["switch_step"] if observed.step is None else int(observed.step.item())
        inner = self.sparse(state["switch_step"])
        state["inner"] = {"spec": spec(inner), **inner.first_state(observed.group)}
        if "seed" in state["inner"]:
            state["seed"] = state["inner"]["seed"]  # the random streams of the layers are the handle's matter
        return True

    def _due(self, state: State, calls: int) -> bool:
        low, high = self.bounds()
        fixed = self.switch == "fixed"
        # before T_min there is nothing to decide, and the host need not wait for the device
        if calls < (low or 0) + (0 if fixed else 1):
            return False
        t, z, threshold = state["t"], state["z_bar"], state["threshold"]
        if fixed:
            return bool((t >= (high or 0)).item())
        due = (z > threshold if self.switch == "staleness" else z < threshold) & (t > (low or 0))
        return bool((due if high is None else due | (t > high)).item())

    def values(self, state: State) -> dict[str, Tensor]:
        """``z_bar``, what AutoSwitch tests; ``switch_step``, T₀ or 0; for option II ``v_unchanged``, how many |Δv| were zero.

        After the switch also those of the inner recipe.
        """
        if not state:
            return {}
        own = {"z_bar": state["z_bar"], "switch_step": torch.tensor(state["switch_step"])}
        if "v_unchanged" in state:
            own["v_unchanged"] = state["v_unchanged"]
        return {**own, **super().values(state)} if state["switch_step"] else own

    def not_ready_reason(self, state: State) -> str:
        return super().not_ready_reason(state) if state["switch_step"] else "is still in its dense phase"
