"""The unbiased estimate of least variance, packed; along rows and along tokens."""

from __future__ import annotations

import torch

from nmkernels import Compressed, ops, testing

from ..registry import Grid, Provider, Ratio, Spec, Work, family
from . import _ours

SEED = 7


ON_CUDA = Grid(_ours.STREAM, dtypes=("bfloat16",), on="cuda")


@family(
    "nm_mvue_compress",
    grids=(Grid(matrices=("4096x11008",), dtypes=("float32", "bfloat16")), Grid(("4096x4096",), ("1:4", "4:8")), ON_CUDA),
)
def along_rows(spec: Spec, device: str) -> Work:
    """``mvue_compress(g, out=)``."""
    return _packing(spec, device, -1)


@family("nm_mvue_compress(dim=0)", grids=(Grid(matrices=("2048x4096",), dtypes=("float32", "bfloat16")), ON_CUDA))
def along_tokens(spec: Spec, device: str) -> Work:
    """``mvue_compress(g, dim=0, out=)``, which packs the transposed gradient as the weight's gradient needs it."""
    return _packing(spec, device, 0)


def _packing(spec: Spec, device: str, dim: int) -> Work:
    g = _ours.normal(spec.rows, spec.cols, device=device, dtype=spec.torch_dtype)
    seed = torch.tensor([SEED, 0], device=device)
    twin = torch.empty_like(g)
    out = ops.mvue_compress(g, spec.pattern, dim=dim, seed=seed)

    def call() -> Compressed:
        return ops.mvue_compress(g, spec.pattern, dim=dim, seed=seed, out=out)

    def check() -> None:
        for leaf in (out.values, out.indices):
            testing.fill_poison(leaf)
        call()
        # the first rows of the packed form: the random numbers of a group depend on its place from the start
        few = min(len(out.values), max(1, _ours.GATE_ELEMENTS // (spec.rows if dim == 0 else spec.cols)))
        head = g[:, :few] if dim == 0 else g[:few]
        expected = _ours.reference("nm_mvue_compress")(head, spec.n, spec.m, dim, seed, "exact")
        _ours.same_bits((out.values[:few], out.indices[:few]), expected, spec.op)

    args = (g, spec.n, spec.m, dim, seed, "exact")
    mine = _ours.ours("nm_mvue_compress", args, lambda: Provider("", call, g.nbytes + out.nbytes, check=check))
    copy = Provider("torch copy_", lambda: twin.copy_(g), 2 * g.nbytes)
    return Work([*mine, copy], [Ratio("share of copy", p.name, (copy.name,), "rate") for p in mine])
