"""What FSDP2 (``torch.distributed.fsdp.fully_shard``) gathers of a sharded layer's weight: W̃, made from the shard.

The transform runs on this rank's shard, inside FSDP2's all-gather, and the layer multiplies what it is handed. So no rank has an unsharded
W, a kept W̃ or a mask beyond its shard, and the wire carries W̃, packed where that is N:M. FSDP2 looks for ``fsdp_pre_all_gather`` and
``fsdp_post_all_gather`` on the local tensor of the sharded Parameter, so they are two attributes there.

A transform whose gradient is not passed straight through needs W itself. Then W is gathered, in its own dtype, since masks come from the
master weight, and transformed at every forward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..gemm.forms import CANONICAL
from ..gemm.route import Operands, operands
from ..layouts import CONV1D, LINEAR
from ..ops import Compressed, decompress
from ..pattern import DtypeError, NMError, Pattern
from ..shards import is_sharded, local

if TYPE_CHECKING:
    from .linear import NMWeight

HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
Form = tuple[Pattern | None, torch.dtype, bool]
"""What a gather carries: the pattern of a packed W̃, its dtype, and whether it is W̃."""


class Gather:
    """The all-gather of one layer's weight.

    Attributes:
        parameter: the sharded Parameter; ``layer.weight`` is another one while FSDP2 has the weight unsharded.
        fresh: W̃ was gathered since the weight or its transform changed. FSDP2 gathers the dense W without an error where the two
            attributes were lost, and nothing anew where it was told to keep weights unsharded: this is what notices.
        effective: what was gathered is W̃; else it is W.
        packed: W̃ as it was gathered packed, until FSDP2 frees it; None where it was gathered in dense layout.
        idle: FSDP2 does not gather this weight, which tensor parallelism alone splits: no attributes, which a copy of the model would copy.
        hollow: the GEMMs read that, so that the dense W̃ need not be made: the unsharded Parameter has no memory and only gets the gradient.
    """

    def __init__(self, layer: NMWeight, parameter: nn.Parameter) -> None:
        self.layer, self.parameter = layer, parameter
        self.fresh = self.effective = self.hollow = self.idle = False
        self.master: Tensor | None = None
        self.packed: Compressed | None = None
        self.param: Any = None
        self._form: Form | None = None
        self._moved: Tensor | None = None
        self.install()

    def install(self) -> None:
        """Put the two attributes where FSDP2 looks for them; loading by assignment and moving give the Parameter other memory."""
        self.fresh = False
        if self.idle:
            return
        shard = local(self.parameter)
        for name in HOOKS if self.param is None or not self.param.offload_to_cpu else (*HOOKS, "to"):
            setattr(shard, name, getattr(self, name))

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """What ``shard.to`` gives with CPU offload, where FSDP2 moves the shard and then looks for the attributes on what came."""
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

    def check(self) -> None:
        """Raise ``NMError`` unless what the layer is about to multiply was gathered anew."""
        if not self.fresh:
            raise NMError(
                "SparseLinear: the sharded weight was not gathered anew since it changed. Either FSDP2 keeps weights unsharded between "
                "steps (set_reshard_after_backward(False), unshard()), which shows the weights of the step before; or the model was "
                "moved or loaded behind the layer's back, and handle.refresh() puts it right."
            )

    # ---- FSDP2's side

    @torch.no_grad()
    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        layer, shard = self.layer, local(self.parameter) if self._moved is None else self._moved
        self._moved = None
        transform, dtype = layer.transform, mp_policy.param_dtype or shard.dtype
        if self.param is not None and shard.dtype != self.param.orig_dtype:
            # among gathers of several dtypes, which go as bytes, FSDP2 does not notice
            raise DtypeError(
                f"SparseLinear: the sharded model was cast to {shard.dtype} after its first forward pass, and FSDP2 still gathers "
                f"{self.param.orig_dtype}. Cast it before fully_shard, or set MixedPrecisionPolicy(param_dtype=...)."
            )
        straight = transform is None or not transform.traits.own_gradient
        ways = mesh.size(-1)  # the last dimension of an HSDP mesh is the one that shards
        packs = transform is not None and straight and transform.traits.is_nm and self._packs(outer_size, ways)
        form = (transform.pattern if packs and transform is not None else None, dtype if straight else shard.dtype, straight)
        if form != self._form:
            self._forget_buffers()
            self._form = form
        extras = [] if transform is None else [extra.to(shard.device) for extra in layer._extras(transform)]
        if packs:
            assert transform is not None
            rows = transform.packed(shard, *extras, dtype=dtype).rows
            assert isinstance(rows, Compressed)
            return (rows.values, rows.indices), (form, outer_size)
        if transform is None or not straight:
            used = shard
        else:
            used = transform(shard.t(), *extras).t().contiguous() if layer.layout == CONV1D else transform(shard, *extras)
        return (_padded(used.to(form[1]), outer_size, ways),), (form, outer_size)

    def fsdp_post_all_gather(self, outs: tuple[Tensor, ...], meta: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        (pattern, _, self.effective), size = meta
        self.fresh = True
        self.master = None if self.effective else outs[0][: size[0]]
        # its layouts are kept by versions, which FSDP2 does not change: a new one for each gather
        self.packed = None if pattern is None else Compressed(outs[0], outs[1], pattern, (size[0], size[1]))
        if pattern is None and outs[0].dtype == dtype:
            return None if out is not None else (outs[0], ())
        weight = outs[0].new_empty(size, dtype=dtype) if out is None else local(out)
        # beside tensor parallelism out is a DTensor, and what autograd has saved is its local tensor
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):  # type: ignore[attr-defined]
            if self.packed is None:
                weight.copy_(outs[0][: size[0]])
            elif self.hollow:
                weight.untyped_storage().resize_(0)
            else:
                decompress(self.packed, out=weight)
        return (weight, (weight,)) if out is None else None

    def _packs(self, size: torch.Size, ways: int) -> bool:
        """Alike on every rank: whether the rows, whole on each, are gathered packed; of a single rank FSDP2 takes one tensor only."""
        even = size[0] % ways == 0 and local(self.parameter).shape[1] == size[1]
        return ways > 1 and even and self.layer.plan.packs and self.layer.layout == LINEAR

    def _forget_buffers(self) -> None:
        """Let FSDP2 allocate anew: it sizes what it gathers into once, for the form of the first gather, and notes then what it found."""
        self.fresh = False
        param = self.param
        if param is None:
            return
        param.all_gather_outputs = []
        if hasattr(param, "_unsharded_param"):
            del param._unsharded_param
        param._init_extensions()


def _padded(weight: Tensor, size: torch.Size, ways: int) -> Tensor:
    """``weight`` with zero rows up to those of the largest shard, as FSDP2 wants them."""
    missing = -(-size[0] // ways) - weight.shape[0]
    return weight if missing <= 0 or weight.shape[1:] != size[1:] else torch.cat([weight, weight.new_zeros(missing, *weight.shape[1:])])


# ---- FSDP2's modules


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules that ``fully_shard`` was called on."""
    return [module for module in model.modules() if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)]


