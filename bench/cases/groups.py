"""Ops that read a weight once and write its mask, its pruned, thresholded or compressed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import nmkernels as nm
from nmkernels import ops, testing

from ..registry import Call, Grid, Provider, Ratio, Spec, Work, family
from . import _ours, eager

FULL = (
    Grid(matrices=("4096x11008",), patterns=("2:4",), dtypes=("float32", "bfloat16")),
    Grid(matrices=("4096x11008",), patterns=("1:4", "2:8", "1:8", "4:8", "1:16", "1:32")),
    Grid(matrices=("3072x768", "4096x1024"), patterns=("2:4",)),
    Grid(_ours.STREAM, ("2:4", "1:8"), ("bfloat16",), on="cuda"),
)


FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "nm_mask": (ops.mask, eager.mask),
    "nm_prune": (ops.prune, eager.prune),
    "nm_compress": (ops.compress, eager.compress),
    "nm_soft_threshold": (ops.soft_threshold, eager.soft_threshold),
}
"""Our function of each op, and torch's formulation."""


def _leaves(result: Any) -> list[Tensor]:
    if isinstance(result, nm.Compressed):
        return [result.values, result.indices]
    return list(result) if isinstance(result, tuple) else [result]


@family(*FORMS, grids=FULL)
def streaming(spec: Spec, device: str) -> Work:
    """``op(w, out=)`` and ``op(w)`` compared with torch's formulation, ``copy_`` into existing memory and ``clone`` into new memory."""
    w = _ours.normal(spec.rows, spec.cols, device=device, dtype=spec.torch_dtype)
    op, theirs = FORMS[spec.op]
    out = op(w, spec.pattern)
    moved = w.nbytes + out.nbytes

    def reuse() -> Any:
        return op(w, spec.pattern, out=out)

    def fresh() -> Any:
        return op(w, spec.pattern)

    def check(run: Call) -> None:
        for leaf in _leaves(out) if run is reuse else ():
            testing.fill_poison(leaf)
        got = _leaves(run())
        for part in _ours.ends(spec.rows, spec.cols):
            testing.assert_equal_bits([leaf[part] for leaf in got], _leaves(_ours.reference(spec.op)(w[part], spec.n, spec.m)), spec.op)

    args = (w, spec.n, spec.m)
    mine = _ours.ours(spec.op, args, lambda: Provider("", reuse, moved, check=lambda: check(reuse)))
    copy, ratios = _ours.copying(w, mine)
    ratios += [Ratio("x eager", p.name, ("torch eager",)) for p in mine]
    others = [Provider("torch eager", lambda: theirs(*args))]
    if device.startswith("cuda"):  # on a GPU new memory comes from torch's cache and costs nothing
        peers = hardware(spec, w, device) if spec.op == "nm_compress" else []
        ratios += [Ratio(f"x {q.name}", p.name, (q.name,)) for p in mine for q in peers]
        return Work([*mine, copy, *others, *peers], ratios)
    new = _ours.ours(spec.op, args, lambda: Provider(", new output", fresh, moved, check=lambda: check(fresh)))
    clone = Provider("torch clone", w.clone, 2 * w.nbytes)
    ratios += [Ratio("share of clone", p.name, (clone.name,), "rate") for p in new]
    return Work([*mine, copy, *new, clone, *others], ratios)


def hardware(spec: Spec, w: Tensor, device: str) -> list[Provider]:
    """torch's own conversions to the layouts of sparse tensor cores that work here: cuSPARSELt's of a pruned matrix, tiles both ways."""
    if spec.pattern != "2:4" or spec.dtype == "float32":
        return []
    found = []
    pruned = ops.prune(w, spec.pattern)
    calls: dict[str, Call] = {
        "torch._cslt_compress": lambda: torch._cslt_compress(pruned),
        "torch._sparse_semi_structured_tile": lambda: torch._sparse_semi_structured_tile(w),
    }
    for name, call in calls.items():
        if _ours.works(call, device):
            found.append(Provider(name, call))
    return found


@family("nm_decompress", grids=(Grid(matrices=("4096x11008",), dtypes=("float32", "bfloat16")), Grid(("4096x11008",), ("1:8",))))
def decompress(spec: Spec, device: str) -> Work:
    """Decompress a matrix, compared with a scatter in torch."""
    w = _ours.normal(spec.rows, spec.cols, device=device, dtype=spec.torch_dtype)
    c, out = ops.compress(w, spec.pattern), torch.empty_like(w)
    values = c.values.unflatten(-1, (-1, spec.n))
    kept = eager.mask(w, spec.n, spec.m).unflatten(-1, (-1, spec.m)).nonzero()[:, -1].view(values.shape)

    def check() -> None:
        testing.fill_poison(out)
        ops.decompress(c, out=out)
        for part in _ours.ends(spec.rows, spec.cols):
            expected = _ours.reference(spec.op)(c.values[part], c.indices[part], spec.n, spec.m, spec.cols)
            testing.assert_equal_bits(out[part], expected, spec.op)

    args = (c.values, c.indices, spec.n, spec.m, spec.cols)
    mine = _ours.ours(spec.op, args, lambda: Provider("", lambda: ops.decompress(c, out=out), c.nbytes + out.nbytes, check=check))
    copy, ratios = _ours.copying(w, mine)
    ratios += [Ratio("x eager", p.name, ("torch eager",)) for p in mine]
    return Work([*mine, copy, Provider("torch eager", lambda: eager.decompress(values, kept, spec.m))], ratios)


@family(
    "nm_transposable_mask",
    grids=(
        Grid(matrices=("4096x4096",)),
        Grid(matrices=("256x256",), patterns=("1:4", "4:8")),
        Grid(_ours.STREAM, dtypes=("bfloat16",), on="cuda"),
    ),
)
def transposable(spec: Spec, device: str) -> Work:
    """The best transposable mask, compared with a copy; on a GPU torch has a greedy one, which packs both ways at once."""
    w = _ours.normal(spec.rows, spec.cols, device=device, dtype=spec.torch_dtype)

    def check() -> None:
        got = ops.transposable_mask(w, spec.pattern)
        part = slice(0, max(spec.m, GATE_TILES * spec.m * spec.m // spec.cols // spec.m * spec.m))
        expected = _ours.reference(spec.op)(w[part], spec.n, spec.m)
        if spec.pattern == "2:4":
            testing.assert_equal_bits(got[part], expected, spec.op)
        else:
            ours, best = ((w[part].abs() * keep).sum(dtype=torch.float64) for keep in (got[part], expected))  # type: ignore[operator]
            assert abs(float(ours - best)) <= 1e-6 * float(best), f"{spec.op}: keeps {float(ours)}, the best mask {float(best)}"

    args = (w, spec.n, spec.m)
    moved = w.nbytes + w.numel()
    mine = _ours.ours(spec.op, args, lambda: Provider("", lambda: ops.transposable_mask(w, spec.pattern), moved, check=check))
    copy, ratios = _ours.copying(w, mine)
    peers = [q for q in hardware(spec, w, device) if q.name.endswith("tile")] if device.startswith("cuda") else []
    ratios += [Ratio(f"x {q.name}", p.name, (q.name,)) for p in mine for q in peers]
    return Work([*mine, copy, *peers], ratios)


GATE_TILES = 4096
"""Tiles whose mask is compared with the reference, which enumerates or solves each of them."""
