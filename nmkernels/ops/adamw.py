"""masked_adamw_: one pass over memory for decay, Adam, the new mask and its statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pattern import DtypeError, OptionError, Pattern, PatternLike, ShapeError
from ..reference.common import FLOATS, check_device, check_float, compute_dtype
from ..reference.pack import BUFFERS, check_packs
from .check import as_pattern
from .compress import Compressed
from .define import Spec, define
from .pack import Packed

HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "decay", "v_step", "clamp", "reserved")
"""The names of the elements of ``hyper``."""

STATS = ("applied", "v_change", "v_log_change", "v_unchanged", "flips", "pruned_abs", "pruned_grad_abs", "nonzeros", "max_update")
"""The names of the elements that ``masked_adamw_`` returns."""

Tensors = list[Tensor]


def _masked_adamw(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, max_exp_avg_sqs: Tensors, steps: Tensors, outs: Tensors,
    hyper: Tensor, n: int, m: int, frozen: bool, eps_inside: bool, maximize: bool, geometric: bool,
    grad_scale: Tensor | None, found_inf: Tensor | None,
    transposable: bool = False, packs: Tensors | None = None, layout: str = "canonical",
) -> tuple[Spec, ...]:  # fmt: skip
    op = "nm_masked_adamw_"
    if hyper.dtype != torch.float64 or tuple(hyper.shape) != (len(HYPER),):
        raise ShapeError(
            f"{op}: hyper is {hyper.dtype} of shape {tuple(hyper.shape)}; it must be float64 ({len(HYPER)},): {', '.join(HYPER)}."
        )
    lists = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "max_exp_avg_sqs": max_exp_avg_sqs, "outs": outs}
    optional = ("max_exp_avg_sqs", "outs")
    for name, tensors in (*lists.items(), ("steps", steps)):
        if len(tensors) != len(params) and not (name in optional and not tensors):
            empty = ", or none" if name in optional else ""
            raise ShapeError(f"{op}: {len(params)} params and {len(tensors)} {name}; there must be one per param{empty}.")
    for name in ("grad_scale", "found_inf"):
        scalar = grad_scale if name == "grad_scale" else found_inf
        if scalar is not None and (scalar.numel() != 1 or scalar.dtype != torch.float32):
            raise ShapeError(f"{op}: {name} is {scalar.dtype} of shape {tuple(scalar.shape)}; it must be one float32 element.")
    given = [(name, tensors, "exp" in name) for name, tensors in lists.items() if tensors]
    for i, param in enumerate(params):
        _check_param(op, i, param, n, m)
        shape, device, state = param.shape, param.device, compute_dtype(param.dtype)
        for name, tensors, is_state in given:
            tensor = tensors[i]
            # one line that is true for what fits: a step of hundreds of small params must not be spent on checks
            fits = tensor.shape == shape and tensor.device == device and tensor.dtype in ((state,) if is_state else FLOATS)
            if not fits or (0 in tensor.stride() and name != "grads"):
                _refuse(op, i, param, name, tensor, state if is_state else None)
        if steps[i].dtype != torch.float32 or steps[i].numel() != 1:
            raise DtypeError(f"{op}: steps[{i}] is {steps[i].dtype} of shape {tuple(steps[i].shape)}; it must be one float32 element.")
    if transposable or packs or layout != "canonical":
        _check_packs(op, params, n, m, transposable, packs or [], layout)
    return (((len(STATS),), torch.float64),)


def _check_param(op: str, i: int, param: Tensor, n: int, m: int) -> None:
    if param.dtype not in FLOATS:
        check_float(op, f"params[{i}]", param)
    if 0 in param.stride():
        _check_written(op, f"params[{i}]", param)
    if n or m:
        p = Pattern(n, m)
        if not param.dim():
            raise ShapeError(f"{op}: params[{i}] is 0-dimensional; groups run along the last dimension. Step it without a pattern.")
        if param.shape[-1] % m:
            p.check_divides(op, int(param.shape[-1]), f"the last dimension of params[{i}]")


def _check_packs(op: str, params: Tensors, n: int, m: int, transposable: bool, packs: Tensors, layout: str) -> None:
    check_packs(op, params, n, m, transposable, packs, layout)
    for i, buffer in enumerate(packs):
        if buffer.numel():
            name = f"packs[{i}] ({BUFFERS[i % 4]} of params[{i // 4}])"
            check_device(op, **{f"params[{i // 4}]": params[i // 4], name: buffer})
            _check_written(op, name, buffer)


def _refuse(op: str, i: int, param: Tensor, name: str, tensor: Tensor, state: torch.dtype | None) -> None:
    """Raise the error of a tensor that does not fit beside its param; an expanded one that is empty fits."""
    if tensor.shape != param.shape:
        raise ShapeError(f"{op}: {name}[{i}] has shape {tuple(tensor.shape)}, params[{i}] has {tuple(param.shape)}; they must be the same.")
    check_float(op, f"{name}[{i}]", tensor)
    if state is not None and tensor.dtype != state:
        raise DtypeError(f"{op}: {name}[{i}] is {tensor.dtype}; the state of a {param.dtype} param is kept in {state}.")
    check_device(op, **{f"params[{i}]": param, f"{name}[{i}]": tensor})
    _check_written(op, f"{name}[{i}]", tensor)


def _check_written(op: str, name: str, x: Tensor) -> None:
    """Raise where elements of ``x`` share memory: a step of one would be a step of all."""
    if x.numel() > 1 and any(size > 1 and not stride for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise ShapeError(f"{op}: {name} is expanded, so that several of its elements are one in memory. Call .contiguous() first.")


nm_masked_adamw_ = define(
    "nm_masked_adamw_",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] max_exp_avg_sqs, "
    "Tensor(e!)[] steps, Tensor(f!)[] outs, Tensor hyper, int n, int m, bool frozen, bool eps_inside, bool maximize, bool geometric, "
    # a list of tensors may have no default but None
    'Tensor? grad_scale, Tensor? found_inf, bool transposable=False, Tensor(g!)[]? packs=None, str layout="canonical") -> Tensor',
    _masked_adamw,
    mutates=(0, 2, 3, 4, 5, 6, 17),
)


def masked_adamw_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    hyper: Tensor,
    pattern: PatternLike | None = None,
    *,
    max_exp_avg_sqs: Tensors | None = None,
    outs: Tensors | None = None,
    frozen: bool = False,
    eps_inside: bool = False,
    maximize: bool = False,
    geometric: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    transposable: bool = False,
    packs: list[Packed | None] | None = None,
) -> Tensor:
    """One AdamW step of every param in one pass over memory, with decay of pruned weights, the new mask and statistics.

    Per param, with t = step + 1, each operation rounded once, in this order (Loshchilov, Hutter, ICLR 2019, algorithm 2)::

        g = ±grad / grad_scale
        g = g + λ·w          where w is pruned            (SR-STE's decay, Zhou et al. 2021, arXiv 2102.04010)
        m = β1·m + (1-β1)·g
        v = β2·v + (1-β2)·g²                              (unless frozen: STEP, Lu et al., ICML 2023)
        D = sqrt(v) / sqrt(1-β2ᵗ) + eps                   (eps_inside: sqrt(v / (1-β2ᵗ) + eps); amsgrad: the running maximum of v)
        u = (m / (1-β1ᵗ)) / D                             (clamped to ±clamp if that is not 0)
        w = w·(1 - lr·weight_decay) - lr·u
        out = w ⊙ mask(w);  packs = pack(w, mask(w))

    Args:
        params: float tensors, groups along the last dimension as given (pass a transposed view of an (in, out) weight).
        grads, exp_avgs, exp_avg_sqs: one per param, of its shape; the states in fp32 (fp64 for fp64 params).
        steps: one-element fp32 tensors; the number of steps done so far, incremented here.
        hyper: fp64 ``(9,)``, named by ``HYPER``, on the CPU or the params' device; ``decay`` is λ, ``v_step`` the step whose bias
            correction a frozen v keeps (0: none).
        pattern: ``"N:M"``, a ``Pattern``, or None: plain AdamW, no mask.
        max_exp_avg_sqs: the running maxima of amsgrad; its presence switches amsgrad on.
        outs: buffers, of any float dtype, that receive the masked weight.
        geometric: also compute the statistics of log |v_t - v_{t-1}|.
        grad_scale, found_inf: of a ``GradScaler``; with found_inf != 0 nothing changes and all statistics are 0.
        transposable: the masks, before and after, are ``transposable_mask``'s; params ``(out, in)``, both multiples of M.
        packs: one per param, made by ``pack`` or ``empty_packed``, or None for a param that is not packed: buffers that receive the weight
            after the step, under the mask after it, rounded once from the param's dtype to theirs. Those of columns need ``transposable``.
            All have one layout.

    Returns:
        fp64 ``(9,)``, named by ``STATS``, summed over the params: 1 if applied; Σ|Δv|; Σ log|Δv|; elements with Δv = 0; mask bits flipped;
        Σ|w| and Σ|g| over pruned weights (before the decay); non-zeros of the masked weights; max |u| (before the clamp).

    Raises:
        ShapeError, DtypeError: lists of different lengths, shapes or dtypes that do not fit.
        PatternError: masks or packed weights without a pattern, columns without ``transposable``. OptionError: packs of several layouts.

    Example:
        >>> from nmkernels import ops
        >>> w = torch.tensor([[1.0, -2.0, 3.0, 0.5]])
        >>> g, m, v, step = torch.ones(1, 4), torch.zeros(1, 4), torch.zeros(1, 4), torch.zeros(())
        >>> hyper = torch.tensor([0.1, 0.9, 0.999, 1e-8, 0, 0, 0, 0, 0], dtype=torch.float64)
        >>> packed = ops.empty_packed(w, "2:4", dtype=torch.bfloat16)
        >>> stats = masked_adamw_([w], [g], [m], [v], [step], hyper, "2:4", packs=[packed])
        >>> w, dict(zip(STATS, stats.tolist()))["nonzeros"], packed.rows.values
        (tensor([[ 0.9000, -2.1000,  2.9000,  0.4000]]), 2.0, tensor([[-2.0938,  2.9062]], dtype=torch.bfloat16))
    """
    n, m = (0, 0) if pattern is None else ((p := as_pattern(pattern)).n, p.m)
    buffers, layout = (None, "canonical") if packs is None else _buffers(params, packs, n, m)
    return nm_masked_adamw_(
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs or [], steps, outs or [],
        hyper, n, m, frozen, eps_inside, maximize, geometric, grad_scale, found_inf, transposable, buffers, layout,
    )  # fmt: skip


def _buffers(params: Tensors, packs: list[Packed | None], n: int, m: int) -> tuple[Tensors, str]:
    """What the raw op takes: four buffers of each param, empty ones for what is not packed, and their layout."""
    op = "nm_masked_adamw_"
    if len(packs) != len(params):
        raise ShapeError(f"{op}: {len(params)} params and {len(packs)} packs; there must be one per param, or none.")
    parts = [x for packed in packs if packed is not None for x in (packed.rows, packed.columns) if x is not None]
    layouts = {"canonical" if isinstance(x, Compressed) else x.layout for x in parts} or {"canonical"}
    if len(layouts) > 1:
        raise OptionError(f"{op}: packs have the layouts {', '.join(sorted(layouts))}; all of one call must have the same.")
    wrong = [x.pattern for x in parts if (x.pattern.n, x.pattern.m) != (n, m)]
    if wrong:
        raise OptionError(
            f"{op}: a pack is {wrong[0]}, and the step is {Pattern(n, m) if n else 'without a pattern'}; they must be the same."
        )
    none = [None] * 4
    flat = [
        p.new_empty(0) if x is None else x
        for p, packed in zip(params, packs, strict=True)
        for x in (none if packed is None else packed.buffers())
    ]
    return flat, layouts.pop()


__all__ = ["HYPER", "STATS", "masked_adamw_"]
