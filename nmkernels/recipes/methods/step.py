"""STEP: learn Adam's second moment densely, freeze it when AutoSwitch or another policy says so, then learn the mask."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...arguments import as_number
from ...ops import STATS
from ...optim.adamw import MaskedAdamW
from ...optim.rules import UpdateRule
from ...pattern import RecipeError
from ...shards import is_sharded, local, summed, total
from ..compose import Composite, first_stage, of_length
from ..contract import About, Observed, Recipe, Setup, Span, Stage, State, choice, flag, number, setting, truncate
from ..registry import recipe, spec
from ..schedule import PACKED, resolve_step
from .ste import SRSTE

APPLIED, CHANGE, LOG_CHANGE, UNCHANGED = (STATS.index(name) for name in ("applied", "v_change", "v_log_change", "v_unchanged"))
LOG_FLOOR = -149 * math.log(2)
"""What the optimizer counts as log|Δv| where v did not change: the logarithm of the smallest fp32 number."""

SWITCHES = ("relative", "paper", "paper_geometric", "relative_norm", "staleness", "fixed")
THRESHOLDS = {"relative": 0.1, "relative_norm": 0.5, "staleness": 0.96}
"""Of the policies that do not take the optimizer's ε."""

REASONS = ("", "test", "t_min", "t_max", "fixed")
"""Why T₀ is what it is, by the number in the state: no switch yet; the policy's test; the test, which T_min had held back; T_max; given."""

TEST, T_MIN, T_MAX, FIXED = range(1, 5)


def window(beta2: float) -> int:
    """T_w = 1/(1 − β₂), rounded: in floating point the quotient may fall just below the whole number."""
    return max(1, round(1 / (1 - beta2)))


LONGEST, SHORTEST, PARTS = 1000, 10, 10
"""The window of the optimizer that ``STEP.optimizer`` builds is 1/PARTS of the run, between these bounds in steps: the longest is that of
AdamW's usual β₂ = 0.999, and an average of fewer than ten squared gradients is too noisy to freeze."""


def figure(switch: str, seen: Observed) -> Tensor:
    """What a policy remembers of each step: Z_t of AutoSwitch, or a norm of v_t, of v̂_t for ``"relative"``."""
    if switch == "paper":
        return seen.stats[CHANGE] / seen.numel
    if switch == "paper_geometric":
        # counted at the floor, one dead weight in ten would shrink Z by e^-10; it says nothing of how settled the others are
        moved = seen.numel - seen.stats[UNCHANGED]
        return torch.where(moved > 0, ((seen.stats[LOG_CHANGE] - seen.stats[UNCHANGED] * LOG_FLOOR) / moved.clamp(min=1)).exp(), 0.0)
    layers = seen.updated_by()
    moments = [layer["exp_avg_sq"] for _, layer in layers]
    if switch == "relative_norm":
        return total(lambda v: v.double().square().sum(), moments).sqrt()
    if switch == "relative":
        counts: dict[Any, list[Tensor]] = {}
        kinds = [(torch.as_tensor(layer["step"]).device, group["betas"][1]) for group, layer in layers]
        for kind, (_, layer) in zip(kinds, layers, strict=True):
            counts.setdefault(kind, []).append(torch.as_tensor(layer["step"]))
        # of many layers at once, as on a GPU each operation is a launch; a layer whose first step was skipped has t = 0 and v = 0
        corrections = {kind: iter(1 - kind[1] ** torch.stack(t).double().clamp(min=1)) for kind, t in counts.items()}
        parts = ((v, local(v).sum(dtype=torch.float64) / next(corrections[kind])) for kind, v in zip(kinds, moments, strict=True))
        return summed(parts).reshape(())
    return total(lambda v: v.double().abs().sum(), moments)


