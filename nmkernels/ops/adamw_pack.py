"""The forms of several weights that GEMMs read, written over earlier ones: by ``nm_pack_forms_``, or in the step of ``masked_adamw_``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from ..backends import renew_changed_forms
from ..pattern import OptionError, Pattern, PatternError, PatternLike, ShapeError
from ..reference.adamw import AdamWArgs
from ..reference.adamw_pack import FormArgs, split
from ..reference.common import compute_dtype
from .adamw import Tensors, check_masks
from .check import as_pattern, check_device, check_float
from .define import CONTRACTS, NAMESPACE, Spec, define
from .pack import Packed, _specs, positions

RULES = ("magnitude", "threshold", "held")
"""The rules by which they can prune: of ``nm_pack``, without those that search or check a mask."""


def _check(op: str, to: FormArgs, weights: Sequence[Tensor], masks: Sequence[Tensor] | None) -> None:
    """Raise unless ``to`` has the forms of ``weights`` by these masks."""
    p = Pattern(to.n, to.m)
    if to.select not in RULES:
        raise OptionError(f"{op}: select={to.select!r} is not known; it is one of {', '.join(map(repr, RULES))}.")
    if weights and (to.select == "held") != bool(masks):
        raise OptionError(f'{op}: select={to.select!r} with {len(masks or ())} masks; "held" prunes by masks, and only that does.')
    if to.select != "held" and (to.values or to.dense) and to.values_t:
        raise PatternError(f"{op}: select={to.select!r} cannot make rows and columns at once; see nm.ops.pack. Take held masks.")
    if to.scales and to.select != "threshold":
        raise OptionError(f'{op}: select={to.select!r} with scales, which only apply to select="threshold".')
    names = ("scales", *to._fields[5:])
    for name, tensors in zip(names, (to.scales, *to.parts), strict=True):
        if tensors and len(tensors) != len(weights):
            raise ShapeError(f"{op}: {len(weights)} weights and {len(tensors)} {name}; there must be one per weight, or none.")
    rows, columns, dense = bool(to.values), bool(to.values_t), bool(to.dense)
    for i, w in enumerate(weights):
        if w.dim() != 2:
            raise ShapeError(f"{op}: weight {i} has shape {tuple(w.shape)}; only matrices can be packed.")
        wanted = _specs(op, w.shape, p, to.dtype if rows or columns or dense else w.dtype, rows, columns, to.layout, dense=dense)
        for name, tensors, (shape, dtype) in zip(names[1:], to.parts, wanted, strict=True):
            if not tensors and (0 in shape or (to.select == "held" and name in ("indices", "indices_t"))):
                continue
            x = tensors[i] if tensors else None
            if x is None or tuple(x.shape) != tuple(shape) or x.dtype != dtype:
                what = "missing" if x is None else f"{x.dtype} of shape {tuple(x.shape)}"
                raise ShapeError(
                    f"{op}: {name}[{i}] is {what}; for this weight it must be {dtype} {tuple(shape)}, as nm.ops.pack makes it."
                )
            check_device(op, **{f"weight {i}": w, f"{name}[{i}]": x})
        if to.scales:
            scale = to.scales[i]
            if scale.numel() != 1 or scale.dtype != compute_dtype(w.dtype):
                what = f"{scale.dtype} of shape {tuple(scale.shape)}"
                raise ShapeError(f"{op}: scales[{i}] is {what}; it must be one element of {compute_dtype(w.dtype)}.")
            check_device(op, **{f"weight {i}": w, f"scales[{i}]": scale})


def _masked_adamw_pack(*args: Any) -> tuple[Spec, ...]:
    to, a = split(args)
    specs = CONTRACTS["nm_masked_adamw_"](*a)
    _check("nm_masked_adamw_pack_", to, a.params, a.masks)
    return specs


def _pack_forms(*args: Any) -> tuple[Spec, ...]:
    op, to, (weights, masks) = "nm_pack_forms_", FormArgs(*args[:-2]), args[-2:]
    for i, w in enumerate(weights):
        check_float(op, f"weight {i}", w)
    _check(op, to, weights, masks)
    if masks:
        check_masks(op, weights, masks)
    return ()


_FORMS = (  # the fields of FormArgs
    "int kept, int of, str select, str layout, Tensor[] scales, Tensor(k!)[] values, Tensor(l!)[] indices, Tensor(m!)[] values_t, "
    "Tensor(n!)[] indices_t, Tensor(o!)[] spread"
)
_STEP = str(getattr(torch.ops, NAMESPACE).nm_masked_adamw_.default._schema).partition("(")[2]
nm_masked_adamw_pack_ = define("nm_masked_adamw_pack_", f"({_FORMS}, {_STEP}", _masked_adamw_pack)
nm_pack_forms_ = define("nm_pack_forms_", f"({_FORMS}, Tensor[] weights, Tensor[]? masks) -> ()", _pack_forms, floats=False)


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
    rule = "held" if masks else mask
    to = arguments(p, [StepForms(rule, form, scales[i] if scales else None) for i, form in enumerate(forms)])
    return nm_masked_adamw_pack_(*to._replace(select=rule), *step)


class StepForms(NamedTuple):
    """The forms of W̃ to be overwritten with those of a changed weight.

    Args:
        rule: ``"magnitude"``, ``"threshold"`` or ``"held"``, as ``nm.ops.masked_adamw_pack_`` prunes.
        forms: W̃ packed, in dense layout or both.
        scale: for ``"threshold"``, one fp32 element.
        positions: whether those of the packed forms are written too; False where a held mask is that of the last time.
    """

    rule: str
    forms: Packed
    scale: Tensor | None = None
    positions: bool = True

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must be the same for all targets of a kernel call."""
        forms = self.forms
        parts = (x if x is None else x.dtype for x in (*forms.buffers(), forms.dense))
        return self.rule, forms.layout, self.positions, *parts, self.scale is None

    def renew_changed(self, weight: Tensor, bits: Tensor | None, changed: Tensor, count: int) -> None:
        """Make the forms again on the device if a strip of ``weight`` differs from them, see ``backends.renew_changed_forms``."""
        renew_changed_forms(weight, bits, self.rule, self.scale, self.forms, changed, count)


def arguments(p: Pattern, many: Sequence[StepForms]) -> FormArgs:
    """The first arguments of ``nm_pack_forms_`` and ``nm_masked_adamw_pack_`` for forms of one kind."""
    parts: list[list[Tensor]] = [[], [], [], [], []]
    for one in many:
        packed = one.forms.rows, one.forms.columns
        pairs = [(None, None) if x is None else (x.values, positions(x) if one.positions else None) for x in packed]
        for part, x in zip(parts, (*pairs[0], *pairs[1], one.forms.dense), strict=True):
            part += () if x is None else (x,)
    rule, layout = (many[0].rule, many[0].forms.layout) if many else ("magnitude", "canonical")
    return FormArgs(p.n, p.m, rule, layout, [one.scale for one in many if one.scale is not None], *parts)


def in_one_pass(args: Sequence[Any], op: str = "nm_masked_adamw_pack_") -> bool:
    """Whether a kernel does such a call in one pass over the weights; the reference does it op by op."""
    forced = dispatch.forced_backend()
    if forced:  # which may have no such op
        named = (entry for entry in dispatch.implementations(op) if entry.backend == forced != dispatch.REFERENCE)
        return any(entry.can(*args)[0] for entry in named)
    return dispatch.choose(op, *args).backend != dispatch.REFERENCE
