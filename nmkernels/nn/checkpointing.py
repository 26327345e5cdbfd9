"""What loading, saving and moving a module mean for an N:M weight, and a warning where a finished one has been changed."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from ..layouts import ORDERS
from ..ops import is_nm
from ..pattern import NMError
from .adapter import ADAPTER
from .sharding import adopt_parameter, take_buffers
from .weight import NMWeight


class Checkpointed(NMWeight):
    """An N:M weight whose state follows the weights that are loaded."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        _, _, missing_keys, _, error_msgs = rest
        loads = self._loads(state_dict, prefix)
        take_buffers(self)
        # set_model_state_dict(full_state_dict=True) passes the present buffers where the checkpoint has none
        unfilled = {prefix + name for name, value in self._buffers.items() if value is not None and state_dict.get(prefix + name) is value}
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.drop()
        adopt_parameter(self)
        buffers = [name for name in self._buffers if name.startswith("nm_") and name not in self._non_persistent_buffers_set]
        saved = [prefix + name for name in (*buffers, *self.learned())]
        absent = [key for key in saved if key not in state_dict or key in unfilled]
        self.restored = bool(saved) and not absent
        if not absent or not loads:
            return
        # a dense checkpoint: they belonged to other weights
        missing_keys[:] = [key for key in missing_keys if key not in absent]
        if not self.stepped:
            try:
                self.renew()
            except NMError as error:
                error_msgs.append(f"layer {prefix.rstrip('.')!r}: {error}")
            return
        self.clear_adapter()  # it was learned with other weights, and the dense model has none
        taken = [name for key in absent if (name := key.rpartition(".")[2]) not in ADAPTER]
        if taken:
            warnings.warn(
                f"load_state_dict: dense weights were loaded in the middle of a run, and what the layers took from earlier ones "
                f"({', '.join(taken)}) stays. handle.renew_masks() takes it from the new weights.",
                stacklevel=2,
            )

    def _loads(self, state_dict: dict[str, Any], prefix: str) -> bool:
        """Whether ``state_dict`` has the weight; a hook may have taken it out."""
        return prefix + "weight" in state_dict

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        warn_if_changed(self)
        take_buffers(self)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # two moves may bring the weight back to its old address with other contents and the same version
        self.effective.release()
        moved = super()._apply(*args, **kwargs)
        adopt_parameter(self)
        return moved

    def train(self, mode: bool = True) -> Checkpointed:
        self.effective.doubt()  # weights are often exchanged around an evaluation
        if not mode:
            warn_if_changed(self)
        return super().train(mode)


def warn_if_changed(layer: NMWeight) -> None:
    """Warn where a finished weight is no longer N:M: a merged LoRA or a dense optimizer changes it and bumps no version.

    This runs wherever a model is saved or evaluated, so at most 64 rows are checked; such a merge touches every row.
    """
    weight = layer.weight
    # a shard or a fake tensor cannot tell
    if not layer.finished or weight.is_meta or weight.dim() != len(ORDERS[layer.layout]) or type(weight.data) is not Tensor:
        return
    rows = layer.master.detach()[:: -(-layer.master.shape[0] // 64) or 1]
    if not is_nm(rows if layer.columns is None else rows.index_select(1, layer.columns.to(rows.device)), layer.pattern):
        warnings.warn(
            f"{type(layer).__name__} {tuple(layer.master.shape)} (out, in): the weight was {layer.pattern} when the recipe finished "
            "and is not any more: something has changed it since, such as a merged LoRA. The layer computes with it as a dense layer "
            "would, and compress_ will refuse it. To keep it sparse, do not merge: add the LoRA as an adapter, by "
            "nm.integrations.peft.absorb(model) or nm.nn.adapter.set_adapter(layer, A.t(), r * scaling * B.t(), out, in); or prune again: "
            "densify_, sparsify_, finish.",
            stacklevel=4,
        )
