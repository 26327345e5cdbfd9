"""The life of the effective weight: of each form that a layer's GEMMs read at most one copy, which is never stale.

A copy is of one Parameter, at one address, of one version. That does not tell of every write: fused optimizers and ``.data`` bump
no version. So on a CPU a fingerprint of all that the copy was made of has to agree as well, at every use; where there is none, as
without the compiled core, no copy is used again. A GPU's memory the host cannot read without waiting: there a copy is used again only
within one training step, in grad mode, and until any optimizer has stepped, ``train()``, ``eval()``, ``deployable()`` or ``refresh()``
was called (``doubt``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from ..autograd import Form, Operands, Reads, WeightTransform
from ..backends.cpu.fingerprint import fingerprint
from ..ops import Packed

State = tuple[int, int, torch.device, torch.dtype]
"""Version, address and device of the weight; dtype of the copy."""

F = TypeVar("F", Tensor, Packed)


@dataclass
class _Kept(Generic[F]):
    """One form of the effective weight, and what it was made of."""

    form: F | None = None
    state: State | None = None
    """None: out of date, and nobody needs the old contents."""
    owner: weakref.ref[nn.Parameter] | None = None
    transform: WeightTransform | None = None
    mark: tuple[int, ...] | None = None
    """The fingerprint of the weight and of what the transform reads beside it."""
    doubted: bool = False

    def right(self, owner: nn.Parameter, state: State, transform: WeightTransform, mark: tuple[int, ...] | None) -> bool:
        """Whether the form is what that transform makes of that Parameter as it is now."""
        if self.form is None or self.transform is not transform or state != self.state or self.owner is None or self.owner() is not owner:
            return False
        if mark is not None:
            return mark == self.mark
        return not _readable(state) and torch.is_grad_enabled() and not self.doubted


@dataclass
class _Forms:
    dense: _Kept[Tensor] = field(default_factory=_Kept)
    packed: _Kept[Packed] = field(default_factory=_Kept)


class EffectiveWeight:
    """Holds one layer's transformed weight, in dense layout and packed as its products read it, and says when it may be used again."""

    def __init__(self) -> None:
        self.attached = False  # an optimizer's hook tells us of every step
        self._forms = _Forms()

    def get(self, weight: Tensor, transform: WeightTransform, dtype: torch.dtype, extras: Sequence[Tensor] = ()) -> Tensor:
        """W̃ of ``weight`` ``(out, in)`` in ``dtype``, from the kept copy where that is still right.

        ``extras`` are what the transform reads beside the weight.
        """
        if torch.compiler.is_compiling():
            # a graph can neither see a version counter nor a hook: it computes W̃ itself, every time
            return transform(weight.detach(), *extras).to(dtype)
        return self._get(self._forms.dense, weight, transform, dtype, extras, lambda old: _dense(weight, transform, dtype, extras, old))

    def packed(self, weight: Tensor, transform: WeightTransform, dtype: torch.dtype, extras: Sequence[Tensor], what: Reads) -> Packed:
        """The packed forms of W̃ that are read, from the kept ones where those are still right and of that layout."""
        rows, columns, layout = what.rows, what.columns, what.layout
        if torch.compiler.is_compiling():
            return transform.packed(weight.detach(), *extras, dtype=dtype, rows=rows, columns=columns, layout=layout)
        kept = self._forms.packed
        have = kept.form if kept.transform is transform else None
        if have is not None:
            if (rows and have.rows is None) or (columns and have.columns is None) or have.layout != layout:
                kept.form = None
            # calls that read different forms, of few tokens and of many, shall not pack in turns
            rows, columns = rows or have.rows is not None, columns or have.columns is not None
        return self._get(
            kept, weight, transform, dtype, extras, lambda old: _packed(weight, transform, dtype, extras, rows, columns, layout, old)
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

    def _get(
        self, kept: _Kept[F], weight: Tensor, transform: WeightTransform, dtype: torch.dtype, extras: Sequence[Tensor],
        build: Callable[[F | None], F],
    ) -> F:  # fmt: skip
        owner = _owner(weight) if self.attached else None
        if owner is None:
            self.release()
            return _lasting(build, None)
        state, mark, captured = _state(weight, dtype), fingerprint(weight, *extras), _capturing(weight)
        # no hook of ours runs when a captured graph does: the graph has to make it, and what it made is of no use outside
        if not captured and kept.right(owner, state, transform, mark) and kept.form is not None:
            return kept.form
        # only a form that an optimizer's step put out of date may be overwritten: a backward pass may still need any other
        free = kept.state is None and kept.transform is transform and not captured
        form = _lasting(build, kept.form if free else None)
        if not captured and (mark is not None or torch.is_grad_enabled()):
            kept.form, kept.state, kept.owner, kept.transform = form, state, weakref.ref(owner), transform
            kept.mark, kept.doubted = mark, False
        return form

    # ---- the end of a copy

    @property
    def kept(self) -> tuple[Tensor | Packed, ...]:
        """The copies that there are, right or out of date."""
        return tuple(form for form in (self._forms.dense.form, self._forms.packed.form) if form is not None)

    def drop(self) -> None:
        """What is kept is out of date; its memory is kept for the next copies."""
        self._forms.dense.state = self._forms.packed.state = None

    def doubt(self) -> None:
        """The weight may have been written: without a fingerprint that says otherwise, what is kept is not used again."""
        self._forms.dense.doubted = self._forms.packed.doubted = True

    def release(self, packed: bool = True) -> None:
        """Forget the copies and their memory; without ``packed`` only the one in dense layout."""
        self._forms = _Forms() if packed else _Forms(packed=self._forms.packed)

    def __reduce__(self) -> tuple[type[EffectiveWeight], tuple[()]]:
        # a copied or pickled layer belongs to no optimizer, and its copies of W̃ can be made again
        return EffectiveWeight, ()


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


def _readable(state: State) -> bool:
    """Whether the host can read the weight without waiting for a device."""
    return state[2].type == "cpu"


def _state(weight: Tensor, dtype: torch.dtype) -> State:
    return weight._version, weight.data_ptr(), weight.device, dtype
