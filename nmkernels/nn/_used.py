"""The life of the weight used: of each form that a layer's products read at most one copy, made once per optimizer step.

A copy is dropped when the optimizer has stepped (its post-step hook), when a state dict is loaded, when the module is
moved or cast, and when the weight's version or storage changed. The version alone is not enough: fused optimizers and
writes through ``.data`` do not bump it, so nothing is kept where no attached optimizer tells of its steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from ..autograd import Form, HardMask, Operands, Reads, WeightTransform
from ..ops import Packed

State = tuple[int, int, torch.device, torch.dtype]
"""Version, address and device of the weight; dtype of the copy."""

F = TypeVar("F", Tensor, Packed)


@dataclass
class _Kept(Generic[F]):
    """One form of the weight used, what it was made of, and by what."""

    form: F | None = None
    state: State | None = None
    owner: weakref.ref[nn.Parameter] | None = None
    transform: WeightTransform | None = None
    written: bool = False
    """By the optimizer, in the pass of its update, and not by us."""

    def right(self, owner: nn.Parameter | None, state: State) -> bool:
        """Whether the form is of that Parameter as it is now."""
        return self.form is not None and state == self.state and self.owner is not None and owner is not None and self.owner() is owner


@dataclass
class _Forms:
    dense: _Kept[Tensor] = field(default_factory=_Kept)
    packed: _Kept[Packed] = field(default_factory=_Kept)


class UsedWeight:
    """Holds one layer's transformed weight, in dense layout and packed as its products read it, and says when it may be used again."""

    def __init__(self) -> None:
        self.attached = False  # an optimizer's hook tells us of every step
        self._forms = _Forms()
        self._lent: list[_Kept[Tensor] | _Kept[Packed]] = []

    def get(self, weight: Tensor, transform: WeightTransform, dtype: torch.dtype, extras: Sequence[Tensor] = ()) -> Tensor:
        """W̃ of ``weight`` ``(out, in)`` in ``dtype``, from the kept copy where that is still right.

        ``extras`` are what the transform reads beside the weight; whoever changes them calls ``drop``.
        """
        if torch.compiler.is_compiling():
            # a graph can neither see a version counter nor a hook: it computes W̃ itself, every time
            return transform(weight.detach(), *extras).to(dtype)
        return self._get(self._forms.dense, weight, transform, dtype, lambda old: _dense(weight, transform, dtype, extras, old))

    def packed(self, weight: Tensor, transform: WeightTransform, dtype: torch.dtype, extras: Sequence[Tensor], what: Reads) -> Packed:
        """The packed forms of W̃ that are read, from the kept ones where those are still right and of that layout."""
        rows, columns, layout = what.rows, what.columns, what.layout
        if torch.compiler.is_compiling():
            return transform.packed(weight.detach(), *extras, dtype=dtype, rows=rows, columns=columns, layout=layout)
        kept = self._forms.packed
        have = kept.form if kept.transform is transform else None
        if have is not None:
            if (rows and have.rows is None) or (columns and have.columns is None) or have.layout != layout:
                kept.state = None
            # calls that read different forms, of few tokens and of many, shall not pack in turns
            rows, columns = rows or have.rows is not None, columns or have.columns is not None
        return self._get(
            kept, weight, transform, dtype, lambda old: _packed(weight, transform, dtype, extras, rows, columns, layout, old)
        )  # fmt: skip

    def operands(
        self, weight: Tensor, transform: WeightTransform, dtype: torch.dtype, extras: Sequence[Tensor], what: Reads, only: bool
    ) -> Operands:
        """The forms that a call reads; ``only``: all calls read the same, so a dense copy beside them, an evaluation's, is given up."""
        if only and not what.dense and self._forms.dense.form is not None and not torch.compiler.is_compiling():
            self.release(packed=False)
        dense = self.get(weight, transform, dtype, extras) if what.dense else None
        packed = self.packed(weight, transform, dtype, extras, what) if what.rows or what.columns else None
        forms: dict[str, Form | None] = {"dense": dense}
        if packed is not None:
            forms |= {"packed": packed.rows, "columns": packed.columns}
        fprop = forms[what.fprop]
        assert fprop is not None
        return Operands(fprop, forms[what.dgrad] if what.dgrad != what.fprop else None, what.columns, what.by)

    def _get(self, kept: _Kept[F], weight: Tensor, transform: WeightTransform, dtype: torch.dtype, build: Callable[[F | None], F]) -> F:
        owner = _owner(weight) if self.attached else None
        if owner is None:
            self.release()
            return _lasting(build, None)
        state, same = _state(weight, dtype), kept.transform is transform
        # no hook of ours runs when a captured graph does: what the optimizer does not write, the graph has to make
        captured = not kept.written and _capturing(weight)
        if kept.form is None or not same or captured or not kept.right(owner, state):
            # another transform of the same weight (an evaluation) must not overwrite what a backward still needs
            kept.form = _lasting(build, kept.form if same and not captured else None)
            kept.state, kept.owner, kept.transform, kept.written = state, weakref.ref(owner), transform, False
        return kept.form

    # ---- the optimizer's part

    def sink(self, weight: Tensor) -> Tensor | None:
        """The kept copy, for an optimizer that writes the next M(W) ⊙ W into it in the same pass as its update.

        None unless it is right for the present ``weight``: a step that is skipped leaves it as it is, and it must then still be right.
        """
        return self._lend(self._forms.dense, weight, None if self._forms.dense.form is None else self._forms.dense.form.dtype)

    def packs(self, weight: Tensor) -> Packed | None:
        """The kept packed rows, under the same condition and for the same purpose."""
        form = self._forms.packed.form
        if form is None or form.rows is None or form.columns is not None:
            return None
        if self._forms.packed.transform is None or form.rows.pattern != self._forms.packed.transform.pattern:
            return None  # a sparser pattern as the 2:4 of tensor cores
        return self._lend(self._forms.packed, weight, form.rows.values.dtype)

    def _lend(self, kept: _Kept[F], weight: Tensor, dtype: torch.dtype | None) -> F | None:
        self._lent = [other for other in self._lent if other is not kept]
        owner = _owner(weight)
        if owner is None or dtype is None or not isinstance(kept.transform, HardMask) or not kept.right(owner, _state(weight, dtype)):
            return None
        self._lent.append(kept)
        return kept.form

    def filled(self, weight: Tensor) -> None:
        """The optimizer has just written W̃ of the present ``weight`` into what it was lent."""
        for kept in self._lent:
            if kept.state is not None:
                kept.state, kept.written = _state(weight, kept.state[-1]), True
        self._lent = []

    # ---- the end of a copy

    @property
    def kept(self) -> tuple[Tensor | Packed, ...]:
        """The copies that there are, right or out of date."""
        return tuple(form for form in (self._forms.dense.form, self._forms.packed.form) if form is not None)

    def drop(self) -> None:
        """What is kept is out of date; its memory is kept for the next copies."""
        self._forms.dense.state = self._forms.packed.state = None

    def release(self, packed: bool = True) -> None:
        """Forget the copies and their memory; without ``packed`` only the one in dense layout."""
        self._forms = _Forms() if packed else _Forms(packed=self._forms.packed)
        self._lent = []

    def __reduce__(self) -> tuple[type[UsedWeight], tuple[()]]:
        # a copied or pickled layer belongs to no optimizer, and its copies of W̃ can be made again
        return UsedWeight, ()


