"""When STEP's second moment is good enough to be frozen: AutoSwitch and the policies it was compared with.

Every policy keeps its memory in the recipe's state as tensors and decides on the device; the host only asks between
T_min and T_max. A step that was skipped (``applied`` = 0) leaves the memory untouched.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..ops import STATS
from .base import Observed, State

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


def start(state: State, switch: str, beta2: float) -> None:
    """Add the memory of policy ``switch`` to ``state``."""
    zero = torch.zeros((), dtype=torch.float64)
    state["t"] = zero.clone()
    state["z_bar"] = zero.clone()
    if switch in ("arithmetic", "geometric"):
        state["ring"] = torch.zeros(window(beta2), dtype=torch.float64)
    elif switch == "relative_norm":
        state["ring"] = torch.zeros(1, dtype=torch.float64)
    elif switch == "staleness":
        state["ring"] = torch.zeros(window(beta2), dtype=torch.float64)


def observe(state: State, switch: str, seen: Observed) -> None:
    """Take the statistics of one step into ``state``: t, the ring of past values, and the figure ``z_bar`` that is tested."""
    applied = seen.stats[APPLIED]
    for key in ("t", "z_bar", "ring"):
        if key in state and state[key].device != applied.device:
            state[key] = state[key].to(applied.device)
    if switch != "fixed":
        _POLICIES[switch](state, seen, applied)
    state["t"] = state["t"] + applied


def fires(state: State, switch: str, threshold: float) -> Tensor:
    """0-d bool: the policy's own test, without T_min and T_max."""
    z = state["z_bar"]
    return z > threshold if switch == "staleness" else z < threshold


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
