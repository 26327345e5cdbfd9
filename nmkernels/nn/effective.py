"""The effective weight of a layer: cached, at most one copy of each form that its GEMMs read, and never stale.

A copy belongs to one Parameter, address and version. Fused optimizers and writes through ``.data`` do not change the version, so on a CPU a
fingerprint of the copy's sources must also match at every use; without the compiled core, which computes it, copies are not reused. On a
GPU the host cannot read the weight without waiting: there a copy is reused only in grad mode and until the next optimizer step,
``train()``, ``eval()``, ``deployable()`` or ``refresh()`` (``doubt``).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from .. import dispatch
from ..autograd import WeightTransform
from ..backends import fingerprint
from ..gemm.plan import GemmPlan
from ..gemm.route import Operands, Route, operands, route
from ..ops import Packed
from ..tuning import TABLE

Source = tuple[Tensor, WeightTransform, Sequence[Tensor], torch.dtype]
"""What an effective weight is made from: the weight, the transform, the extras that it reads, and the dtype of the GEMMs."""


MOST_ROUTES = 256
"""Size of a layer's cache of routes; when full it is cleared."""


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
    doubted: bool = False


class EffectiveWeight:
    """The cache of one layer's effective weight, in dense layout and packed as its GEMMs read it.

    ``attached``: whether an optimizer hook reports every step; without it nothing is cached. ``routes``: the forms that calls read, by size
    and dtype of the GEMM, grad mode and forced backend.
    """

    def __init__(self) -> None:
        self.attached = False
        self.routes: dict[tuple[int, torch.dtype, bool, Any], Route] = {}
        self._basis: tuple[Any, ...] = ()
        self._dense, self._packed = _Copy(), _Copy()

    def read(self, source: Source, plan: GemmPlan, x: Tensor) -> Tensor | Operands:
        """The effective weight in the forms that a call with the input ``x`` reads under ``plan``."""
        if plan.fprop == "dense":
            return self.dense(source) if torch.compiler.is_compiling() else self._current(self._dense, source, ())
        fprop, dgrad, layout, by = self.route(source, plan, x)
        if fprop == dgrad == "dense":
            return self.dense(source) if torch.compiler.is_compiling() else self._current(self._dense, source, ())
        back = dgrad if x.requires_grad and torch.is_grad_enabled() else fprop  # what dgrad reads is made for a gradient of x alone
        dense = packed = None
        if "dense" in (fprop, back):
            dense = self.dense(source)
        elif plan.fprop != "auto" and dgrad != "dense" and self._dense.form is not None and not torch.compiler.is_compiling():
            self._dense = _Copy()  # all calls read the packed form; this copy is left over from an evaluation
        rows, columns = "packed" in (fprop, back), back == "columns"
        if rows or columns:
            packed = self.packed(source, rows, columns, layout)
            if fprop == back and packed.rows is not None:
                return operands(packed.rows, by=by)
        forms: dict[str, Any] = {"dense": dense, "packed": packed and packed.rows, "columns": packed and packed.columns}
        return operands(forms[fprop], None if back == fprop else forms[back], back == "columns", by)

    def route(self, source: Source, plan: GemmPlan, x: Tensor) -> Route:
        """The route of a call, cached by kind of call."""
        weight, transform, _, dtype = source
        tokens = x.numel()
        if torch.compiler.is_compiling() or type(tokens) is not int:  # traced, for any number of tokens
            return route(plan, transform, weight, dtype, x)
        basis = plan, transform, weight.shape, weight.device, TABLE.revision
        if basis != self._basis or len(self.routes) >= MOST_ROUTES:
            self._basis, self.routes = basis, {}
        kind = tokens, dtype, torch.is_grad_enabled(), dispatch.environment.get(dispatch.ENV_KEY)
        result = self.routes.get(kind)
        if result is None:
            result = route(plan, transform, weight, dtype, x)
            self._basis, self.routes[kind] = (
                (*basis[:4], TABLE.revision),
                result,
            )  # the current revision: the route may have been measured just now
        return result

    def dense(self, source: Source) -> Tensor:
        """W̃ ``(out, in)`` in dense layout, from the cache if that is up to date."""
        if torch.compiler.is_compiling():
            # a compiled graph cannot check versions or hooks, so it computes W̃ at every call
            weight, transform, extras, dtype = source
            return transform(weight.detach(), *extras).to(dtype)
        return self._current(self._dense, source, ())

    def packed(self, source: Source, rows: bool, columns: bool, layout: str) -> Packed:
        """W̃ packed, its transpose packed, or both, in ``layout``, from the cache if that is up to date."""
        if torch.compiler.is_compiling():
            weight, transform, extras, dtype = source
            return transform.packed(weight.detach(), *extras, dtype=dtype, rows=rows, columns=columns, layout=layout)
        copy = self._packed
        if copy.form is not None and copy.transform is source[1]:
            # pack what earlier calls read too, so that calls that alternate between forms do not repack every time
            rows, columns = rows or copy.how[0], columns or copy.how[1]
        return self._current(copy, source, (rows, columns, layout))

    def _current(self, copy: _Copy, source: Source, how: tuple[Any, ...]) -> Any:
        weight, transform, extras, dtype = source
        owner = weight if isinstance(weight, nn.Parameter) else weight._base
        # functional_call and replicas pass a plain tensor, not a Parameter; inference tensors have no version counter, fake ones no address
        if not self.attached or isinstance(weight, FakeTensor) or not isinstance(owner, nn.Parameter) or owner.is_inference():
            self.release()
            return _made(None, source, how)
        mark, captured = fingerprint(weight, *extras), _capturing(weight)
        stamp = (weight._version, weight.data_ptr(), weight.device, dtype, mark)
        same = copy.form is not None and copy.transform is transform and copy.how == how
        # replaying a captured graph runs no hooks, so W̃ must be made inside the graph, and is not valid outside
        valid = same and not captured and stamp == copy.stamp and copy.owner is not None and copy.owner() is owner
        if valid and (mark is not None or (not readable(weight) and torch.is_grad_enabled() and not copy.doubted)):
            return copy.form
        # overwrite a copy only after an optimizer step; before that a backward pass may still need it
        free = same and copy.stamp is None and not captured
        form = _made(copy.form if free else None, source, how)
        if not captured and (mark is not None or torch.is_grad_enabled()):
            copy.form, copy.stamp, copy.owner, copy.transform = form, stamp, weakref.ref(owner), transform
            copy.how, copy.doubted = how, False
        return form

    # ---- the end of a copy

    @property
    def copies(self) -> tuple[Tensor | Packed, ...]:
        """All cached copies, including those that are out of date."""
        return tuple(copy.form for copy in (self._dense, self._packed) if copy.form is not None)

    def drop(self) -> None:
        """Mark the copies as out of date; their memory is reused for the next ones."""
        self._dense.stamp = self._packed.stamp = None

    def doubt(self) -> None:
        """The weight may have changed: reuse the copies only if a fingerprint shows that it has not."""
        self._dense.doubted = self._packed.doubted = True

    def release(self) -> None:
        """Free the copies."""
        self._dense, self._packed = _Copy(), _Copy()

    def __reduce__(self) -> tuple[type[EffectiveWeight], tuple[()]]:
        # a copied or pickled layer has no optimizer attached, and can make W̃ again
        return EffectiveWeight, ()


def _made(old: Any, source: Source, how: tuple[Any, ...]) -> Any:
    """Make the effective weight, in the memory of ``old`` if that fits, else as new tensors."""
    weight, transform, extras, dtype = source
    # not in inference mode: inference tensors cannot be saved for backward
    with torch.inference_mode(False), torch.no_grad():
        w = weight.detach()
        if how:
            new = transform.packed(w, *extras, dtype=dtype, rows=how[0], columns=how[1], layout=how[2], out=old)
            return new if old is None or new is old or not readable(weight) else _moved(new, old)
        if old is not None and old.dtype == dtype == w.dtype and old.shape == w.shape and old.device == w.device:
            return transform(w, *extras, out=old)
        return transform(w, *extras).to(dtype)


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
