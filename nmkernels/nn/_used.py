"""The life of the weight used: at most one transformed copy of a layer's weight, rebuilt once per optimizer step.

The copy is dropped when the optimizer has stepped (its post-step hook), when a state dict is loaded, and when
the weight's version or storage changed. The version alone is not enough: fused optimizers and writes through
``.data`` do not bump it, so without an attached optimizer nothing is kept while grad mode is on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..autograd import WeightTransform

Key = tuple[int, int, torch.dtype, torch.device]


class UsedWeight:
    """Holds one layer's transformed weight and says when it may be used again."""

    def __init__(self) -> None:
        self.attached = False  # an optimizer's hook tells us of every step
        self._tensor: Tensor | None = None
        self._key: Key | None = None

    def get(self, weight: Tensor, transform: WeightTransform, dtype: torch.dtype) -> Tensor:
        """W̃ of ``weight`` ``(out, in)`` in ``dtype``, from the kept copy where that is still right."""
        master = weight.detach()
        if torch.compiler.is_compiling():
            # a graph can neither see a version counter nor a hook: it computes W̃ itself, every time
            return transform(master).to(dtype)
        key = _key(master, dtype)
        if self._tensor is not None and key is not None and key == self._key:
            return self._tensor
        keep = key is not None and (self.attached or not torch.is_grad_enabled())
        # an inference tensor could never be saved for a later backward
        with torch.inference_mode(False), torch.no_grad():
            tensor = self._build(master, transform, dtype, keep)
        self._tensor, self._key = (tensor, key) if keep else (None, None)
        return tensor

    def _build(self, master: Tensor, transform: WeightTransform, dtype: torch.dtype, keep: bool) -> Tensor:
        old = self._tensor
        reusable = keep and old is not None and old.dtype == dtype == master.dtype and old.shape == master.shape and old.device == master.device
        if reusable:
            return transform(master, out=old)
        return transform(master).to(dtype)

    def sink(self, weight: Tensor) -> Tensor | None:
        """The kept copy, for an optimizer that writes the next W̃ into it in the same pass as its update.

        None unless it is right for the present ``weight``: a step that is skipped leaves it as it is, and it must then still be right.
        """
        if self._tensor is None or self._key is None or self._key != _key(weight.detach(), self._tensor.dtype):
            return None
        return self._tensor

    def filled(self, weight: Tensor) -> None:
        """The optimizer has just written W̃ of the present ``weight`` into ``sink``."""
        if self._tensor is not None:
            self._key = _key(weight.detach(), self._tensor.dtype)

    def drop(self) -> None:
        """The kept copy is out of date; its memory is kept for the next one."""
        self._key = None

    def release(self) -> None:
        """Forget the copy and its memory."""
        self._tensor, self._key = None, None

    def __reduce__(self) -> tuple[type[UsedWeight], tuple[()]]:
        # a copied or pickled layer belongs to no optimizer, and its copy of W̃ can be made again
        return UsedWeight, ()


def _key(weight: Tensor, dtype: torch.dtype) -> Key | None:
    if weight.is_inference():
        return None  # inference tensors have no version counter
    return weight._version, weight.data_ptr(), dtype, weight.device