def _lasting(build: Callable[[F | None], F], old: F | None) -> F:
    # an inference tensor could never be saved for a later backward
    with torch.inference_mode(False), torch.no_grad():
        return build(old)


def _dense(weight: Tensor, transform: WeightTransform, dtype: torch.dtype, extras: Sequence[Tensor], old: Tensor | None) -> Tensor:
    """W̃ as a new tensor, or in the memory of ``old`` where it fits."""
    w = weight.detach()
    if old is not None and old.dtype == dtype == w.dtype and old.shape == w.shape and old.device == w.device:
        return transform(w, *extras, out=old)
    return transform(w, *extras).to(dtype)


def _packed(
    weight: Tensor, transform: WeightTransform, dtype: torch.dtype, extras: Sequence[Tensor],
    rows: bool, columns: bool, layout: str, old: Packed | None,
) -> Packed:  # fmt: skip
    """The packed forms as new tensors, or in the memory of ``old`` where they fit: a captured graph reads them there."""
    new = transform.packed(weight.detach(), *extras, dtype=dtype, rows=rows, columns=columns, layout=layout)
    pairs = [] if old is None else list(zip(old.buffers(), new.buffers(), strict=True))
    if old is None or old.layout != layout or any(not _alike(a, b) for a, b in pairs):
        return new
    for there, here in pairs:
        if there is not None and here is not None:
            there.copy_(here)
    return old


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _owner(weight: Tensor) -> nn.Parameter | None:
    """The Parameter that ``weight`` is or is a view of; None for what ``functional_call`` or a replica puts in its place."""
    base = weight if isinstance(weight, nn.Parameter) else weight._base
    # inference tensors have no version counter
    return base if isinstance(base, nn.Parameter) and not base.is_inference() else None


def _capturing(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _state(weight: Tensor, dtype: torch.dtype) -> State:
    return weight._version, weight.data_ptr(), weight.device, dtype
