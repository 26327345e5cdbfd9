"""How a layer whose weight ranks share reads it: FSDP2 gathers W̃, made from the shards, and tensor parallelism multiplies a part.

**FSDP2** (``torch.distributed.fsdp.fully_shard``). The transform runs on this rank's shard, inside FSDP2's all-gather, and the layer
multiplies what was gathered. So no rank has an unsharded W, a copy of W̃ or a mask beyond its shard, and the wire carries W̃, packed where
that is N:M. FSDP2 looks for ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` on the local tensor of the sharded Parameter, so they are
two attributes there. A transform with a gradient rule of its own needs W itself: W is then gathered, in its own dtype, since masks come
from the master weight, and transformed at every forward pass.

**Tensor parallelism** (``ColwiseParallel``, ``RowwiseParallel``). Groups lie along ``in``. Column parallel splits ``out``, row parallel
``in`` between groups; W̃ of a part is then that part of the whole W̃.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..gemm.forms import CANONICAL
from ..gemm.route import Operands, operands
from ..layouts import LINEAR, REDUCED, as_matrix, as_stored
from ..ops import Compressed, decompress
from ..pattern import DtypeError, NMError, Pattern, ShapeError
from ..shards import is_sharded, local
from .weight import NMWeight

HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


# ---- FSDP2


class Gather:
    """The all-gather of one layer's weight, from ``connect`` to ``remove``.

    Attributes:
        parameter: the sharded Parameter; ``layer.weight`` is another one while FSDP2 has the weight unsharded.
        fsdp_param: FSDP2's object for it.
        fresh: the weight was gathered since it, or its transform, last changed. FSDP2 raises no error where the two attributes were lost
            and it gathers W, nor where it keeps weights unsharded and gathers nothing: this flag detects both.
        master: W, where that was gathered; None where W̃ was.
        packed: W̃ as it was gathered packed, until FSDP2 frees it; None where it was gathered in dense layout.
        hollow: the GEMMs read ``packed``, so W̃ need not be expanded: the unsharded Parameter has no memory and only gets the gradient.
    """

    def __init__(self, layer: NMWeight, fsdp_param: Any) -> None:
        self.layer, self.parameter, self.fsdp_param = layer, layer.weight, fsdp_param
        self.fresh = self.hollow = False
        self.master: Tensor | None = None
        self.packed: Compressed | None = None
        self._form: tuple[Pattern | None, torch.dtype, bool] | None = None
        """What a gather carries: the pattern of a packed W̃, its dtype, and whether it is W̃ (else W)."""
        self._moved: Tensor | None = None
        self.install()
        self._forget_buffers()

    def install(self) -> None:
        """Put the two attributes where FSDP2 looks for them."""
        self.fresh = False
        shard = local(self.parameter)
        for name in (*HOOKS, "to") if self.fsdp_param.offload_to_cpu else HOOKS:
            setattr(shard, name, getattr(self, name))

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """``shard.to`` under CPU offload, where FSDP2 looks for the attributes on the tensor that it has moved."""
        moved = Tensor.to(local(self.parameter), *args, **kwargs)
        for name in HOOKS:
            setattr(moved, name, getattr(self, name))
        self._moved = moved
        return moved

    def remove(self) -> None:
        """Let FSDP2 gather the weight as it is."""
        shard = local(self.parameter)
        for name in (*HOOKS, "to"):
            shard.__dict__.pop(name, None)
        self._forget_buffers()

    @torch.no_grad()
    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        layer, shard = self.layer, local(self.parameter) if self._moved is None else self._moved
        self._moved = None
        if shard.dtype != self.fsdp_param.orig_dtype:
            # FSDP2 does not notice where it gathers several dtypes, which go as bytes
            raise DtypeError(
                f"SparseLinear: the sharded model was cast to {shard.dtype} after its first forward pass, and FSDP2 still gathers "
                f"{self.fsdp_param.orig_dtype}. Cast it before fully_shard, or set MixedPrecisionPolicy(param_dtype=...)."
            )
        transform, ranks = layer.transform, mesh.size(-1)  # the last dimension of an HSDP mesh is the one that shards
        straight = transform is None or not transform.traits.own_gradient
        dtype = mp_policy.param_dtype or shard.dtype if straight else shard.dtype
        packed = transform if straight and self._packs(outer_size, ranks) else None
        form = None if packed is None else packed.pattern, dtype, straight
        if form != self._form:
            self._forget_buffers()
            self._form = form
        extras = [] if transform is None else [extra.to(shard.device) for extra in layer._extras(transform)]
        if packed is not None:
            rows = packed.packed(shard, *extras, dtype=dtype).rows
            assert isinstance(rows, Compressed)
            return (rows.values, rows.indices), (form, outer_size)
        used = shard
        if transform is not None and straight:
            used = as_stored(transform(as_matrix(shard, layer.layout), *extras), layer.layout, shard.shape).contiguous()
        used, missing = used.to(dtype), -(-outer_size[0] // ranks) - used.shape[0]
        if missing > 0 and used.shape[1:] == outer_size[1:]:  # FSDP2 requires as many rows as the largest shard has
            used = torch.cat([used, used.new_zeros(missing, *used.shape[1:])])
        return (used,), (form, outer_size)

    def fsdp_post_all_gather(self, outs: tuple[Tensor, ...], meta: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        (pattern, _, straight), size = meta
        self.fresh = True
        self.master = None if straight else outs[0][: size[0]]
        # a new one for each gather: its layouts are cached by versions, which FSDP2 does not change
        self.packed = None if pattern is None else Compressed(outs[0], outs[1], pattern, (size[0], size[1]))
        if pattern is None and outs[0].dtype == dtype:
            return None if out is not None else (outs[0], ())
        weight = outs[0].new_empty(size, dtype=dtype) if out is None else local(out)
        # with tensor parallelism out is a DTensor, and autograd has saved its local tensor
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):  # type: ignore[attr-defined]
            if self.packed is None:
                weight.copy_(outs[0][: size[0]])
            elif self.hollow and out is not None:  # a new Parameter, as after a resume, needs its memory once
                weight.untyped_storage().resize_(0)
            else:
                decompress(self.packed, out=weight)
        return (weight, (weight,)) if out is None else None

    def read(self, x: Tensor) -> tuple[Tensor, Tensor | Operands | None]:
        """The weight that gets the gradient of a call with the input ``x``; and W̃ as the call reads it, None where W was gathered."""
        if not self.fresh:
            raise NMError(
                "SparseLinear: the sharded weight was not gathered since it last changed. Either FSDP2 keeps weights unsharded between "
                "steps (set_reshard_after_backward(False), unshard()), and still shows the weights of the step before; or the model was "
                "moved or loaded behind the layer's back, and handle.refresh() puts it right."
            )
        layer, master, c, hollow = self.layer, self.master, self.packed, self.hollow
        weight = layer.weight.to_local() if is_sharded(layer.weight) else layer.weight  # type: ignore[attr-defined]
        if master is not None:
            return (weight if master.dtype == weight.dtype else _Substitute.apply(weight, master)), None
        if c is None or layer.transform is None:
            return weight, weight.detach()
        if torch.compiler.is_compiling():
            return weight, weight.detach() if not hollow else c.dense()
        # every rank gathers the same, and may then choose its own kernel; the next gather follows this call
        self.hollow = False
        if x.dtype == c.dtype and not torch.are_deterministic_algorithms_enabled():
            how = layer.effective.route((weight, layer.transform, (), c.dtype), layer.plan, x)
            if how.fprop == how.dgrad == "packed" and how.layout == CANONICAL:
                self.hollow = True
                return weight, operands(c, backends=how.backends)
        return weight, c.dense() if hollow else weight.detach()

    def _packs(self, size: torch.Size, ranks: int) -> bool:
        """Whether the rows, whole on each rank, are gathered packed: alike on all ranks; with a single one FSDP2 takes one tensor only."""
        layer, even = self.layer, size[0] % ranks == 0 and local(self.parameter).shape[1] == size[1]
        packs = layer.transform is not None and layer.transform.traits.is_nm and layer.plan.packs
        return packs and ranks > 1 and even and layer.layout == LINEAR

    def _forget_buffers(self) -> None:
        """Have FSDP2 allocate its buffers again: it sizes them once, for the form of the first gather."""
        self.fresh, param = False, self.fsdp_param
        param.all_gather_outputs = []
        if hasattr(param, "_unsharded_param"):
            del param._unsharded_param
        param._init_extensions()


class _Substitute(torch.autograd.Function):
    """``master``, with the gradient going to ``weight``."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, master: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return master.view_as(master)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g.to(ctx.dtype), None


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules that ``fully_shard`` was called on."""
    return [module for module in model.modules() if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)]


def reshard(model: nn.Module) -> None:
    """Have every rank hold its shard only: after an evaluation FSDP2 leaves the root's weights unsharded, as copies."""
    for module in fsdp_modules(model):
        module.reshard()


