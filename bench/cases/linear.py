"""The three GEMMs of a linear layer with one operand compressed, compared with the dense GEMMs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from nmkernels import Compressed, ops, testing

from ..device import CACHES, rotated
from ..registry import AMX, FASTEST, Call, Grid, Provider, Ratio, Spec, Work, family
from ..shapes import MODELS
from . import _ours, machine
from .dense import LINEAR
from .dense import gemms as torch_gemms
from .machine import has_amx, last_level_cache

DESIGN = tuple(MODELS["design"].values())
FEW = 16
"""Up to this many tokens the packed weight is most of the memory traffic, and on a GPU its rate is compared with a copy's."""

GATE_TOKENS = 16
MANY = 1024
"""From this many tokens on, Triton's two methods are both timed."""

ON_CUDA = ("14336x4096", "4096x4096")
"""117 MB in 16 bits, more than any L2, and 34 MB."""


def _layers(*models: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(matrix for model in models for matrix in MODELS[model].values()))


@family(
    "nm_linear",
    grids=(
        Grid(DESIGN[:1], ("2:4", "1:4", "1:8"), ("float32", "bfloat16"), tokens=(1, 16, 64, 256, 2048)),
        Grid(DESIGN[:1], ("2:4",), ("float16",), tokens=(1, 16, 256)),
        Grid(DESIGN[:1], ("2:4",), tokens=(4,)),
        Grid(DESIGN[1:], ("2:4", "1:8"), tokens=(1, 16, 256)),
        Grid(DESIGN[:1], ("1:16",), tokens=(1, 256)),
        Grid(_layers("gpt2", "llama3-8b", "vit-l", "bert-large"), ("2:4",), tokens=(1, 256)),
        Grid(DESIGN[:1], ("4:8", "2:8", "1:32"), tokens=(1, 256)),
        Grid(ON_CUDA, ("2:4", "1:4", "1:8"), ("bfloat16",), tokens=(1, 4), on="cuda"),
        Grid(ON_CUDA, ("2:4",), ("bfloat16",), tokens=(8, 16, 64, 256), on="cuda"),
        Grid(ON_CUDA[:1], ("2:4", "1:4", "1:8"), ("bfloat16",), tokens=(1024, 4096), on="cuda"),
        Grid(ON_CUDA[:1], ("2:8", "1:16", "1:32"), ("bfloat16",), tokens=(1, 16, 4096), on="cuda"),
    ),
)
def fprop(spec: Spec, device: str) -> Work:
    """``y = x Wᵀ``, compressed and dense."""
    c, dense = _weight(spec, device)
    x = _ours.normal(spec.tokens, spec.cols, device=device, dtype=spec.torch_dtype, seed=1)

    args = (x, c.values, c.indices, spec.n, spec.m, spec.cols, None)
    weight = _turning(c, device)
    mine = Provider("", lambda: ops.linear(x, weight()), check=lambda: no_worse(ops.linear(x, c), x, dense.t(), spec))
    return _against_dense(spec, device, args, c, dense, mine, lambda w, v: F.linear(v, w), x, (x, dense))


@family(
    "nm_linear_dgrad",
    grids=(Grid(DESIGN[:1], ("2:4", "1:8"), tokens=(16, 256)), Grid(ON_CUDA[1:], ("2:4",), ("bfloat16",), (4096,), on="cuda")),
)
def dgrad(spec: Spec, device: str) -> Work:
    """``dx = g W``, compressed and dense."""
    c, dense = _weight(spec, device)
    g = _ours.normal(spec.tokens, spec.rows, device=device, dtype=spec.torch_dtype, seed=1)

    args = (g, c.values, c.indices, spec.n, spec.m, spec.cols)
    weight = _turning(c, device)
    mine = Provider("", lambda: ops.linear_dgrad(g, weight()), check=lambda: no_worse(ops.linear_dgrad(g, c), g, dense, spec))
    return _against_dense(spec, device, args, c, dense, mine, lambda w, v: v @ w, g, (g, dense.t()))


@family(
    "nm_linear_wgrad",
    grids=(Grid(("1024x4096",), ("2:4", "1:8"), tokens=(2048,)), Grid(ON_CUDA[1:], ("2:4",), ("bfloat16",), (4096,), on="cuda")),
)
def wgrad(spec: Spec, device: str) -> Work:
    """``dW = gᵀ x``, with the gradient compressed and dense."""
    g = _ours.normal(spec.tokens, spec.rows, device=device, dtype=spec.torch_dtype, seed=1)
    x = _ours.normal(spec.tokens, spec.cols, device=device, dtype=spec.torch_dtype, seed=2)
    gc = ops.mvue_compress(g, spec.pattern, dim=0, seed=0)
    dense = gc.dense()

    args = (gc.values, gc.indices, spec.n, spec.m, spec.tokens, x)
    weight = _turning(gc, device)
    mine = Provider("", lambda: ops.linear_wgrad(weight(), x), check=lambda: no_worse(ops.linear_wgrad(gc, x), dense, x, spec))
    return _against_dense(spec, device, args, gc, g, mine, lambda w, v: w.t() @ v, x, (g.t(), x.t()))


def _weight(spec: Spec, device: str) -> tuple[Compressed, Tensor]:
    c = ops.compress(_ours.normal(spec.rows, spec.cols, device=device, dtype=spec.torch_dtype), spec.pattern)
    return c, c.dense()


