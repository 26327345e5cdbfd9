"""What is chosen for: one matrix product of a linear layer, and the text under which its choice is stored."""

from __future__ import annotations

import platform
import re
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from ..._version import __version__
from ...backends.cpu.core import core
from ...capability import compiled_core, cusparselt, triton
from ...ops.mvue import METHODS
from ...ops.pack import tensor_core_pattern
from ...pattern import NMError, Pattern

ROLES = ("fprop", "dgrad", "wgrad")
FORMS = ("dense", "rows", "columns", "rows:mma.sp", "columns:mma.sp", "rows:wgmma.sp", "columns:wgmma.sp")
RULES = ("", "magnitude", *METHODS)


@lru_cache(maxsize=1024)
def forms(
    rows: int, cols: int, n: int, m: int, dtype: torch.dtype, kind: str, dense: bool = True, columns: bool = False
) -> tuple[str, ...]:
    """The forms that a weight ``(rows, cols)`` can have on a device of that kind, for ``Product.forms``.

    Args:
        kind: ``device.type``. dense: with a dense layout at hand. columns: Wᵀ packed, for a mask that is transposable; W otherwise.

    Example:
        >>> forms(64, 128, 2, 4, torch.bfloat16, "cuda"), forms(64, 128, 2, 4, torch.bfloat16, "cpu", dense=False)
        (('dense', 'rows', 'rows:mma.sp'), ('rows',))
    """
    name, height, width = ("columns", cols, rows) if columns else ("rows", rows, cols)
    tiles = height % 16 == 0 and width % 64 == 0 and dtype.itemsize == 2 and tensor_core_pattern(Pattern(n, m))
    return (*(("dense",) if dense else ()), name, *((f"{name}:mma.sp",) if kind == "cuda" and tiles else ()))


class Product(NamedTuple):
    """One product of a layer ``y = x W̃ᵀ`` and the forms in which its sparse operand is at hand.

    role: ``"fprop"`` y = x W̃ᵀ, ``"dgrad"`` dx = g W̃, or ``"wgrad"`` dW = ĝᵀ x, with ĝ an N:M estimate of g along tokens.
    tokens: rows of x and g. rows, cols: (out, in) of the layer. n, m: the pattern of W̃, or of ĝᵀ.
    forms: ``"dense"``: W̃ in dense layout, its zeros included; ``"rows"``: W̃ compressed; ``"columns"``: W̃ᵀ compressed, for the gradient of
    the input from a mask that is transposable; ``"rows:mma.sp"`` and so on: the same in the order of tensor cores (``ops.relayout``). Of
    those that are no dense layout the preferred one first. In wgrad they say how ĝᵀ may be written, and every one can be made.
    rule: of wgrad: ``"exact"`` or ``"approx"``, as ``ops.mvue`` has them, or ``"magnitude"``.
    changing: W̃ is another one at every call, as in training; what a backend makes of it beside the operand is then part of its time.
    """

    role: str
    tokens: int
    rows: int
    cols: int
    n: int
    m: int
    dtype: torch.dtype
    device: torch.device
    forms: tuple[str, ...] = ("dense", "rows")
    rule: str = ""
    changing: bool = False

    def check(self) -> None:
        """Raise NMError for what is no product."""
        if self.role not in ROLES:
            raise NMError(f"choice: role {self.role!r} is unknown; choose one of {', '.join(ROLES)}.")
        if not self.forms or any(form not in FORMS for form in self.forms):
            raise NMError(f"choice: forms {self.forms!r}; give at least one of {', '.join(FORMS)}.")
        if (self.role == "wgrad") != bool(self.rule) or self.rule not in RULES:
            raise NMError(f"choice: rule {self.rule!r} of {self.role}; wgrad, and only it, has one of {', '.join(RULES[1:])}.")

    def words(self) -> str:
        """Short, for a reader: ``fprop 4096x1024 2:4 bfloat16, 8192 tokens``."""
        return f"{self.role} {self.rows}x{self.cols} {self.n}:{self.m} {_plain(self.dtype)}, {self.tokens} tokens"


def key(product: Product) -> str:
    """The line of the table: what it runs on and with, and the product, its tokens rounded up to a power of two."""
    where = f"{device_name(product.device)}|{versions(product.device.type)}"
    return f"{where}|{shape_key(product)}|{token_class(product.tokens)}"


def shape_key(product: Product) -> str:
    """The part of the key that does not depend on tokens or the machine."""
    what = " ".join(part for part in (product.role, product.rule) if part)
    how = f"{'+'.join(product.forms)}{' changing' if product.changing else ''}"
    return f"{what}|{_plain(product.dtype)}|{product.n}:{product.m}|{product.rows}x{product.cols}|{how}"


def token_class(tokens: int) -> int:
    """The next power of two."""
    return 1 << max(0, tokens - 1).bit_length()


def device_name(device: torch.device) -> str:
    """What measurements on this device hold for: the GPU's model, or the CPU's with its threads and the core's instruction set."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type == "xpu":
        return str(torch.xpu.get_device_name(device))
    isa = core().isa() if compiled_core().ok else "no core"
    return f"{_cpu_model()}, {torch.get_num_threads()} threads, {isa}" if device.type == "cpu" else device.type


@cache
def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(encoding="utf-8", errors="replace"), re.M) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


@cache
def versions(kind: str) -> str:
    """What a speed depends on besides the device: this package, torch, and on a GPU Triton and cuSPARSELt."""
    parts = [f"nmkernels {__version__}", f"torch {torch.__version__}"]
    if kind != "cpu":
        parts += [probe.reason.split(",")[0] for probe in (triton(), cusparselt()) if probe.ok]
    return ", ".join(parts)


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