def observe(state: State, switch: str, seen: Observed) -> None:
    """Take one step into ``state``, on the device: t, the ring of past figures and ``z_bar``, which is tested; a skipped one adds none."""
    applied = seen.stats[APPLIED]
    state |= {key: state[key].to(applied.device) for key in ("t", "z_bar", "ring") if key in state}
    t = state["t"]
    if switch != "fixed":
        now, ring = figure(switch, seen), state["ring"]
        place = (t % ring.numel()).long().reshape(1)
        old = ring[place].reshape(())
        # a copy, so that a state dict taken before this step keeps its own numbers
        state["ring"] = ring.scatter(0, place, torch.where(applied > 0, now, old).reshape(1))
        if switch == "relative_norm":
            z = torch.where(old > 0, (now - old).abs() / old, torch.inf)
        elif switch == "relative":
            # of step ⌊(t + 1)/2⌋, but not before those that the ring has
            lag = torch.div(t + 2, 2, rounding_mode="floor").clamp(max=ring.numel())
            then = ring[((t - lag) % ring.numel()).long()]
            # v begins at 0, so the first change is the whole of it
            z = torch.where(then > 0, (now - then).abs() / now, 1.0)
        elif switch == "staleness":
            z = torch.where((t >= ring.numel()) & (old > 0), now / old, 0.0)
        else:
            z = state["ring"].sum() / (t + applied).clamp(min=1, max=ring.numel())
        state["z_bar"] = torch.where(applied > 0, z, state["z_bar"])
    state["t"] = t + applied


def use_one_step_count(seen: Observed, v_step: int) -> None:
    """Scale v of layers with fewer steps than ``v_step``, in place, so that its bias correction is right for them too."""
    for group, layer in seen.updated_by():
        step, beta2 = int(layer["step"]), float(group["betas"][1])
        for key in ("exp_avg_sq", "max_exp_avg_sq") if step != v_step else ():
            if key in layer:  # the second with amsgrad
                local(layer[key]).mul_((1 - beta2**v_step) / (1 - beta2 ** max(step, 1)))


