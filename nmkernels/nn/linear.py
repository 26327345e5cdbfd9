"""SparseLinear: a drop-in nn.Linear that trains a dense master weight and multiplies its N:M form.

What autocast would do with a linear layer's operands; an autograd Function has to do it by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..autograd import HardMask, WeightTransform, linear, transformed
from ..gemm.plan import GemmPlan
from ..gemm.problem import Problem
from ..gemm.route import Operands, problems_of
from ..layouts import CONV1D, LINEAR, MATRICES, ORDERS, REDUCED, as_matrix, as_stored, matrix_shape, ordered
from ..ops import is_nm
from ..ops.pack import positions
from ..pattern import NMError, Pattern, PatternLike, RecipeError
from ..shards import is_sharded, local, whole
from .adapter import ADAPTER, adapter_of, add_adapter, set_adapter
from .classes import QuantisedByClass, computed_by
from .effective import EffectiveWeight
from .gather import Gather, gathered
from .parallel import tensor_parallel
from .traces import PROXY, constant, is_tracing, leaf, refuse_script


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of GEMMs under the autocast that is on for x's device, or None."""
    if x.is_cpu:  # three times as fast as asking the device for its name
        return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    kind = x.device.type
    # autocast does not know the meta device and raises when asked about it
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def castable(dtype: torch.dtype) -> bool:
    """Whether autocast casts tensors of ``dtype``: floating point up to 32 bits."""
    return dtype.is_floating_point and dtype != torch.float64


