"""What backends share: what they ask of tensors before they take their addresses, and nm_pack made of a backend's other ops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import Verdict
from ..pattern import Pattern, ShapeError
from ..reference.layouts import to_layout
from . import streams

FLOAT64 = False, "it computes in float32, and this call is in float64"
ORDERED = False, "it reads canonical indices, and these are metadata in the order of a tensor core"
DENSE = False, "it multiplies N:M weights, and this one has no zeros"
"""What a backend answers that has no float64, one that knows no device layout, and one that has no kernel for dense integers."""


def tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    """Every tensor among arguments and lists of them."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from tensors(arg)


def device_of(args: Iterable[Any]) -> torch.device:
    """The device of the first tensor; the CPU without one."""
    first = next(tensors(args), None)
    return torch.device("cpu") if first is None else first.device


def address(x: Tensor | None) -> int:
    """Where a tensor lies; 0 for none."""
    return 0 if x is None else x.data_ptr()


def contiguous(x: Tensor) -> Tensor:
    """Contiguous, with a lazy negation carried out: what the pointer shows is what the tensor says."""
    return x if x.is_contiguous() and not x.is_neg() else x.resolve_neg().contiguous()


def aligned(x: Tensor) -> Tensor:
    """Contiguous, and beginning where 16 bytes may be read at once."""
    x = contiguous(x)
    return x.clone() if x.data_ptr() & 15 else x