@recipe("step")
@dataclass(frozen=True)
class STEP(Composite):
    """STEP (Lu et al., "STEP: learning N:M structured sparsity masks from scratch with precondition", ICML 2023, algorithm 2).

    Phase 0, t ≤ T₀: dense AdamW. Phase 1, t > T₀: forward with M(W) ⊙ W, the straight-through gradient into
    m = β₁m + (1−β₁)g, and W ← W − lr · m̂ / (√v̂* + ε) with v* = v_{T₀} frozen. Parameters without a mask keep plain AdamW.

    T₀ is the first t with (the test passes and t > T_min) or t > T_max. The test asks whether v has settled over its window of
    w = 1/(1−β₂) steps. By default, with μ_t the mean of v̂_t = v_t/(1−β₂^t) over all maskable weights, t counted for each layer and v̂ = 0
    for layers that have not begun, it passes where

        |μ_t − μ_s| < threshold · μ_t,   s = max(⌊t/2⌋, t − w)

    which does not depend on the scale of the gradients. AutoSwitch of the paper compares the mean Z̄ of Z_t over the last w steps with
    Adam's ε, Z_t the mean of |v_t − v_{t−1}|, which is about (1−β₂) g² whether v has settled or not: multiply the loss, and T₀ changes.

    A switch at T_max means that the test never passed: a warning says so, and ``handle.report`` after it. So does one at a T_min of your
    own, unless the test is the default one.

    ``STEP.optimizer`` without ``betas`` fits the window to ``total_steps``, so that v is frozen after at least one whole window:

        w = max(10, min(1000, total_steps/10)),   β₁ = 0.9,   β₂ = 1 − 1/w

    Args:
        switch: ``"relative"`` (see above, threshold 0.1), ``"paper"`` (AutoSwitch's option I), ``"paper_geometric"`` (option II: Z_t is
            exp of the mean of log|Δv| over the weights whose v changed), ``"fixed"`` (at ``start``), or the paper's rivals
            ``"relative_norm"`` (|‖v_t‖−‖v_{t−1}‖|/‖v_{t−1}‖ < 0.5) and ``"staleness"`` (‖v_t‖₁/‖v_{t−w}‖₁ > 0.96).
        t_min, t_max: bounds on T₀: whole steps, or shares of ``total_steps`` as floats; None for no bound. ``"window"`` is w of the
            optimizer that is attached, at most a tenth of ``total_steps``, and not above T_max. In the paper they are 0.1 and 0.5.
        start: T₀ for ``switch="fixed"``, in steps or as a share.
        threshold: of the policy's test; by default the optimizer's own ε, or the number above.
        bias_corrected: freeze ``v̂* = v*/(1−β₂^T₀)`` (no jump of the step size at the switch), with a layer's own number of steps where
            it has had fewer; False keeps it raw.
        eps_mode: ``"outside"`` √v̂* + ε, or ``"inside"`` √(v̂* + ε).
        clamp: bound on |m̂/D| in phase 1, None for none: the frozen v may be tiny where phase 0 has driven gradients to zero.
        decay, packed: λ of SR-STE in phase 1, 0 for plain STE; how it multiplies, as for ``STE``.
        inner: another recipe for phase 1, ``MdGf("1:8", ...)`` or its text ``"mdgf(end=0.8)"``. Its own schedule counts from the
            switch over the steps that are left of ``total_steps``, and all its updates have v frozen.

    Raises:
        RecipeError: shares without ``total_steps``, t_min > t_max; an inner recipe with a dense phase of its own or that trains no
            weights; or, at ``attach``, an optimizer whose second moment cannot be frozen.

    Example:
        >>> STEP("2:4", total_steps=1000).bounds()
        (100, 500)
        >>> STEP("1:8", total_steps=1000, switch="fixed", inner="mdgf(end=0.8)").sparse(250).stages[-1][0]
        600
    """

    switch: str = choice(*SWITCHES, resume="until inner")
    t_min: float | int | str | None = setting(
        "window", lambda x: x in (None, "window") or as_number(x) is not None, 'must be "window", whole steps, a share of the run, or None'
    )
    t_max: float | int | None = number(0.5, none="for no bound")
    start: float | int = number(0.25)
    threshold: float | None = number(None, above=True, none="for the policy's own")
    bias_corrected: bool = flag(True)
    eps_mode: str = choice("outside", "inside")
    clamp: float | None = number(2.0, above=True, none="for no clamp")
    decay: float = number(0.0)
    packed: bool | str = choice(*PACKED)

    about = About(
        paper="Lu et al., ICML 2023, arXiv 2302.01172",
        extra_state="a window of 1/(1−β₂) numbers of the second moment until the switch",
        cost="dense until the switch, by default at 50 % of the steps or earlier; then as ste, or the inner recipe",
    )
    _optional_state = ("window",)
    _renamed: ClassVar = {"arithmetic": "paper", "geometric": "paper_geometric"}

    def __post_init__(self) -> None:
        if new := self._renamed.get(str(self.switch)):
            raise RecipeError(f"STEP: switch={self.switch!r} is now called {new!r}.")
        super().__post_init__()
        low, high = self.bounds()
        if low is not None and high is not None and low > high:
            raise RecipeError(f"STEP: t_min ({low} steps) is later than t_max ({high} steps).")
        if self.switch == "fixed" and high == 0:
            raise RecipeError("STEP: start is step 0, before any second moment exists; use SRSTE, or switch later.")
        if self.inner is None:
            return
        for name, what, default in (("decay", "SR-STE", 0.0), ("packed", "phase 1", "auto")):
            if (value := getattr(self, name)) != default:
                raise RecipeError(f"STEP: {name}={value!r} is a setting of {what}, which inner= replaces; set it on the inner recipe.")
        inner = self.sparse(0)
        refused = f"STEP: {type(inner).__name__} cannot be its inner recipe: "
        stage = first_stage(inner)
        if stage.phase == 0:
            raise RecipeError(f"{refused}it begins with a dense phase, and STEP already has one. Remove start=, or use it without STEP.")
        if stage.plan.wgrad == "none" or (stage.transform is not None and "learned" in stage.transform.reads.values()):
            raise RecipeError(f"{refused}it learns masks, from the first step on, which a dense phase cannot prepare. Use it without STEP.")
        if (optimizer := inner.setup.optimizer or MaskedAdamW) is not MaskedAdamW:
            raise RecipeError(f"{refused}it needs an optimizer of its own, {optimizer.__name__}. Use it without STEP.")
        if inner.setup.mask_score not in (None, "magnitude"):
            raise RecipeError(f'{refused}its masks are of a model that is trained already. Use score="magnitude", or it without STEP.')
        earliest, _ = self._possible()
        for at in {earliest, self._latest() or earliest}:
            try:
                self.sparse(at)
            except RecipeError as error:
                raise RecipeError(f"STEP: after a switch at step {at} its inner recipe has too few steps left: {error}") from error

    def _latest(self) -> int | None:
        """The last step that can be T₀ and leaves one; None where the length of the run is not known."""
        last = None if self.total_steps is None else self.total_steps - 1
        return min((at for at in (last, self._possible()[1]) if at is not None), default=None)

    def sparse(self, switch_step: int) -> Recipe:
        """The recipe of phase 1 after a switch at T₀ = ``switch_step``: the inner one over the steps that are left."""
        if self.inner is None:
            return SRSTE(self.pattern, decay=self.decay, packed=self.packed)
        assert isinstance(self.inner, Recipe)
        if self.total_steps is None:
            return self.inner
        return of_length(self.inner, self.total_steps - min(switch_step, self._latest() or 0))

    def bounds(self, window: int | None = None) -> tuple[int | None, int | None]:
        """(T_min, T_max) in steps, None for no bound; both are T₀ itself for ``switch="fixed"``.

        With ``t_min="window"`` T_min depends on the ``window`` of the optimizer that is attached; without it, it is the latest possible.
        """
        if self.switch == "fixed":
            at = resolve_step("STEP", "start", self.start, self.total_steps)
            return at, at
        low = None if self.t_min is None or isinstance(self.t_min, str) else resolve_step("STEP", "t_min", self.t_min, self.total_steps)
        high = None if self.t_max is None else resolve_step("STEP", "t_max", self.t_max, self.total_steps)
        if isinstance(self.t_min, str):
            share = None if self.total_steps is None else self.total_steps // PARTS
            low = min((steps for steps in (window, share, high) if steps is not None), default=None)
        return low, high

    def _possible(self, window: int | None = None) -> tuple[int, int | None]:
        """The first and the last step that can be T₀: one more than the bounds, unless it is given."""
        low, high = self.bounds(window)
        more = self.switch != "fixed"
        return (low or 0) + more, None if high is None else high + more

    def profile(self, steps: int) -> list[Span]:
        """Dense until T_max, the latest T₀, or to the end where there is no bound; then what the inner recipe costs."""
        late = self._possible()[1] or steps
        return truncate([Span(late), *self.sparse(late).profile(max(steps - late, 1))], steps)

    def switched_at(self, step: int) -> STEP:
        """The same recipe with T₀ = ``step``, for counting the FLOPs of a run after it."""
        return replace(self, switch="fixed", start=step)

    @property
    def setup(self) -> Setup:
        return replace(super().setup, optimizer=MaskedAdamW, needs="freezes the second moment")

    def optimizer(self, params: Iterable[Any], lr: float | Tensor = 1e-3, **kwargs: Any) -> torch.optim.Optimizer:
        """``MaskedAdamW``, with the keywords of ``torch.optim.AdamW``; without ``betas``, β₂ = 1 − 1/w follows from ``total_steps``."""
        if self.total_steps is not None and "betas" not in kwargs:
            steps = max(SHORTEST, min(LONGEST, self.total_steps // PARTS))
            kwargs["betas"] = (0.9, 1 - 1 / steps)
        return super().optimizer(params, lr=lr, **kwargs)

    def active(self, state: State) -> tuple[Recipe, State]:
        """The recipe of phase 1; its own state is empty until it begins."""
        return self.sparse(state.get("switch_step", 0)), state.get("inner", {})

    def first_state(self, group: dict[str, Any]) -> State:
        threshold = self.threshold if self.threshold is not None else THRESHOLDS.get(self.switch, group["eps"])
        zero = torch.zeros((), dtype=torch.float64)
        state: State = {"switch_step": 0, "switch_reason": 0, "v_step": 0, "threshold": float(threshold), "t": zero, "z_bar": zero.clone()}
        if self.switch == "fixed":
            return state
        for mesh in (p.device_mesh for p in group.get("params", ()) if is_sharded(p)):
            root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
            names = root.mesh_dim_names or ()
            if "pp" in names and root.size(names.index("pp")) > 1:
                raise RecipeError(
                    "STEP switches by sums over all weights, and under pipeline parallelism no rank sees more than its stage's. Say at "
                    'which step: STEP(switch="fixed", start=...).'
                )
        state["window"] = window(float(group["betas"][1]))
        state["ring"] = torch.zeros(1 if self.switch == "relative_norm" else state["window"], dtype=torch.float64)
        return state

    def stage(self, state: State) -> Stage:
        if not state.get("switch_step"):
            rule, later = UpdateRule(geometric=self.switch == "paper_geometric"), first_stage(self.sparse(0)).transform
            return Stage(phase=0, rule=rule, later=later, not_ready="is still in its dense phase")
        stage = super().stage(state)
        rule = replace(
            stage.rule,
            frozen=True,
            v_step=state["v_step"] if self.bias_corrected else 0,
            eps_inside=self.eps_mode == "inside",
            clamp=self.clamp or 0.0,
        )
        return replace(stage, rule=rule, remark=self._remark(state))

    def advance(self, state: State, observed: Observed) -> bool:
        if state["switch_step"]:
            state["t"] = state["t"] + observed.stats[APPLIED].to(state["t"].device)
            return super().advance(state, replace(observed, max_applied_steps=observed.max_applied_steps - state["switch_step"]))
        observe(state, self.switch, observed)
        if self.switch == "paper_geometric":
            state["v_unchanged"] = observed.stats[UNCHANGED]
        earliest, latest = self._possible(state.get("window"))
        if observed.max_applied_steps < earliest:  # nothing to decide yet, and the host need not wait for the device
            return False
        t, z, threshold = state["t"], state["z_bar"], state["threshold"]
        passed = z > threshold if self.switch == "staleness" else z < threshold
        due = passed & (t >= earliest)
        if not (due if latest is None else due | (t >= latest)).item():
            return False
        state["switch_step"] = int(t.item())
        chosen = T_MAX if not passed.item() else T_MIN if state["switch_step"] == earliest > 1 else TEST
        state["switch_reason"] = FIXED if self.switch == "fixed" else chosen
        state["v_step"] = max((int(layer["step"]) for _, layer in observed.updated_by()), default=state["switch_step"])
        if self.bias_corrected:
            use_one_step_count(observed, state["v_step"])
        inner = self.sparse(state["switch_step"])
        state["inner"] = {"spec": spec(inner), **inner.first_state(observed.find_group())}
        if "seed" in state["inner"]:
            state["seed"] = state["inner"]["seed"]  # the run owns the layers' random streams
        return True

    def _remark(self, state: State) -> str:
        """What to change where T_max has chosen T₀, or a T_min that the user gave, and whose test depends on the scale of gradients."""
        how = {T_MIN: "at its lower bound T_min, before its test could decide", T_MAX: "at its upper bound T_max: its test never passed"}
        reason = state.get("switch_reason")
        if reason not in how or (reason == T_MIN and (self.t_min == "window" or self.switch == "relative")):
            return ""
        sign, z, threshold = ">" if self.switch == "staleness" else "<", state["z_bar"].item(), state["threshold"]
        scale = "" if self.switch in THRESHOLDS else 'switch="relative", which does not depend on the scale of the gradients, '
        return (
            f"STEP: AutoSwitch switched {how[reason]} (T₀ = {state['switch_step']}; the test is z_bar {sign} "
            f'{threshold:.3g}, and z_bar is {z:.3g}). Choose another threshold=..., {scale}or switch="fixed" with start=....'
        )

    def values(self, state: State) -> dict[str, Tensor]:
        """``z_bar``, what AutoSwitch tests; ``switch_step``, T₀ or 0; ``switch_reason``, an index of ``REASONS``; for option II
        ``v_unchanged``, how many |Δv| were zero."""
        if not state:
            return {}
        names = ("z_bar", "v_unchanged", "switch_step", "switch_reason")
        metrics = {name: torch.as_tensor(state[name]) for name in names if name in state}
        return {**metrics, **super().values(state)} if state["switch_step"] else metrics
