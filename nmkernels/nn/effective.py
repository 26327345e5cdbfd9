"""The effective weight of a layer: of each form that its GEMMs read at most one copy, which is never stale.

A copy is of one Parameter, at one address, of one version. Fused optimizers and ``.data`` bump no version: so on a CPU a fingerprint of
all that the copy was made of has to agree as well, at every use; without the compiled core, which takes it, no copy is used again. A
GPU's memory the host cannot read without waiting: there a copy is used again only within one training step, in grad mode, and until
any optimizer has stepped, ``train()``, ``eval()``, ``deployable()`` or ``refresh()`` was called (``doubt``).
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
"""What an effective weight is made of: the weight, the transform, what that reads with it, and the dtype of the GEMMs."""


MOST_ROUTES = 256
"""Kinds of calls whose route a layer remembers; then it forgets all."""


@dataclass(eq=False)
class _Copy:
    """One form of the effective weight, and what it was made of."""

    form: Any = None
    stamp: tuple[Any, ...] | None = None
    """Version, address, device, dtype and fingerprint; None: out of date, and nobody needs the old contents."""
    owner: weakref.ref[nn.Parameter] | None = None
    transform: WeightTransform | None = None
    how: tuple[Any, ...] = ()
    """Of the packed form: whether rows and columns are packed, and the layout."""
    doubted: bool = False


class EffectiveWeight:
    """Holds one layer's effective weight, in dense layout and packed as its GEMMs read it, and says when it may be used again.

    ``attached``: an optimizer's hook announces every step. ``routes``: what calls read, by size and dtype of the GEMM, grad mode and forced
    backend.
    """

    def __init__(self) -> None:
        self.attached = False
        self.routes: dict[tuple[int, torch.dtype, bool, Any], Route] = {}
        self._basis: tuple[Any, ...] = ()
        self._dense, self._packed = _Copy(), _Copy()

    def read(self, source: Source, plan: GemmPlan, x: Tensor) -> Tensor | Operands:
        """The effective weight as a call with the input ``x`` reads it by ``plan``."""
        if plan.fprop == "dense":
            return self.dense(source) if torch.compiler.is_compiling() else self._current(self._dense, source, ())
        fprop, dgrad, layout, by = self.route(source, plan, x)
        if fprop == dgrad == "dense":
            return self.dense(source) if torch.compiler.is_compiling() else self._current(self._dense, source, ())
        if not (self.attached or torch.is_grad_enabled()):
            dgrad = fprop  # there is no backward pass, so dgrad is not needed
        dense = packed = None
        if fprop == "dense" or dgrad == "dense":
            dense = self.dense(source)
        elif plan.fprop != "auto" and self._dense.form is not None and not torch.compiler.is_compiling():
            self._dense = _Copy()  # all calls read the same: this dense copy is left over from an evaluation
        rows, columns = "packed" in (fprop, dgrad), dgrad == "columns"
        if rows or columns:
            packed = self.packed(source, rows, columns, layout)
            if fprop == dgrad and packed.rows is not None:
                return operands(packed.rows, by=by)
        forms: dict[str, Any] = {"dense": dense, "packed": packed and packed.rows, "columns": packed and packed.columns}
        return operands(forms[fprop], None if dgrad == fprop else forms[dgrad], dgrad == "columns", by)

    def route(self, source: Source, plan: GemmPlan, x: Tensor) -> Route:
        """What a call reads, remembered for those like it."""
        weight, transform, _, dtype = source
        tokens = x.numel()
        if torch.compiler.is_compiling() or type(tokens) is not int:  # of a graph for any number of them
            return route(plan, transform, weight, dtype, x)
        basis = plan, transform, weight.shape, weight.device, TABLE.revision
        if basis != self._basis or len(self.routes) >= MOST_ROUTES:
            self._basis, self.routes = basis, {}
        kind = tokens, dtype, torch.is_grad_enabled(), dispatch.environment.get(dispatch.ENV_KEY)
        found = self.routes.get(kind)
        if found is None:
            found = route(plan, transform, weight, dtype, x)
            self._basis, self.routes[kind] = (*basis[:4], TABLE.revision), found  # which may have been measured just now
        return found

    def dense(self, source: Source) -> Tensor:
        """W̃ ``(out, in)`` in dense layout, from the copy where that is still right."""
        if torch.compiler.is_compiling():
            # a graph can neither see a version counter nor a hook: it computes W̃ itself, every time
            weight, transform, extras, dtype = source
            return transform(weight.detach(), *extras).to(dtype)
        return self._current(self._dense, source, ())

    def packed(self, source: Source, rows: bool, columns: bool, layout: str) -> Packed:
        """W̃ packed, its transpose, or both, from the copies where those are still right and of that layout."""
        if torch.compiler.is_compiling():
            weight, transform, extras, dtype = source
            return transform.packed(weight.detach(), *extras, dtype=dtype, rows=rows, columns=columns, layout=layout)
        copy = self._packed
        if copy.form is not None and copy.transform is source[1]:
            # calls that read different forms, of few tokens and of many, must not pack alternately
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
        # no hook of ours runs when a captured graph does: the graph has to make it, and what it made is of no use outside
        right = same and not captured and stamp == copy.stamp and copy.owner is not None and copy.owner() is owner
        if right and (mark is not None or (not weight.is_cpu and torch.is_grad_enabled() and not copy.doubted)):
            return copy.form
        # only a form that an optimizer's step put out of date may be overwritten: a backward pass may still need any other
        free = same and copy.stamp is None and not captured
        form = _made(copy.form if free else None, source, how)
        if not captured and (mark is not None or torch.is_grad_enabled()):
            copy.form, copy.stamp, copy.owner, copy.transform = form, stamp, weakref.ref(owner), transform
            copy.how, copy.doubted = how, False
        return form

    # ---- the end of a copy

    @property
    def copies(self) -> tuple[Tensor | Packed, ...]:
        """The copies that there are, right or out of date."""
        return tuple(copy.form for copy in (self._dense, self._packed) if copy.form is not None)

    def drop(self) -> None:
        """What is held is out of date; its memory is used again for the next copies."""
        self._dense.stamp = self._packed.stamp = None

    def doubt(self) -> None:
        """The weight may have been written: without a fingerprint that says otherwise, what is held is not used again."""
        self._dense.doubted = self._packed.doubted = True

    def release(self) -> None:
        """Forget the copies and their memory."""
        self._dense, self._packed = _Copy(), _Copy()

    def __reduce__(self) -> tuple[type[EffectiveWeight], tuple[()]]:
        # a copied or pickled layer belongs to no optimizer, and its copies of W̃ can be made again
        return EffectiveWeight, ()


def _made(old: Any, source: Source, how: tuple[Any, ...]) -> Any:
    """The effective weight as new tensors, or in the memory of ``old`` where it fits."""
    weight, transform, extras, dtype = source
    # an inference tensor could never be saved for a later backward
    with torch.inference_mode(False), torch.no_grad():
        w = weight.detach()
        if how:
            new = transform.packed(w, *extras, dtype=dtype, rows=how[0], columns=how[1], layout=how[2], out=old)
            return new if old is None or new is old else _moved(new, old)
        if old is not None and old.dtype == dtype == w.dtype and old.shape == w.shape and old.device == w.device:
            return transform(w, *extras, out=old)
        return transform(w, *extras).to(dtype)


def _capturing(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _moved(new: Packed, old: Packed) -> Packed:
    """``new`` in the memory of ``old`` where it fits, which optimizers' steps leave warm in the cache and mapped."""
    pairs = [(a, b) for a, b in zip(old.buffers(), new.buffers(), strict=True) if a is not None and b is not None]
    if any((a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device) for a, b in pairs):
        return new
    for there, here in pairs:
        there.copy_(here)
    return old


def readable(weight: Tensor) -> bool:
    """Whether the host can read ``weight`` without waiting for a device."""
    return weight.is_cpu
