"""Whether speeds may be measured now: what the environment says, and whether somebody watches."""

from __future__ import annotations

import os

import torch

from ..pattern import NMError

ENV = "NMKERNELS_CHOICE"
SETTINGS = ("", "dense", "packed", "measured")


def setting() -> str:
    """What ``NMKERNELS_CHOICE`` says."""
    value = os.environ.get(ENV, "")
    if value == "table":  # the default, which earlier versions had to be told
        return ""
    if value not in SETTINGS:
        raise NMError(f"{ENV}={value!r} is unknown; set one of {', '.join(SETTINGS[1:])}, or unset it.")
    return value


def reproducible() -> bool:
    """Whether ``torch.use_deterministic_algorithms`` is on: then nothing may depend on what was measured."""
    return torch._C._get_deterministic_algorithms()


def undisturbed(device: torch.device) -> bool:
    """Whether calls made now are run now, and seen by nobody."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch.autograd.profiler._is_profiler_enabled
        or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )
