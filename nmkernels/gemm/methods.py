"""The methods of computing a GEMM: torch's dense GEMM, a backend's sparse kernel, or decompressing followed by the dense GEMM.

All multiply the same W̃, or in wgrad the same estimate ĝ to the bit, but for ``UNESTIMATED``, which multiplies g itself; drawing the
estimate is part of the method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..backends.shared import Scratch, product
from ..dispatch import REFERENCE, forced_backend, implementations
from ..ops.define import CALLS, CONTRACTS
from ..ops.linear import CANONICAL_TOKENS
from ..ops.verify import any_wrong
from ..pattern import NMError, Pattern
from .problem import Problem

Packed = tuple[Tensor, ...]
"""The values of a compressed operand, its indices or metadata, and the step if values are integers."""

Operand = Mapping[str, "Tensor | Packed"] | Tensor
"""W̃ in several forms, by name; in wgrad g ``(tokens, out)``, from which the method draws ĝ."""


class Method(NamedTuple):
    """A method of computing a GEMM.

    Args:
        name: the name in the table of measurements: ``"dense"``, torch's GEMM in dense layout; ``"op"``, the sparse op with the backend
            that the dispatcher chooses; ``"cpu rows"``, ``"cuda rows:wgmma.sp"``: the sparse op with one backend, on one form;
            ``"expand"``, decode integers if there are any, decompress and use torch's GEMM; ``"expand float32"``, the same in float32.
        form: the form of the operand that it reads, as in ``Problem.forms``.
        backend: the backend, if the method is one backend's kernel.
    """

    name: str
    form: str
    backend: str = ""


DENSE = Method("dense", "dense")
UNESTIMATED = Method("without estimate", "dense")
"""wgrad on a GPU as torch's GEMM of g itself, although an estimate of g was asked for: where the estimate costs more than it saves."""

ROUNDING = ("cusparselt",)
"""Backends whose results of 16-bit operands have 16 bits."""
OP, EXPAND, AS_FLOAT32 = "op", "expand", "expand float32"
"""Names of the methods for compressed operands that do not belong to one backend."""


def methods(p: Problem, backends: bool = True) -> tuple[Method, ...]:
    """The methods for ``p``, the baseline first; whether a backend supports the call is checked when it is measured.

    Args:
        backends: also those that are one backend's kernel, which the rule never chooses.
    """
    packed = [form for form in p.forms if op_of(p, form)]
    available = [DENSE] if DENSE.form in p.forms else []
    # the op reads the first form, but beyond a few tokens, and in wgrad, that of the tensor cores, which 2:4 has without another copy
    # of its values; given canonical indices, the op would convert them in every call
    cores = [form for form in packed if ":" in form] if (p.n, p.m) == (2, 4) and p.role != "dgrad" else []
    if cores and (p.role == "wgrad" or p.tokens > CANONICAL_TOKENS[cores[0].partition(":")[2]]):
        available.append(Method(OP, cores[0]))
    else:
        available += [Method(OP, form) for form in packed[:1]]
    if DENSE not in available:
        for form in [form for form in p.forms if form in ("rows", "columns")][:1]:
            available.append(Method(EXPAND, form))
            if p.dtype.itemsize == 2 and p.device.type == "cpu":
                available.append(Method(AS_FLOAT32, form))
    for form in packed if backends else ():
        for entry in implementations(op_of(p, form)):
            # neither the reference nor what is only for tests, or switched off on this machine
            if entry.backend != REFERENCE and entry.priority >= 0 and not any_wrong(entry.op, entry.backend):
                available.append(Method(f"{entry.backend} {form}", form, entry.backend))
    if optional(p):
        available.append(UNESTIMATED)
    return tuple(available)


def optional(p: Problem) -> bool:
    """Whether the estimate of a wgrad may be left out: an unbiased one, on a GPU."""
    return p.role == "wgrad" and p.rule != "magnitude" and p.device.type == "cuda" and DENSE.form in p.forms


def op_of(p: Problem, form: str) -> str:
    """The raw op that multiplies this form of the operand; empty if there is none."""
    kind, _, layout = form.partition(":")
    if p.values != "float":
        return "nm_linear_integers" if form == "rows" else ""
    if p.role == "fprop":
        return "nm_linear" if kind == "rows" else ""
    if p.role == "dgrad":
        return "nm_linear" if kind == "columns" else "nm_linear_dgrad" if kind == "rows" and not layout else ""
    return "nm_linear_wgrad" if kind == "rows" else ""


def arguments(p: Problem, form: str, packed: Packed, other: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
    """The arguments of ``op_of(p, form)``; ``other`` is x in fprop and wgrad, g in dgrad."""
    values, indices, *step = packed
    pattern = (2, 4) if ":" in form else (p.n, p.m)  # the layouts of tensor cores are always 2:4
    if p.role == "wgrad":
        return values, indices, *pattern, p.tokens, other
    if p.role == "dgrad":
        return other, values, indices, *pattern, p.rows if form.startswith("columns") else p.cols
    return other, values, indices, *step, *pattern, p.cols, bias


def run(
    method: Method, p: Problem, other: Tensor, operand: Operand, *, bias: Tensor | None = None, seed: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``p`` by ``method``.

    Args:
        other: x ``(..., in)`` in fprop, x ``(tokens, in)`` in wgrad, g ``(..., out)`` in dgrad.
        operand: W̃ by form; in wgrad g ``(tokens, out)``.
        bias: of fprop, ``(out,)`` or None.
        seed: int64 ``(2,)`` for the estimate of wgrad.
        dtype: of wgrad's result: None for that of the operands, or float32, which is then rounded as little as the method can.

    Returns:
        y ``(..., out)``, dx ``(..., in)`` or dW ``(out, in)``.
    """
    if method == UNESTIMATED:
        assert isinstance(operand, Tensor)
        return product(operand.t(), other, dtype)
    if method == DENSE:
        w: Any = dense_estimate(p, operand, seed) if isinstance(operand, Tensor) else operand[DENSE.form]
        return product(w, other, dtype) if p.role == "wgrad" else _dense(p, other, w, bias)
    packed: Any = pack_estimate(p, operand, seed, method.form) if isinstance(operand, Tensor) else operand[method.form]
    if method.name in (EXPAND, AS_FLOAT32):
        return expand(method, p, other, packed, bias)
    call, args = CALLS[op_of(p, method.form)], arguments(p, method.form, packed, other, bias)
    if p.role != "wgrad" or dtype is None:
        return call(*args, backend=method.backend)
    if (forced_backend() or method.backend) in ROUNDING:
        return call(*args, backend=method.backend).to(dtype)
    return call(*args, dtype, backend=method.backend)


def expand(method: Method, p: Problem, other: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """Compute the GEMM by decompressing the operand and multiplying in dense layout, in float32 if the method says so."""
    CONTRACTS[op_of(p, method.form)](*arguments(p, method.form, packed, other, bias))  # what the op refuses
    values, indices, *step = packed
    dtype = torch.float32 if method.name == AS_FLOAT32 else other.dtype
    cols = p.tokens if p.role == "wgrad" else p.cols if method.form == "rows" else p.rows
    fresh = torch.compiler.is_compiling() or torch.is_grad_enabled() or not values.is_cpu
    if step:
        stored = Pattern(p.n, p.m).kept(cols)
        room = None if fresh else _values.like(values, (values.shape[0], stored), dtype)
        values = CALLS["nm_dequantize_values"](values, *step, stored, dtype, out=room)
    else:
        values = values.to(dtype)
    w = values  # of integers without zeros and indices
    if not step or p.m > 1:
        out = None if fresh else _scratch.like(values, (values.shape[0], cols), dtype)
        w = CALLS["nm_decompress"](values, indices, p.n, p.m, cols, out=out)
    b = None if bias is None else bias.to(dtype)
    return _dense(p, other.to(dtype), w if method.form == "rows" else w.t(), b).to(other.dtype)


_values, _scratch = Scratch(), Scratch()
"""Decoded integers, and expanded weights."""


def _dense(p: Problem, other: Tensor, operand: Tensor, bias: Tensor | None) -> Tensor:
    if p.role == "fprop":
        return F.linear(other, operand, bias)
    return other.matmul(operand) if p.role == "dgrad" else operand.matmul(other)


# ---- the operand of wgrad


def dense_estimate(p: Problem, g: Tensor, seed: Tensor | None) -> Tensor:
    """ĝᵀ ``(out, tokens)`` of wgrad, in dense layout."""
    raw = torch.ops.nmkernels
    if p.rule == "magnitude":
        return raw.nm_prune(_padded(p, g), p.n, p.m)[:, : p.tokens]
    return raw.nm_mvue(g, p.n, p.m, 0, seed, p.rule).t()


def pack_estimate(p: Problem, g: Tensor, seed: Tensor | None, form: str = "rows") -> Packed:
    """ĝᵀ ``(out, tokens)`` compressed along tokens, its indices in the layout of ``form``."""
    layout = form.partition(":")[2]
    if p.rule == "magnitude":
        values, indices = CALLS["nm_compress"](_padded(p, g), p.n, p.m, None)
        return (values, torch.ops.nmkernels.nm_metadata(indices, p.tokens, layout)) if layout else (values, indices)
    return CALLS["nm_mvue_compress"](g, p.n, p.m, 0, seed, p.rule, layout or "canonical")


def _padded(p: Problem, g: Tensor) -> Tensor:
    """gᵀ, with the last group padded with zeros."""
    return F.pad(g.t(), (0, -p.tokens % p.m)).contiguous()


# ---- random operands, to measure on

BLOCK = 1 << 18
"""Random numbers are drawn once and repeated: drawing all of them would take longer than the GEMMs."""

Drawn = tuple[Tensor, Any, "Tensor | None"]
"""x or g, the sparse operand for ``run``, and the seed."""


def random_operands(p: Problem) -> Drawn:
    """Random operands from a separate generator; the weight is N:M, along both dimensions if a form needs W̃ᵀ."""

    def draw(rows: int, cols: int) -> Tensor:
        generator = torch.Generator(device=p.device).manual_seed(rows * 31 + cols)
        count = rows * cols
        block = torch.randn(min(count, BLOCK - 1), dtype=torch.float32, generator=generator, device=p.device).to(p.dtype)
        return block.repeat(-(-count // max(block.numel(), 1)))[:count].view(rows, cols)

    if p.role == "wgrad":
        return draw(p.tokens, p.cols), draw(p.tokens, p.rows), torch.tensor([1, 2], device=p.device)
    return draw(p.tokens, p.cols if p.role == "fprop" else p.rows), _weight(p, draw(p.rows, p.cols)), None


def _weight(p: Problem, w: Tensor) -> dict[str, Any]:
    """W̃ in the forms of the GEMM; for a form that cannot be made, the reason as text."""
    pattern = Pattern(p.n, p.m)
    transposable = any(form.startswith("columns") for form in p.forms)
    mask = ops.transposable_mask(w, pattern) if transposable else ops.mask(w, pattern)
    w = w * mask
    if p.integers:
        c = ops.quantize_values(ops.compress(w, pattern, mask), p.values, p.group)
        return {DENSE.form: c.dense(p.dtype), "rows": (c.values, c.indices, c.step)}
    made: dict[str, Any] = {DENSE.form: w}
    for form in p.forms:
        kind, _, layout = form.partition(":")
        if kind == DENSE.form:
            continue
        c = ops.compress(w, pattern, mask) if kind == "rows" else ops.compress(w.t().contiguous(), pattern, mask.t().contiguous())
        try:
            d = ops.relayout(c, layout) if layout else None
            made[form] = (c.values, c.indices) if d is None else (d.values, d.meta)
        except NMError as error:
            made[form] = str(error)
    return made
