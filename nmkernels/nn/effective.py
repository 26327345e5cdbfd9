"""The effective weight of a layer: cached, at most one copy of each form that its GEMMs read, and never stale.

A copy belongs to one Parameter, address and version. Fused optimizers and writes through ``.data`` do not change the version, so on a CPU a
fingerprint of the copy's sources must also match at every use; without the compiled core, which computes it, copies are not reused. On a
GPU the host cannot read the weight without waiting: there a copy is reused only in grad mode and until the next optimizer step,
``train()``, ``eval()``, ``deployable()`` or ``refresh()`` (``doubt``).

With ``handle.attach(optimizer, forms="step")`` that step itself overwrites the copies on a GPU and offers them for the next forward pass,
which believes them as its own. It checks a strip of the weight on the device, without waiting, and makes them again if that differs.
Otherwise a call of the model overwrites those of all layers at once and believes them while it lasts (``train/ahead.py``).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from .. import dispatch
from ..autograd.transforms import WeightTransform
from ..gemm.plan import GemmPlan
from ..gemm.route import Operands, Route, Routes, operands, route
from ..ops import Compressed, Packed
from ..ops.adamw_pack import StepForms
from ..ops.compress import fingerprint
from ..ops.pack import Operand
from ..timing import TABLE

Source = tuple[Tensor, WeightTransform, Sequence[Tensor], torch.dtype]
"""What an effective weight is made from: the weight, the transform, the extras that it reads, and the dtype of the GEMMs."""


NO_OPERANDS = (None, None, None, "", None)

POLLED = 8
"""Checks of offered copies between two looks at their result, which has reached the host by then."""


@dataclass(eq=False)
class _Copy:
    """One form of the effective weight, and what it was made from."""

    form: Any = None
    stamp: tuple[Any, ...] | None = None
    """Version, address, device, dtype and fingerprint; None if out of date, and the memory may be overwritten."""
    owner: weakref.ref[nn.Parameter] | None = None
    transform: WeightTransform | None = None
    how: tuple[Any, ...] = ()
    """For the packed form: whether rows and columns are packed, and the layout."""
    mask: tuple[Tensor, int] | None = None
    """The held mask by which it was packed, and that one's version."""
    doubted: bool = False
    due: bool = False
    """It is out of date and was read before, so that the next forward pass may read it again."""
    unread: bool = False
    """It was made before the present forward pass, which has not read it yet."""


@dataclass(eq=False)
class _Offer:
    """What a step of an attached optimizer overwrites, or a call of the model: copies, the dtype of their GEMMs, and W̃ in these forms."""

    copies: list[_Copy]
    dtype: torch.dtype
    forms: StepForms
    bits: Tensor | None
    mask: tuple[Tensor, int] | None

    def stamp(self, weight: Tensor, version: int) -> None:
        """They are those of ``weight`` at that version."""
        for copy in self.copies:
            copy.stamp, copy.doubted = (version, weight.data_ptr(), weight.device, self.dtype, None), False
        self.copies[0].mask = self.mask


class _Wanted(NamedTuple):
    """Whether a form is wanted, how (for the packed one), and an old one whose memory may be used for it."""

    wanted: bool
    how: tuple[Any, ...] = ()
    old: Any = None


