"""masked_adamw_: one AdamW step with decay of pruned weights, new masks and statistics, in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..pattern import DtypeError, OptionError, Pattern, PatternLike, ShapeError
from ..reference.adamw import AdamWArgs, bits_of
from ..reference.common import compute_dtype
from .check import as_pattern, check_device, check_float
from .define import Spec, define

HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "decay", "v_step", "clamp", "reserved")
"""The names of the elements of ``hyper``."""

STATS = ("applied", "v_change", "v_log_change", "v_unchanged", "flips", "pruned_abs", "pruned_grad_abs", "nonzeros", "max_update")
"""The names of the elements that ``masked_adamw_`` returns."""

Tensors = list[Tensor]


def _masked_adamw(*args: Any) -> tuple[Spec, ...]:
    a = AdamWArgs(*args)
    op, pattern = "nm_masked_adamw_", Pattern(a.n, a.m) if a.n or a.m else None
    if a.hyper.dtype != torch.float64 or tuple(a.hyper.shape) != (len(HYPER),):
        raise ShapeError(
            f"{op}: hyper is {a.hyper.dtype} of shape {tuple(a.hyper.shape)}; it must be float64 ({len(HYPER)},): {', '.join(HYPER)}."
        )
    lists = {"grads": a.grads, "exp_avgs": a.exp_avgs, "exp_avg_sqs": a.exp_avg_sqs, "max_exp_avg_sqs": a.max_exp_avg_sqs}
    for name, tensors in (*lists.items(), ("steps", a.steps)):
        optional = name == "max_exp_avg_sqs"
        if len(tensors) != len(a.params) and not (optional and not tensors):
            empty = ", or none" if optional else ""
            raise ShapeError(f"{op}: {len(a.params)} params and {len(tensors)} {name}; there must be one per param{empty}.")
    if a.masks:
        if pattern is not None:
            raise OptionError(f"{op}: masks and the pattern {pattern}; the masks say which weights are kept. Pass pattern=None with masks.")
        check_masks(op, a.params, a.masks)
    elif a.fixed and a.params:
        raise OptionError(f"{op}: fixed=True holds the weights outside of `masks` at zero, and there are none. Pass masks.")
    _check_states(op, a)
    for name, scalar in (("grad_scale", a.grad_scale), ("found_inf", a.found_inf)):
        if scalar is not None and (scalar.numel() != 1 or scalar.dtype != torch.float32):
            raise ShapeError(f"{op}: {name} is {scalar.dtype} of shape {tuple(scalar.shape)}; it must be one float32 element.")
    for i, (param, step) in enumerate(zip(a.params, a.steps, strict=True)):
        check_float(op, f"params[{i}]", param)
        _check_written(op, f"params[{i}]", param)
        if pattern is not None:
            if not param.dim():
                raise ShapeError(f"{op}: params[{i}] is 0-dimensional; groups run along the last dimension. Step it without a pattern.")
            pattern.check_divides(op, param.shape[-1], f"the last dimension of params[{i}]")
        for name, tensors in lists.items():
            if tensors:
                _check_like(op, f"params[{i}]", param, f"{name}[{i}]", tensors[i])
        if step.dtype != torch.float32 or step.numel() != 1:
            raise DtypeError(f"{op}: steps[{i}] is {step.dtype} of shape {tuple(step.shape)}; it must be one float32 element.")
    return (((len(STATS),), torch.float64),)


def _check_states(op: str, a: AdamWArgs) -> None:
    """Check that all states have one dtype if any is bfloat16, and that only such are rounded stochastically."""
    dtypes = {x.dtype for xs in (a.exp_avgs, a.exp_avg_sqs, a.max_exp_avg_sqs) for x in xs}
    if len(dtypes) > 1 and torch.bfloat16 in dtypes:
        raise DtypeError(f"{op}: some states are bfloat16 and others are not; those of one call are all bfloat16 or none.")
    if a.stochastic and dtypes and dtypes != {torch.bfloat16}:
        raise OptionError(f"{op}: stochastic=True rounds states to bfloat16, and these are {dtypes.pop()}. Pass states in bfloat16.")


def check_masks(op: str, params: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Check the bits of held masks against the params."""
    if len(masks) != len(params):
        raise ShapeError(f"{op}: {len(params)} params and {len(masks)} masks; there must be one per param, or none.")
    for i, (param, bits) in enumerate(zip(params, masks, strict=True)):
        name = f"masks[{i}]"
        if not param.dim():
            raise ShapeError(f"{op}: params[{i}] is 0-dimensional; bits of a mask run along the last dimension. Step it without masks.")
        if bits.dtype != torch.uint8:
            raise DtypeError(f"{op}: {name} is {bits.dtype}; it must be uint8, eight weights a byte. Make it with nm.ops.mask_bits(mask).")
        shape = (*param.shape[:-1], -(-param.shape[-1] // 8))
        if tuple(bits.shape) != shape:
            raise ShapeError(
                f"{op}: {name} has shape {tuple(bits.shape)}; for a param of shape {tuple(param.shape)} it must be "
                f"{shape}. Make it with nm.ops.mask_bits(mask)."
            )
        check_device(op, **{f"params[{i}]": param, name: bits})


def _check_like(op: str, param_name: str, param: Tensor, name: str, x: Tensor) -> None:
    """Check the gradient of a param, or a part of its state, against the param."""
    if x.shape != param.shape:
        raise ShapeError(f"{op}: {name} has shape {tuple(x.shape)}, {param_name} has {tuple(param.shape)}; they must be the same.")
    check_float(op, name, x)
    state = compute_dtype(param.dtype)
    if "exp_avg" in name and x.dtype != state and (x.dtype != torch.bfloat16 or state == torch.float64):
        other = "" if state == torch.float64 else " or torch.bfloat16"
        raise DtypeError(f"{op}: {name} is {x.dtype}; the state of a {param.dtype} param is kept in {state}{other}.")
    check_device(op, **{param_name: param, name: x})
    if not name.startswith("grads"):
        _check_written(op, name, x)


def _check_written(op: str, name: str, x: Tensor) -> None:
    """Raise if elements of ``x`` share memory: a step of one would be a step of all."""
    if 0 in x.stride() and x.numel() > 1 and any(size > 1 and not stride for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise ShapeError(f"{op}: {name} is expanded, so that several of its elements share one place in memory. Call .contiguous() first.")


nm_masked_adamw_ = define(
    "nm_masked_adamw_",
    # the fields of AdamWArgs, in order
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] max_exp_avg_sqs, "
    "Tensor(e!)[] steps, Tensor hyper, int n, int m, bool frozen=False, bool eps_inside=False, bool maximize=False, "
    "bool geometric=False, Tensor? grad_scale=None, Tensor? found_inf=None, Tensor[]? masks=None, bool fixed=False, "
    "bool stochastic=False, int seed=0) -> Tensor",
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
    frozen: bool = False,
    eps_inside: bool = False,
    maximize: bool = False,
    geometric: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    masks: Tensors | None = None,
    fixed: bool = False,
    stochastic: bool = False,
    seed: int = 0,
) -> Tensor:
    """Take one AdamW step of every param in one pass over memory, with decay of pruned weights, new masks and statistics.

    Per param, with t = step + 1, each operation rounded once, in this order (Loshchilov, Hutter, ICLR 2019, algorithm 2)::

        g = ±grad / grad_scale                            (fixed: 0 where w is pruned, whatever the gradient is)
        g = g + λ·w          where w is pruned            (SR-STE's decay, Zhou et al. 2021, arXiv 2102.04010; not if fixed)
        m = β1·m + (1-β1)·g
        v = β2·v + (1-β2)·g²                              (unless frozen: STEP, Lu et al., ICML 2023)
        D = sqrt(v) / sqrt(1-β2ᵗ) + eps                   (eps_inside: sqrt(v / (1-β2ᵗ) + eps); amsgrad: the running maximum of v)
        u = (m / (1-β1ᵗ)) / D                             (clamped to ±clamp if that is not 0)
        w = w·(1 - lr·weight_decay) - lr·u                (fixed: +0 where w is pruned)

    Pruned are the weights outside the N:M mask of w before the step; the mask after it only counts in the statistics. With ``masks``,
    pruned are the weights outside of these, before and after: no bit flips.

    Args:
        params: float tensors, groups along the last dimension (pass a transposed view of an (in, out) weight).
        grads, exp_avgs, exp_avg_sqs: one per param, of its shape; the states in fp32 (fp64 for fp64 params), or all of them in bf16.
        steps: one-element fp32 tensors; the number of steps done so far, incremented here.
        hyper: fp64 ``(lr, beta1, beta2, eps, weight_decay, decay, v_step, clamp, reserved)`` on the CPU or the params' device; ``decay``
            is λ, ``v_step`` the step whose bias correction a frozen v keeps (0: none).
        pattern: None: plain AdamW, or ``masks``.
        max_exp_avg_sqs: the running maxima of amsgrad; passing them switches amsgrad on.
        geometric: also compute the statistics of log |v_t - v_{t-1}|.
        grad_scale, found_inf: of a ``GradScaler``; with found_inf != 0 nothing changes and all statistics are 0.
        masks: held masks, one per param, of ``mask_bits``: uint8 ``(*shape[:-1], ceil(cols / 8))``; instead of a pattern.
        fixed: hold the weights outside of ``masks`` at zero.
        stochastic, seed: how m and v are rounded to bf16: stochastically, by random words of the seed and the step count, and not to
            nearest. ``nmkernels.reference.adamw`` has the definition.

    Returns:
        fp64 ``(9,)``, named by ``STATS``, summed over the params: 1 if applied; Σ|Δv|; Σ log|Δv|; elements with Δv = 0; mask bits flipped;
        Σ|w| and Σ|g| over pruned weights (before the decay); non-zeros of the masked weights; max |u| (before the clamp).

    Raises:
        ShapeError, DtypeError, PatternError: the tensors do not fit each other or the pattern; nothing is changed then.
        OptionError: masks and a pattern, ``fixed`` without masks, ``stochastic`` without states in bf16, or a seed that is not an int64.

    Example:
        >>> w = torch.tensor([[1.0, -2.0, 3.0, 0.5]])
        >>> g, m, v, step = torch.ones(1, 4), torch.zeros(1, 4), torch.zeros(1, 4), torch.zeros(())
        >>> hyper = torch.tensor([0.1, 0.9, 0.999, 1e-8, 0, 0, 0, 0, 0], dtype=torch.float64)
        >>> stats = masked_adamw_([w], [g], [m], [v], [step], hyper, "2:4")
        >>> w, dict(zip(STATS, stats.tolist()))["nonzeros"]
        (tensor([[ 0.9000, -2.1000,  2.9000,  0.4000]]), 2.0)
    """
    if not -(2**63) <= seed < 2**63:
        raise OptionError(f"nm_masked_adamw_: seed={seed} does not fit into int64. Reduce it modulo 2**63.")
    n, m = (0, 0) if pattern is None else ((p := as_pattern(pattern)).n, p.m)
    return nm_masked_adamw_(
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs or [], steps,
        hyper, n, m, frozen, eps_inside, maximize, geometric, grad_scale, found_inf, masks, fixed, stochastic, seed,
    )  # fmt: skip


def mask_bits(mask: Tensor) -> Tensor:
    """A mask as bits, eight weights a byte, as ``masked_adamw_`` reads held masks.

    Bit i % 8 of byte i // 8 is column i: ``bits[..., i // 8] >> (i % 8) & 1 == mask[..., i]``; spare bits of the last byte are 0.

    Args:
        mask: bool ``(..., cols)``.

    Returns:
        uint8 ``(..., ceil(cols / 8))``, contiguous, on the mask's device.

    Raises:
        DtypeError: the mask is not bool.
        ShapeError: it has no dimensions.

    Example:
        >>> mask_bits(torch.tensor([True, False, False, True, False, False, False, False, True]))
        tensor([9, 1], dtype=torch.uint8)
    """
    if mask.dtype != torch.bool:
        raise DtypeError(f"mask_bits: the mask is {mask.dtype}; it must be torch.bool.")
    if not mask.dim():
        raise ShapeError("mask_bits: the mask is 0-dimensional; bits run along the last dimension.")
    return bits_of(mask)
