"""The minimum-variance unbiased N:M estimate: mvue and mvue_compress."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import whole_number
from ..pattern import DtypeError, OptionError, Pattern, PatternError, PatternLike, ShapeError
from ..reference.layouts import index_dtype, operand_shapes
from .check import as_pattern, check_device, check_float, check_layout
from .compress import Compressed, check_same_form
from .define import Spec, define

METHODS = ("exact", "approx")


def _checked(op: str, g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str) -> Pattern:
    p = Pattern(n, m)
    check_float(op, "g", g)
    if not -g.dim() <= dim < g.dim():
        raise ShapeError(f"{op}: dim={dim} does not exist in a tensor of shape {tuple(g.shape)}; it has {g.dim()} dimensions.")
    if dim in (-1, g.dim() - 1):
        p.check_divides(op, g.shape[-1])
    if method not in METHODS:
        raise OptionError(f'{op}: method={method!r} is not known; it is "exact" (least variance) or "approx" (two draws, N = 2 only).')
    if method == "approx" and n != 2:
        raise PatternError(f'{op}: method="approx" draws exactly two elements, so it needs N = 2, not {p}. Use method="exact".')
    if seed.dtype != torch.int64:
        raise DtypeError(f"{op}: the seed tensor has dtype {seed.dtype}; it must be int64 (seed, offset). Convert it with .long().")
    if tuple(seed.shape) != (2,):
        raise ShapeError(f"{op}: the seed tensor has shape {tuple(seed.shape)}; it must be (2,): seed and offset.")
    check_device(op, g=g, seed=seed)
    return p


def _mvue(g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str) -> tuple[Spec, ...]:
    _checked("nm_mvue", g, n, m, dim, seed, method)
    return ((g.shape, g.dtype),)


def _mvue_compress(g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str, layout: str = "canonical") -> tuple[Spec, ...]:
    op = "nm_mvue_compress"
    p = _checked(op, g, n, m, dim, seed, method)
    *lead, cols = _moved(g.shape, dim)
    if layout != "canonical":
        if len(lead) != 1:
            raise ShapeError(f"{op}: layout {layout!r} is of matrices, and g has shape {tuple(g.shape)}. Flatten it, or use 'canonical'.")
        check_layout(op, layout, lead[0], cols, p, g.dtype)
        values, indices = operand_shapes(p, lead[0], cols, layout)
        return (values, g.dtype), (indices, index_dtype(layout))
    return ((*lead, p.kept(cols)), g.dtype), ((*lead, p.index_bytes(cols)), torch.uint8)


def _moved(shape: torch.Size, dim: int) -> torch.Size:
    sizes = list(shape)
    sizes.append(sizes.pop(dim))
    return torch.Size(sizes)


_SCHEMA = "(Tensor g, int n, int m, int dim, Tensor seed, str method"
nm_mvue = define("nm_mvue", _SCHEMA + ") -> Tensor", _mvue, outs=("out",))
nm_mvue_compress = define(
    "nm_mvue_compress", _SCHEMA + ', str layout="canonical") -> (Tensor, Tensor)', _mvue_compress, outs=("out_values", "out_indices")
)
"""``layout``: that of the indices, metadata where it is one of a tensor core (``reference.layouts``)."""


def mvue(
    g: Tensor,
    pattern: PatternLike,
    dim: int = -1,
    seed: int | Tensor | None = None,
    offset: int = 0,
    method: str = "exact",
    out: Tensor | None = None,
) -> Tensor:
    """A random N:M sparse tensor with mean ``g`` and minimal variance, in dense layout.

    Element i of a group is kept with probability ``p_i = min(1, c·|g_i|)``, ``Σ p_i = N``, and becomes ``g_i / p_i``
    (Chmiel et al. 2023, arXiv 2203.10991, for 1:2 and 2:4). For N <= 2 and M = 2, 4, 8 or 16 probabilities have steps of ``2^-16`` (M = 16:
    ``2^-15``), and sampled values are rounded to the dtype up or down at random, so the mean of an element is off by little more than a
    step of that value. A group with at most N non-zeros is copied; one that is not finite becomes NaN at ``mask(g)``. Backward raises.

    Args:
        g: ``(rows, cols)``, or any shape; usually the gradient of a layer's output ``(tokens, out)``.
        dim: the grouped dimension. The last one must be a multiple of M; any other is padded with zeros.
        seed: None draws from torch's generator of g's device; a 64-bit int, or an int64 tensor (seed, offset) on g's device,
            replays. The tensor form avoids recompilation under ``torch.compile``, and is not frozen in a CUDA graph.
        offset: second 64-bit word of an int seed's random stream, e.g. the step.
        method: ``"exact"``, or ``"approx"``: the two draws of FST's and S-STE's code (N = 2 only).
        out: tensor of g's shape and dtype to write into.

    Raises:
        ShapeError: the last dimension is not divisible by M, ``dim`` does not exist, or ``out`` or ``seed`` has a wrong shape.
        DtypeError: ``g`` is not floating-point, or ``seed`` not int64.
        OptionError, PatternError: the method is unknown, or does not support this pattern; a number is not whole.

    Example:
        >>> mvue(torch.tensor([0.0, 5.0, 0.0, -1.0]), "2:4", seed=0)  # two non-zeros: copied
        tensor([ 0.,  5.,  0., -1.])
    """
    p, words = as_pattern(pattern), seed_words("nm_mvue", seed, offset, g.device)
    dim = dim if type(dim) is int else whole_number(OptionError, "nm_mvue: dim", dim, least=None)
    return nm_mvue(g, p.n, p.m, dim, words, method, out=out)


def mvue_compress(
    g: Tensor,
    pattern: PatternLike,
    dim: int = -1,
    seed: int | Tensor | None = None,
    offset: int = 0,
    method: str = "exact",
    out: Compressed | None = None,
) -> Compressed:
    """``mvue`` in compressed form, with ``dim`` moved last; errors as ``mvue``.

    For a gradient ``(tokens, out)``, ``dim=0`` gives gᵀ ``(out, tokens)`` packed along tokens, as ``linear_wgrad`` needs it.

    Args:
        g, pattern, dim, seed, offset, method: as for ``mvue``; the same seed gives the same numbers.
        out: a ``Compressed`` of the result's pattern, shape and dtype, whose buffers are written.

    Example:
        >>> c = mvue_compress(torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 4.0]]), "2:4", dim=0, seed=0)
        >>> c.shape, c.dense()
        (torch.Size([2, 3]), tensor([[1., 0., 0.],
                [0., 0., 4.]]))
    """
    p, words = as_pattern(pattern), seed_words("nm_mvue_compress", seed, offset, g.device)
    dim = dim if type(dim) is int else whole_number(OptionError, "nm_mvue_compress: dim", dim, least=None)
    if out is None:
        values, indices = nm_mvue_compress(g, p.n, p.m, dim, words, method)
        return Compressed.trusted(values, indices, p, _moved(g.shape, dim))
    check_same_form("nm_mvue_compress", out, p.n, p.m, _moved(g.shape, dim))
    nm_mvue_compress(g, p.n, p.m, dim, words, method, out=(out.values, out.indices))
    return out


def seed_words(op: str, seed: int | Tensor | None, offset: int, device: torch.device) -> Tensor:
    """The int64 tensor (seed, offset) that the raw op takes."""
    if isinstance(seed, Tensor) or seed is None:
        if offset != 0:
            raise OptionError(f"{op}: offset={offset} needs an int seed; a seed tensor carries its own offset, and seed=None draws both.")
        return seed if isinstance(seed, Tensor) else torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device)
    return torch.tensor([_signed(op, "seed", seed), _signed(op, "offset", offset)], dtype=torch.int64, device=device)


def _signed(op: str, name: str, value: int) -> int:
    also = "an int64 tensor (seed, offset), or None" if name == "seed" else ""
    value = whole_number(OptionError, f"{op}: {name}", value, least=None, also=also)
    if not -(2**63) <= value < 2**64:
        raise OptionError(f"{op}: {name}={value} does not fit in 64 bits. Reduce it modulo 2**64.")
    return value - 2**64 if value >= 2**63 else value