class NMWeight(nn.Module):
    """What every layer with an N:M weight shares: pattern, transform, plan, and the kept W̃.

    ``transform`` is W -> W̃, or None where the layer uses its weight as it is (a dense phase, or after ``finish``); ``final`` is the
    one that ``finish`` will apply. What they read beside the weight are tensors ``nm_*``: in the state dict where they are fixed
    or learned (a dense checkpoint, which has none, renews them), outside it where they are held or a schedule writes them.
    ``columns`` is the order in which a finished weight is N:M where that is not its own, else None. ``seed`` is int64 (seed, offset) of the
    estimates that ``plan`` draws. ``adapts``: a low-rank adapter (``nm_left``, ``nm_right``), where there is one, takes part.
    ``governed``: a handle drives the layer, or did; ``stepped``: an attached optimizer has made a step. ``watch``: sees the result of each
    call until the first backward pass.
    """

    weight: Tensor
    bias: Tensor | None
    pattern: Pattern
    layout = LINEAR
    """How the Parameter stores the matrix ``(out, in)``; one of ``nmkernels.layouts``."""
    dense_type: type[nn.Module] = nn.Linear
    """What the layer was made from, and becomes again."""
    own_gemms = True
    """False where torch multiplies W̃ by itself (a convolution): then what a recipe does to the GEMMs is none of the layer's."""

    def _start(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.final: WeightTransform = HardMask(pattern)
        self.transform: WeightTransform | None = self.final
        self.plan: GemmPlan = GemmPlan("auto", "auto", n=pattern.n, m=pattern.m)
        self.seed: Tensor | None = None
        self.starts: tuple[WeightTransform, ...] = ()
        self.adapts = False
        self.columns: Tensor | None = None
        self.restored = False
        self.governed = False
        self.finished = False
        self.ran = self.stepped = False
        self.effective = EffectiveWeight()
        self.gather: Gather | None = None
        self.watch: Any = None
        self.put_in_order()

    @property
    def parameter(self) -> Tensor:
        """The Parameter that an optimizer has; ``weight`` is another one while FSDP2 has it unsharded."""
        return self.weight if self.gather is None else self.gather.parameter

    @property
    def master(self) -> Tensor:
        """The dense master weight as ``(out, in)``, the parameter itself or a view of it; of a sharded one this rank's shard."""
        weight = local(self.parameter)
        return weight if self.layout == LINEAR else as_matrix(weight, self.layout)

    def matrix(self, tensor: Tensor) -> Tensor:
        """``tensor``, stored as the Parameter is, as ``(out, in)``: the same memory; see ``nmkernels.layouts``."""
        return as_matrix(tensor, self.layout)

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)`` of the weight, whole where it is sharded."""
        return matrix_shape(self.parameter.shape, self.layout)

    @property
    def grouped(self) -> Tensor:
        """The weight ``(out, in)`` in the order of columns in which it is N:M once finished; a copy where that is not its own."""
        return self.master if self.columns is None else self.master.index_select(1, self.columns.to(self.weight.device))

    @property
    def multiplied(self) -> Tensor:
        """A tensor like the weight ``(out, in)`` that this rank's GEMMs multiply, which FSDP2 gathers whole; not its contents."""
        gather = self.gather
        if gather is None or gather.param is None:
            return self.master
        size = gather.param._orig_size
        return self.master.new_empty(1, 1).expand(*matrix_shape(size, self.layout))

    @property
    def mask_pattern(self) -> Pattern:
        """The pattern of the mask that is in use; a schedule may go through others before the layer's own."""
        return self.pattern if self.transform is None else self.transform.pattern

    def computed(self, *keys: str) -> str:
        """What computes the weight, or another tensor of ``keys``, from others, and how to undo that; empty where it is a Parameter."""
        return next((said for key in keys or ("weight",) if (said := computed_by(self, key))), "")

    def check_computed(self) -> None:
        """Raise ``RecipeError`` where a recipe drives the layer and its weight is no Parameter any more."""
        said = self.computed() if self.governed and not self.finished else ""
        if said:
            raise RecipeError(f"{type(self).__name__}: the layer is in sparse training, and {said}.")

    @property
    def flattened(self) -> bool:
        """Whether the weight is a part of a flat tensor, as FullyShardedDataParallel (FSDP1) makes it one."""
        weight = self._parameters.get("weight")
        return weight is None or weight.dim() != len(ORDERS[self.layout])

    @property
    def reduced(self) -> int:
        """The dimension of the Parameter along which groups run."""
        return REDUCED[self.layout]

    @property
    def inputs(self) -> int:
        """How many inputs there are along that dimension, among which groups have to fit: of a convolution the channels."""
        return int(self.parameter.shape[self.reduced])

    def put_in_order(self) -> None:
        """Have the Parameter's memory in the order of its matrix, where loading by assignment or moving has changed that; it stays the
        same Parameter."""
        if self.layout in MATRICES or is_sharded(self.parameter):
            return
        data, grad = self.parameter.data, self.parameter.grad
        right = ordered(data, self.layout)
        if right is not data:
            self.parameter.data = right
            if grad is not None:  # torch's fused optimizers go by memory and not by strides
                self.parameter.grad = ordered(grad, self.layout)

    def use(self, transform: WeightTransform | None, plan: GemmPlan) -> None:
        """From now on multiply W̃ = ``transform(W)``, or W where it is None, by ``plan``."""
        if transform is not None:
            plan.check(transform)
        self.plan = plan if self.own_gemms else plan.dense_layout
        if transform is not self.transform:
            self.transform = transform
            self.drop()

    def drop(self) -> None:
        """The weight, or what its transform reads, has changed: W̃ is made anew before it is multiplied again."""
        self.effective.drop()
        if self.gather is not None:
            self.gather.fresh = False

    def adopt_shard(self) -> None:
        """Where the weight is sharded, have W̃ made from the shard as it is gathered."""
        self.take_buffers()
        weight = self._parameters["weight"]
        if weight is None or not is_sharded(weight):
            return  # FSDP2 may have it unsharded
        if self.gather is None:
            self.gather = Gather(self, weight)
        else:
            self.gather.parameter = weight
            self.gather.install()

    def take_buffers(self) -> None:
        """Have plain buffers, of which ``parallelize_module`` makes replicated DTensors; a mask is split as the weight is."""
        weight: Any = self._parameters["weight"]
        for name, buffer in self._buffers.items():
            if is_sharded(buffer):
                part: Any = buffer
                if is_sharded(weight) and part.shape == weight.shape and part.device_mesh == weight.device_mesh:
                    part = part.redistribute(weight.device_mesh, weight.placements)
                self._buffers[name] = local(part)

    def begin(self, *transforms: WeightTransform) -> None:
        """Take from the present weight what ``transforms`` and ``final`` start from, unless a checkpoint has restored it.

        A Parameter that is there already keeps its identity: an optimizer may have it.
        """
        self.starts = tuple(dict.fromkeys((*transforms, *self.starts)))
        if self.restored:
            return
        for transform in dict.fromkeys((*self.starts, self.final)):
            for name, value in self._started(transform).items():
                if transform.reads.get(name) != "learned":
                    self.register_buffer(name, value)
                elif name in self._parameters:
                    with torch.no_grad():
                        getattr(self, name).copy_(value)
                else:
                    parameter = nn.Parameter(value)
                    parameter.nm_learned = True  # type: ignore[attr-defined]  # so that an optimizer can tell it
                    self.register_parameter(name, parameter)
        self._clear_adapter()
        self.drop()

    @torch.no_grad()
    def _clear_adapter(self) -> None:
        adapter = adapter_of(self)
        if adapter is not None:
            adapter[1].zero_()

    def _started(self, transform: WeightTransform) -> dict[str, Tensor]:
        """What ``transform`` takes once from the present weight, by name."""
        if type(transform).start is WeightTransform.start:
            return {}
        return transform.start(self.matrix(whole(self.parameter.detach())))

    def add_adapter(self, left: Tensor) -> None:
        """Add a low-rank adapter, L = ``left`` ``(in, r)`` and R = 0, which trains where the weight does."""
        rows, cols = self.master.shape
        left, trains = left.to(self.weight), self.weight.requires_grad
        right = left.new_zeros(left.shape[1], rows)
        set_adapter(self, nn.Parameter(left, trains), nn.Parameter(right, trains), rows, cols)

    def hold(self, values: dict[str, Tensor]) -> None:
        """Keep what the transform holds until it is renewed."""
        for name, value in values.items():
            self.register_buffer(name, value.to(self.master.device), persistent=False)
        self.drop()

    def learned(self) -> dict[str, nn.Parameter]:
        """The Parameters that the recipe has added to the layer, by name."""
        return {name: p for name, p in self._parameters.items() if name.startswith("nm_") and p is not None}

    def takes_part(self) -> bool:
        """True if the last backward passes gave the weight, or what is learned beside it, a gradient."""
        return self.parameter.grad is not None or any(p.grad is not None for p in self.learned().values())

    def watched(self) -> dict[str, Tensor]:
        """Figures of the present transform, by name."""
        return {} if self.transform is None else self.transform.watch(self.master.detach(), *self._extras(self.transform))

    def kept(self) -> Tensor:
        """Which weights the present transform does not prune, bool ``(out, in)``."""
        transform = self.transform or self.final
        return transform.kept(self.master.detach(), *self._extras(transform))

    def penalties(self) -> dict[str, Tensor]:
        """Gradients of the present transform's own loss term at the present weight, by name; see ``WeightTransform.penalty``."""
        transform = self.transform
        return {} if transform is None else transform.penalty(self.master.detach(), *self._extras(transform))

    def feed(self, values: dict[str, Tensor]) -> None:
        """Write the schedule's numbers into the buffers from which the transform reads them."""
        for name, value in values.items():
            if name in self._buffers:
                getattr(self, name).copy_(value)
            else:
                self.register_buffer(name, value.to(self.master.device, copy=True), persistent=False)
        self.drop()

    def forget(self, adapter: bool = True) -> None:
        """Remove every tensor that a transform reads, as before the recipe, and the adapter unless told to leave it."""
        kept = () if adapter else ADAPTER
        for name in [name for name in (*self._buffers, *self._parameters) if name.startswith("nm_") and name not in kept]:
            delattr(self, name)
        self.seed, self.starts = None, ()

    def _extras(self, transform: WeightTransform) -> list[Tensor]:
        return [getattr(self, name) for name in transform.reads]

    def transformed(self, transform: WeightTransform) -> Tensor:
        """What ``transform`` makes of the present weight ``(out, in)``, detached, as a new tensor."""
        return transform(self.master.detach(), *self._extras(transform))

    def effective_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """W̃ ``(out, in)``, the weight that the next forward pass multiplies, detached; in the weight's dtype unless told."""
        if self.transform is None:
            return self.master.detach().to(dtype or self.master.dtype)
        return self.effective.dense((self.master, self.transform, self._extras(self.transform), dtype or self.master.dtype))

    def differentiable_weight(self, x: Tensor) -> Tensor:
        """W̃ as the Parameter stores it, for torch to multiply by x: its gradient goes to the Parameter. Under autocast in that dtype."""
        transform, weight, layout, extras = self.transform, self.weight, self.layout, []
        if transform is None:
            return weight
        dtype, cast = weight.dtype, autocast_dtype(x)
        if cast is not None and castable(dtype):
            dtype = cast
        for name in transform.reads:
            extras.append(getattr(self, name))

        def made() -> Tensor:
            # functional_call may pass a weight in any memory order, and it only has to be read
            used = self.effective.dense((as_matrix(ordered(weight, layout), layout), transform, extras, dtype))
            return as_stored(used, layout, weight.shape)

        if is_tracing():
            return constant(made)
        y = transformed(weight, made(), transform, extras, layout)
        if self.watch is not None and not torch.compiler.is_compiling():
            self.watch.see(y, weight, 0)
        return y

    def problems(self, tokens: int) -> list[tuple[Problem, ...]]:
        """The GEMMs that its plan leaves open, for so many rows of the input and the autocast that is on; those of a tuple together."""
        if self.transform is None or not self.own_gemms:
            return []
        cast, dtype = autocast_dtype(self.weight), self.weight.dtype
        return problems_of(self.plan, self.transform, self.multiplied, cast if cast is not None and castable(dtype) else dtype, tokens)

    def tunable(self, counts: Sequence[int]) -> Iterator[tuple[str, NMWeight, Sequence[int]]]:
        """The layers that ``nm.tune`` finds here, with their names in this module and the rows of their inputs: this one."""
        yield "", self, counts

    def as_op(self, x: Tensor) -> tuple[tuple[Any, ...], str]:
        """The arguments of ``nm_linear`` for the input x, and in words what the layer does instead of leaving it to the dispatcher; for
        ``nm.explain``."""
        transform, kind = self.transform, type(self).__name__
        sharded = self.gather is not None or is_sharded(self.weight)
        if transform is None or not self.own_gemms or not transform.traits.is_nm or sharded:
            why = "its weight is sharded" if sharded else "torch multiplies its weight"
            raise NMError(
                f"explain: {kind} in its present state calls no op for its GEMM: {why}. What makes its mask: "
                "nm.explain('mask', layer.master, layer.pattern). What a compressed layer calls: nm.compress_(model)."
            )
        cast = autocast_dtype(x)
        dtype = cast if cast is not None and castable(self.weight.dtype) else self.weight.dtype
        x = x.to(cast) if cast is not None and castable(x.dtype) else x
        weight, extras = self.master.detach(), self._extras(transform)
        how = self.effective.route((weight, transform, extras, dtype), self.plan, x) if self.plan.packs else None
        packed = how is not None and how.fprop == "packed"
        rows = transform.packed(weight, *extras, dtype=dtype, layout=how.layout if how is not None and packed else "canonical").rows
        assert rows is not None
        bias = None if self.bias is None else self.bias.to(x.dtype)
        args = x, rows.values, positions(rows), rows.pattern.n, rows.pattern.m, self.shape[1], bias
        if not packed:
            return (
                args,
                "not called by this layer: W̃ in dense layout, for torch's GEMM, is what its plan says or is faster for so many tokens",
            )
        by = "" if how is None else how.by[0]
        return args, f"this layer names its kernel, of backend {by!r}, which was measured fastest" if by else ""

    def forward(self, input: Tensor) -> Tensor:
        """y = x W̃ᵀ + b, and the adapter's part; x ``(..., in)``. Under autocast the mask comes from the master weight."""
        x = input
        if isinstance(x, PROXY):
            return leaf(self, x)
        self.ran = True
        if "weight" not in self._parameters:
            self.check_computed()
        gather = self.gather
        if (gather is not None or type(x) is not Tensor) and is_sharded(self.weight):
            y = tensor_parallel(self, x)
        elif gather is None:
            y = self._multiply(x, self.weight, None, self.bias, self.plan)
        else:
            y = self._multiply(x, *gathered(self, x), self.bias, self.plan.dense_layout)
        adapter = adapter_of(self) if self.adapts else None
        return y if adapter is None else add_adapter(y, x, *adapter)

    def _multiply(self, x: Tensor, weight: Tensor, used: Tensor | Operands | None, bias: Tensor | None, plan: GemmPlan) -> Tensor:
        """y = x W̃ᵀ + b of a plain ``weight``, as the Parameter is stored; ``used``: W̃, stored likewise, where that is known."""
        transform = self.transform
        if self.layout == CONV1D:
            weight, used = weight.t(), used.t() if isinstance(used, Tensor) else used
        if transform is None:
            return F.linear(x, weight, bias)
        dtype, cast, extras = weight.dtype, autocast_dtype(x), []
        if cast is not None:
            dtype = cast if castable(dtype) else dtype
            x = x.to(cast) if castable(x.dtype) else x
        elif self.gather is not None:
            dtype = x.dtype  # of FSDP2's mixed precision
        for name in transform.reads:  # a loop, since a comprehension is a call
            extras.append(getattr(self, name))
        if plan.fprop == "auto" and torch.are_deterministic_algorithms_enabled():
            plan = plan.dense_layout
        if is_tracing():
            source = weight, transform, extras, dtype
            return F.linear(x, constant(lambda: self.effective.dense(source)), bias if bias is None else bias.to(dtype))
        if used is None:
            used = self.effective.read((weight, transform, extras, dtype), plan, x)
        elif isinstance(used, Tensor):
            used = used.to(dtype)
        y = linear(x, weight, used, bias, plan, self.seed, transform, extras)
        if self.watch is not None and not torch.compiler.is_compiling():
            self.watch.see(y, weight, 1)
        return y

    __prepare_scriptable__ = refuse_script
    qconfig = QuantisedByClass()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        _, _, missing_keys, _, error_msgs = rest
        given = self._given(state_dict, prefix)
        self.take_buffers()
        # set_model_state_dict(full_state_dict=True) gives back as they are the buffers that a checkpoint does not have
        own = {prefix + name for name, value in self._buffers.items() if value is not None and state_dict.get(prefix + name) is value}
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.put_in_order()
        self.drop()
        self.adopt_shard()  # loaded by assignment it is another Parameter
        buffers = [name for name in self._buffers if name.startswith("nm_") and name not in self._non_persistent_buffers_set]
        saved = [prefix + name for name in (*buffers, *self.learned())]
        absent = [key for key in saved if key not in state_dict or key in own]
        self.restored = bool(saved) and not absent
        if absent and given:
            # a dense checkpoint: they belonged to other weights
            missing_keys[:] = [key for key in missing_keys if key not in absent]
            taken = [name for key in absent if (name := key.rpartition(".")[2]) not in ADAPTER]
            if self.stepped:
                self._clear_adapter()  # it was learned with other weights, and the dense model has none
                if taken:
                    warnings.warn(
                        f"load_state_dict: dense weights were loaded in the middle of a run, and what the layers took from earlier ones "
                        f"({', '.join(taken)}) stays. handle.renew_masks() takes it from the new weights.",
                        stacklevel=2,
                    )
                return
            try:
                self.begin()
            except NMError as error:
                error_msgs.append(f"layer {prefix.rstrip('.')!r}: {error}")

    def _given(self, state_dict: dict[str, Any], prefix: str) -> bool:
        """Whether ``state_dict`` has the weight."""
        return prefix + "weight" in state_dict  # a hook may take it out

    def train(self, mode: bool = True) -> NMWeight:
        self.effective.doubt()  # weights are often exchanged around an evaluation
        if not mode:
            self._warn_if_changed()
        return super().train(mode)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self._warn_if_changed()
        self.take_buffers()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _warn_if_changed(self) -> None:
        """Warn where a finished weight is not N:M any more: a merged LoRA or a dense optimizer changes it and bumps no version.

        Such a merge touches every row, and 64 of them are looked at: this is called wherever a model is saved or evaluated.
        """
        # a shard or a fake tensor cannot tell
        dims = len(ORDERS[self.layout])
        if not self.finished or self.weight.is_meta or self.weight.dim() != dims or type(self.weight.data) is not Tensor:
            return
        rows = self.master.detach()[:: -(-self.master.shape[0] // 64) or 1]
        if not is_nm(rows if self.columns is None else rows.index_select(1, self.columns.to(rows.device)), self.pattern):
            warnings.warn(
                f"{type(self).__name__} {tuple(self.master.shape)} (out, in): the weight was {self.pattern} when the recipe finished "
                "and is not any more: something has changed it since, such as a merged LoRA. The layer computes with what it holds, as a "
                "dense one, and compress_ will refuse it. To keep it sparse, do not merge: have the LoRA beside the weight, by "
                "nm.integrations.peft.absorb(model) or nm.nn.set_adapter(layer, A.t(), r * scaling * B.t(), out, in); or prune again: "
                "densify_, sparsify_, finish.",
                stacklevel=3,
            )

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # two moves may bring the weight back to its old address with other contents and the same version
        self.effective.release()
        moved = super()._apply(*args, **kwargs)
        self.put_in_order()
        self.adopt_shard()
        return moved

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, {self._uses()}"

    def _uses(self) -> str:
        use = "finished" if self.finished else "dense" if self.transform is None else type(self.transform).__name__
        return f"pattern={self.pattern}, uses={use}"


class SparseLinear(NMWeight, nn.Linear):  # type: ignore[misc]  # torch types bias as always there
    """An ``nn.Linear`` whose forward uses the N:M form of its dense weight: y = x W̃ᵀ + b, W̃ = M(W) ⊙ W.

    The parameter ``weight`` ``(out, in)`` stays dense and receives the straight-through gradient ∂L/∂W̃. Groups run along
    ``in_features``. On its own it is STE; recipes (``sparsify_``) change the transform with the phase of training. Each GEMM multiplies the
    weight in dense layout or packed, whichever is faster by rule or as measured by ``nm.tune``; under
    ``torch.use_deterministic_algorithms(True)`` in dense layout.

    Args:
        in_features, out_features, bias, device, dtype: as for ``nn.Linear``.
        pattern: ``"N:M"`` or a ``Pattern``; M must divide ``in_features``.

    Raises:
        PatternError: the pattern is not usable.
        ShapeError: M does not divide ``in_features``.

    Example:
        >>> layer = SparseLinear(8, 4, pattern="2:4")
        >>> layer(torch.randn(3, 8)).shape, int((layer.effective_weight() != 0).sum())
        (torch.Size([3, 4]), 16)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        pattern: PatternLike = "2:4",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        p = Pattern(pattern)
        p.check_divides("SparseLinear", in_features, "in_features")
        super().__init__(in_features, out_features, bias, device, dtype)
        self._start(p)


OWN_ATTRIBUTES = frozenset(
    {
        "pattern",
        "final",
        "transform",
        "plan",
        "seed",
        "starts",
        "adapts",
        "columns",
        "restored",
        "governed",
        "finished",
        "ran",
        "stepped",
        "effective",
        "gather",
        "watch",
    }
)
"""What ``NMWeight._start`` adds to a module, and what ``make_dense_`` takes away again."""
