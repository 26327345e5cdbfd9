"""The package's CUDA kernels as nvcc compiles them give the bits of the reference: their PTX, run on the CPU."""

from __future__ import annotations

import itertools
import struct

import pytest
import torch

from nmkernels import reference, testing
from nmkernels.reference.adamw import bits_of

from .machine import execute
from .nvcc import CSRC, NVCC, ptx
from .parse import parse

pytestmark = [pytest.mark.slow, pytest.mark.skipif(NVCC is None or not CSRC.is_dir(), reason="no nvcc, or not a source checkout")]

BF16 = torch.bfloat16
MODES = ["earliest", "latest", 1]


@pytest.mark.parametrize("mode", MODES)
def test_packing_along_rows(mode: str | int) -> None:
    """Two blocks, the second with whole chunks and threads without any."""
    text = ptx(CSRC / "cuda" / "compress.cu", "sm_90a", "-fmad=false")
    for dtype, name in ((BF16, "INS_4bf16ES3_NS_5FixedILi2ELi4EEELi0E"), (torch.float32, "IffNS_5FixedILi2ELi4EEELi0E")):
        w = torch.randn(40, 512, dtype=dtype)
        w[3, :64] = 0
        chunks = w.numel() // (16 if dtype == BF16 else 8)
        want = reference.compress(w, 2, 4)
        got = torch.empty_like(want[0]), torch.empty_like(want[1])
        execute(parse(text, name), -(-chunks // 512), [w, 0, 0, *got, 0, chunks], mode=mode, threads=256)
        testing.assert_equal_bits(got, want, f"{dtype} {mode}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("op", "reference_of"), [("Mask", reference.mask), ("Prune", reference.prune)])
def test_groups_in_registers_and_in_shared_memory(op: str, reference_of, mode: str | int) -> None:
    text = ptx(CSRC / "cuda" / "groups.cu", "sm_90a", "-fmad=false")
    w = torch.randn(8192 + 64).to(BF16)
    out = torch.empty_like(reference_of(w, 2, 4))
    one = parse(text, f"13groups_kernelINS1_{len(op)}{op}ENS_4bf16ENS_5FixedILi2ELi4E")
    execute(one, 2, [w, out, w.numel(), 1], mode=mode, threads=256)
    testing.assert_equal_bits(out, reference_of(w, 2, 4), f"{op} 2:4")
    w = torch.randn(5 * 300).to(BF16)
    out = torch.empty_like(reference_of(w, 3, 5))
    name = f"any_groups_kernelINS1_{len(op)}{op}ENS_4bf16E"
    execute(parse(text, name), 1, [w, out, 300, 3, 5], mode=mode, threads=256)
    testing.assert_equal_bits(out, reference_of(w, 3, 5), f"{op} 3:5")


def test_metadata_for_the_tensor_cores() -> None:
    text = ptx(CSRC / "cuda" / "metadata.cu", "sm_90a", "-fmad=false")
    w = torch.randn(128, 256).to(BF16)
    indices = reference.compress(w, 2, 4)[1]
    for code, layout in ((1, "mma.sp"), (2, "wgmma.sp")):
        want = reference.to_layout(indices, 256, layout)
        got = torch.empty_like(want)
        execute(parse(text, "15metadata_kernel"), 1, [indices, 128, 4, code, 1, got], threads=256)
        testing.assert_equal_bits(got, want, layout)
    want = reference.to_layout(indices, 256, "wgmma.sp.8bit")
    got = torch.empty_like(want)
    execute(parse(text, "metadata_8bit_kernel"), 1, [indices, 128, 2, 1, got], threads=256)
    testing.assert_equal_bits(got, want, "wgmma.sp.8bit")


SMALL, MIDDLE = (64, 64, 32, 32, 4, 3), (128, 128, 64, 64, 3, 2)
"""Tiles of gemm/tile.h: rows and columns of a block and of a warp, stages, blocks of a multiprocessor."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tile", "by_column"), [(SMALL, False), (MIDDLE, False), (MIDDLE, True)])
def test_the_gemm_by_mma_sp(tile: tuple[int, ...], by_column: bool, mode: str | int) -> None:
    """Copies under way by cp.async over more slabs than there are stages; whole numbers, whose sums are exact; columns left over."""
    rows, cols, *warp, stages, _ = tile
    m, n, k = rows, cols - 24, 64 * (stages + 3)
    g = torch.Generator().manual_seed(0)
    w, x = (torch.randint(-r, r + 1, (size, k), generator=g).to(BF16) for r, size in ((8, m), (4, n)))
    values, indices = reference.compress(w, 2, 4)
    metadata = reference.to_layout(indices, k, "mma.sp")
    want = (reference.decompress(values, indices, 2, 4, k).double() @ x.double().T).to(BF16)
    dense = x.t().contiguous() if by_column else x
    out = torch.full_like(want if by_column else want.T.contiguous(), torch.nan)
    at = [t.data_ptr() for t in (values, metadata, dense, out)]
    # struct Gemm: values, metadata, dense; y, bias, residual, parts, rows, tokens, activation; m, n, k; tiles, slabs of a part, warps
    parameter = struct.pack("<7Q2qi4x3q4i", *at, 0, 0, 0, out.shape[1], out.shape[0], 0, m, n, k, 1, 1, k // 64, 1)
    text = ptx(CSRC / "cuda" / "gemm" / "mma_sp.cu", "sm_90a")
    name = f"INS_4bf16ENS1_4TileI{''.join(f'Li{i}E' for i in tile)}EELb{int(by_column)}E"
    threads = 32 * (rows // warp[0]) * (cols // warp[1])
    shared = stages * (cols * 128 + rows * 64 + rows * 8)
    execute(parse(text, name), 1, [parameter], [values, metadata, dense, out], mode=mode, threads=threads, shared=shared)
    testing.assert_equal_bits(out, want if by_column else want.T.contiguous(), f"{tile} {mode}")


TILES = {
    "both ways": ("INS_4bf16ES3_NS_5FixedILi2ELi4EEELi1ELb1ELb1E", "transposable", None),
    "by magnitude": ("IfNS_4bf16ENS_5FixedILi2ELi4EEELi0ELb1ELb0ELb1E", "magnitude", None),
    "by the soft threshold": ("IfNS_4bf16ENS_5FixedILi2ELi4EEELi3ELb1ELb0ELb1E", "threshold", torch.tensor(1.75)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", TILES)
def test_packing_tiles_through_shared_memory(how: str, mode: str | int) -> None:
    """Both ways, or rows and the dense form from one reading; whole tiles, and a last one that is short in both directions."""
    name, rule, scale = TILES[how]
    kernel, both = parse(ptx(CSRC / "cuda" / "pack_tiles.cu", "sm_90a", "-fmad=false"), name), rule == "transposable"
    for code, layout, rows, cols in ((0, "canonical", 160, 96), (2, "wgmma.sp", 64, 64)):
        w = torch.randn(rows, cols, dtype=BF16 if both else torch.float32)
        made = reference.pack(w, 2, 4, rule, None, scale, BF16, columns=both, layout=layout, dense=not both)
        want = [t for t in made if t.numel()]
        got = [torch.empty_like(t) for t in want]
        at = [t.data_ptr() for t in got]
        pairs = struct.pack("<2Q", *at[:2]), struct.pack("<2Q", *(at[2:] if both else (0, 0)))
        across = -(-cols // 64)
        args = [w, 0, 0 if scale is None else scale, *pairs, 0 if both else got[2], rows, cols, divider(across), code, 0]
        execute(kernel, across * -(-rows // 128), args, got, mode=mode, threads=kernel.most_threads)
        testing.assert_equal_bits(got, want, f"{layout} {mode}")


@pytest.mark.parametrize("mode", MODES)
def test_the_forms_of_several_weights_in_one_launch(mode: str | int) -> None:
    """By magnitude with the dense form, and both ways by the bits of held masks, where the metadata may stay."""
    text = ptx(CSRC / "cuda" / "adamw_pack.cu", "sm_90a", "-fmad=false")
    shapes = (64, 128), (128, 64)
    for select, back, rule in ((0, 2, "magnitude"), (2, 1, "held")):
        weights, held = [torch.randn(shape) for shape in shapes], rule == "held"
        masks = [reference.transposable_mask(w, 2, 4) if held else None for w in weights]
        bits = [bits_of(mask) if mask is not None else torch.zeros(0, dtype=torch.uint8) for mask in masks]
        want = [
            reference.pack(w, 2, 4, rule, mask, None, BF16, True, held, "wgmma.sp", not held)
            for w, mask in zip(weights, masks, strict=True)
        ]
        for kept in (False, True) if held else (False,):
            got = [[torch.zeros_like(t) for t in one] for one in want]
            params = torch.zeros(2, 23, dtype=torch.int64)
            for i, (w, b) in enumerate(zip(weights, bits, strict=True)):
                # struct AdamWParam: addresses of four tensors, mask, step, rows, cols, first tile, tiles, dtypes, walk, index, strides
                params[i, 0], params[i, 4] = w.data_ptr(), b.data_ptr()
                params[i, 6:13] = torch.tensor([*w.shape, 2 * i, 2, 0, 1, i])
            table = [[0 if not t.numel() or (kept and k in (1, 3)) else t.data_ptr() for k, t in enumerate(one)] for one in got]
            forms = torch.tensor([[*one, 0] for one in table])
            owners = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
            memory = [*weights, *(b for b in bits if b.numel()), *(t for one in got for t in one if t.numel())]
            kernel = parse(text, f"17pack_forms_kernelILi{select}ELi{back}E")
            execute(kernel, 4, [params, owners, forms, 2], memory, mode=mode, threads=256)
            for one, expected in zip(got, want, strict=True):
                some = [torch.zeros_like(t) if kept and k in (1, 3) else t for k, t in enumerate(expected)]
                testing.assert_equal_bits(one, some, f"{rule} {mode} {kept}")


def edges(dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Whatever ``testing.cases`` has of 2:4, repeated."""
    all_of_them = torch.cat([case.x.flatten() for case in testing.cases("2:4", dtype)])
    return all_of_them.repeat(-(-numel // all_of_them.numel()))[:numel].clone()


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_the_soft_threshold_of_pairs(dtype: torch.dtype) -> None:
    """S, S packed times a scale, and the scale, of ordinary numbers and of all edge cases."""
    name = "NS_4bf16E" if dtype == BF16 else "NS_4fp16E"
    groups, rows, sums = (ptx(CSRC / "cuda" / f"{file}.cu", "sm_90a", "-fmad=false") for file in ("groups", "compress", "threshold"))
    for w in (torch.randn(16384).to(dtype), edges(dtype, 16384)):
        for n in (1, 2):
            out = torch.empty_like(w)
            pattern = f"NS_5FixedILi{n}ELi4E"
            execute(parse(groups, f"13groups_kernelINS1_13SoftThresholdE{name}{pattern}"), 2, [w, out, w.numel(), 1], threads=256)
            testing.assert_equal_bits(out, reference.soft_threshold(w, n, 4), f"{dtype} {n}:4")
        scale = torch.tensor(1.75)
        want = reference.pack(w.view(1, -1), 2, 4, select="threshold", scale=scale)
        got = torch.empty_like(want[0]), torch.empty_like(want[1])
        kernel = parse(rows, f"16pack_rows_kernelI{name}S3_NS_5FixedILi2ELi4EEELi3E")
        execute(kernel, 2, [w, 0, scale, *got, 0, w.numel() // 16], threads=256)
        testing.assert_equal_bits(got, tuple(want[:2]), f"{dtype} packed")
    w = torch.randn(8192).to(dtype)
    for n in (1, 2):
        found = torch.empty(2, 2, dtype=torch.float64)
        execute(parse(sums, f"17scale_sums_kernelI{name}NS_5FixedILi{n}ELi4E"), 2, [w, found, w.numel(), 1], threads=256)
        s = reference.soft_threshold(w, n, 4).double()
        torch.testing.assert_close(found.sum(0), torch.stack([(w.double() * s).sum(), (s * s).sum()]), rtol=1e-12, atol=0)


def divider(d: int) -> bytes:
    """``struct Divider`` of launch.h."""
    shift = next(s for s in range(31, 64) if 1 << s >= d << 31)
    return struct.pack("<3I", d, -(-(1 << shift) // d), shift)


@pytest.mark.parametrize(("dtype", "name"), [(BF16, "NS_4bf16E"), (torch.float16, "NS_4fp16E"), (torch.float32, "f")])
def test_mvue_along_rows_and_along_tokens(dtype: torch.dtype, name: str) -> None:
    """A whole strip for each thread; two tiles after each other for one block, the second copied while the first is worked on."""
    text = ptx(CSRC / "cuda" / "mvue.cu", "sm_90a", "-fmad=false")
    seed = torch.tensor([1234567890123, 77])
    tokens, columns = 256, 128 // dtype.itemsize
    for g in (torch.randn(tokens, columns).to(dtype), edges(dtype, tokens * columns).view(tokens, columns)):
        flat = g.flatten()
        want = reference.mvue_compress(flat, 2, 4, 0, seed)
        got = torch.empty_like(want[0]), torch.empty_like(want[1])
        strips = flat.numel() // 16
        execute(parse(text, f"18mvue_strips_kernelI{name}E"), -(-strips // 256), [flat, strips, seed, *got], threads=256)
        testing.assert_equal_bits(got, tuple(want), f"{dtype} rows")
        want = reference.mvue_compress(g, 2, 4, 0, seed)
        ordered = reference.to_layout(want[1], tokens, "wgmma.sp").view(torch.uint8).view(want[1].shape) if dtype.itemsize == 2 else None
        for mode, meta in itertools.product(MODES, (False, True) if dtype.itemsize == 2 else (False,)):  # metadata has as many bytes
            got = torch.empty_like(want[0]), torch.empty_like(want[1])
            # struct Mvue: g; outer, length, inner; seed; dense, values, indices; groups and bytes of indices of a packed row
            at = [t.data_ptr() for t in (g, seed, *got)]
            call = struct.pack("<Q3q4Q2q", at[0], 1, tokens, columns, at[1], 0, at[2], at[3], tokens // 4, tokens // 8)
            kernel = parse(text, f"19mvue_columns_kernelI{name}Lb1ELb{int(meta)}E")
            execute(kernel, 1, [call, divider(1), divider(1), 2, 1, 1], [g, seed, *got], mode=mode, threads=256)
            testing.assert_equal_bits(got, (want[0], ordered if meta else want[1]), f"{dtype} tokens {mode} {meta}")
