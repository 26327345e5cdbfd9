"""NMWeight: an N:M weight and its state, which all layers that train one share, whatever they multiply it by."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.transforms import INTEGERS, HardMask, WeightTransform, transformed
from ..gemm.plan import STRAIGHT_THROUGH, GemmPlan
from ..gemm.problem import Problem
from ..layouts import LINEAR, MATRICES, ORDERS, as_matrix, as_stored, matrix_shape, ordered
from ..ops import Compressed, is_nm
from ..pattern import NMError, Pattern, RecipeError
from ..shards import is_sharded, local, whole
from .adapter import ADAPTER, adapter_of
from .classes import QuantisedByClass, computed_by
from .effective import EffectiveWeight
from .traces import constant, is_tracing, refuse_script


@dataclass(eq=False, repr=False)
class WeightState:
    """The attributes of a layer with an N:M weight, which ``make_dense_`` takes away again.

    ``pattern`` is that of the finished weight, and ``final`` the transform that makes it; ``transform`` makes the present W̃, or is None
    where the layer uses W itself (a dense phase, or after ``finish``); ``plan`` says how the GEMMs are done, and ``seed`` is int64 (seed,
    offset) of its random estimates, None for torch's generator. ``adapts``: the low-rank adapter (``nm_left``, ``nm_right``), if there is
    one, takes part. ``idle`` names Parameters that do not yet, but get a gradient of zeros. ``columns`` is the order in which the finished
    weight is N:M, None for its own. ``starts`` are the transforms that took something from the weight at the beginning, which a checkpoint
    may have ``restored``. ``integers``: (values, group) that ``compress_`` rounds the finished weight to by default. ``governed``: a handle
    drives the layer, or did; ``stepped``: an attached optimizer has stepped; ``ran``: the layer was called. ``effective`` keeps copies of
    W̃, ``gather`` is the ``sharding.Gather`` of a weight that FSDP2 shards, and ``watch`` sees the result of each call until the first
    backward pass.
    """

    pattern: Pattern
    final: WeightTransform = field(init=False)
    transform: WeightTransform | None = field(init=False)
    plan: GemmPlan = field(init=False)
    seed: Tensor | None = None
    adapts: bool = False
    idle: tuple[str, ...] = ()
    columns: Tensor | None = None
    starts: tuple[WeightTransform, ...] = ()
    restored: bool = False
    integers: tuple[str, int | None] | None = None
    governed: bool = False
    stepped: bool = False
    finished: bool = False
    ran: bool = False
    effective: EffectiveWeight = field(default_factory=EffectiveWeight)
    gather: Any = None
    watch: Any = None

    def __post_init__(self) -> None:
        self.final = self.transform = HardMask(self.pattern)
        self.plan = GemmPlan("auto", "auto", n=self.pattern.n, m=self.pattern.m)


class NMWeight(nn.Module, WeightState):
    """A dense weight W that is used in its N:M form W̃ = ``transform(W)``: the base of ``SparseLinear`` and all its like.

    One weight has these names: ``weight`` is torch's, where FSDP2 puts an unsharded one during a call; ``parameter`` is the Parameter that
    an optimizer updates; ``master`` is that as a matrix ``(out, in)``, of a sharded one this rank's shard; ``effective_weight()`` is W̃.

    Tensors ``nm_*`` are what transforms read in addition to W. They are in the state dict where they are fixed or learned (a dense
    checkpoint, which has none, renews them), and outside it where they are held or a schedule writes them.
    """

    weight: Tensor
    bias: Tensor | None
    layout = LINEAR
    """How the Parameter stores the matrix ``(out, in)``; one of ``nmkernels.layouts``."""
    dense_type: type[nn.Module] = nn.Linear
    """What the layer was made from, and becomes again."""
    own_gemms = False
    """Whether the layer multiplies W̃ by a plan. Otherwise torch does (a convolution), and no recipe reaches its GEMMs."""

    def _start(self, pattern: Pattern) -> None:
        WeightState.__init__(self, pattern)
        self.put_in_order()

    # ---- the weight

    @property
    def parameter(self) -> Tensor:
        """The Parameter that an optimizer updates; ``weight`` is another one while FSDP2 has it unsharded."""
        return self.weight if self.gather is None else self.gather.parameter

    @property
    def master(self) -> Tensor:
        """The dense weight as ``(out, in)``, the Parameter itself or a view of it; of a sharded one this rank's shard."""
        weight = local(self.parameter)
        return weight if self.layout == LINEAR else as_matrix(weight, self.layout)

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)`` of the weight, whole where it is sharded."""
        return matrix_shape(self.parameter.shape, self.layout)

    @property
    def grouped(self) -> Tensor:
        """``master`` with its columns in the order in which a finished weight is N:M; a copy where that is not their own."""
        return self.master if self.columns is None else self.master.index_select(1, self.columns.to(self.weight.device))

    @property
    def home(self) -> tuple[nn.Module, str]:
        """The module that has the Parameter, and its name there."""
        return self, "weight"

    def computed(self, *keys: str) -> str:
        """What computes the weight, or another tensor of ``keys``, from others, and how to undo that; empty where it is a Parameter."""
        module, name = self.home
        reasons = (computed_by(module, name if key == "weight" else key) for key in keys or ("weight",))
        return next(filter(None, reasons), "")

    def check_computed(self) -> None:
        """Raise ``RecipeError`` where a recipe drives the layer and its weight is no longer a Parameter."""
        reason = self.computed() if self.governed and not self.finished else ""
        if reason:
            raise RecipeError(f"{type(self).__name__}: the layer is in sparse training, and {reason}.")

    def put_in_order(self) -> None:
        """Put the Parameter's memory in the order of its matrix, which loading by assignment or moving may have changed; it stays the
        same Parameter."""
        if self.layout in MATRICES or is_sharded(self.parameter):
            return
        data, grad = self.parameter.data, self.parameter.grad
        right = ordered(data, self.layout)
        if right is not data:
            self.parameter.data = right
            if grad is not None:  # torch's fused optimizers go by memory and not by strides
                self.parameter.grad = ordered(grad, self.layout)

    def adopt_parameter(self) -> None:
        """Take up the Parameter that the layer now has: loading by assignment gives it another one, and moving gives it other memory."""
        self.put_in_order()
        self.take_buffers()
        for name, parameter in self.learned().items():
            if name not in ADAPTER:
                parameter.nm_learned = True  # type: ignore[attr-defined]
        weight: Any = self._parameters.get("weight")
        if self.gather is not None and is_sharded(weight):  # FSDP2 may have it unsharded
            self.gather.parameter = weight
            self.gather.install()

    def take_buffers(self) -> None:
        """Make plain buffers of the replicated DTensors that ``parallelize_module`` makes of them; a mask is split as the weight is."""
        weight: Any = self._parameters.get("weight")
        for name, buffer in self._buffers.items():
            if is_sharded(buffer):
                part: Any = buffer
                if is_sharded(weight) and part.shape == weight.shape and part.device_mesh == weight.device_mesh:
                    part = part.redistribute(weight.device_mesh, weight.placements)
                self._buffers[name] = local(part)

    # ---- loading, saving and moving the module

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        _, _, missing_keys, _, error_msgs = rest
        loads = self._loads(state_dict, prefix)
        self.take_buffers()
        # set_model_state_dict(full_state_dict=True) passes the present buffers where the checkpoint has none
        unfilled = {prefix + name for name, value in self._buffers.items() if value is not None and state_dict.get(prefix + name) is value}
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.drop()
        self.adopt_parameter()
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
        self.take_buffers()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # two moves may bring the weight back to its old address with other contents and the same version
        self.effective.release()
        learned = {name: p for name, p in self.learned().items() if name not in ADAPTER}
        tensors = {**self._buffers, **learned}
        before = {name: (t.detach(), None if t.grad is None else t.grad.detach()) for name, t in tensors.items() if t is not None}
        moved = super()._apply(*args, **kwargs)
        for name, (old, grad) in before.items():
            new = getattr(self, name)
            if old.dtype == new.dtype or new.dtype not in (torch.float16, torch.bfloat16):
                continue
            # numbers of the recipe, such as S-STE's scale, and what is learned: the weight, and what has its shape, are rounded alone
            if name in learned:
                new.grad = None
                new.data = old.to(new.device, torch.float32)
                new.grad = None if grad is None else grad.to(new.device, torch.float32)
            elif old.shape != self.shape:
                self._buffers[name] = old.to(new.device, torch.float32)
        self.adopt_parameter()
        return moved

    def train(self, mode: bool = True) -> NMWeight:
        self.effective.doubt()  # weights are often exchanged around an evaluation
        if not mode:
            warn_if_changed(self)
        return super().train(mode)

    # ---- what a recipe does with it

    def begin(self, final: WeightTransform, *transforms: WeightTransform, overwrite: bool = False) -> None:
        """Take from the present weight what ``transforms`` and ``final`` start from; without ``overwrite`` only if no checkpoint had it."""
        self.governed, self.final = True, final
        self.starts = tuple(dict.fromkeys((*transforms, *self.starts)))
        self.restored &= not overwrite
        if not self.restored:
            self.renew()

    def renew(self) -> None:
        """Take from the present weight what the transforms of ``begin`` start from, and zero the adapter.

        A Parameter that exists keeps its identity: an optimizer may have it.
        """
        for transform in dict.fromkeys((*self.starts, self.final)):
            for name, value in self._started(transform).items():
                if transform.reads.get(name) != "learned":
                    self.register_buffer(name, value)
                elif name in self._parameters:
                    present = getattr(self, name)
                    if present.shape != value.shape:
                        raise NMError(
                            f"its {name} have shape {tuple(present.shape)}, and {self.pattern}, which the present weights choose, "
                            f"needs {tuple(value.shape)}. Load the weights before sparsify_, or give the patterns: "
                            "LayerWise(rule=None, given=...)."
                        )
                    with torch.no_grad():
                        present.copy_(value)
                else:
                    parameter = nn.Parameter(value)
                    parameter.nm_learned = True  # type: ignore[attr-defined]  # for is_learned: torch.compile takes no class of its own
                    self.register_parameter(name, parameter)
        self.clear_adapter()
        self.drop()

    def _started(self, transform: WeightTransform) -> dict[str, Tensor]:
        """What ``transform`` takes once from the present weight, by name."""
        if type(transform).start is WeightTransform.start:
            return {}
        return transform.start(as_matrix(whole(self.parameter.detach()), self.layout))

    @torch.no_grad()
    def restore(self, values: dict[str, Tensor]) -> None:
        """Write ``values`` over what transforms start from, as loading a checkpoint does: ``begin`` leaves them."""
        for name, value in values.items():
            getattr(self, name).copy_(value)
        self.restored = True
        self.drop()

    def use(self, transform: WeightTransform | None, plan: GemmPlan) -> None:
        """From now on multiply W̃ = ``transform(W)``, or W where it is None, by ``plan``."""
        if transform is not None:
            plan.check(transform)
        self.plan = plan if self.own_gemms else plan.dense_layout
        if transform is not self.transform:
            self.transform = transform
            self.drop()

    def hold(self, values: dict[str, Tensor], in_place: bool = False) -> None:
        """Keep ``values``, which the transform reads, outside the state dict; ``in_place``: in the memory of those kept before."""
        for name, value in values.items():
            if in_place and name in self._buffers:
                getattr(self, name).copy_(value)
            else:
                self.register_buffer(name, value.to(self.master.device, copy=in_place), persistent=False)
        self.drop()

    def drop(self) -> None:
        """The weight, or what its transform reads, has changed: make W̃ again before use."""
        self.effective.drop()
        if self.gather is not None:
            self.gather.fresh = False

    def detach(self) -> None:
        """No optimizer is attached any more: make W̃ at every call, and let FSDP2 gather W."""
        self.effective.attached = False
        self.effective.release()
        if self.gather is not None:
            self.gather.remove()
            self.gather = None

    def as_pruned(self) -> Compressed | None:
        """The compressed weight that ``prune_`` has made, on the weight's device, if W still has its bits; else None."""
        packed = self.effective.pruned
        if packed is None:
            return None
        weight = self.master.detach()
        if type(weight) is not Tensor or weight.is_meta or (weight.shape, weight.dtype) != (packed.shape, packed.dtype):
            return None
        packed, words = packed.to(weight.device), INTEGERS[weight.dtype.itemsize]  # as bits, NaN equals itself, and -0.0 is not 0.0
        return packed if torch.equal(packed.dense().view(words), weight.view(words)) else None

    @torch.no_grad()
    def finish(self, weight: Tensor | None, columns: Tensor | None) -> None:
        """Replace W by ``weight`` ``(out, in)``, N:M in the order ``columns``, and forget all else of the recipe but the adapter. None: W
        is what ``prune_`` has made, and stays."""
        if weight is not None:
            self.master.copy_(weight)
            self.effective.pruned = None
        self.use(None, STRAIGHT_THROUGH)
        self.finished, self.columns = True, columns
        self.adapts = True  # also one that is set later, such as an absorbed LoRA
        self.remove_extras(keep_adapter=True)
        self.effective.release()

    def remove_extras(self, keep_adapter: bool = False) -> None:
        """Remove the tensors that a transform reads."""
        for name in [name for name in (*self._buffers, *self._parameters) if name.startswith("nm_")]:
            if not (keep_adapter and name in ADAPTER):
                delattr(self, name)
        self.seed, self.starts = None, ()

    # ---- extra tensors of the transform, and its metrics

    @torch.no_grad()
    def clear_adapter(self) -> None:
        """Have the adapter, if there is one, add nothing: R = 0."""
        adapter = adapter_of(self)
        if adapter is not None:
            adapter[1].zero_()

    def learned(self) -> dict[str, nn.Parameter]:
        """The Parameters that the recipe has added to the layer, by name."""
        return {name: p for name, p in self._parameters.items() if name.startswith("nm_") and p is not None}

    def takes_part(self) -> bool:
        """Whether the last backward passes gave the weight, or what is learned with it, a gradient."""
        return self.parameter.grad is not None or any(p.grad is not None for p in self.learned().values())

    @property
    def mask_pattern(self) -> Pattern:
        """The pattern of the present mask; a schedule may go through others before the layer's own."""
        return self.pattern if self.transform is None else self.transform.pattern

    def _extras(self, transform: WeightTransform) -> list[Tensor]:
        """What ``transform`` reads in addition to the weight."""
        return [getattr(self, name) for name in transform.reads]

    def watched(self) -> dict[str, Tensor]:
        """Metrics of the present transform, by name."""
        return {} if self.transform is None else self.transform.watch(self.master.detach(), *self._extras(self.transform))

    def kept(self) -> Tensor:
        """Which weights the present transform does not prune, bool ``(out, in)``."""
        transform = self.transform or self.final
        return transform.kept(self.master.detach(), *self._extras(transform))

    def penalties(self) -> dict[str, Tensor]:
        """Gradients of the present transform's own loss term at the present weight, by name; see ``WeightTransform.penalty``."""
        return {} if self.transform is None else self.transform.penalty(self.master.detach(), *self._extras(self.transform))

    # ---- W̃

    def effective_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """W̃ ``(out, in)``, which the next forward pass multiplies, detached; None for the weight's dtype."""
        if self.transform is None:
            return self.master.detach().to(dtype or self.master.dtype)
        return self.effective.dense((self.master, self.transform, self._extras(self.transform), dtype or self.master.dtype))

    def differentiable_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """W̃ of ``weight``, both as the Parameter is stored; the gradient reaches ``weight`` by the transform's rule."""
        transform, layout = self.transform, self.layout
        if transform is None:
            return weight
        extras = self._extras(transform)

        def made() -> Tensor:
            # functional_call may pass a weight in any memory order, and it only has to be read
            matrix = self.effective.dense((as_matrix(ordered(weight, layout), layout), transform, extras, dtype))
            return as_stored(matrix, layout, weight.shape)

        if is_tracing():
            return constant(made)
        used = transformed(weight, made(), transform, extras, layout)
        if self.watch is not None and not torch.compiler.is_compiling():
            self.watch.see(used, weight, 0)
        return used

    def problems(self, tokens: int) -> list[tuple[Problem, ...]]:
        """The GEMMs that the plan leaves open, for an input of ``tokens`` rows; none where torch multiplies."""
        return []

    def tunable(self, counts: Sequence[int]) -> Iterator[tuple[str, NMWeight, Sequence[int]]]:
        """The layers that ``nm.tune`` finds here, with their names in this module and the rows of their inputs: this one."""
        yield "", self, counts

    __prepare_scriptable__ = refuse_script
    qconfig = QuantisedByClass()

    def _uses(self) -> str:
        use = "finished" if self.finished else "dense" if self.transform is None else type(self.transform).__name__
        return f"pattern={self.pattern}, uses={use}{'' if self.integers is None else f', values={self.integers[0]}'}"


def warn_if_changed(layer: NMWeight) -> None:
    """Warn where a finished weight is no longer N:M: a merged LoRA or a dense optimizer changes it and bumps no version.

    At most 64 rows are checked, as this runs wherever a model is saved or evaluated; such a merge touches every row.
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


def is_learned(entry: Any) -> bool:
    """Whether a Parameter, or a pair (name, Parameter), is one that a recipe learns; of a copy only the name tells."""
    name, parameter = entry if isinstance(entry, tuple) else ("", entry)
    return getattr(parameter, "nm_learned", False) or str(name).rpartition(".")[2].startswith("nm_")
