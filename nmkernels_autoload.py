"""Lets transformers open compressed models without an import of nmkernels: what ``import torch`` runs in every process of an environment
that has nmkernels (entry point in the group ``torch.backends``), and ``import nmkernels`` too.

It imports nothing and prints nothing: it puts a finder before the others of ``sys.meta_path``, which sees when the process imports
transformers' registry of quantization methods, adds the method ``nmkernels`` to it, and goes. nmkernels itself is imported by the first
folder that has this method. Whatever fails here is ignored, since ``import torch`` must not fail. ``NMKERNELS_AUTOLOAD=0`` turns it off,
and ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` all such entry points of torch.

A module of its own, since importing one of the package would import all of it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

METHOD = "nmkernels"
REGISTRY = "transformers.quantizers.auto"
SIGNS = (REGISTRY, "transformers.modeling_utils")
"""Modules after whose import the registry is there: the second where torch itself is first imported by the first."""


class _Config:
    """Stands for ``nmkernels.integrations.hf.NMConfig`` in the registry until a folder needs that."""

    @classmethod
    def from_dict(cls, *args: Any, **keywords: Any) -> Any:
        from nmkernels.integrations.hf import NMConfig  # which takes this class's place

        return NMConfig.from_dict(*args, **keywords)


class _Finder:
    """Has the others find a module of ``SIGNS``, and registers after it has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in SIGNS or self not in sys.meta_path:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in later if hasattr(finder, "find_spec"))), None)
        loader: Any = getattr(spec, "loader", None)
        run: Any = getattr(loader, "exec_module", None)

        def run_and_register(module: Any) -> None:
            run(module)
            register()

        try:
            if run is not None:
                loader.exec_module = run_and_register  # this loader was made for this module
        except AttributeError:
            pass
        return spec


def register() -> bool:
    """Add the method to transformers' registry if that is imported; whether it is there now."""
    try:
        auto: Any = sys.modules.get(REGISTRY)
        if not hasattr(auto, "get_hf_quantizer"):  # the end of that module has not run yet
            return False
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, _Config)
        return True
    except Exception:
        return False


def watch() -> None:
    """Register now, or when transformers is imported."""
    try:
        if not register() and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    except Exception:
        pass


def autoload() -> None:
    """The entry point."""
    if os.environ.get("NMKERNELS_AUTOLOAD") != "0":
        watch()
