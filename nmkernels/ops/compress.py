"""``Compressed``, the canonical N:M form of a tensor, and the ops compress and decompress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..arguments import whole_number
from ..backends.cpu.fingerprint import fingerprint as fingerprint  # tells of writes that torch does not count
from ..backends.streams import MadeOf
from ..pattern import OptionError, Pattern, PatternLike, ShapeError
from .check import as_pattern, check_dense, check_mask, check_packed
from .define import Spec, define
from .integers import BITS, GROUPS, kind_of, nm_dequantize_values, nm_quantize_values


@dataclass(frozen=True, eq=False, repr=False)
class Compressed:
    """An N:M sparse tensor: the N values of every group of M and their positions. The form is the same on every device and on disk.

    ``dense[..., g·M + index[..., g·N + k]] = values[..., g·N + k]``, zero elsewhere.
    It is immutable, compares by identity, is a pytree of (values, indices) and the step, if it has one, and can be pickled and
    deep-copied.

    Args:
        values: ``(..., groups·N)``, in order of index.
        indices: uint8 ``(..., bytes)``: position inside the group of each value, 2 bits for M <= 4, 4 bits for M <= 16, 8 bits above,
            packed lowest bits first, each row starting on a byte, spare bits 0. Dense integers, ``"1:1"`` with a step, have none.
        pattern: ``"N:M"`` or a ``Pattern``.
        shape: the dense shape ``(..., cols)``; ``cols`` need not be a multiple of M (the last group is then partial).
        step: None for floating-point values. For integers (``ops.quantize_values``) bf16 ``(..., steps)``: a weight is integer · step, and
            each step belongs to ``cols / steps`` columns. 8 bits are int8 values; 4 bits uint8 ``(..., ⌈kept/2⌉)``, the earlier integer in
            the low half, two's complement, each row starting on a byte, a spare half 0.

    Raises:
        ShapeError, DtypeError: values, indices, pattern and shape do not match.

    Example:
        >>> from nmkernels import ops
        >>> c = ops.compress(torch.tensor([[3.0, -4.0, 0.5, 0.0]]), "2:4")
        >>> c.values, c.indices
        (tensor([[ 3., -4.]]), tensor([[4]], dtype=torch.uint8))
        >>> c.dense()
        tensor([[ 3., -4.,  0.,  0.]])
    """

    values: Tensor
    indices: Tensor
    pattern: Pattern
    shape: tuple[int, ...]
    step: Tensor | None = None
    _layouts: dict[str, MadeOf[Any]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", as_pattern(self.pattern))
        try:
            shape = torch.Size(self.shape)
        except TypeError:
            raise ShapeError(f"Compressed: shape={self.shape!r} must be the dense shape (..., cols), in whole numbers.") from None
        object.__setattr__(self, "shape", shape)
        if torch.compiler.is_compiling():
            return  # checked by the op that made them
        p, cols = self.pattern, self.shape[-1] if self.shape else 0
        check_packed("Compressed", self.values, self.indices, p.n, p.m, cols, self.step)
        if self.values.shape[:-1] != self.shape[:-1]:
            raise ShapeError(
                f"Compressed: values have shape {tuple(self.values.shape)}, but the dense shape is {tuple(self.shape)}; "
                "all dimensions but the last must agree."
            )

    @classmethod
    def trusted(cls, values: Any, indices: Any, pattern: Pattern, shape: torch.Size, step: Any = None) -> Compressed:
        """Create without checks or conversions, from the results of an op or the leaves of a ``tree_map``."""
        c = object.__new__(cls)
        fields = {"values": values, "indices": indices, "pattern": pattern, "shape": shape, "step": step, "_layouts": {}}
        for name, value in fields.items():
            object.__setattr__(c, name, value)
        return c

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the values and indices."""
        return self.values.device

    @property
    def kind(self) -> str:
        """What the values are: ``"float"``, ``"int8"`` or ``"int4"``."""
        return kind_of(self.values)

    @property
    def group(self) -> int:
        """The dense columns that share a step; 0 if all of a row do, or values are floating-point."""
        return 0 if self.step is None or self.step.shape[-1] == 1 else self.shape[-1] // self.step.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of values, indices and steps, without cached layouts."""
        return self.values.nbytes + self.indices.nbytes + (0 if self.step is None else self.step.nbytes)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense tensor in ``dtype``; by default that of the values, and float32 for integers."""
        if self.step is not None and self.pattern.m == 1:
            return nm_dequantize_values(self.values, self.step, self.shape[-1], dtype or torch.float32)
        c = self if self.step is None and dtype is None else dequantize_values(self, dtype or torch.float32)
        return nm_decompress(c.values, c.indices, c.pattern.n, c.pattern.m, c.shape[-1])

    def to(self, *args: Any, **kwargs: Any) -> Compressed:
        """Move to another device or cast floating-point values, like ``Tensor.to``; returns itself if nothing changes."""
        if self.step is None:
            values, step = self.values.to(*args, **kwargs), None
        else:
            moved = self.step.to(*args, **kwargs)
            step = self.step.to(moved.device, non_blocking=kwargs.get("non_blocking", False))  # integers and their steps are not cast
            values = self.values.to(moved.device, non_blocking=kwargs.get("non_blocking", False))
        indices = self.indices.to(values.device, non_blocking=kwargs.get("non_blocking", False))
        if values is self.values and indices is self.indices and step is self.step:
            return self
        return Compressed(values, indices, self.pattern, self.shape, step)

    def layout(self, name: str, build: Callable[[Compressed], Any]) -> Any:
        """Return ``build(self)``, cached under ``name``, for backends that need the data in another order.

        It is rebuilt after values, indices or steps are written or get other memory, and at every call if they were created in inference
        mode, where torch counts no writes. It is never copied or saved. A call on another CUDA stream waits for it. A CUDA graph reads it
        if values and indices were never written in place, and otherwise rebuilds it in every replay; layouts built during capture are not
        cached.
        """

        def made() -> tuple[Any, list[Tensor]]:
            # a later call may need gradients, which inference tensors do not support
            with torch.inference_mode(False):
                value = build(self)
            held = [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor) and x.device == self.device]
            return value, held if step is None else [*held, step.detach()]

        step = self.step
        if not can_be_remembered(self.values, self.indices) or not (step is None or counts_writes(step)):
            return made()[0]
        key = None if step is None else (step._version, step.data_ptr())
        return self._layouts.setdefault(name, MadeOf()).get(self.values, self.indices, key, made)

    def __reduce__(self) -> tuple[Any, ...]:
        return Compressed, (self.values, self.indices, self.pattern, tuple(self.shape), self.step)

    def __getattr__(self, name: str) -> Any:
        # called only for missing attributes
        lacks = f"{type(self).__name__!r} object has no attribute {name!r}"
        if hasattr(Tensor, name) and not name.startswith("_"):
            lacks += ": it is a compressed weight, not a tensor. .dense() returns the dense tensor; nm.densify_(model) restores layers."
        raise AttributeError(lacks)

    def __repr__(self) -> str:
        device = "" if self.device.type == "cpu" else f', device="{self.device}"'
        kind = self.dtype if self.step is None else f"{self.kind}, {f'a step per {self.group} columns' if self.group else 'a step per row'}"
        return f'Compressed({tuple(self.shape)}, "{self.pattern}", {kind}{device}, {self.nbytes} bytes)'


def counts_writes(x: Tensor) -> bool:
    """Whether torch counts writes to ``x``; not for inference tensors, which have no version."""
    if torch.compiler.is_compiling():
        return True  # a graph caches nothing
    if x.is_inference():
        return False
    try:
        return x._version >= 0
    except RuntimeError:  # an inference tensor whose .data was replaced
        return False


PLAIN = (Tensor, torch.nn.Parameter)


def can_be_remembered(values: Tensor, indices: Tensor) -> bool:
    """Whether changes of both tensors can be detected, and results do not belong to a single derivative or transform."""
    if values.requires_grad or torch.compiler.is_compiling() or not (counts_writes(values) and counts_writes(indices)):
        return False
    plain = type(values) in PLAIN and type(indices) in PLAIN
    return plain and not (torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack())


def _unflatten(leaves: Any, context: tuple[Pattern, tuple[int, ...]]) -> Compressed:
    shape = torch.Size(context[1])
    if isinstance(leaves[0], Tensor) and leaves[0].dim() > len(shape):  # torch.vmap added a leading dimension
        shape = leaves[0].shape[:-1] + shape[-1:]
    return Compressed.trusted(leaves[0], leaves[1], context[0], shape, *leaves[2:])


def _leaves(c: Compressed) -> dict[str, Tensor]:
    return {"values": c.values, "indices": c.indices, **({} if c.step is None else {"step": c.step})}


pytree.register_pytree_node(
    Compressed,
    lambda c: (list(_leaves(c).values()), (c.pattern, tuple(c.shape))),
    _unflatten,
    serialized_type_name="nmkernels.Compressed",
    flatten_with_keys_fn=lambda c: (
        [(pytree.GetAttrKey(name), leaf) for name, leaf in _leaves(c).items()],
        (c.pattern, tuple(c.shape)),
    ),
    to_dumpable_context=lambda context: [str(context[0]), list(context[1])],
    from_dumpable_context=lambda dumped: (Pattern(dumped[0]), tuple(dumped[1])),
)


def _compress(w: Tensor, n: int, m: int, mask: Tensor | None = None) -> tuple[Spec, ...]:
    p = check_dense("nm_compress", w, n, m)
    if mask is not None:
        check_mask("nm_compress", mask, w)
    cols, lead = w.shape[-1], tuple(w.shape[:-1])
    return ((*lead, cols // m * n), w.dtype), ((*lead, p.index_bytes(cols)), torch.uint8)


def _decompress(values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> tuple[Spec, ...]:
    check_packed("nm_decompress", values, indices, n, m, cols)
    return (((*values.shape[:-1], cols), values.dtype),)


nm_compress = define(
    "nm_compress",
    "(Tensor w, int n, int m, Tensor? mask=None) -> (Tensor, Tensor)",
    _compress,
    outs=("out_values", "out_indices"),
    leading=("w", "mask"),
)
nm_decompress = define(
    "nm_decompress",
    "(Tensor values, Tensor indices, int n, int m, SymInt cols) -> Tensor",
    _decompress,
    outs=("out",),
    leading=("values", "indices"),
)


def compress(w: Tensor, pattern: PatternLike, mask: Tensor | None = None, out: Compressed | None = None) -> Compressed:
    """The compressed form of ``w``: the N kept values of every group of M and their positions. Backward raises.

    ``values[..., g·N + k] = w[..., g·M + index[..., g·N + k]]``, in order of index; kept values keep their bits.

    Args:
        w: weights ``(..., in)``, usually ``(out, in)``; any strides. For a DTensor the results are DTensors sharded along the same leading
            dimensions.
        mask: bool, the shape of ``w``: the elements to keep instead of the N largest magnitudes. A group with fewer than N stores zeros at
            its lowest unkept positions.
        out: a ``Compressed`` of the same pattern, shape and dtype, whose buffers are written.

    Raises:
        ShapeError: ``in`` is not a multiple of M, the mask keeps more than N in a group, or ``out`` does not fit.
        DtypeError: ``w`` is not floating-point, or ``mask`` not bool.

    Example:
        >>> c = compress(torch.tensor([[1.0, 0.0, -2.0, 3.0]]), "2:4")
        >>> c.values, c.indices  # positions 2 and 3: 2 + 3·4
        (tensor([[-2.,  3.]]), tensor([[14]], dtype=torch.uint8))
    """
    p = as_pattern(pattern)
    if out is None:
        values, indices = nm_compress(w, p.n, p.m, mask)
        return Compressed.trusted(values, indices, p, w.shape)
    check_same_form("nm_compress", out, p.n, p.m, w.shape)
    nm_compress(w, p.n, p.m, mask, out=(out.values, out.indices))
    return out


def decompress(c: Compressed, out: Tensor | None = None) -> Tensor:
    """The dense tensor of a compressed one: ``y[..., g·M + index] = value``, +0.0 elsewhere; written into ``out`` if given.

    Example:
        >>> decompress(compress(torch.tensor([1.0, 0.5, -2.0, 3.0]), "1:4"))
        tensor([0., 0., 0., 3.])
    """
    c = dequantize_values(c, torch.float32 if out is None else out.dtype) if c.step is not None else c
    return nm_decompress(c.values, c.indices, c.pattern.n, c.pattern.m, c.shape[-1], out=out)


def quantize_values(c: Compressed, values: str = "int8", group: int | None = None) -> Compressed:
    """``c`` with its values rounded to integers of 8 or 4 bits: w ≈ integer · step, one bf16 step per row or per ``group`` columns.

    ``"int8"``: step = max|w|/127, integers from −127 to 127. ``"int4"``: from −8 to 7, with the best of 42 steps by squared error, which
    may be negative. Rounding half to even; bit-equal on every device. Prune first, then quantise (Harma et al. 2024, arXiv 2405.20935).

    Args:
        c: compressed, with floating-point values, of any leading dimensions.
        group: dense columns that share a step, a multiple of M that divides the columns; 0: all of a row. Default 0 for ``"int8"``, and for
            ``"int4"`` the first of 128, 64, 32 that fits, else 0.

    Raises:
        OptionError: ``values`` is unknown, or ``group`` does not fit.
        DtypeError: the values of ``c`` are integers already.

    Example:
        >>> c = compress(torch.tensor([[1.0, 0.0, -2.0, 0.5]]), "2:4")
        >>> q = quantize_values(c)
        >>> q.values, q.step
        (tensor([[  64, -127]], dtype=torch.int8), tensor([[0.0157]], dtype=torch.bfloat16))
    """
    p, cols = c.pattern, int(c.shape[-1])
    group = group_of("nm_quantize_values", values, group, p, cols)
    integers, step = nm_quantize_values(c.values, BITS[values], cols // group if group else 1)
    indices = c.indices if p.m > 1 else c.indices.new_empty(*c.indices.shape[:-1], 0)
    return Compressed(integers, indices, p, c.shape, step)


def group_of(op: str, values: str, group: int | None, p: Pattern, cols: int) -> int:
    """The columns that share a step in rows of ``cols``, as ``quantize_values`` takes ``values`` and ``group``; 0 for a row.

    Raises:
        OptionError: ``values`` is unknown, or ``group`` does not fit.
    """
    if values not in BITS:
        raise OptionError(f"{op}: values={values!r} is unknown; choose one of {', '.join(map(repr, BITS))}.")

    def fits(size: int) -> bool:
        return cols % size == 0 and size % p.m == 0

    if group is None:
        return next(filter(fits, GROUPS), 0) if values == "int4" else 0
    group = whole_number(OptionError, f"{op}: group", group, least=0)
    if group and not fits(group):
        raise OptionError(
            f"{op}: group={group} does not divide {cols} columns into whole groups of M={p.m}; pass a multiple of M that divides them, or "
            "0 for one step per row."
        )
    return group


def dequantize_values(c: Compressed, dtype: torch.dtype = torch.float32) -> Compressed:
    """``c`` with floating-point values integer · step, exact in fp32 and rounded once to ``dtype``; unchanged if they are that already.

    Example:
        >>> q = quantize_values(compress(torch.tensor([[1.0, 0.0, -2.0, 0.0]]), "2:4"))
        >>> dequantize_values(q).values
        tensor([[ 1.0078, -1.9999]])
    """
    if c.step is None:
        return c.to(dtype)
    values = nm_dequantize_values(c.values, c.step, c.pattern.kept(c.shape[-1]), dtype)
    size = c.pattern.index_bytes(c.shape[-1])
    indices = c.indices if size == c.indices.shape[-1] else c.indices.new_zeros(*c.indices.shape[:-1], size)  # at 1:1 each is 0
    return Compressed(values, indices, c.pattern, c.shape)


def check_same_form(op: str, out: Compressed, n: int, m: int, shape: torch.Size) -> None:
    """Raise ``ShapeError`` unless ``out`` has that pattern and dense shape."""
    if (out.pattern.n, out.pattern.m) != (n, m) or out.shape != shape:
        raise ShapeError(f"{op}: out is {out!r}, the result is {n}:{m} of shape {tuple(shape)}. Pass one made from a tensor of that shape.")
