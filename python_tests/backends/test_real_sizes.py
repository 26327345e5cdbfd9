"""Real sizes on a GPU, with the CUDA and the Triton kernels: whole weights against the CPU, and tensors beyond 2^31 elements against the
reference on some rows or columns. The emulator goes through the same tests with small tensors, so that they are right before a GPU is."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nmkernels import Pattern, dispatch, reference, testing
from nmkernels.backends.cuda.core import EMULATED, emulator_built
from nmkernels.reference.mvue import group_mvue, words
from python_tests.conformance import built, moved, tensors
from python_tests.ops.samples import adamw, seed

pytestmark = [pytest.mark.slow, pytest.mark.alone]

DEVICE = "cuda"
WEIGHT = (4096, 11008)
LARGE = (131200, 16384)
"""Just above 2^31 elements, in whole tiles of every kernel."""
SMALL = {"DEVICE": "cpu", "WEIGHT": (64, 192), "LARGE": (192, 128)}
"""The same for the emulator."""
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPS = torch.ops.nmkernels
Ours = Callable[..., Any]


@pytest.fixture(autouse=True)
def unforced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The raw ops on CPU tensors run whatever the dispatcher chooses: the compiled core, which has the bits of the reference."""
    monkeypatch.delenv(dispatch.ENV, raising=False)


@pytest.fixture(params=[*(pytest.param(backend, marks=pytest.mark.gpu) for backend in ("cuda", "triton")), EMULATED])
def ours(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ours:
    """``ours("nm_mask", w, 2, 4)`` runs a backend's kernel; a test ends where the backend has none for a GEMM."""
    backend = request.param
    if backend == EMULATED:
        if not emulator_built():
            pytest.skip("the emulator of CUDA kernels is not built; NMKERNELS_EMULATOR=1 python setup.py build_ext --inplace")
        for name, value in SMALL.items():
            monkeypatch.setattr(sys.modules[__name__], name, value)

    def run(op: str, *args: Any) -> Any:
        entry = next((i for i in dispatch.implementations(op) if i.backend == backend), None)
        can, reason = entry.supports(*args) if entry else (False, f"{backend} has no kernel for {op}")
        if not can and op.startswith("nm_linear"):
            pytest.skip(reason)
        assert can and entry, reason
        return entry.fn(*args)

    return run


def need(gigabytes: float) -> None:
    """Skips where the GPU has less memory free."""
    if DEVICE == "cpu":
        return
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes:.0f} GiB of GPU memory, {free:.0f} are free")


def parts_of(size: int) -> list[slice]:
    """The first and last eight, and those around the places where a byte's or an element's number outgrows 31 bits."""
    middle = size // 2 // 8 * 8
    return [slice(start, start + 8) for start in (0, middle - 8, middle, size - 8)]