def reshard(model: nn.Module) -> None:
    """Have every rank hold its shard only: after an evaluation FSDP2 leaves the root's weights unsharded, as copies."""
    for module in fsdp_modules(model):
        module.reshard()


def connect(model: nn.Module, layers: list[NMWeight]) -> None:
    """Have FSDP2 gather W̃ of the ``layers`` of ``model`` whose weights are sharded.

    Raises:
        NMError: FSDP2 is to reshard to a smaller mesh after forward, which it cannot with gathers that a tensor shapes.
    """
    reshard(model)
    found: dict[nn.Module, Any] = {}
    for module in fsdp_modules(model):
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [g for g in (state._fsdp_param_group,) if g is not None]
        for param in (param for group in groups for param in group.fsdp_params):
            info = param._module_info
            if info.param_name == "weight":
                found[info.module] = param
    for layer in layers:
        layer.adopt_shard()
        if layer.gather is None:
            continue
        layer.gather.param = param = found.get(layer)
        layer.gather.idle = param is None
        if param is None:
            layer.gather.remove()
            continue
        if param.post_forward_mesh_info is not None and param.post_forward_mesh_info is not param.mesh_info:
            raise NMError(
                "attach: fully_shard(reshard_after_forward=<number>) shards to a smaller mesh after forward, which FSDP2 cannot do with a "
                "weight that is transformed as it is gathered. Say reshard_after_forward=True or False."
            )
        layer.gather._forget_buffers()
        layer.gather.install()


def data_dims(layer: NMWeight) -> int:
    """Over how many dimensions of its mesh, the first ones, FSDP2 shares out or copies the weight of ``layer``; tensor parallelism has the
    others."""
    param = None if layer.gather is None else layer.gather.param
    return 0 if param is None else int(param.mesh_info.mesh.ndim)


def gathered(layer: NMWeight, x: Tensor) -> tuple[Tensor, Tensor | Operands | None]:
    """The weight of ``layer`` that gets the gradient of a call with the input ``x``; and W̃ as it reads it, None where W was gathered."""
    weight, gather = layer.weight, layer.gather
    assert gather is not None
    gather.check()
    weight = weight.to_local() if is_sharded(weight) else weight  # type: ignore[attr-defined]
    if not gather.effective:
        master = gather.master
        assert master is not None
        return (weight if master.dtype == weight.dtype else _Instead.apply(weight, master)), None
    c, hollow = gather.packed, gather.hollow
    if c is None or layer.transform is None:
        return weight, weight.detach()
    if torch.compiler.is_compiling():
        return weight, weight.detach() if not hollow else c.dense()
    # every rank gathers the same; what it then multiplies is its own business, and the next gather follows this call
    gather.hollow = False
    if x.dtype == c.dtype and not torch.are_deterministic_algorithms_enabled():
        how = layer.effective.route((weight, layer.transform, (), c.dtype), layer.plan, x)
        if how.fprop == how.dgrad == "packed" and how.layout == CANONICAL:
            gather.hollow = True
            return weight, operands(c, by=how.by)
    return weight, c.dense() if hollow else weight.detach()


class _Instead(torch.autograd.Function):
    """The second of two tensors in the place of the first, which gets its gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, master: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return master.view_as(master)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g.to(ctx.dtype), None
