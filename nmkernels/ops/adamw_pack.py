"""masked_adamw_pack_: the step of ``masked_adamw_``, which also writes the forms of the new weights that GEMMs read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from ..backends import renew_changed_forms
from ..pattern import OptionError, Pattern, PatternError, PatternLike, ShapeError
from ..reference.adamw import AdamWArgs
from ..reference.adamw_pack import split
from ..reference.common import compute_dtype
from .adamw import Tensors
from .check import as_pattern, check_device
from .define import CONTRACTS, NAMESPACE, Spec, define
from .pack import Packed, _specs, positions

RULES = ("magnitude", "threshold", "held")
"""The rules by which a step can prune: of ``nm_pack``, without those that search or check a mask."""


def _masked_adamw_pack(*args: Any) -> tuple[Spec, ...]:
    op, (to, a) = "nm_masked_adamw_pack_", split(args)
    specs, p = CONTRACTS["nm_masked_adamw_"](*a), Pattern(to.n, to.m)
    if to.select not in RULES:
        raise OptionError(f"{op}: select={to.select!r} is not known; it is one of {', '.join(map(repr, RULES))}.")
    if a.params and (to.select == "held") != bool(a.masks):
        counted = f"{len(a.masks or ())} masks"
        raise OptionError(f'{op}: select={to.select!r} with {counted}; "held" prunes by the masks of the step, and only that does.')
    if to.select != "held" and (to.values or to.dense) and to.values_t:
        raise PatternError(f"{op}: select={to.select!r} cannot make rows and columns at once; see nm.ops.pack. Take held masks.")
    if to.scales and to.select != "threshold":
        raise OptionError(f'{op}: select={to.select!r} with scales, which only apply to select="threshold".')
    names = ("scales", *to._fields[5:])
    for name, tensors in zip(names, (to.scales, *to.parts), strict=True):
        if tensors and len(tensors) != len(a.params):
            raise ShapeError(f"{op}: {len(a.params)} params and {len(tensors)} {name}; there must be one per param, or none.")
    rows, columns, dense = bool(to.values), bool(to.values_t), bool(to.dense)
    for i, w in enumerate(a.params):
        if w.dim() != 2:
            raise ShapeError(f"{op}: params[{i}] has shape {tuple(w.shape)}; only matrices can be packed. Step it by nm_masked_adamw_.")
        wanted = _specs(op, w.shape, p, to.dtype if rows or columns or dense else w.dtype, rows, columns, to.layout, dense=dense)
        for name, tensors, (shape, dtype) in zip(names[1:], to.parts, wanted, strict=True):
            if 0 in shape and not tensors:
                continue
            x = tensors[i] if tensors else None
            if x is None or tuple(x.shape) != tuple(shape) or x.dtype != dtype:
                what = "missing" if x is None else f"{x.dtype} of shape {tuple(x.shape)}"
                raise ShapeError(
                    f"{op}: {name}[{i}] is {what}; for this weight it must be {dtype} {tuple(shape)}, as nm.ops.pack makes it."
                )
            check_device(op, **{f"params[{i}]": w, f"{name}[{i}]": x})
        if to.scales:
            scale = to.scales[i]
            if scale.numel() != 1 or scale.dtype != compute_dtype(w.dtype):
                what = f"{scale.dtype} of shape {tuple(scale.shape)}"
                raise ShapeError(f"{op}: scales[{i}] is {what}; it must be one element of {compute_dtype(w.dtype)}.")
            check_device(op, **{f"params[{i}]": w, f"scales[{i}]": scale})
    return specs


_STEP = str(getattr(torch.ops, NAMESPACE).nm_masked_adamw_.default._schema).partition("(")[2]
nm_masked_adamw_pack_ = define(
    "nm_masked_adamw_pack_",
    # the fields of FormArgs, then those of AdamWArgs
    "(int kept, int of, str select, str layout, Tensor[] scales, Tensor(k!)[] values, Tensor(l!)[] indices, Tensor(m!)[] values_t, "
    f"Tensor(n!)[] indices_t, Tensor(o!)[] spread, {_STEP}",
    _masked_adamw_pack,
)


def masked_adamw_pack_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    hyper: Tensor,
    pattern: PatternLike,
    forms: Sequence[Packed],
    *,
    mask: str = "magnitude",
    masks: Tensors | None = None,
    scales: Tensors | None = None,
    frozen: bool = False,
    eps_inside: bool = False,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """Take the step of ``masked_adamw_`` and write the forms of the new weights, what ``pack`` makes of them, in the same pass.

    Per param: ``masked_adamw_``, then ``forms[i] = pack(w, pattern, mask, ...)``. A skipped step (``found_inf``) writes nothing.

    On a GPU one kernel reads and writes each weight once, where weights and moments are fp32, contiguous, of rows and columns that are
    multiples of 64, gradients fp32 or bf16, and the forms 2:4 in bf16 with rows; ``explain`` says for which calls. All others run as the
    reference, op by op: ``handle.attach(optimizer, forms="step")`` uses it only where there is a kernel.

    Args:
        params: matrices ``(out, in)``.
        grads, exp_avgs, exp_avg_sqs, steps, hyper, frozen, eps_inside, maximize, grad_scale, found_inf: as for ``masked_adamw_``.
        pattern: of the weights and of the forms.
        forms: of each param, results of ``pack`` with the same parts, dtype and layout for all; overwritten.
        mask: ``"magnitude"`` or ``"threshold"``, as for ``pack``.
        masks: held masks, as for ``masked_adamw_``, instead of ``mask``: N:M wherever W is packed, which is not checked.
        scales: for ``"threshold"``: of each param one fp32 element.

    Returns:
        The statistics of ``masked_adamw_``.

    Raises:
        ShapeError, DtypeError, PatternError, OptionError: as for the two ops; nothing is changed then.

    Example:
        >>> from nmkernels import ops
        >>> w, g, m, v, step = torch.ones(4, 8), torch.ones(4, 8), torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(())
        >>> hyper = torch.tensor([0.1, 0.9, 0.999, 1e-8, 0, 0, 0, 0, 0], dtype=torch.float64)
        >>> forms = ops.pack(w, "2:4", dtype=torch.bfloat16)
        >>> _ = masked_adamw_pack_([w], [g], [m], [v], [step], hyper, "2:4", [forms])
        >>> forms.rows.values[0]
        tensor([0.8984, 0.8984, 0.8984, 0.8984], dtype=torch.bfloat16)
    """
    p = as_pattern(pattern)
    n, m = (0, 0) if masks else (p.n, p.m)
    step = AdamWArgs(
        params, grads, exp_avgs, exp_avg_sqs, [], steps,
        hyper, n, m, frozen, eps_inside, maximize, False, grad_scale, found_inf, masks or None,
    )  # fmt: skip
    return nm_masked_adamw_pack_(*arguments(p, forms, "held" if masks else mask, scales or [], step))


class StepForms(NamedTuple):
    """The forms of W̃ that a step overwrites with those of the new weight.

    Args:
        rule: ``"magnitude"``, ``"threshold"`` or ``"held"``, as ``nm.ops.masked_adamw_pack_`` prunes.
        forms: W̃ packed, in dense layout or both.
        scale: for ``"threshold"``, one fp32 element.
    """

    rule: str
    forms: Packed
    scale: Tensor | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must be the same for all targets of a kernel call."""
        forms = self.forms
        return self.rule, forms.layout, *(x if x is None else x.dtype for x in (*forms.buffers(), forms.dense)), self.scale is None

    def renew_changed(self, weight: Tensor, bits: Tensor | None, changed: Tensor, count: int) -> None:
        """Make the forms again on the device if a strip of ``weight`` differs from them, see ``backends.renew_changed_forms``."""
        renew_changed_forms(weight, bits, self.rule, self.scale, self.forms, changed, count)


def arguments(p: Pattern, forms: Sequence[Packed], rule: str, scales: Tensors, step: AdamWArgs) -> tuple[Any, ...]:
    """The arguments of ``nm_masked_adamw_pack_`` for a step and its forms."""
    parts: list[list[Tensor]] = [[], [], [], [], []]
    for form in forms:
        pairs = [(None, None) if part is None else (part.values, positions(part)) for part in (form.rows, form.columns)]
        for part, x in zip(parts, (*pairs[0], *pairs[1], form.dense), strict=True):
            part += () if x is None else (x,)
    layout = forms[0].layout if forms else "canonical"
    return p.n, p.m, rule, layout, scales, *parts, *step


def in_one_pass(args: Sequence[Any]) -> bool:
    """Whether a kernel does such a call in one pass over the weights; the reference does it op by op."""
    op, forced = "nm_masked_adamw_pack_", dispatch.forced_backend()
    if forced:  # which may have no such op
        named = (entry for entry in dispatch.implementations(op) if entry.backend == forced != dispatch.REFERENCE)
        return any(entry.can(*args)[0] for entry in named)
    return dispatch.choose(op, *args).backend != dispatch.REFERENCE