def product(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The dense GEMM ``a b`` in a's dtype, or in ``dtype``: float32 for 16-bit operands, whose sums CUDA's GEMM then does not round.

    Elsewhere the rounded result is converted.
    """
    if dtype in (None, a.dtype):
        return a.matmul(b)
    if a.is_cuda and not torch._C._are_functorch_transforms_active() and (COMPILED or not torch.compiler.is_compiling()):
        return torch.mm(a, b, out_dtype=dtype)
    return a.matmul(b).to(dtype)


COMPILED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether torch's compiler is known to take ``torch.mm`` with ``out_dtype``, which it could not trace at first (pytorch issue 163275)."""


class Scratch(threading.local):
    """A thread's memory on a CPU for what one call makes and uses, as large as the largest so far, up to 256 MB.

    Mapping fresh pages takes longer than decoding or expanding into them.
    """

    memory = torch.empty(0, dtype=torch.uint8)

    def like(self, x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor on x's device, valid until the next call."""
        count = torch.Size(shape).numel() * dtype.itemsize
        if count > 256 << 20 or not x.is_cpu:
            return x.new_empty(shape, dtype=dtype)
        if count > self.memory.numel():
            self.memory = torch.empty(count, dtype=torch.uint8)
        return self.memory[:count].view(dtype).view(shape)


def packed(like: Tensor, lead: Sequence[int], cols: int, n: int, m: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Room for the compressed form of ``(*lead, cols)``."""
    width, size = packed_sizes(n, m, cols)
    return like.new_empty((*lead, width), dtype=dtype), like.new_empty((*lead, size), dtype=torch.uint8)


def in_layout(made: tuple[Tensor, Tensor], cols: int, layout: str, out: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """A matrix with ``cols`` columns in canonical form, in another layout."""
    values, indices = made
    meta = to_layout(indices, cols, layout)
    return (values, meta) if out is None else (out[0].copy_(values), out[1].copy_(meta))


@lru_cache(maxsize=4096)
def packed_sizes(n: int, m: int, cols: int) -> tuple[int, int]:
    """Values and index bytes of a row."""
    p = Pattern(n, m)
    return p.kept(cols), p.index_bytes(cols)


def overfull(op: str, n: int, m: int) -> ShapeError:
    """What is raised where a given mask keeps too many."""
    return ShapeError(f"{op}: the mask keeps more than {n} elements in a group, but {n}:{m} stores {n}; prune it first.")


def flag_for(mask: Tensor | None) -> Tensor | None:
    """What kernels set where a mask keeps too many: one int32, of any operand."""
    return None if mask is None else torch.zeros(1, dtype=torch.int32, device=mask.device)


def check_flag(op: str, flag: Tensor | None, n: int, m: int) -> None:
    """Raise where it is set, for which the host waits; not looked at while a graph is captured, nor where nothing runs."""
    if flag is None or flag.is_meta or streams.capturing(flag.device):
        return
    if flag.item():
        raise overfull(op, n, m)


def only_2_4(n: int, m: int) -> Verdict:
    """What a backend answers whose transposable masks are those of 2:4."""
    if (n, m) != (2, 4):
        return False, f"it tries the patterns of 2:4 only; {n}:{m} is a matching problem, which the reference and the CPU solve"
    return True, ""


def around(g: Tensor, dim: int, transposed: bool = False) -> tuple[Tensor, int, int, int]:
    """``g`` contiguous around ``dim``, as ``(outer, length, inner)``; with ``transposed`` a matrix may be taken as its transpose.

    The packed rows of both are the same.
    """
    dim %= g.dim()
    if transposed and g.dim() == 2 and not g.is_contiguous() and g.t().is_contiguous():
        g, dim = g.t(), 1 - dim
    g, shape = contiguous(g), g.shape
    return g, shape[:dim].numel(), shape[dim], shape[dim + 1 :].numel()


def row_stride(x: Tensor) -> int | None:
    """The one stride between rows of ``x`` seen as ``(rows, last dimension)``; None where no single stride exists."""
    step, reach = 0, None
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if reach is None:
            step = stride
        elif stride != reach:
            return None
        reach = stride * size
    return step


def dense(x: Tensor) -> bool:
    """Whether ``x`` fills its memory without gaps, in whatever order of dimensions."""
    reach = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1):
        if stride != reach:
            return False
        reach *= size
    return True


class Parts(NamedTuple):
    """A backend's own functions, with the arguments of the raw ops."""

    mask: Callable[..., Tensor]
    soft_threshold: Callable[..., Tensor]
    transposable_mask: Callable[..., Tensor]
    compress: Callable[..., tuple[Tensor, Tensor]]
    decompress: Callable[..., Tensor]


def pack(
    parts: Parts, w: Tensor, n: int, m: int, select: str, mask: Tensor | None, scale: Tensor | None,
    dtype: torch.dtype | None, rows: bool, columns: bool, layout: str, dense: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``nm_pack`` of the parts: right for every call, for backends that have no kernel which does it in one read.

    A weight whose transpose is contiguous is packed along its columns without a copy.
    """
    dtype = dtype or w.dtype

    def sourced(w: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if select != "threshold":
            return w, kept
        source = parts.soft_threshold(w, n, m)
        return source if scale is None else source.float() * scale.reshape(()), parts.mask(w, n, m)

    def one(w: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        source, kept = sourced(w, kept)
        # packed first and cast after, so that only what is kept is written twice
        values, indices = parts.compress(source, n, m, kept)
        return values.to(dtype), indices

    def ordered(operand: tuple[Tensor, Tensor] | None, cols: int) -> tuple[Tensor, Tensor]:
        if operand is None:
            return w.new_empty(0, dtype=dtype), w.new_empty(0, dtype=torch.uint8 if layout == "canonical" else torch.int32)
        return operand[0], to_layout(operand[1], cols, layout)

    chosen = parts.transposable_mask(w, n, m) if select == "transposable" else mask
    # compress checks a mask, for which the host waits for a GPU: not for the dense form of a mask that is known to be N:M
    alone = dense and not rows and select in ("held", "transposable", "threshold")
    along = one(w, chosen) if rows or (dense and not alone) else None
    down = one(w.t(), None if chosen is None else chosen.t()) if columns else None
    spread = w.new_empty(0, dtype=dtype)
    if alone:
        source, chosen = sourced(w, chosen)
        assert chosen is not None
        spread = torch.where(chosen, source.to(dtype), torch.zeros((), dtype=dtype, device=w.device)).contiguous()
    elif dense and along is not None:
        spread = parts.decompress(*along, n, m, w.shape[1])
    return *ordered(along if rows else None, w.shape[1]), *ordered(down, w.shape[0]), spread