class EffectiveWeight:
    """The cache of one layer's effective weight, in dense layout and packed as its GEMMs read it.

    ``attached``: whether an optimizer hook reports every step; without it nothing is cached. ``pruned``: the weight as ``prune_`` has made
    it, until the first step; ``NMWeight.as_pruned`` tells whether it still is that. ``rounded``: that one with integers, as ``prune_`` has
    rounded it. ``routes``: the forms that calls read, by size and dtype of the GEMM, grad mode and forced backend.
    """

    def __init__(self, pruned: Compressed | None = None, rounded: Compressed | None = None) -> None:
        self.attached = False
        self.pruned, self.rounded = pruned, rounded
        self.routes = Routes()
        self._basis: tuple[Any, ...] = ()
        self._dense, self._packed = _Copy(), _Copy()
        self._operands: tuple[Any, ...] = NO_OPERANDS
        """What the last operands are of: W̃ dense and packed, the route, and the form for dgrad; and the operands."""
        self._reads_ahead = True
        self._requested: _Offer | None = None
        self._offered: _Offer | None = None
        self._checks = 0
        self._changed: tuple[Tensor, Tensor] | None = None
        """Int32, not 0 once a check has found a weight that was written after the step; and the same on the host, some checks old."""

    def read(self, source: Source, plan: GemmPlan, x: Tensor) -> Tensor | Operands:
        """The effective weight in the forms that a call with the input ``x`` reads under ``plan``."""
        if plan.fprop == "dense":
            return cast(Tensor, self.forms(source, dense=True)[0])
        chosen = self.route(source, plan, x)
        fprop, dgrad, layout, backends = chosen
        if fprop == dgrad == "dense":
            return cast(Tensor, self.forms(source, dense=True)[0])
        back = dgrad if x.requires_grad and torch.is_grad_enabled() else fprop  # what dgrad reads is made for a gradient of x alone
        dense, rows, columns = "dense" in (fprop, back), "packed" in (fprop, back), back == "columns"
        if not dense and plan.fprop != "auto" and dgrad != "dense" and self._dense.form is not None and not torch.compiler.is_compiling():
            self._dense = _Copy()  # all calls read the packed form; this copy is left over from an evaluation
        spread, packed = self.forms(source, dense, rows, columns, layout)
        compiling = torch.compiler.is_compiling()
        if not compiling:
            last = self._operands  # read once: another thread may replace it
            if last[0] is spread and last[1] is packed and last[2] is chosen and last[3] == back:
                return cast(Operands, last[4])
        forms: dict[str, Any] = {"dense": spread, "packed": packed and packed.rows, "columns": packed and packed.columns}
        used = operands(forms[fprop], None if back == fprop else forms[back], back == "columns", backends)
        if not compiling and packed is self._packed.form and (spread is None or spread is self._dense.form):
            self._operands = spread, packed, chosen, back, used
        return used

    def route(self, source: Source, plan: GemmPlan, x: Tensor) -> Route:
        """The route of a call, cached by kind of call."""
        weight, transform, _, dtype = source
        tokens = x.numel()
        if torch.compiler.is_compiling() or type(tokens) is not int:  # traced, for any number of tokens
            return route(plan, transform, weight, dtype, x)
        basis = plan, transform, weight.shape, weight.device, TABLE.revision
        if basis != self._basis:
            self._basis, self.routes = basis, Routes()
        kind = tokens, dtype, torch.is_grad_enabled(), dispatch.environment.get(dispatch.ENV_KEY)
        result: Route | None = self.routes.get(kind)
        if result is None:
            result = self.routes.put(kind, route(plan, transform, weight, dtype, x))
            self._basis = *basis[:4], TABLE.revision  # route() may have measured, which raises the revision
        return result

    def dense(self, source: Source) -> Tensor:
        """W̃ ``(out, in)`` in dense layout, from the cache if that is up to date."""
        return cast(Tensor, self.forms(source, dense=True)[0])

    def forms(
        self, source: Source, dense: bool = False, rows: bool = False, columns: bool = False, layout: str = "canonical"
    ) -> tuple[Tensor | None, Packed | None]:
        """W̃ in dense layout, and packed, its transpose packed, or both, in ``layout``, from the cache if that is up to date."""
        weight, transform, extras, dtype = source
        packed = rows or columns
        if torch.compiler.is_compiling():
            # a compiled graph cannot check versions or hooks, so it computes W̃ at every call
            return _made(source, _Wanted(dense), _Wanted(packed, (rows, columns, layout)))
        if packed and self._packed.form is not None and self._packed.transform is transform:
            # pack what earlier calls read too, so that calls that alternate between forms do not repack every time
            rows, columns = rows or self._packed.how[0], columns or self._packed.how[1]
        wanted = _Wanted(dense), _Wanted(packed, (rows, columns, layout))
        owner = weight if isinstance(weight, nn.Parameter) else weight._base
        # functional_call and replicas pass a plain tensor, not a Parameter; inference tensors have no version counter, fake ones no address
        if not self.attached or isinstance(weight, FakeTensor) or not isinstance(owner, nn.Parameter) or owner.is_inference():
            self.release()
            with torch.inference_mode(False), torch.no_grad():  # inference tensors cannot be saved for backward
                return _made(source, *wanted)
        mark, captured = fingerprint(weight, *extras), _capturing(weight)
        stamp = (weight._version, weight.data_ptr(), weight.device, dtype, mark)
        forms: list[Any] = []
        stale: list[_Wanted] = []
        copies = self._dense, self._packed
        for copy, (want, how, _) in zip(copies, wanted, strict=True):
            same = copy.form is not None and copy.transform is transform and copy.how == how
            # replaying a captured graph runs no hooks, so W̃ must be made inside the graph, and is not valid outside
            valid = same and not captured and stamp == copy.stamp and copy.owner is not None and copy.owner() is owner
            valid = valid and (mark is not None or (not readable(weight) and torch.is_grad_enabled() and not copy.doubted))
            forms.append(copy.form if want and valid else None)
            copy.unread = copy.unread and not (want and valid)
            # overwrite a copy only after an optimizer step; before that a backward pass may still need it
            stale.append(_Wanted(want and not valid, how, copy.form if same and copy.stamp is None and not captured else None))
        if self._offered is not None and any(form is not None for form in forms):
            self._check(weight.detach(), self._offered)
        if not (stale[0].wanted or stale[1].wanted):
            return forms[0], forms[1]
        with torch.inference_mode(False), torch.no_grad():
            made = _made(source, *stale)
        for i, (copy, form) in enumerate(zip(copies, made, strict=True)):
            if form is None:
                continue
            forms[i] = form
            if not captured and (mark is not None or torch.is_grad_enabled()):
                copy.form, copy.stamp, copy.owner, copy.transform = form, stamp, weakref.ref(owner), transform
                copy.how, copy.doubted, copy.unread = stale[i].how, False, False
                copy.mask = (extras[0], extras[0]._version) if transform.traits.in_step == "held" else None
        return forms[0], forms[1]

    # ---- copies that the optimizer's step makes, or the model's next call

    def request(
        self, weight: Tensor, transform: WeightTransform, bits: Tensor | None, extras: Sequence[Tensor], sure: bool
    ) -> StepForms | None:
        """The copies that the last forward pass read, for the coming step to overwrite; None if it cannot, or they are those of a CPU.

        Args:
            bits: of a held mask, where the transform has one.
            sure: only copies that are those of the present weight, since the step may be skipped.
        """

        def fits(copy: _Copy) -> bool:
            stamp = copy.stamp
            if stamp is None:
                return False
            return not sure or (stamp[:3] == (weight._version, weight.data_ptr(), weight.device) and not copy.doubted)

        self._requested = offer = self._overwritten(weight, transform, bits, extras, sure, fits)
        if offer is None:
            return None
        offer.forms = offer.forms._replace(positions=True)  # the step's kernel always writes them
        return offer.forms

    def outdated(self, weight: Tensor, transform: WeightTransform, extras: Sequence[Tensor]) -> StepForms | None:
        """The copies that the last forward pass read and a step has made stale, to be overwritten with those of the present weight; then
        call ``made``."""
        self._requested = None
        if self._reads_ahead:
            self._requested = self._overwritten(weight, transform, None, extras, False, lambda copy: copy.due and copy.stamp is None)
        return None if self._requested is None else self._requested.forms

    def made(self, weight: Tensor) -> None:
        """The copies of ``outdated`` were made of the present weight, for the forward pass that begins now."""
        requested, self._requested = self._requested, None
        assert requested is not None
        requested.stamp(weight, weight._version)
        for copy in requested.copies:
            copy.unread = True

    def forget_unread(self) -> None:
        """The forward pass has ended: those of ``made`` that it has not read are out of date."""
        self._reads_ahead = not self._packed.unread  # a layer that is left out, or runs again in backward, makes its own from now on
        for copy in (self._dense, self._packed):
            if copy.unread:
                copy.stamp, copy.unread, copy.due = None, False, False

    def _overwritten(
        self,
        weight: Tensor,
        transform: WeightTransform,
        bits: Tensor | None,
        extras: Sequence[Tensor],
        sure: bool,
        fits: Callable[[_Copy], bool],
    ) -> _Offer | None:
        """The copies that fit, of W̃ packed and perhaps dense, as a kernel overwrites them; ``sure``: or leaves them as they are."""
        packed, dense, rule = self._packed, self._dense, transform.traits.in_step

        def usable(copy: _Copy) -> bool:
            owned = copy.form is not None and copy.owner is not None and copy.owner() is weight
            return owned and copy.transform is transform and fits(copy)

        scale = extras[0] if rule == "threshold" else None
        if not rule or readable(weight) or _capturing(weight) or not usable(packed) or (scale is not None and scale.numel() > 1):
            return None
        form: Packed = packed.form
        values = cast(Operand, form.rows or form.columns).values
        copies = [packed, dense] if usable(dense) and dense.form.dtype == values.dtype else [packed]
        mask = extras[0] if rule == "held" else None
        known = mask is not None and packed.mask is not None and packed.mask[0] is mask and packed.mask[1] == mask._version
        if sure and mask is not None and not known:
            return None
        forms = StepForms(rule, Packed(form.rows, form.columns, dense.form if len(copies) > 1 else None), scale, not known)
        return _Offer(copies, values.dtype, forms, bits, None if mask is None else (mask, mask._version))

    def offer(self, weight: Tensor, version: int, forms: StepForms | None) -> None:
        """A step has written ``forms`` for ``weight``, which had that version then: the requested ones, unless another layer has it too."""
        requested, self._requested = self._requested, None
        if requested is None or requested.forms is not forms:
            return
        self._offered = requested
        requested.stamp(weight, version)

    def _check(self, weight: Tensor, offered: _Offer) -> None:
        """Compare a strip of the weight with the copies, another each time, and make them again on the device if it differs."""
        self._offered, forms = None, offered.forms
        if self._changed is None or self._changed[0].device != weight.device:
            on_host = torch.zeros(1, dtype=torch.int32, pin_memory=weight.is_cuda)
            self._changed = torch.zeros(1, dtype=torch.int32, device=weight.device), on_host
        changed, on_host = self._changed
        forms.renew_changed(weight, offered.bits, changed, self._checks)
        self._checks += 1
        if self._checks % POLLED:
            return
        if int(on_host):
            warnings.warn(
                f"nmkernels: something wrote a weight of shape {tuple(weight.shape)} between optimizer.step() and the forward pass, where "
                "attach(forms='step') promised that nothing does; W̃ was made again. Call handle.refresh() after such writes, or leave "
                "forms='step' out.",
                stacklevel=2,
            )
        on_host.copy_(changed, non_blocking=True)

    # ---- the end of a copy

    @property
    def copies(self) -> tuple[Tensor | Packed, ...]:
        """All cached copies, including those that are out of date."""
        return tuple(copy.form for copy in (self._dense, self._packed) if copy.form is not None)

    def drop(self) -> None:
        """Mark the copies as out of date; their memory is reused for the next ones."""
        for copy in (self._dense, self._packed):
            copy.due = copy.due or copy.stamp is not None
            copy.stamp = None
        self._offered = None

    def doubt(self) -> None:
        """The weight may have changed: reuse the copies only if a fingerprint shows that it has not."""
        self._dense.doubted = self._packed.doubted = True
        self._offered = None

    def release(self) -> None:
        """Free the copies."""
        self._dense, self._packed = _Copy(), _Copy()
        self._operands = NO_OPERANDS
        self._requested = self._offered = None

    def __reduce__(self) -> tuple[Any, ...]:
        # a copied or pickled layer has no optimizer attached, and can make all again but the integers that prune_ has chosen
        return EffectiveWeight, () if self.rounded is None else (self.pruned, self.rounded)


