"""Where cuSPARSELt is, and the opened library: from ``NMKERNELS_CUSPARSELT``, else from the pip wheel, else from the system.

Nothing is linked or bundled; the library is opened when somebody first asks.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module, util
from pathlib import Path
from typing import Any

from ._capability import compiled_core

ENV = "NMKERNELS_CUSPARSELT"
"""Names the library's file, instead of the one that would be found."""

OLDEST = 800
SONAMES = ("libcusparseLt.so.0", "libcusparseLt.so")
INSTALL = "`pip install -U nvidia-cusparselt-cu13` (-cu12 for CUDA 12)"


def folders() -> list[Path]:
    """The folders of NVIDIA's pip packages."""
    spec = util.find_spec("nvidia")
    return [] if spec is None or spec.submodule_search_locations is None else [Path(p) for p in spec.submodule_search_locations]


def files() -> list[str]:
    """Files to try, the first that fits is taken; the last are names that the system's loader looks for."""
    # of 0.8 the wheel's folder is cusparselt, of 0.10 cu13
    wheels = [str(path) for base in folders() for path in sorted(base.glob("*/lib/libcusparseLt.so*"))]
    return [*wheels, *SONAMES]


def version_text(version: int) -> str:
    """A version as people write it.

    Example:
        >>> version_text(801), version_text(1000)
        ('0.8.1', '0.10.0')
    """
    return f"{version // 1_000_000}.{version // 100 % 10_000}.{version % 100}"


def opened() -> tuple[Any, str]:
    """The library, or None, and in words what was found or why there is none."""
    core = compiled_core()
    if not core.ok:
        return None, f"it is reached through the compiled core, and {core.reason}"
    return _opened(os.environ.get(ENV) or "")


@cache
def _opened(given: str) -> tuple[Any, str]:
    refused = []
    for path in [given] if given else files():
        library, reason = _open(path)
        if library is not None:
            return library, reason
        # that the loader knows no such name is no news
        if given or path not in SONAMES or "cannot be opened" not in reason:
            refused.append(reason)
    if given:
        return None, f"{refused[0]}. {ENV} names this file; unset it, or name another."
    if refused:
        return None, f"{refused[0]}; {INSTALL}, or name another file in {ENV}"
    return None, f"libcusparseLt is neither in a pip wheel nor on the system; {INSTALL}"


def _open(path: str) -> tuple[Any, str]:
    try:
        library = import_module("._C", __package__).cusparselt.Library(path)
    except RuntimeError as error:
        return None, f"{path} is not usable: {error}"
    text = version_text(library.version)
    if library.version < OLDEST:
        return None, f"cuSPARSELt {text}, {path}, is too old: {version_text(OLDEST)} or newer is needed"
    return library, f"cuSPARSELt {text}, {path}"
