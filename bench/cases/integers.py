"""A linear layer whose compressed values are 8- or 4-bit integers, compared with torch's weight-only ops of the same bits.

Weights are read from memory: each call takes another copy. ``int8`` has a step per row, ``int4`` one per 128 columns, in both libraries.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from nmkernels import Compressed, ops, testing

from ..device import rotated
from ..registry import Grid, Provider, Ratio, Spec, Work, family
from . import _ours
from .dense import onednn, onednn_takes
from .linear import part
from .machine import READ, last_level_cache

OP = "nm_linear_integers"
COPIES = 32 << 20
"""On a CPU the copies of a weight are four times as many bytes: more than any core's share of the last-level cache."""


@family(
    OP,
    grids=(
        Grid(("4096x4096",), ("2:4", "1:4", "1:8"), ("bfloat16",), tokens=(1, 4, 16)),
        Grid(("14336x4096",), ("2:4",), ("bfloat16",), tokens=(1, 4, 16), on="cuda"),
    ),
)
def fprop(spec: Spec, device: str) -> Work:
    """``y = x Wᵀ`` with W in 8 and in 4 bits; torch's int8 and int4 ops, its dense GEMMs, torchao's int8 layer, and ours in bf16."""
    cuda, full = device.startswith("cuda"), 2.0 * spec.tokens * spec.rows * spec.cols
    cache = last_level_cache(device) if cuda else COPIES
    w = _ours.normal(spec.rows, spec.cols, device=device, dtype=torch.float32)
    x = _ours.normal(spec.tokens, spec.cols, device=device, dtype=spec.torch_dtype, seed=1)
    others = spec.tokens * (spec.rows + spec.cols) * x.element_size()
    pruned = ops.compress(w, spec.pattern)

    def provider(name: str, call: Callable[[Compressed], Tensor], c: Compressed) -> Provider:
        weight = rotated(c, c.nbytes, cache, copy.deepcopy)

        def check() -> None:
            y, dense = call(c), c.dense().to(x.dtype)
            exact = c.dense(torch.float32).double()
            for some in part(spec.tokens):
                testing.assert_no_worse(y[some], F.linear(x[some], dense), F.linear(x[some].double(), exact), spec.op)

        return Provider(name, lambda: call(weight()), c.nbytes + others, full * spec.n / spec.m, check=check)

    found: dict[str, list[Provider]] = {}
    for kind in ("int8", "int4"):
        c = ops.quantize_values(pruned, kind)
        args = (x, c.values, c.indices, c.step, spec.n, spec.m, spec.cols)
        found[kind] = _ours.ours(OP, args, lambda c=c, kind=kind: provider(f", {kind}", lambda some: ops.linear(x, some), c))  # type: ignore[misc]
    narrow = ops.compress(w.to(x.dtype), spec.pattern)
    plain = provider("nmkernels, 16 bits", lambda some: ops.linear(x, some), narrow)
    theirs = {kind: [*_weight_only(kind, spec, x, device, cache)] for kind in found}
    dense = [
        _dense(w.to(dtype), x.to(dtype), name, cache) for name, dtype in (("torch dense", x.dtype), ("torch dense fp32", torch.float32))
    ]
    packed = _packed(w.to(x.dtype), x, cache)
    ratios = []
    for kind, mine in found.items():
        for p in mine:
            ratios += [Ratio("x dense", p.name, tuple(q.name for q in dense)), Ratio("x 16 bits", p.name, (plain.name,))]
            ratios += [Ratio(f"x weight-only {kind}", p.name, (q.name,)) for q in theirs[kind]]
            ratios += [Ratio("x packed dense", p.name, (q.name,)) for q in packed]
    read = _read(found["int8"][0].bytes, device, cache)
    if spec.tokens == 1:
        ratios += [Ratio("share of read", p.name, (read.name,), "rate") for p in (*found["int8"], *found["int4"], plain)]
    every = [*found["int8"], *found["int4"], plain, *theirs["int8"], *theirs["int4"], *packed, *dense, *_torchao(w, x), read]
    for p in every:
        p.under = partial(_after_another, p.call, p.under)
    return Work(every, ratios)