def _made(source: Source, dense: _Wanted, packed: _Wanted) -> tuple[Tensor | None, Packed | None]:
    """Make the wanted forms of the effective weight; a GPU makes them in one reading of the weight."""
    weight, transform, extras, dtype = source
    w, old, spread = weight.detach(), dense.old, None
    if dense.wanted and (readable(weight) or (dtype == w.dtype and not packed.wanted)):
        if old is not None and old.dtype == dtype == w.dtype and old.shape == w.shape and old.device == w.device:
            spread = transform(w, *extras, out=old)
        else:
            spread = transform(w, *extras).to(dtype)
    also = dense.wanted and spread is None
    if not (packed.wanted or also):
        return spread, None
    rows, columns, layout = packed.how if packed.wanted else (False, False, "canonical")
    made = transform.packed(w, *extras, dtype=dtype, rows=rows, columns=columns, dense=also, layout=layout, out=packed.old)
    if also:
        return made.dense, Packed(made.rows, made.columns) if packed.wanted else None
    if packed.old is not None and made is not packed.old and readable(weight):
        made = _moved(made, packed.old)
    return spread, made


def _capturing(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _moved(new: Packed, old: Packed) -> Packed:
    """Copy ``new`` into the memory of ``old`` if it fits, since on a CPU that is mapped and often still in cache."""
    pairs = [(a, b) for a, b in zip(old.buffers(), new.buffers(), strict=True) if a is not None and b is not None]
    if any((a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device) for a, b in pairs):
        return new
    for target, source in pairs:
        target.copy_(source)
    return old


def readable(weight: Tensor) -> bool:
    """Whether the host can read ``weight`` without synchronising."""
    return weight.is_cpu
