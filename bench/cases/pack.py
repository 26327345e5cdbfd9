"""Packing: a weight for forward and backward at once, and the unbiased estimate of a gradient, along rows and tokens."""

from __future__ import annotations

import torch
from torch import Tensor

import nmkernels as nm
from nmkernels import ops, testing

from ..registry import Grid, Provider, Ratio, Spec, Work, family
from . import _ours
from .groups import hardware

ON_CUDA = Grid(_ours.STREAM, dtypes=("bfloat16",), on="cuda")
GATE_ROWS = 64
"""Rows of W (columns of Wᵀ) whose packed forms are compared with the reference."""


@family("nm_pack(both)", grids=(Grid(("4096x4096",), dtypes=("float32", "bfloat16")), ON_CUDA))
def both(spec: Spec, device: str) -> Work:
    """``pack(w, mask="transposable", columns=True)``: W and Wᵀ in 16 bits by one mask, compared with torch's greedy search of tiles."""
    return _packing(spec, device, "transposable", columns=True)


@family("nm_pack(threshold)", grids=(Grid(("4096x4096",)), ON_CUDA))
def threshold(spec: Spec, device: str) -> Work:
    """``pack(w, mask="threshold", scale=...)``: S-STE's projection, scaled, cast and packed."""
    return _packing(spec, device, "threshold", columns=False)


@family("nm_pack(mma.sp)", grids=(Grid(("4096x4096",)), ON_CUDA))
def device_layout(spec: Spec, device: str) -> Work:
    """``pack(w, layout="mma.sp")``: the metadata in the layout of tensor cores."""
    return _packing(spec, device, "magnitude", columns=False, layout="mma.sp")


@family("nm_pack(dense)", grids=(Grid(("4096x4096",)), Grid(_ours.STREAM, dtypes=("float32",), on="cuda")))
def all_forms(spec: Spec, device: str) -> Work:
    """``pack(w, dense=True)``: rows for the forward pass, M ⊙ W in dense layout for the backward pass, from one reading of the weight."""
    return _packing(spec, device, "magnitude", columns=False, layout="wgmma.sp" if device.startswith("cuda") else "canonical", dense=True)


def _packing(spec: Spec, device: str, mask: str, columns: bool, layout: str = "canonical", dense: bool = False) -> Work:
    w = _ours.normal(spec.rows, spec.cols, device=device, dtype=spec.torch_dtype)
    scale = torch.tensor(1.25, device=device) if mask == "threshold" else None
    args = (w, spec.n, spec.m, mask, None, scale, torch.bfloat16, True, columns, layout, dense)

    def call() -> nm.ops.Packed:
        return ops.pack(w, spec.pattern, mask, scale=scale, dtype=torch.bfloat16, columns=columns, dense=dense, layout=layout)

    def check() -> None:
        got = torch.ops.nmkernels.nm_pack(*args)
        head = w[:GATE_ROWS]
        expected: tuple[Tensor, ...] = _ours.reference("nm_pack")(head, *args[1:])  # type: ignore[assignment]
        few = {"mma.sp": GATE_ROWS // 16, "wgmma.sp": GATE_ROWS // 64}.get(layout, GATE_ROWS)
        testing.assert_equal_bits((got[0][:GATE_ROWS], got[1][:few]), expected[:2], spec.op)
        if dense:
            testing.assert_equal_bits(got[4][:GATE_ROWS], expected[4], spec.op)
        if columns:  # the first columns of Wᵀ belong to the same rows of W
            kept = GATE_ROWS // spec.m * spec.n
            width = expected[3].shape[-1]
            testing.assert_equal_bits((got[2][:, :kept], got[3][:, :width]), expected[2:4], spec.op)

    moved = w.nbytes + sum(part.nbytes for part in torch.ops.nmkernels.nm_pack(*args))
    mine = _ours.ours("nm_pack", args, lambda: Provider("", call, moved, check=check))
    copy, ratios = _ours.copying(w, mine)
    peers = [q for q in hardware(spec, w, device) if columns == q.name.endswith("tile")] if device.startswith("cuda") else []
    ratios += [Ratio(f"x {q.name}", p.name, (q.name,)) for p in mine for q in peers]
    return Work([*mine, copy, *peers], ratios)


@family(
    "nm_mvue_compress",
    grids=(Grid(matrices=("4096x11008",), dtypes=("float32", "bfloat16")), Grid(("4096x4096",), ("1:4", "4:8")), ON_CUDA),
)
def along_rows(spec: Spec, device: str) -> Work:
    """``mvue_compress(g, out=)``."""
    return _estimate(spec, device, -1)


@family("nm_mvue_compress(dim=0)", grids=(Grid(matrices=("2048x4096",), dtypes=("float32", "bfloat16")), ON_CUDA))
def along_tokens(spec: Spec, device: str) -> Work:
    """``mvue_compress(g, dim=0, out=)``, which packs the transposed gradient for wgrad."""
    return _estimate(spec, device, 0)


def _estimate(spec: Spec, device: str, dim: int) -> Work:
    g = _ours.normal(spec.rows, spec.cols, device=device, dtype=spec.torch_dtype)
    seed = torch.tensor([7, 0], device=device)
    out = ops.mvue_compress(g, spec.pattern, dim=dim, seed=seed)

    def call() -> nm.Compressed:
        return ops.mvue_compress(g, spec.pattern, dim=dim, seed=seed, out=out)

    def check() -> None:
        for leaf in (out.values, out.indices):
            testing.fill_poison(leaf)
        call()
        # the first rows of the packed form: the random numbers of a group depend on its index
        few = min(len(out.values), max(1, _ours.GATE_ELEMENTS // (spec.rows if dim == 0 else spec.cols)))
        head = g[:, :few] if dim == 0 else g[:few]
        expected = _ours.reference("nm_mvue_compress")(head, spec.n, spec.m, dim, seed, "exact")
        testing.assert_equal_bits((out.values[:few], out.indices[:few]), expected, spec.op)

    args = (g, spec.n, spec.m, dim, seed, "exact")
    mine = _ours.ours("nm_mvue_compress", args, lambda: Provider("", call, g.nbytes + out.nbytes, check=check))
    copy, ratios = _ours.copying(g, mine)
    return Work([*mine, copy], ratios)
