"""The three GEMMs of a linear layer with one compressed operand: fprop nt, dgrad nn, wgrad tn."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends.streams import capturing
from ..dispatch import forced_backend, preferred_layout
from ..pattern import DtypeError, OptionError, Pattern, ShapeError
from ..reference.layouts import COLUMNS, layout_of, tile_of
from .check import check_device, check_last, check_linear, check_matrix, check_ordered, check_packed, check_same_dtype
from .compress import Compressed, can_be_remembered, dequantize_values
from .define import Spec, define
from .derivatives import require_no_grad
from .integers import nm_linear_integers
from .pack import Operand, nm_metadata, positions


def _operands(op: str, what: str, x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> None:
    check_matrix(op, "the compressed operand", values)
    if indices.dtype == torch.int32 and op != "nm_linear_dgrad":  # metadata of a tensor-core layout
        check_ordered(op, values, indices, Pattern(n, m), layout_of(indices), values.shape[0], cols)
    else:
        check_packed(op, values, indices, n, m, cols)
    check_same_dtype(op, what, x, "the compressed operand", values)
    check_device(op, **{what: x, "the compressed operand": values})


def _linear(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None,
) -> tuple[Spec, ...]:  # fmt: skip
    op = "nm_linear"
    _operands(op, "x", x, values, indices, n, m, cols)
    return check_linear(op, x, values.shape[0], cols, bias, activation, residual)


def _linear_dgrad(g: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> tuple[Spec, ...]:
    op = "nm_linear_dgrad"
    _operands(op, "g", g, values, indices, n, m, cols)
    check_last(op, "g", g, values.shape[0])
    return (((*g.shape[:-1], cols), g.dtype),)


def _linear_wgrad(
    values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor, out_dtype: torch.dtype | None = None
) -> tuple[Spec, ...]:
    op = "nm_linear_wgrad"
    _operands(op, "x", x, values, indices, n, m, cols)
    check_matrix(op, "x", x)
    if x.shape[0] != cols:
        raise ShapeError(f"{op}: x has {x.shape[0]} rows, the compressed gradient has {cols} tokens; they must be the same tokens.")
    if out_dtype not in (None, x.dtype) and (out_dtype != torch.float32 or x.element_size() != 2):
        raise DtypeError(f"{op}: the result of {x.dtype} has that dtype, or torch.float32 if x has 16 bits, not {out_dtype}.")
    return (((values.shape[0], x.shape[1]), out_dtype or x.dtype),)


CANONICAL_TOKENS = {"wgmma.sp": 1, "mma.sp": 16}
"""The most tokens for which kernels of canonical indices are no slower, by the layout of the tensor cores that multiply more.