def connect(model: nn.Module, layers: list[NMWeight]) -> None:
    """Have FSDP2 gather W̃ of the ``layers`` of ``model`` whose weights are sharded."""
    reshard(model)
    params: dict[nn.Module, Any] = {}
    for module in fsdp_modules(model):
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [g for g in (state._fsdp_param_group,) if g is not None]
        for param in (param for group in groups for param in group.fsdp_params):
            info = param._module_info
            if info.param_name == "weight":
                params[info.module] = param
    for layer in layers:
        layer.adopt_parameter()
        param = params.get(layer)
        if param is None:
            continue
        if param.post_forward_mesh_info is not None and param.post_forward_mesh_info is not param.mesh_info:
            raise NMError(
                "attach: fully_shard(reshard_after_forward=<number>) shards to a smaller mesh after forward, which FSDP2 cannot do with a "
                "weight that is transformed as it is gathered. Say reshard_after_forward=True or False."
            )
        layer.gather = Gather(layer, param)


def data_dims(layer: NMWeight) -> int:
    """Over how many dimensions of its mesh, the first ones, FSDP2 shards or replicates the weight; tensor parallelism has the others."""
    return 0 if layer.gather is None else int(layer.gather.fsdp_param.mesh_info.mesh.ndim)


# ---- tensor parallelism

