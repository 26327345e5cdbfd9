"""The host's side of MaskedAdamW, the same on every GPU.

Step counts on the CPU, torch's default, are advanced there and passed to the kernel as an argument. With ``found_inf`` on the device the
host must then know whether the step is skipped: it waits for that one element, as ``torch.optim.AdamW`` with a ``GradScaler`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import Verdict
from ..pattern import BackendError
from ..reference.adamw import AdamWArgs
from . import streams

STATS = 9
"""Statistics that a step returns."""


def supports_tensors(a: AdamWArgs) -> Verdict:
    """Whether a GPU can take the tensors: arithmetic in fp32, all params on one device; step counts and ``hyper`` may be on the CPU.

    Called at every step with hundreds of params, so it repeats nothing that the op's contract has checked.
    """
    for name, xs in (("param", a.params), ("gradient", a.grads)):
        if torch.float64 in {x.dtype for x in xs}:
            return False, f"it computes in float32, and a {name} is float64"
    if len({x.device for x in a.params}) > 1:
        return False, "it steps the params of one device at once, and these are on several"
    return True, ""


def with_plain_masks(a: AdamWArgs) -> AdamWArgs:
    """The same call with the bits of its masks in the order of memory, as kernels read them."""
    if not a.masks or all(map(Tensor.is_contiguous, a.masks)):
        return a
    return a._replace(masks=[bits.contiguous() for bits in a.masks])


def placed(a: AdamWArgs) -> list[Tensor]:
    """Tensors that show whether a backend reaches all of the call's: one param for its device, and gradients that are not strided."""
    return [*a.params[:1], *(x for x in a.grads if x.layout != torch.strided)] if a.params else [a.hyper]


def on_host(x: Tensor, device: torch.device) -> bool:
    """Whether ``x`` is on the host while the params are on a GPU."""
    return x.device != device and x.is_cpu


class DeviceArgs(NamedTuple):
    """What the kernels of a step read on its device, and where the statistics go.

    hyper: None if it is on the host. host_steps: the params whose steps the host counts.
    """

    device: torch.device
    grad_scale: Tensor | None
    found_inf: Tensor | None
    stats: Tensor
    hyper: Tensor | None
    host_steps: list[int]
    skip: bool


def to_device(a: AdamWArgs, out: Tensor | None) -> DeviceArgs:
    """Prepare a step; if the result has ``skip``, the step ends here and ``stats`` are zero."""
    device = a.params[0].device if a.params else a.hyper.device
    scale, found_inf = (None if x is None else x.to(device, non_blocking=True) for x in (a.grad_scale, a.found_inf))
    stats = torch.empty(STATS, dtype=torch.float64, device=device) if out is None else out
    host_steps = [i for i, step in enumerate(a.steps) if on_host(step, device)]
    if host_steps and streams.capturing(device):
        raise BackendError(
            "nm_masked_adamw_: a CUDA graph is being captured and the step counts are on the CPU, where replays would not advance them; "
            "create the optimizer with capturable=True."
        )
    skip = bool(host_steps) and a.found_inf is not None and bool(a.found_inf != 0)  # waits for the device
    hyper = None if on_host(a.hyper, device) else a.hyper.contiguous()
    return DeviceArgs(device, scale, found_inf, stats.zero_() if skip else stats, hyper, host_steps, skip)


def advance(steps: Sequence[Tensor], host_steps: list[int]) -> tuple[int, list[int] | None]:
    """Advance the step counts on the host; returns the count that all of them have, and, if they differ, a list of one per param."""
    if not host_steps:
        return 0, None
    # the number is wrapped once here; torch would wrap it for every step
    torch._foreach_add_([steps[i] for i in host_steps], torch.ones((), dtype=torch.float32))
    counts = {i: int(steps[i].item()) for i in host_steps}  # tensors on the CPU: nothing waits
    first = counts[host_steps[0]]
    return first, [counts.get(i, 0) for i in range(len(steps))] if len(set(counts.values())) > 1 else None
