"""masked_adamw_: one pass over memory for decay, Adam, the new mask and its statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pattern import DtypeError, OptionError, Pattern, PatternError, PatternLike, ShapeError
from ..reference.common import compute_dtype
from ..reference.layouts import index_dtype, operand_shapes
from .check import as_pattern, check_device, check_float, check_layout
from .define import Spec, define
from .pack import DeviceCompressed, Packed

HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "decay", "v_step", "clamp", "reserved")
"""The names of the elements of ``hyper``."""

STATS = ("applied", "v_change", "v_log_change", "v_unchanged", "flips", "pruned_abs", "pruned_grad_abs", "nonzeros", "max_update")
"""The names of the elements that ``masked_adamw_`` returns."""

BUFFERS = ("values", "indices", "values_t", "indices_t")
"""What the raw op's ``packs`` have of every param, as ``nm_pack`` returns them; pairs of empty ones are not wanted."""

Tensors = list[Tensor]


def _masked_adamw(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, max_exp_avg_sqs: Tensors, steps: Tensors, outs: Tensors,
    hyper: Tensor, n: int, m: int, frozen: bool, eps_inside: bool, maximize: bool, geometric: bool,
    grad_scale: Tensor | None, found_inf: Tensor | None,
    transposable: bool = False, packs: Tensors | None = None, layout: str = "canonical",
) -> tuple[Spec, ...]:  # fmt: skip
    op, pattern = "nm_masked_adamw_", Pattern(n, m) if n or m else None
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
    for name, scalar in (("grad_scale", grad_scale), ("found_inf", found_inf)):
        if scalar is not None and (scalar.numel() != 1 or scalar.dtype != torch.float32):
            raise ShapeError(f"{op}: {name} is {scalar.dtype} of shape {tuple(scalar.shape)}; it must be one float32 element.")
    if pattern is None and (transposable or packs):
        raise PatternError(f"{op}: without a pattern there are no transposable masks and no packed weights. Give one, e.g. '2:4'.")
    for i, param in enumerate(params):
        _check_param(op, f"params[{i}]", param, pattern, transposable)
        for name, tensors in lists.items():
            if tensors:
                _check_beside(op, f"params[{i}]", param, f"{name}[{i}]", tensors[i])
        if steps[i].dtype != torch.float32 or steps[i].numel() != 1:
            raise DtypeError(f"{op}: steps[{i}] is {steps[i].dtype} of shape {tuple(steps[i].shape)}; it must be one float32 element.")
    check_layout(op, layout, 0, 0, Pattern(2, 4), torch.float16)  # is there one of that name?
    if pattern is not None and packs:
        _check_packs(op, params, pattern, transposable, packs, layout)
    return (((len(STATS),), torch.float64),)


def _check_param(op: str, name: str, param: Tensor, pattern: Pattern | None, transposable: bool) -> None:
    check_float(op, name, param)
    _check_written(op, name, param)
    if pattern is None:
        return
    if not param.dim():
        raise ShapeError(f"{op}: {name} is 0-dimensional; groups run along the last dimension. Step it without a pattern.")
    pattern.check_divides(op, param.shape[-1], f"the last dimension of {name}")
    if transposable:
        if param.dim() != 2:
            raise ShapeError(f"{op}: {name} has shape {tuple(param.shape)}; a transposable mask needs a matrix. Step it apart.")
        pattern.check_divides(op, param.shape[0], f"the first dimension of {name}")


def _check_beside(op: str, param_name: str, param: Tensor, name: str, x: Tensor) -> None:
    """The checks of a tensor that belongs to a param: its gradient, a part of its state, or where the masked weight goes."""
    if x.shape != param.shape:
        raise ShapeError(f"{op}: {name} has shape {tuple(x.shape)}, {param_name} has {tuple(param.shape)}; they must be the same.")
    check_float(op, name, x)
    state = compute_dtype(param.dtype)
    if "exp_avg" in name and x.dtype != state:
        raise DtypeError(f"{op}: {name} is {x.dtype}; the state of a {param.dtype} param is kept in {state}.")
    check_device(op, **{param_name: param, name: x})
    if not name.startswith("grads"):
        _check_written(op, name, x)