``wgmma.sp`` takes about as long for 1 token as for 16. A weight of 14336x4096 at 2:4 in bfloat16, in us, canonical against ``wgmma.sp``: on
an H100 27.3 against 29.5 for one token, 40.3 against 29.9 for 16; on an H200 21.6 against 20.7, and 41.4 against 21.7. Two tokens were not
measured. ``mma.sp``: 16 is what those kernels take.
"""


def operand_for(x: Tensor, c: Operand) -> tuple[Tensor, Tensor]:
    """Values of a weight, and their positions as the fastest kernel reads them for ``x``.

    For more than a few tokens on a GPU that is metadata of its tensor cores, where the weight has whole tiles: made once, and kept with the
    weight. Not where it would be made at every call: in a compiled graph, of a weight whose writes torch does not count, and in a CUDA
    graph that is captured before it is made, or of a weight that was written in place.
    """
    # other types of tensors are of tracing and of transforms
    if not isinstance(c, Compressed) or not x.is_cuda or torch.compiler.is_compiling() or type(x) is not Tensor:
        return c.values, positions(c)
    rows, cols = c.shape[0], c.shape[-1]
    if (c.pattern.n, c.pattern.m) != (2, 4) or c.dtype.itemsize != 2 or len(c.shape) != 2 or forced_backend():
        return c.values, c.indices
    layout = preferred_layout("nm_linear", x.device)
    layout = "mma.sp" if layout == "wgmma.sp" and rows % tile_of(layout)[0] else layout
    if not layout or x.numel() <= CANONICAL_TOKENS[layout] * cols or rows % tile_of(layout)[0] or cols % COLUMNS:
        return c.values, c.indices
    name = f"rows:{layout}"
    if not can_be_remembered(c.values, c.indices) or (
        capturing(x.device) and (c.values._version or c.indices._version or name not in c._layouts)
    ):
        return c.values, c.indices
    operand: tuple[Tensor, Tensor] = c.layout(name, lambda c: (c.values, nm_metadata(c.indices, cols, layout)))
    return operand


_PACKED = "Tensor values, Tensor indices, int n, int m, SymInt cols"
nm_linear = define(
    "nm_linear",
    f'(Tensor x, {_PACKED}, Tensor? bias=None, str activation="", Tensor? residual=None) -> Tensor',
    _linear,
    leading=("x", "residual"),
)
nm_linear_dgrad = define("nm_linear_dgrad", f"(Tensor g, {_PACKED}) -> Tensor", _linear_dgrad, leading=("g",))
nm_linear_wgrad = define("nm_linear_wgrad", f"({_PACKED}, Tensor x, ScalarType? out_dtype=None) -> Tensor", _linear_wgrad)


def linear(x: Tensor, c: Operand, bias: Tensor | None = None, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
    """The output ``y = f(x Wᵀ + b) + r`` of a linear layer with a compressed weight, activation f and residual r (fprop, layout nt).

    Accumulated in fp32 (fp64 for fp64). ``linear(g, packed.columns)`` is the gradient g W of the input, see ``pack``.

    Args:
        x: ``(..., in)``.
        c: the weight, of shape ``(out, in)``, in x's dtype, in canonical form or a tensor-core layout (``relayout``); or with integers as
            values (``quantize_values``), for x in any floating dtype. On a GPU a 2:4 weight of whole tiles in 16 bits keeps metadata of the
            tensor cores, an eighth of a byte for each dense element, from its first product with 17 tokens on; on compute capability 9.0
            with 2.
        bias: ``(out,)``, in x's dtype.
        activation: f: None for none, ``"gelu"`` y·Φ(y), ``"silu"`` y/(1 + exp(−y)), ``"relu2"`` max(y, 0)². Kernels that hold the sum in
            fp32 apply it before the only rounding; others round the sum first.
        residual: r ``(..., out)``, in x's dtype; added likewise.

    Raises:
        ShapeError, DtypeError: the operands do not match.
        OptionError: the activation is unknown.
        NMError: an operand requires grad; use ``nm.nn.CompressedLinear`` or ``nm.nn.SparseLinear``, which are differentiable.

    Example:
        >>> from nmkernels import ops
        >>> w = ops.compress(torch.tensor([[1.0, 0.0, -2.0, 3.0]]), "2:4")
        >>> linear(torch.tensor([[0.0, 0.0, -1.0, 0.0]]), w, activation="relu2")
        tensor([[4.]])
    """
    p = c.pattern
    if isinstance(c, Compressed) and c.step is not None:
        require_no_grad("nm_linear_integers", x=x, bias=bias, residual=residual)
        return nm_linear_integers(x, c.values, c.indices, c.step, p.n, p.m, c.shape[-1], bias, activation or "", residual)
    require_no_grad("nm_linear", x=x, weight=c.values, bias=bias, residual=residual)
    return nm_linear(x, *operand_for(x, c), p.n, p.m, c.shape[-1], bias, activation or "", residual)


def linear_dgrad(g: Tensor, c: Compressed) -> Tensor:
    """The gradient ``dx = g W`` ``(..., in)`` of the input of a linear layer with a compressed weight (dgrad, layout nn).

    Args:
        g: gradient of the output ``(..., out)``.
        c: the weight, of shape ``(out, in)``, in g's dtype; integers are decoded to it.

    Raises:
        ShapeError, DtypeError, NMError: as ``linear``.
        OptionError: the weight is in a device layout.

    Example:
        >>> from nmkernels import ops
        >>> linear_dgrad(torch.ones(1, 1), ops.compress(torch.tensor([[1.0, 0.0, -2.0, 3.0]]), "2:4"))
        tensor([[ 0.,  0., -2.,  3.]])
    """
    if not isinstance(c, Compressed):
        raise OptionError(
            "nm_linear_dgrad: the weight is in the order of tensor cores, which sum along its rows, and g W sums along its columns. "
            "Pack those, nm.ops.pack(w, pattern, 'transposable', columns=True), and use nm.ops.linear(g, packed.columns)."
        )
    c = c if c.step is None else dequantize_values(c, g.dtype)
    require_no_grad("nm_linear_dgrad", g=g, weight=c.values)
    p = c.pattern
    return nm_linear_dgrad(g, c.values, c.indices, p.n, p.m, c.shape[-1])


def linear_wgrad(gc: Operand, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """The dense gradient ``dW = gᵀ x`` ``(out, in)`` of a linear layer's weight from a compressed output gradient (wgrad, layout tn).

    Args:
        gc: gᵀ, of shape ``(out, tokens)``, compressed along tokens: ``nm.ops.mvue_compress(g, pattern, dim=0)``, or its ``relayout``.
        x: the layer's input ``(tokens, in)``, in gc's dtype; more leading dimensions are flattened into tokens.
        out_dtype: of the result: x's by default, or ``torch.float32`` for an x of 16 bits: the sums as they are, which are not rounded to
            16 bits. That is the gradient of a float32 weight.

    Raises:
        ShapeError, DtypeError, NMError: as ``linear``.

    Example:
        >>> from nmkernels import ops
        >>> g, x = torch.tensor([[0.0], [2.0], [0.0], [1.0]]), torch.ones(4, 3)
        >>> linear_wgrad(ops.mvue_compress(g, "2:4", dim=0), x)
        tensor([[3., 3., 3.]])
    """
    require_no_grad("nm_linear_wgrad", g=gc.values, x=x)
    p = gc.pattern
    tokens = x.reshape(-1, x.shape[-1]) if x.dim() > 2 else x
    return nm_linear_wgrad(gc.values, positions(gc), p.n, p.m, gc.shape[-1], tokens, out_dtype)