def large(dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(LARGE, dtype=dtype, device=DEVICE).normal_()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_weights(ours: Ours, dtype: torch.dtype) -> None:
    w, key = torch.randn(WEIGHT).to(dtype), seed(5, 2**33)
    calls: list[tuple[Any, ...]] = [("nm_transposable_mask", w, 2, 4)]
    for n, m in ((2, 4), (1, 8), (4, 32)):
        calls += [(op, w, n, m) for op in ("nm_mask", "nm_prune", "nm_soft_threshold", "nm_compress")]
        calls += [("nm_decompress", *OPS.nm_compress(w, n, m, None), n, m, WEIGHT[1])]
        scale = ours("nm_soft_threshold_scale", w.to(DEVICE), n, m).cpu()
        torch.testing.assert_close(scale, OPS.nm_soft_threshold_scale(w, n, m), rtol=1e-6, atol=0)
    for op in ("nm_mvue", "nm_mvue_compress"):
        calls += [(op, w, 2, 4, dim, key, method) for dim in (0, 1) for method in ("exact", "approx")]
    for select, layout in (("magnitude", "canonical"), ("transposable", "canonical"), ("transposable", "mma.sp")):
        calls += [("nm_pack", w, 2, 4, select, None, None, BF16, True, select == "transposable", layout)]
    for op, *args in calls:
        testing.assert_equal_bits(ours(op, *moved(args, DEVICE)), getattr(OPS, op)(*args), f"{op} {args[1:]}")


def test_optimizer_step(ours: Ours) -> None:
    shapes = (WEIGHT, (WEIGHT[1],), (1024, 4096) if DEVICE == "cuda" else (8, 16), (3, 4))
    args, baseline = (built(lambda: adamw(shapes=shapes), d) for d in ("cpu", DEVICE))
    stats, expected = ours("nm_masked_adamw_", *baseline), OPS.nm_masked_adamw_(*args)
    torch.testing.assert_close(stats.cpu(), expected, rtol=1e-6, atol=0)
    testing.assert_equal_bits(tensors(baseline), tensors(args))


def judged(y: Tensor, x: Tensor, dense: Tensor) -> None:
    """``y`` is a GEMM x · dense no worse than torch's own on the same device; float64 on the GPU validators."""
    testing.assert_no_worse(y, x @ dense, x.double() @ dense.double())


@pytest.mark.parametrize("op", ["nm_linear", "nm_linear_dgrad", "nm_linear_wgrad"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_gemms(ours: Ours, dtype: torch.dtype, op: str) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    declined = []
    for tokens, pattern in itertools.product([1, 3, 16, 1024, 1030], ["2:4", "1:8"]):
        try:
            one_product(ours, op, dtype, tokens, Pattern(pattern))
        except pytest.skip.Exception as why:
            declined.append(why)
    if len(declined) == 10:
        raise declined[0]


def one_product(ours: Ours, op: str, dtype: torch.dtype, tokens: int, p: Pattern) -> None:
    rows, cols = WEIGHT
    tokens -= 960 if DEVICE == "cpu" and tokens > 960 else 0
    x, g = torch.randn(tokens, cols, device=DEVICE).to(dtype), torch.randn(tokens, rows, device=DEVICE).to(dtype)
    if op == "nm_linear_wgrad":
        gc = ours("nm_mvue_compress", g, p.n, p.m, 0, moved(seed(), DEVICE), "exact")
        return judged(ours(op, *gc, p.n, p.m, tokens, x), ours("nm_decompress", *gc, p.n, p.m, tokens), x)
    w = torch.randn(WEIGHT, device=DEVICE).to(dtype)
    packed, dense = ours("nm_compress", w, p.n, p.m, None), ours("nm_prune", w, p.n, p.m)
    if op == "nm_linear":
        return judged(ours(op, x, *packed, p.n, p.m, cols, None), x, dense.T)
    return judged(ours(op, g, *packed, p.n, p.m, cols), g, dense)


# ---- beyond 2^31 elements, in bfloat16: numbers of elements and offsets in bytes outgrow 32 bits


@pytest.mark.parametrize("op", ["nm_mask", "nm_prune", "nm_soft_threshold", "nm_transposable_mask"])
def test_groups_beyond_32_bits(ours: Ours, op: str) -> None:
    need(12)
    w = large()
    result = ours(op, w, 2, 4)
    for part in parts_of(LARGE[0]):
        testing.assert_equal_bits(result[part], getattr(reference, op[3:])(w[part].cpu(), 2, 4), f"{op} {part}")


@pytest.mark.parametrize("pattern", ["2:4", "4:32"])
def test_packed_beyond_32_bits(ours: Ours, pattern: str) -> None:
    """compress and back."""
    need(24)
    (rows, cols), p = LARGE, Pattern(pattern)
    w = large()
    values, indices = ours("nm_compress", w, p.n, p.m, None)
    for part in parts_of(rows):
        testing.assert_equal_bits((values[part], indices[part]), reference.compress(w[part].cpu(), p.n, p.m), f"compress {part}")
    dense, pruned = ours("nm_decompress", values, indices, p.n, p.m, cols), ours("nm_prune", w, p.n, p.m)
    for start in range(0, rows, 4096):
        part = slice(start, start + 4096)
        assert torch.equal(dense[part], pruned[part]), f"decompress {part}"


def test_scale_beyond_32_bits(ours: Ours) -> None:
    need(16)
    w, ws, ss = large(), 0.0, 0.0
    for start in range(0, LARGE[0], 4096):
        part = w[start : start + 4096]
        soft = ours("nm_soft_threshold", part, 2, 4).double()
        ws, ss = ws + float((part * soft).sum()), ss + float((soft * soft).sum())
    assert float(ours("nm_soft_threshold_scale", w, 2, 4)) == pytest.approx(ws / ss, rel=1e-6)


@pytest.mark.parametrize("layout", ["canonical", "mma.sp"])
def test_both_ways_beyond_32_bits(ours: Ours, layout: str) -> None:
    """One weight packed along its rows and along its columns, whose tiles are 4 x 4 of the transposable mask."""
    need(24)
    (rows, cols), whole = LARGE, 64  # rows or columns that a tensor core's metadata has together
    w = large()
    args = (2, 4, "transposable", None, None, BF16, True, True, layout)
    values, indices, values_t, indices_t, _ = ours("nm_pack", w, *args)
    for start in (0, rows // 2 // whole * whole, rows - whole):
        part, tile = slice(start, start + whole), slice(start // 16, (start + whole) // 16)
        expected = reference.pack(w[part].cpu(), *args)[:2]
        testing.assert_equal_bits((values[part], indices[part if layout == "canonical" else tile]), expected, f"rows {part}")
    for start in (0, cols // 2 // whole * whole, cols - whole):
        part, tile = slice(start, start + whole), slice(start // 16, (start + whole) // 16)
        expected = reference.pack(w[:, part].contiguous().cpu(), *args)[2:4]
        testing.assert_equal_bits((values_t[part], indices_t[part if layout == "canonical" else tile]), expected, f"columns {part}")


def test_metadata_beyond_32_bits(ours: Ours) -> None:
    need(4)
    rows, cols = LARGE
    # a nibble for the two kept of a group, the same for the next
    bytes = torch.tensor([0x44, 0x88, 0xCC, 0x99, 0xDD, 0xEE], device=DEVICE, dtype=torch.uint8)
    indices = bytes[torch.randint(6, (rows, cols // 8), device=DEVICE)]
    words = ours("nm_metadata", indices, cols, "mma.sp")
    for start in (0, rows // 2 // 16 * 16, rows - 16):
        expected = OPS.nm_metadata(indices[start : start + 16].cpu(), cols, "mma.sp")
        testing.assert_equal_bits(words[start // 16 : start // 16 + 1], expected, f"rows {start}")


@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_beyond_32_bits(ours: Ours, dim: int) -> None:
    need(16)
    g, key = large(), seed(5, 2**33)
    dense = ours("nm_mvue", g, 2, 4, dim, key.to(DEVICE), "exact")
    values, indices = ours("nm_mvue_compress", g, 2, 4, dim, key.to(DEVICE), "exact")
    across, along = LARGE if dim == 1 else LARGE[::-1]
    for part in parts_of(across):
        lines = (g[part] if dim == 1 else g[:, part].T).cpu()
        groups = lines.reshape(-1, 4)
        expected = group_mvue(groups, words(key, len(groups), part.start * along // 4), 2).view_as(lines)
        testing.assert_equal_bits(dense[part] if dim == 1 else dense[:, part].T, expected, f"{part}")
        # the packed form may store a zero anywhere, so that it is read back
        packed = OPS.nm_decompress(values[part].cpu(), indices[part].cpu(), 2, 4, along)
        testing.assert_equal_bits(packed, expected, f"compressed {part}")


def test_optimizer_step_beyond_32_bits(ours: Ours) -> None:
    need(60)
    rows, _ = LARGE
    hyper = adamw()[6]
    torch.manual_seed(0)
    p, g = large(), large()
    m, v = torch.zeros(LARGE, device=DEVICE), torch.ones(LARGE, device=DEVICE)
    flags = (2, 4, False, False, False, False, None, None)
    parts = parts_of(rows)
    before = [[x[part].cpu() for x in (p, g, m, v)] for part in parts]
    ours("nm_masked_adamw_", [p], [g], [m], [v], [], [torch.tensor(4.0, device=DEVICE)], hyper.to(DEVICE), *flags)
    for part, (p0, g0, m0, v0) in zip(parts, before, strict=True):
        reference.masked_adamw_([p0], [g0], [m0], [v0], [], [torch.tensor(4.0)], hyper, *flags)
        testing.assert_equal_bits([x[part] for x in (p, m, v)], [p0, m0, v0], f"rows {part}")


@pytest.mark.parametrize("wide", ["result", "operand"])
def test_gemms_beyond_32_bits(ours: Ours, wide: str) -> None:
    need(24)
    tokens, cols = LARGE
    out, inner = (cols, 64) if wide == "result" else (64, cols)
    w = torch.randn(out, inner, device=DEVICE).to(BF16)
    x = torch.empty(tokens, inner, dtype=BF16, device=DEVICE).normal_()
    y = ours("nm_linear", x, *ours("nm_compress", w, 2, 4, None), 2, 4, inner, None)
    dense = ours("nm_prune", w, 2, 4).T
    for part in parts_of(tokens):
        judged(y[part], x[part], dense)


@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
def test_weights_of_gemms_beyond_32_bits(ours: Ours, tokens: int) -> None:
    """The kernels for one token, for a few and for many; and of dgrad."""
    need(24)
    w = large()
    packed, dense = ours("nm_compress", w, 2, 4, None), ours("nm_prune", w, 2, 4)
    x, g = (torch.randn(tokens, size, device=DEVICE).to(BF16) for size in LARGE[::-1])
    y = ours("nm_linear", x, *packed, 2, 4, LARGE[1], None)
    for part in parts_of(LARGE[0]):
        judged(y[:, part], x, dense[part].T)
    dx = ours("nm_linear_dgrad", g, *packed, 2, 4, LARGE[1])
    for part in parts_of(LARGE[1]):
        judged(dx[:, part], g, dense[:, part])


def test_wgrad_beyond_32_bits(ours: Ours) -> None:
    need(24)
    tokens, cols = LARGE
    x, g = large(), torch.randn(tokens, 64, device=DEVICE).to(BF16)
    packed = ours("nm_mvue_compress", g, 2, 4, 0, moved(seed(), DEVICE), "exact")
    dw, dense = ours("nm_linear_wgrad", *packed, 2, 4, tokens, x), ours("nm_decompress", *packed, 2, 4, tokens)
    for part in parts_of(cols):
        judged(dw[:, part], dense, x[:, part])
