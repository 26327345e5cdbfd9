"""Adapters to other libraries, one module each. ``import nmkernels`` imports none of them.

``nm.integrations.peft`` and the others are imported on first use, and need their library. Those of ``ADAPTERS`` also register nmkernels'
layers with it. ``sparsify_``, ``compress_`` and ``load_compressed`` import them for every library that the process has imported by then.
A compressed Hugging Face folder needs no import at all, see ``nmkernels_autoload``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from types import ModuleType

from torch import nn

from ..nn.swap import post_swap_hooks

ADAPTERS = {"transformers.modeling_utils": "hf", "peft": "peft", "torchao.quantization.quant_api": "torchao_compat"}
"""Modules of other libraries, and the adapters that register nmkernels' layers there by their function ``install``."""


def __getattr__(name: str) -> ModuleType:
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def register(model: nn.Module | None = None) -> None:
    """Register nmkernels' layers with all libraries of ``ADAPTERS`` that are imported; ``post_swap_hooks`` calls it.

    A failure is a warning: the library may have nothing to do with this model, or have another version.
    """
    for library, adapter in ADAPTERS.items():
        if library in sys.modules:
            install(adapter)


def install(adapter: str) -> None:
    """Import an adapter and call its ``install()``, which does nothing the second time; an error becomes a warning."""
    try:
        importlib.import_module(f"{__name__}.{adapter}").install()
    except Exception as error:
        warnings.warn(
            f"nmkernels.integrations.{adapter} could not register nmkernels' layers: {type(error).__name__}: {error}. Without it that "
            "library treats them as unknown layers.",
            RuntimeWarning,
            stacklevel=2,
        )


post_swap_hooks.append(register)