OUT, IN, NOTHING = "out", "in", ""


def check_mesh(where: str, weight: Any, data: int = 0) -> None:
    """Raise ``ShapeError`` where tensor parallelism has the DTensor ``weight`` on several dimensions of a mesh; ``data``: FSDP2's."""
    mesh = weight.device_mesh
    if mesh.ndim - data > 1:
        raise ShapeError(
            f"{where}: tensor parallelism has the weight on {mesh.ndim - data} dimensions of {mesh}. Give parallelize_module a mesh "
            'of one, mesh["tp"]; fully_shard takes the others.'
        )


def check_input(layer: nn.Module, x: Tensor) -> None:
    """Raise ``ShapeError`` unless ``x`` is a DTensor."""
    if not is_sharded(x):
        raise ShapeError(
            f"{type(layer).__name__}: its weight is sharded, and the input is a plain tensor. Call the whole model, whose hooks gather the "
            "weight (fully_shard) or make a DTensor of the input (parallelize_module), and not the layer."
        )


def split_along(weight: Any, layout: str) -> str:
    """Which side of the DTensor ``weight`` tensor parallelism splits: ``"out"`` (column parallel), ``"in"`` (row parallel), ``""``."""
    (placement,) = weight.placements
    if placement.is_replicate():
        return NOTHING
    return IN if placement.is_shard(REDUCED[layout]) else OUT


def split_linear(x: Any, mesh: Any, along: str, out: int, bias: Any, multiply: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
    """y = x Wᵀ + b as a DTensor on ``mesh``, of DTensors x ``(..., in)`` and b, and a weight ``(out, in)`` that is split ``along`` a side.

    Column parallel takes the whole x and gives a split y; row parallel takes a split x and gives y as a sum over the ranks (``Partial``).
    ``multiply`` is x Wᵀ + b of this rank's parts.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    last = Shard(x.dim() - 1)
    needed = last if along == IN else Replicate()
    if x.placements != (needed,):  # a redistribution that moves nothing would still reduce ∂L/∂x whole, not scattered, in backward
        x = x.redistribute(mesh, [needed])
    if bias is not None:
        bias = bias.redistribute(mesh, [Shard(0) if along == OUT else Replicate()]).to_local()
        if along == IN and mesh.get_local_rank() != 0:
            bias = bias - bias.detach()  # added on one rank only, with its gradient on all
    # column parallel: each rank has one term of the sum ∂L/∂x
    y = multiply(x.to_local(grad_placements=[Partial() if along == OUT else needed]), bias)
    shape = torch.Size((*x.shape[:-1], out))
    stride = torch.empty(shape, device="meta").stride()  # passed, since parts may be of unequal sizes
    placement = {OUT: last, IN: Partial(), NOTHING: Replicate()}[along]
    result: Tensor = DTensor.from_local(y.contiguous(), mesh, [placement], run_check=False, shape=shape, stride=stride)
    return result


def tensor_parallel(layer: NMWeight, x: Tensor, multiply: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
    """y = x W̃ᵀ + b as a DTensor, of the DTensor x and a weight on a one-dimensional mesh; for ``multiply`` see ``split_linear``."""
    weight: Any = layer.weight
    check_input(layer, x)
    check_mesh(type(layer).__name__, weight)
    layer.take_buffers()
    return split_linear(x, weight.device_mesh, split_along(weight, layer.layout), layer.shape[0], layer.bias, multiply)
