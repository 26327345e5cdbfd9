"""SparseLinear: a drop-in nn.Linear that trains a dense master weight and multiplies its N:M form."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..arguments import whole_number
from ..autograd.linear import linear
from ..gemm.choose import choose
from ..gemm.methods import UNESTIMATED
from ..gemm.plan import GemmPlan
from ..gemm.problem import Problem
from ..gemm.route import Operands, problems_of, wgrad_problem
from ..layouts import CONV1D, matrix_shape
from ..ops.pack import positions
from ..pattern import NMError, Pattern, PatternLike, ShapeError
from ..shards import is_sharded, local
from .adapter import adapter_of, add_adapter
from .sharding import tensor_parallel
from .traces import PROXY, constant, is_tracing, leaf
from .weight import NMWeight

# autocast does not reach into an autograd Function, so that has to cast a linear layer's operands itself


def under_autocast(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """``dtype``, or what the autocast that is on for x's device makes of it: it casts floating point up to 32 bits."""
    kind = "cpu" if x.is_cpu else x.device.type  # the device's name takes three times as long
    # autocast does not know the meta device and raises when asked about it
    casts = dtype.is_floating_point and dtype != torch.float64 and kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if casts else dtype


class NMLinear(NMWeight):
    """The base of linear layers with an N:M weight: their GEMMs, done by ``plan``."""

    own_gemms = True

    def problems(self, tokens: int) -> list[tuple[Problem, ...]]:
        """The GEMMs that its plan leaves open, for so many rows of the input and the autocast that is on; those of a tuple together."""
        if self.transform is None:
            return []
        dtype, gather = under_autocast(self.weight, self.weight.dtype), self.gather
        # what this rank's GEMMs multiply, which FSDP2 gathers whole
        shape = matrix_shape(local(self.parameter).shape if gather is None else gather.fsdp_param._orig_size, self.layout)
        return problems_of(self.plan, self.transform, shape, self.weight.device, dtype, tokens)

    def as_op(self, x: Tensor) -> tuple[tuple[Any, ...], str]:
        """The arguments of ``nm_linear`` for the input x, and in words what the layer does instead of leaving it to the dispatcher; for
        ``nm.explain``."""
        transform, kind = self.transform, type(self).__name__
        sharded = self.gather is not None or is_sharded(self.weight)
        if transform is None or not transform.traits.is_nm or sharded:
            why = "its weight is sharded" if sharded else "torch multiplies its weight"
            raise NMError(
                f"explain: {kind} in its present state calls no op for its GEMM: {why}. What makes its mask: "
                "nm.explain('mask', layer.master, layer.pattern). What a compressed layer calls: nm.compress_(model)."
            )
        x, dtype = x.to(under_autocast(x, x.dtype)), under_autocast(x, self.weight.dtype)
        weight, extras = self.master.detach(), self._extras(transform)
        how = self.effective.route((weight, transform, extras, dtype), self.plan, x) if self.plan.packs else None
        packed = how is not None and how.fprop == "packed"
        rows = transform.packed(weight, *extras, dtype=dtype, layout=how.layout if how is not None and packed else "canonical").rows
        assert rows is not None
        bias = None if self.bias is None else self.bias.to(x.dtype)
        args = x, rows.values, positions(rows), rows.pattern.n, rows.pattern.m, self.shape[1], bias
        notes, backend = [], "" if how is None else how.backends[0]
        if not packed:
            notes = ["not called by this layer: W̃ in dense layout, for torch's GEMM, is what its plan says or is faster for so many tokens"]
        elif backend:
            notes = [f"this layer names its kernel, of backend {backend!r}, which was measured fastest"]
        plan, tokens = self.plan, x.numel() // max(1, x.shape[-1])
        if plan.fprop == "auto" and plan.wgrad == "mvue":
            wgrad = wgrad_problem(plan, tokens, self.shape[0], self.shape[1], x.dtype, x.device)
            if choose(wgrad) == (UNESTIMATED,):
                notes.append("its weight gradient is the dense GEMM: an estimate of the output gradient would cost more than it saves here")
        return args, "\n  ".join(notes)

    def forward(self, input: Tensor) -> Tensor:
        """y = x W̃ᵀ + b, and the adapter's part; x ``(..., in)``. Under autocast the mask comes from the master weight."""
        x = input
        if isinstance(x, PROXY):
            return leaf(self, x)
        self.ran = True
        if "weight" not in self._parameters:
            self.check_computed()
        weight = self.weight
        if type(weight) is not nn.Parameter and is_sharded(weight):
            y = tensor_parallel(self, x, self._multiply_shared)
        elif self.gather is None:
            y = self._multiply(x, weight, None, self.bias, self.plan)
        else:
            y = self._multiply_shared(x, self.bias)
        adapter = adapter_of(self) if self.adapts else None
        return y if adapter is None else add_adapter(y, x, *adapter)

    def _multiply_shared(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """y = x W̃ᵀ + b with what this rank has of a sharded weight: its part under tensor parallelism, or what FSDP2 has gathered."""
        if self.gather is None:
            shared: Any = self.weight
            return self._multiply(x, shared.to_local(), None, bias, self.plan)
        x = x.to(under_autocast(x, x.dtype))  # before it is decided whether x can meet the packed weight
        weight, used = self.gather.read(x)
        return self._multiply(x, weight, used, bias, self.plan.dense_layout)

    def _multiply(self, x: Tensor, weight: Tensor, used: Tensor | Operands | None, bias: Tensor | None, plan: GemmPlan) -> Tensor:
        """y = x W̃ᵀ + b of a plain ``weight``, as the Parameter is stored; ``used``: W̃, stored likewise, where that is known."""
        transform = self.transform
        if self.layout == CONV1D:
            weight, used = weight.t(), used.t() if isinstance(used, Tensor) else used
        if transform is None:
            return F.linear(x, weight, bias)
        dtype, extras = weight.dtype if self.gather is None else x.dtype, []  # x.dtype: of FSDP2's mixed precision
        if torch._C._is_any_autocast_enabled():
            x, dtype = x.to(under_autocast(x, x.dtype)), under_autocast(x, dtype)
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
        for name in self.idle:
            extras.append(getattr(self, name))
        y = linear(x, weight, used, bias, plan, self.seed, transform, extras)
        if self.watch is not None and not torch.compiler.is_compiling():
            self.watch.see(y, weight, 1)
        return y

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, {self._uses()}"


class SparseLinear(NMLinear, nn.Linear):  # type: ignore[misc]  # torch types bias as always there
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
        ShapeError: M does not divide ``in_features``, or a size is not a whole number.

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
        p, in_features = Pattern(pattern), whole_number(ShapeError, "SparseLinear: in_features", in_features, least=0)
        out_features = whole_number(ShapeError, "SparseLinear: out_features", out_features, least=0)
        p.check_divides("SparseLinear", in_features, "in_features")
        super().__init__(in_features, out_features, bias, device, dtype)
        self._start(p)
