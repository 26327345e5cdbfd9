"""Real sizes on a GPU: whole weights against the CPU, and tensors beyond 2^31 elements against the reference on some rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nmkernels import Pattern, _dispatch, reference, testing
from python_tests.conformance import built, moved, tensors
from python_tests.ops.samples import adamw, seed

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

DEVICE = "cuda"
ROWS, COLS = 4096, 11008
LARGE = (131080, 16384)
"""Just above 2^31 elements."""
BF16, FP32 = torch.bfloat16, torch.float32
OPS = torch.ops.nmkernels


@pytest.fixture(autouse=True)
def unforced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The raw ops on CPU tensors run whatever the dispatcher chooses: the compiled core, which has the bits of the reference."""
    monkeypatch.delenv(_dispatch.ENV, raising=False)


def ours(op: str, *args: Any) -> Any:
    return next(i for i in _dispatch.implementations(op) if i.backend == "triton").fn(*args)


def need(gigabytes: float) -> None:
    """Skips where the GPU has less memory free."""
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes:.0f} GiB of GPU memory, {free:.0f} are free")


def some_rows(rows: int) -> list[slice]:
    """The first and last rows, and those around the places where a byte's or an element's number outgrows 31 bits."""
    return [slice(max(0, r - 4), min(rows, r + 4)) for r in (0, rows // 2, rows - 8, rows)]


GROUPED = ["nm_mask", "nm_prune", "nm_soft_threshold", "nm_compress"]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("pattern", ["2:4", "1:8", "4:32"])
def test_weights(pattern: str, dtype: torch.dtype) -> None:
    p = Pattern(pattern)
    w = torch.randn(ROWS, COLS).to(dtype)
    for op in GROUPED:
        expected = getattr(OPS, op)(w, p.n, p.m)
        testing.assert_equal_bits(ours(op, w.to(DEVICE), p.n, p.m), expected, op)
        if op == "nm_compress":
            dense = OPS.nm_decompress(*expected, p.n, p.m, COLS)
            testing.assert_equal_bits(ours("nm_decompress", *moved(expected, DEVICE), p.n, p.m, COLS), dense, "decompress")
    torch.testing.assert_close(
        ours("nm_soft_threshold_scale", w.to(DEVICE), p.n, p.m).cpu(), OPS.nm_soft_threshold_scale(w, p.n, p.m), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_transposable(dtype: torch.dtype) -> None:
    w = torch.randn(ROWS, COLS).to(dtype)
    testing.assert_equal_bits(ours("nm_transposable_mask", w.to(DEVICE), 2, 4), OPS.nm_transposable_mask(w, 2, 4))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_gradients(dtype: torch.dtype, dim: int) -> None:
    g = torch.randn(ROWS, COLS).to(dtype)
    for op in ("nm_mvue", "nm_mvue_compress"):
        for method in ("exact", "approx"):
            args = (g, 2, 4, dim, seed(5, 2**33), method)
            testing.assert_equal_bits(ours(op, *moved(args, DEVICE)), getattr(OPS, op)(*args), f"{op} {method}")


def test_optimizer_step() -> None:
    args, twin = (built(lambda: adamw(shapes=((ROWS, COLS), (COLS,), (1024, 4096), (3, 4)), outs=BF16), d) for d in ("cpu", DEVICE))
    stats, expected = ours("nm_masked_adamw_", *twin), OPS.nm_masked_adamw_(*args)
    torch.testing.assert_close(stats.cpu(), expected, rtol=1e-6, atol=0)
    testing.assert_equal_bits(tensors(twin), tensors(args))


def judged(y: Tensor, x: Tensor, dense: Tensor) -> None:
    """``y`` is a product x · dense no worse than torch's own on the same device; float64 on the GPU judges."""
    testing.assert_no_worse(y, x @ dense, x.double() @ dense.double())


@pytest.mark.parametrize("pattern", ["2:4", "1:8"])
@pytest.mark.parametrize("tokens", [1, 3, 16, 1030])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32], ids=str)
def test_products(dtype: torch.dtype, tokens: int, pattern: str) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    p = Pattern(pattern)
    w = torch.randn(ROWS, COLS, device=DEVICE).to(dtype)
    packed = ours("nm_compress", w, p.n, p.m, None)
    dense = ours("nm_prune", w, p.n, p.m)
    x, g = torch.randn(tokens, COLS, device=DEVICE).to(dtype), torch.randn(tokens, ROWS, device=DEVICE).to(dtype)
    judged(ours("nm_linear", x, *packed, p.n, p.m, COLS, None), x, dense.T)
    judged(ours("nm_linear_dgrad", g, *packed, p.n, p.m, COLS), g, dense)
    gc = ours("nm_mvue_compress", g, p.n, p.m, 0, moved(seed(), DEVICE), "exact")
    judged(ours("nm_linear_wgrad", *gc, p.n, p.m, tokens, x), ours("nm_decompress", *gc, p.n, p.m, tokens), x)


def test_beyond_32_bits() -> None:
    """mask, prune, compress and back in bfloat16, where numbers of elements and offsets in bytes outgrow 32 bits."""
    need(24)
    rows, cols = LARGE
    w = torch.empty(LARGE, dtype=BF16, device=DEVICE).normal_()
    mask, (values, indices) = ours("nm_mask", w, 2, 4), ours("nm_compress", w, 2, 4, None)
    for part in some_rows(rows):
        here = w[part].cpu()
        testing.assert_equal_bits(mask[part], reference.mask(here, 2, 4), f"mask {part}")
        testing.assert_equal_bits((values[part], indices[part]), reference.compress(here, 2, 4), f"compress {part}")
    del mask
    dense, pruned = ours("nm_decompress", values, indices, 2, 4, cols), ours("nm_prune", w, 2, 4)
    for start in range(0, rows, 4096):
        part = slice(start, start + 4096)
        assert torch.equal(dense[part], pruned[part]), f"decompress {part}"


def test_optimizer_step_beyond_32_bits() -> None:
    need(60)
    rows, _ = LARGE
    hyper = adamw()[7]
    torch.manual_seed(0)
    p, g = (torch.empty(LARGE, dtype=BF16, device=DEVICE).normal_() for _ in range(2))
    m, v = torch.zeros(LARGE, device=DEVICE), torch.ones(LARGE, device=DEVICE)
    flags = (2, 4, False, False, False, False, None, None)
    parts = some_rows(rows)
    before = [[x[part].cpu() for x in (p, g, m, v)] for part in parts]
    ours("nm_masked_adamw_", [p], [g], [m], [v], [], [torch.tensor(4.0, device=DEVICE)], [], hyper.to(DEVICE), *flags)
    for part, (p0, g0, m0, v0) in zip(parts, before, strict=True):
        reference.masked_adamw_([p0], [g0], [m0], [v0], [], [torch.tensor(4.0)], [], hyper, *flags)
        testing.assert_equal_bits([x[part] for x in (p, m, v)], [p0, m0, v0], f"rows {part}")


@pytest.mark.parametrize("wide", ["result", "operand"])
def test_products_beyond_32_bits(wide: str) -> None:
    need(24)
    tokens, cols = LARGE
    out, inner = (cols, 64) if wide == "result" else (64, cols)
    w = torch.randn(out, inner, device=DEVICE).to(BF16)
    x = torch.empty(tokens, inner, dtype=BF16, device=DEVICE).normal_()
    y = ours("nm_linear", x, *ours("nm_compress", w, 2, 4, None), 2, 4, inner, None)
    dense = ours("nm_prune", w, 2, 4).T
    for part in some_rows(tokens):
        judged(y[part], x[part], dense)