@contextmanager
def _after_another(call: Callable[[], object], under: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Make an untimed call first: as in a model, whose layers follow each other, code is in the cache and weights are not. Without it
    whoever comes after a dense GEMM, which fills the cache, would take 0.1 ms longer."""
    with under():
        call()
        yield


def _dense(w: Tensor, x: Tensor, name: str, cache: int) -> Provider:
    weight = rotated(w, w.nbytes, cache, Tensor.clone)
    return Provider(name, lambda: F.linear(x, weight()), w.nbytes + x.nbytes, 2.0 * x.shape[0] * w.numel())


def _packed(w: Tensor, x: Tensor, cache: int) -> list[Provider]:
    """oneDNN's GEMM in 16 bits with the weight in its own order, as in a graph with frozen weights, if it runs here."""
    if not x.is_cpu or x.dtype == torch.float32 or not onednn_takes(x.dtype):
        return []
    order: Callable[[Tensor], Tensor] = lambda some: torch.ops.mkldnn._reorder_linear_weight(some.clone(), x.shape[0])  # noqa: E731
    weight = rotated(order(w), w.nbytes, cache, lambda _: order(w))
    return [Provider("torch packed dense", lambda: onednn(x, weight()), w.nbytes + x.nbytes, 2.0 * x.shape[0] * w.numel())]


def _read(nbytes: float, device: str, cache: int) -> Provider:
    """A sum, torch's fastest op that only reads, of as many bytes from memory."""
    data = rotated(torch.ones(int(nbytes) // 8, dtype=torch.int64, device=device), nbytes, cache, Tensor.clone)
    return Provider(READ, lambda: data().sum(), nbytes)


def _torchao(w: Tensor, x: Tensor) -> list[Provider]:
    """torchao's layer with int8 weights, without torch.compile, where it is installed."""
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError:
        return []
    layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, device=w.device, dtype=x.dtype)
    with torch.no_grad():
        layer.weight.copy_(w)
    quantize_(layer, Int8WeightOnlyConfig())

    def call() -> Tensor:
        with torch.no_grad():
            return layer(x)

    return [Provider("torchao weight-only int8", call, w.numel() + x.nbytes)]


def _weight_only(kind: str, spec: Spec, x: Tensor, device: str, cache: int) -> list[Provider]:
    """Torch's weight-only op of so many bits, if it runs here; its time does not depend on the integers."""
    aten, gen, group = torch.ops.aten, torch.Generator().manual_seed(0), min(128, spec.cols)
    if kind == "int8":
        w = torch.randint(-127, 128, (spec.rows, spec.cols), dtype=torch.int8, generator=gen).to(device=device)
        steps = torch.rand(spec.rows, generator=gen).to(device=device, dtype=x.dtype)
        call = lambda weight: aten._weight_int8pack_mm(x, weight, steps)  # noqa: E731
    else:
        steps = torch.rand(spec.cols // group, spec.rows, 2, generator=gen).to(device=device, dtype=x.dtype)
        if device.startswith("cuda"):  # two integers to a byte
            integers = torch.randint(0, 256, (spec.rows, spec.cols // 2), dtype=torch.uint8, generator=gen).to(device=device)
            pack, gemm = lambda: aten._convert_weight_to_int4pack(integers, 8), aten._weight_int4pack_mm
        else:
            integers = torch.randint(0, 16, (spec.rows, spec.cols), dtype=torch.int32, generator=gen)
            pack, gemm = lambda: aten._convert_weight_to_int4pack_for_cpu(integers, 1), aten._weight_int4pack_mm_for_cpu
        if not _ours.works(pack, device):
            return []
        w = pack()
        call = lambda weight: gemm(x, weight, group, steps)  # noqa: E731
    if not _ours.works(lambda: call(w), device):
        return []
    weight = rotated(w, w.nbytes, cache, Tensor.clone)
    return [Provider(f"torch weight-only {kind}", lambda: call(weight()), w.nbytes + x.nbytes, 2.0 * spec.tokens * spec.rows * spec.cols)]