def _turning(c: Compressed, device: str) -> Callable[[], Compressed]:
    """On a GPU a rotation among copies of ``c``, each evicted from the cache before its next use; elsewhere ``c``."""
    cuda = device.startswith("cuda")
    return rotated(c, c.nbytes, last_level_cache(device) if cuda else 0, copy.deepcopy)


def part(count: int) -> list[slice]:
    """Rows of a result that are compared with float64: the first and the last few."""
    half = GATE_TOKENS // 2
    return [slice(0, count)] if count <= GATE_TOKENS else [slice(0, half), slice(count - half, count)]


def no_worse(y: Tensor, a: Tensor, b: Tensor, spec: Spec) -> None:
    """The check that the first and the last rows of y are a b, rounded; see ``testing.assert_no_worse``."""
    for some in part(len(y)):
        testing.assert_no_worse(y[some], a[some] @ b, a[some].double() @ b.double(), spec.op)


def _against_dense(
    spec: Spec,
    device: str,
    args: tuple[object, ...],
    c: Compressed,
    dense: Tensor,
    mine: Provider,
    gemm: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    as_linear: tuple[Tensor, Tensor],
) -> Work:
    """Our providers of ``mine`` compared with ``gemm(dense, x)``, with the bytes and FLOPs of each.

    ``as_linear`` are the operands, or views of them, with which ``F.linear`` gives the same result.
    """
    full = 2 * spec.tokens * spec.rows * spec.cols
    others = spec.tokens * (spec.rows + spec.cols) * x.element_size()
    cuda, cache = device.startswith("cuda"), last_level_cache(device)

    def make() -> Provider:
        return Provider(mine.name, mine.call, c.nbytes + others, full * spec.n / spec.m, check=mine.check)

    ours = _ours.ours(spec.op, args, make)
    facts = {(p.name, "packed bytes over cache"): c.nbytes / cache for p in ours} if cache else {}
    if not cuda:
        theirs, read = torch_gemms(*as_linear, dense.nbytes + others, full), machine.reader(c.nbytes + others)
        ratios = [Ratio(FASTEST, p.name, tuple(q.name for q in theirs.plain)) for p in ours]
        ratios += [Ratio("x packed dense", p.name, tuple(q.name for q in theirs.packed)) for p in ours if theirs.packed]
        if spec.dtype != "float32":
            facts[LINEAR, AMX] = has_amx()
        derive = machine.shares(spec, ours, theirs.plain, read)
        return Work([*ours, *theirs.providers, read], ratios, {**facts, **theirs.facts}, derive=derive)
    if spec.op == "nm_linear" and spec.tokens >= MANY and any(p.name == "nmkernels triton" for p in ours):
        ours += triton_methods(spec, x, make)
    weight = rotated(dense, dense.nbytes, cache, Tensor.clone)
    cublas = Provider(LINEAR, lambda: gemm(weight(), x), dense.nbytes + others, full)
    providers = [*ours, cublas]
    ratios = [Ratio("x dense", p.name, (cublas.name,)) for p in ours]
    if spec.op == "nm_linear" and spec.tokens <= FEW:
        a = torch.ones(max(c.nbytes, CACHES * cache), dtype=torch.uint8, device=device)
        b = torch.zeros_like(a)
        providers.append(Provider("torch copy_", lambda: b.copy_(a), 2 * a.nbytes))
        ratios += [Ratio("share of copy", p.name, ("torch copy_",), "rate") for p in ours]
    if semi := semi_structured(spec, device, dense, x):
        providers.append(Provider("torch semi-structured", semi, flops=full / 2))
        ratios += [Ratio("x semi-structured", p.name, ("torch semi-structured",)) for p in ours]
    return Work(providers, ratios, facts)


def triton_methods(spec: Spec, x: Tensor, make: Callable[[], Provider]) -> list[Provider]:
    """Triton's methods for GEMMs of many tokens, whichever it chooses by default."""
    from nmkernels.backends.triton import launches
    from nmkernels.backends.triton.launch import capability as capability_of

    sizes = ("fprop", x.dtype, spec.rows, spec.cols, spec.tokens, spec.n, spec.m)
    capability = capability_of(x)
    gemm = launches.Gemm(*sizes, x.device, capability)
    expanding = [p for p in launches.candidates(*sizes, capability) if p.method == "gemm"]
    plans = {"scratch": launches.Tiling("scratch"), **({"in kernel": expanding[0]} if expanding else {})}

    @contextmanager
    def using(plan: launches.Tiling) -> Iterator[None]:
        launches._plans[gemm] = plan
        try:
            with _ours.forced("triton"):
                yield
        finally:
            launches._plans.pop(gemm, None)

    found = []
    for name, plan in plans.items():
        p = make()
        p.name, p.under = f"nmkernels triton, {name}", partial(using, plan)
        found.append(p)
    return found


def semi_structured(spec: Spec, device: str, dense: Tensor, x: Tensor) -> Call | None:
    """torch's own 2:4 path if it has one: CUDA, 16 bits, ``nm_linear``."""
    fprop = spec.op in ("nm_linear", "nm_linear(cores)")
    if not device.startswith("cuda") or not fprop or spec.pattern != "2:4" or spec.dtype == "float32":
        return None
    try:
        sparse = torch.sparse.to_sparse_semi_structured(dense)
        weight = rotated(sparse, dense.nbytes * 9 / 16, last_level_cache(device), lambda _: torch.sparse.to_sparse_semi_structured(dense))
    except (RuntimeError, NotImplementedError, ValueError):
        return None

    def call() -> Tensor:
        return F.linear(x, weight())

    return call if _ours.works(call, device) else None
