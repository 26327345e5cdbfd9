"""The host's side of MaskedAdamW on every GPU.

Step counts on the CPU, torch's default, are advanced there and travel as an argument. With ``found_inf`` on the device the host must then
know whether the step is skipped: it waits for that one element, as ``torch.optim.AdamW`` with a ``GradScaler`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import Verdict
from ..pattern import BackendError
from . import streams

STATS = 9
"""Statistics that a step returns."""


def of_one_kind(params: Sequence[Tensor], grads: Sequence[Tensor], outs: Sequence[Tensor]) -> Verdict:
    """What a call must have in common: fp32 arithmetic and one device.

    It is asked at every step about hundreds of params, so it looks at nothing that the op has compared with them already.
    """
    for name, xs in (("param", params), ("gradient", grads), ("output", outs)):
        if torch.float64 in {x.dtype for x in xs}:
            return False, f"it computes in float32, and a {name} is float64"
    if len({x.device for x in params}) > 1:
        return False, "it steps the params of one device at once, and these are on several"
    return True, ""


def on_host(x: Tensor, device: torch.device) -> bool:
    """Whether ``x`` is held by the host while the params are on a GPU."""
    return x.device != device and x.is_cpu


class Opened(NamedTuple):
    """A call's device, with what the kernels read there, and room for the statistics.

    numbers: ``hyper``, None where the host holds it. held: the params whose steps the host counts.
    """

    device: torch.device
    scale: Tensor | None
    found: Tensor | None
    stats: Tensor
    numbers: Tensor | None
    held: list[int]
    skip: bool


def opened(
    params: Sequence[Tensor], steps: Sequence[Tensor], hyper: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None,
    out: Tensor | None,
) -> Opened:  # fmt: skip
    """How every step begins; where ``skip`` is set it ends here, with zero statistics."""
    device = params[0].device if params else hyper.device
    scale, found = (None if x is None else x.to(device, non_blocking=True) for x in (grad_scale, found_inf))
    stats = torch.empty(STATS, dtype=torch.float64, device=device) if out is None else out
    held = [i for i, step in enumerate(steps) if on_host(step, device)]
    if held and streams.capturing(device):
        raise BackendError(
            "nm_masked_adamw_: a CUDA graph is captured and the step counts are on the CPU, so that replays would not count; "
            "make the optimizer with capturable=True."
        )
    skip = bool(held) and found_inf is not None and bool(found_inf != 0)  # waits for the device
    numbers = None if on_host(hyper, device) else hyper.contiguous()
    return Opened(device, scale, found, stats.zero_() if skip else stats, numbers, held, skip)


def count(steps: Sequence[Tensor], held: list[int]) -> tuple[int, list[int] | None]:
    """Counts the steps that the host holds; returns the one count of all of them, and where there are several one for every param."""
    if not held:
        return 0, None
    torch._foreach_add_([steps[i] for i in held], torch.ones((), dtype=torch.float32))  # wrapped once: a number would be, per step
    values = {i: int(steps[i].item()) for i in held}  # tensors on the CPU: nothing is waited for
    one = values[held[0]]
    return one, [values.get(i, 0) for i in range(len(steps))] if len(set(values.values())) > 1 else None
