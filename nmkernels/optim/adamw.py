"""MaskedAdamW: AdamW that also decays pruned weights, tracks masks and gathers statistics, in one pass over memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import Parameter

from ..arguments import whole_number
from ..layouts import LINEAR, as_matrix, ordered
from ..ops import STATS
from ..ops.adamw import nm_masked_adamw_
from ..ops.adamw_pack import StepForms, arguments, in_one_pass, nm_masked_adamw_pack_
from ..pattern import CheckpointError, DtypeError, OptionError, Pattern
from ..reference.adamw import AdamWArgs
from ..shards import Groups, align_gradient, groups_of, is_sharded, local, reduced
from .rules import PLAIN, Target, UpdateRule

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
STATES, ROUNDINGS = ("float32", "bfloat16"), ("nearest", "stochastic")


class MaskedAdamW(torch.optim.AdamW):
    """AdamW that also decays pruned weights, tracks their N:M masks and can freeze its second moment, in one pass over memory.

    Per parameter w with gradient g and step t = 1, 2, ..., M(w) the N:M mask of w before the step (Loshchilov & Hutter, ICLR 2019,
    algorithm 2; the decay λ is that of SR-STE, Zhou et al., ICLR 2021, eq. 8)::

        g = g / grad_scale + λ (1 - M(w)) w
        m = β₁m + (1 - β₁) g
        v = β₂v + (1 - β₂) g²
        w = (1 - lr·weight_decay) w - lr · (m / (1 - β₁ᵗ)) / (√v / √(1 - β₂ᵗ) + ε)

    With a held mask that replaces M, a recipe may also hold the weights outside of it at zero: g = 0 and w = 0 there. A recipe sets the
    masks, λ and what else differs by phase: see ``UpdateRule``. Without a recipe there are no masks and no λ, and it
    equals ``torch.optim.AdamW`` to 1e-6 relative.

    The moments of bf16 and fp16 parameters are fp32, also after ``load_state_dict``, or all are bf16. A step that a ``GradScaler`` skips
    changes nothing. State dicts load into ``torch.optim.AdamW`` and from it, whatever the dtypes of the moments.

    With moments in bf16 a step reads and writes 8 bytes a weight less. Rounded to nearest, v cannot fall while β₂ > 0.998: a change of less
    than half a unit in the last of 8 bits is lost. ``rounding="stochastic"`` keeps the mean.

    Args:
        params: parameters of any shape, or parameter groups; real floating point. Groups of N:M run along the input dimension.
        lr, betas, eps, weight_decay, amsgrad, maximize, capturable, foreach, fused: as for ``torch.optim.AdamW``. ``foreach`` changes
            nothing, as every step is fused; ``fused`` and ``capturable`` keep the step counts on the device.
        states: the dtype of the moments, ``"float32"`` or ``"bfloat16"``; those of float64 parameters are float64.
        rounding: of moments in bfloat16: ``"nearest"`` or ``"stochastic"``; the running maximum of amsgrad is always rounded to nearest.
        seed: of stochastic rounding, below 2³². The random numbers depend on it, the step count and the order of the parameters, so that a
            resumed run draws the same; a sharded parameter draws by the places in its shard.

    Attributes:
        targets: the maskable parameters, each with its ``Target``; set by the recipe.
        rule: the ``UpdateRule`` of the maskable parameters; set by the recipe.
        stats: sums over the maskable parameters in the last step, float64 ``(9,)``, named by ``nmkernels.ops.STATS``, over all ranks for
            sharded parameters (DTensor); None if no maskable parameter took part.
        stats_numel: the number of weights that they are sums over.
        packed: the parameters of which the last step has also written the forms of their targets, each with its version after that.

    Raises:
        ValueError: a hyper-parameter is out of range, or ``differentiable=True``.
        OptionError: ``states``, ``rounding`` or ``seed`` is not one of those above.
        DtypeError: in ``step``, a parameter is complex or a gradient sparse.
        CheckpointError: in ``load_state_dict``, the state belongs to another kind of optimizer or another model.

    Example:
        >>> w = torch.nn.Parameter(torch.ones(2, 4))
        >>> opt = MaskedAdamW([w], lr=0.1, weight_decay=0.0)
        >>> w.sum().backward()
        >>> opt.step()
        >>> round(w[0, 0].item(), 4)
        0.9
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *args: Any,
        states: str = "float32",
        rounding: str = "nearest",
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("differentiable"):
            raise ValueError("MaskedAdamW: differentiable=True is not possible, the update is one fused kernel; use torch.optim.AdamW.")
        for name, value, known in (("states", states, STATES), ("rounding", rounding, ROUNDINGS)):
            if value not in known:
                raise OptionError(f"{type(self).__name__}: {name}={value!r} is unknown; choose {' or '.join(map(repr, known))}.")
        if rounding == "stochastic" and states != "bfloat16":
            raise OptionError(f"{type(self).__name__}: rounding='stochastic' is for states='bfloat16'; those in {states} are not rounded.")
        if whole_number(OptionError, f"{type(self).__name__}: seed", seed, least=0) >> 32:
            raise OptionError(f"{type(self).__name__}: seed={seed} must be below 2**32.")
        super().__init__(params, lr, *args, **kwargs)
        self.states, self.rounding, self.seed = states, rounding, seed
        self._init_masks()

    def _init_masks(self) -> None:
        # a GradScaler then sets grad_scale and found_inf instead of unscaling and skipping itself
        self._step_supports_amp_scaling = True
        self._need_device_dtype_check_for_fused = False
        self.targets: dict[Tensor, Target] = {}
        self.rule = PLAIN
        self.stats: Tensor | None = None
        self.stats_numel = 0
        self.packed: dict[Tensor, int] = {}
        self._one_pass: dict[Any, bool] = {}

    def forget(self) -> None:
        """Drop every mask: from now on this is plain AdamW."""
        self.targets, self.rule = {}, PLAIN

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name, default in (("states", STATES[0]), ("rounding", ROUNDINGS[0]), ("seed", 0)):
            self.__dict__.setdefault(name, default)
        if not hasattr(self, "targets"):
            self._init_masks()

    def __getstate__(self) -> dict[str, Any]:
        settings = {"states": self.states, "rounding": self.rounding, "seed": self.seed}
        return {"defaults": self.defaults, "state": self.state, "param_groups": self.param_groups, **settings}

    @torch.no_grad()
    @_disable_dynamo  # one kernel call: a graph is no faster, and would be recompiled for every learning rate
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's loss, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.stats_numel = 0
        self.packed = {}
        parts: dict[Groups, Tensor] = {}
        number = 0
        for group in self.param_groups:
            for bucket in self._buckets(group):
                bucket.number, number = number, number + 1
                stats = self._run(group, bucket)
                if bucket.maskable:
                    ranks = bucket.ranks
                    parts[ranks] = merge_stats(parts[ranks], stats) if ranks in parts else stats
                    self.stats_numel += bucket.numel
        # without shards there is nothing to reduce
        self.stats = parts.get(()) if parts.keys() <= {()} else reduced(parts, merge_stats)
        return loss

    def _buckets(self, group: dict[str, Any]) -> Iterable[_Bucket]:
        """The parameters of one group, in sets that one kernel call can step together."""
        buckets: dict[Any, _Bucket] = {}
        for p in group["params"]:
            sharded, target = type(p) is not Parameter and is_sharded(p), self.targets.get(p)
            layout = LINEAR if target is None else target.layout
            grad = align_gradient(p, layout) if sharded or layout != LINEAR else p.grad
            if grad is None:
                continue
            if grad.is_sparse:
                raise DtypeError("MaskedAdamW: sparse gradients are not supported; use torch.optim.SparseAdam for that parameter.")
            state = self.state[p]
            if "exp_avg_sq" not in state or (group["amsgrad"] and "max_exp_avg_sq" not in state):
                self._start(group, p, state)
            pattern = target.pattern if target is not None else None
            ranks = groups_of(p) if sharded and target is not None else ()
            bits = target.bits if target is not None else None
            forms = None if target is None or target.forms is None else self._packs(group, p, grad, state, target)
            kind = None if forms is None else (forms.kind, grad.dtype)
            key = (target is not None, pattern, p.dtype, p.device, ranks, bits is not None, kind)
            bucket = buckets.get(key)
            if bucket is None:
                bucket = buckets[key] = _Bucket(target is not None, pattern, ranks, forms is not None)
            bucket.numel += p.numel()
            bucket.targets.append(target)
            if bits is not None:
                bucket.bits.append(bits)
            bucket.steps.append(state["step"])
            shard, grad = (local(p), local(grad)) if sharded else (p, grad)
            bucket.params.append(shard if layout == LINEAR else as_matrix(shard, layout))
            bucket.grads.append(grad if layout == LINEAR else as_matrix(grad, layout))
            for name in MOMENTS:
                moment = state.get(name)
                if moment is not None:
                    moment = local(moment) if sharded else moment
                    if layout != LINEAR:
                        right = ordered(moment, layout)
                        if right is not moment:  # created before the weight was reordered
                            state[name] = right
                        moment = as_matrix(right, layout)
                    bucket.moments[name].append(moment)
        return buckets.values()

    def _start(self, group: dict[str, Any], p: Tensor, state: dict[str, Tensor]) -> None:
        if not state:
            if p.is_complex() or not p.is_floating_point():
                raise DtypeError(f"MaskedAdamW: parameters must be real floating point, got {p.dtype}; use torch.optim.AdamW for it.")
            on = p.device if group["capturable"] or group["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=on)
        dtype = self._moments_dtype(p)
        for name in MOMENTS if group["amsgrad"] else MOMENTS[:2]:
            if name not in state:
                state[name] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)

    def _moments_dtype(self, p: Tensor) -> torch.dtype:
        return torch.float64 if p.dtype == torch.float64 else torch.bfloat16 if self.states == "bfloat16" else torch.float32

    def _packs(self, group: dict[str, Any], p: Tensor, grad: Tensor, state: dict[str, Tensor], target: Target) -> StepForms | None:
        """The target's forms if a kernel writes them in the pass of its step."""
        forms = target.forms
        if forms is None or is_sharded(p) or target.layout != LINEAR or group["amsgrad"] or not self.rule.masked:
            return None
        if self.rule.fixed or self.rounding == "stochastic" or (forms.rule == "held") != (target.bits is not None):
            return None
        dtypes = p.dtype, grad.dtype, state["exp_avg"].dtype
        key = (self.rule, forms.kind, p.shape, dtypes, p.is_contiguous(), grad.is_contiguous(), target.bits is None)
        known = self._one_pass.get(key)
        if known is None:
            b = _Bucket(True, target.pattern, (), True)
            b.params, b.grads, b.steps, b.targets = [p], [grad], [state["step"]], [target]
            b.bits += () if target.bits is None else (target.bits,)
            for name in MOMENTS[:2]:
                b.moments[name].append(state[name])
            known = self._one_pass[key] = in_one_pass(self._pack_arguments(group, b))
        return forms if known else None

    def _arguments(self, group: dict[str, Any], b: _Bucket) -> AdamWArgs:
        rule = self.rule if b.maskable else PLAIN
        masks = b.bits if rule.masked or rule.fixed else None
        pattern = b.pattern if rule.masked and not masks else None
        stochastic = self.rounding == "stochastic" and b.params[0].dtype != torch.float64
        return AdamWArgs(
            b.params,
            b.grads,
            b.moments["exp_avg"],
            b.moments["exp_avg_sq"],
            b.moments["max_exp_avg_sq"] if group["amsgrad"] else [],
            b.steps,
            _hyper(group, rule, b.params[0].device),
            *((0, 0) if pattern is None else (pattern.n, pattern.m)),
            rule.frozen,
            rule.eps_inside,
            group["maximize"],
            rule.geometric,
            getattr(self, "grad_scale", None),
            getattr(self, "found_inf", None),
            masks or None,
            rule.fixed,
            stochastic,
            self.seed | b.number << 32 if stochastic else 0,
        )

    def _pack_arguments(self, group: dict[str, Any], b: _Bucket) -> tuple[Any, ...]:
        assert b.pattern is not None
        forms = [target.forms for target in b.targets if target is not None and target.forms is not None]
        return *arguments(b.pattern, forms), *self._arguments(group, b)

    def _run(self, group: dict[str, Any], b: _Bucket) -> Tensor:
        if not b.packs:
            return nm_masked_adamw_(*self._arguments(group, b))
        stats: Tensor = nm_masked_adamw_pack_(*self._pack_arguments(group, b))
        self.packed.update((p, p._version) for p in b.params)
        return stats

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not all("betas" in group and "eps" in group for group in state_dict["param_groups"]):
            raise CheckpointError(
                "MaskedAdamW: the state dict belongs to another kind of optimizer: its parameter groups have no betas and eps."
            )
        # matched by position; torch itself checks the numbers of groups and parameters
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        states = ((state_dict["state"].get(i) or {}, p) for i, p in zip(saved_ids, params, strict=False))
        # entries of a recipe do not belong to the optimizer
        pairs = [(state, p) for state, p in states if any(not name.startswith("nm_") for name in state)]
        for saved, p in pairs:
            missing = [name for name in ("step", *MOMENTS[:2]) if name not in saved]
            if missing:
                raise CheckpointError(
                    f"MaskedAdamW: the state dict belongs to another kind of optimizer: its state has no {', '.join(missing)}."
                )
            for name in MOMENTS:
                if name in saved and saved[name].shape != p.shape:
                    raise CheckpointError(
                        f"MaskedAdamW: the state dict belongs to another model: {name} has shape {tuple(saved[name].shape)} "
                        f"for a parameter of shape {tuple(p.shape)}."
                    )
        super().load_state_dict(state_dict)
        # torch has cast the moments to the parameter's dtype, and keeps the tensors of the state dict without copying them
        for saved, p in pairs:
            state = self.state[p]
            for name in MOMENTS:
                if name in saved:
                    fresh = torch.empty_like(p, dtype=self._moments_dtype(p), memory_format=torch.preserve_format)
                    state[name] = fresh.copy_(saved[name].detach())
            # torch turns a step saved as a number into a tensor of the default dtype; the kernel counts in fp32
            state["step"] = state["step"].detach().to(torch.float32, copy=True)


