"""Whether calls are traced, profiled or captured, so that timing is not allowed; and how to leave torch's modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def undisturbed(device: torch.device) -> bool:
    """Whether calls run immediately and are not traced, profiled or captured."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch.autograd.profiler._is_profiler_enabled
        or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


@contextmanager
def outside_modes() -> Iterator[None]:
    """Create plain tensors, unaffected by inference mode, torch function modes, default device or autocast."""
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
        yield