def _check_packs(op: str, params: Tensors, pattern: Pattern, transposable: bool, packs: Tensors, layout: str) -> None:
    if len(packs) != len(BUFFERS) * len(params):
        raise ShapeError(f"{op}: {len(params)} params and {len(packs)} packs; four belong to each: {', '.join(BUFFERS)}.")
    for k in range(0, len(packs), 2):
        (values, indices), i, transposed = packs[k : k + 2], k // 4, k % 4 == 2
        if not (values.numel() or indices.numel()):
            continue
        p, name = params[i], f"packs of {'the transpose of ' if transposed else ''}params[{i}]"
        if transposed and not transposable:
            raise PatternError(
                f"{op}: {name} need transposable=True: by the magnitudes of its rows a weight is not {pattern} along its columns."
            )
        if p.dim() != 2:
            raise ShapeError(f"{op}: params[{i}] has shape {tuple(p.shape)}; only a matrix is packed. Give it empty packs.")
        rows, cols = p.shape[::-1] if transposed else p.shape
        check_float(op, f"{name}, values:", values)
        check_layout(op, layout, rows, cols, pattern, values.dtype)
        shapes, kind = operand_shapes(pattern, rows, cols, layout), index_dtype(layout)
        if (tuple(values.shape), tuple(indices.shape)) != shapes:
            raise ShapeError(
                f"{op}: {name} have shapes {tuple(values.shape)} and {tuple(indices.shape)}; {pattern} of ({rows}, {cols}) in {layout!r} "
                f"has {shapes[0]} and {shapes[1]}. Make them with nm.ops.empty_packed."
            )
        if indices.dtype != kind:
            raise DtypeError(f"{op}: {name} have indices in {indices.dtype}; layout {layout!r} has them in {kind}.")
        for j in (k, k + 1):
            name = f"packs[{j}] ({BUFFERS[j % 4]} of params[{i}])"
            check_device(op, **{f"params[{i}]": p, name: packs[j]})
            _check_written(op, name, packs[j])


def _check_written(op: str, name: str, x: Tensor) -> None:
    """Raise where elements of ``x`` share memory: a step of one would be a step of all."""
    if 0 in x.stride() and x.numel() > 1 and any(size > 1 and not stride for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise ShapeError(f"{op}: {name} is expanded, so that several of its elements are one in memory. Call .contiguous() first.")


nm_masked_adamw_ = define(
    "nm_masked_adamw_",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] max_exp_avg_sqs, "
    "Tensor(e!)[] steps, Tensor(f!)[] outs, Tensor hyper, int n, int m, bool frozen, bool eps_inside, bool maximize, bool geometric, "
    # a list of tensors may have no default but None
    'Tensor? grad_scale, Tensor? found_inf, bool transposable=False, Tensor(g!)[]? packs=None, str layout="canonical") -> Tensor',
    _masked_adamw,
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
        pattern: None: plain AdamW, no mask.
        max_exp_avg_sqs: the running maxima of amsgrad; its presence switches amsgrad on.
        outs: buffers, of any float dtype, that receive the masked weight.
        geometric: also compute the statistics of log |v_t - v_{t-1}|.
        grad_scale, found_inf: of a ``GradScaler``; with found_inf != 0 nothing changes and all statistics are 0.
        transposable: the masks, before and after, are ``transposable_mask``'s; params ``(out, in)``, both multiples of M.
        packs: per param None, or what ``pack`` or ``empty_packed`` made, all of one layout: buffers that receive the weight after the step,
            under the mask after it, rounded once to their dtype. Those of columns need ``transposable``.

    Returns:
        fp64 ``(9,)``, named by ``STATS``, summed over the params: 1 if applied; Σ|Δv|; Σ log|Δv|; elements with Δv = 0; mask bits flipped;
        Σ|w| and Σ|g| over pruned weights (before the decay); non-zeros of the masked weights; max |u| (before the clamp).

    Raises:
        ShapeError, DtypeError, PatternError, OptionError: tensors, pattern and packs do not fit each other; nothing is changed then.

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
    layouts = {x.layout if isinstance(x, DeviceCompressed) else "canonical" for x in parts} or {"canonical"}
    if len(layouts) > 1:
        raise OptionError(f"{op}: packs have the layouts {', '.join(sorted(layouts))}; all of one call must have the same.")
    for part in parts:
        if (part.pattern.n, part.pattern.m) != (n, m):
            step = Pattern(n, m) if n else "without a pattern"
            raise OptionError(f"{op}: a pack is {part.pattern}, and the step is {step}; they must be the same.")
    flat = []
    for p, packed in zip(params, packs, strict=True):
        flat += [p.new_empty(0) if x is None else x for x in (packed.buffers() if packed is not None else [None] * len(BUFFERS))]
    return flat, layouts.pop()