class _Bucket:
    """The argument lists of one kernel call."""

    def __init__(self, maskable: bool, pattern: Pattern | None, ranks: Groups, packs: bool) -> None:
        self.maskable, self.pattern, self.ranks, self.packs, self.numel = maskable, pattern, ranks, packs, 0
        self.number = 0  # of the call in its step
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.steps: list[Tensor] = []
        self.targets: list[Target | None] = []
        self.bits: list[Tensor] = []
        self.moments: dict[str, list[Tensor]] = {"exp_avg": [], "exp_avg_sq": [], "max_exp_avg_sq": []}


def _hyper(group: dict[str, Any], rule: UpdateRule, device: torch.device) -> Tensor:
    """The scalars of one call as float64: on the CPU, from which a GPU gets them as arguments, or on the device of those that are tensors.

    Nothing is copied from host to device: the copy would wait, and a captured graph would keep reading memory that has been freed.
    """
    lr, (beta1, beta2) = group["lr"], group["betas"]
    values = [lr, beta1, beta2, group["eps"], group["weight_decay"], rule.decay, rule.v_step, rule.clamp, 0.0]
    tensors, on_host = {}, True
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            tensors[i], values[i] = value, 0.0
            on_host = on_host and value.is_cpu
    if on_host:
        hyper = torch.tensor(values, dtype=torch.float64)
    else:
        hyper = torch.empty(len(values), dtype=torch.float64, device=device)
        for i, value in enumerate(values):
            hyper[i].fill_(float(value))
    for i, value in tensors.items():
        hyper[i].copy_(value)
    return hyper


def merge_stats(a: Tensor, b: Tensor) -> Tensor:
    """The ``stats`` of two calls, on several ranks or groups, as one: the sums of both, and the larger ``applied`` and ``max_update``."""
    both = a + b
    for name in ("applied", "max_update"):
        i = STATS.index(name)
        both[i] = torch.maximum(a[i], b[i])
    return both
