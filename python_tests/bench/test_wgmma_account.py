"""The account of the wgmma.sp kernel's cycles: a tile, a GEMM and machine code by hand; the committed table."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from bench import cuda_resources as resources
from bench import rows as tidy
from bench import wgmma_account as accounts


def test_one_tile_by_hand() -> None:
    """256 x 192 x 64: 3145728 pairs; B of 24 KB is read for each of 4 x 64 rows, A and its words (18 KB) once; half of B comes from L2."""
    found = accounts.account(256, 192, 4, 2, False, 74)
    assert (found.multiply, found.reads, found.writes, found.l2, found.issue, found.cycles) == (768, 912, 336, 960, 148, 1248)
    assert (found.share, found.over_dense) == (round(768 / 1248, 3), round(1536 / 1248, 2))
    # without a cluster L2 binds, and with a long loop the instructions
    assert accounts.account(128, 128, 7, 1, False, 57).cycles == 25600 / 32
    assert accounts.account(128, 128, 7, 2, False, 400).cycles == 800


def test_one_tile_of_8_bits_by_hand() -> None:
    """128 of k in a slab: as many bytes, twice as much metadata; half the bytes of an element, and k goes twice as fast."""
    found = accounts.account(256, 192, 4, 2, False, 80, "e4m3")
    assert (found.multiply, found.reads, found.writes, found.l2, found.issue, found.cycles) == (768, 928, 352, 1024, 160, 1280)
    assert (found.share, found.over_dense) == (0.6, 1.2)
    cycles = 11 * (64 * 1280 + 3072) + 1500
    assert accounts.predicted(256, 192, 2, 1280, 8192, 8192, 8192, 3e12, 1) == pytest.approx(2 * 8192**3 / (cycles / 1.75e9) / 1e12)
    few = accounts.predicted(128, 128, 2, 576, 14336, 16, 128, 1e9, 1)
    assert few == pytest.approx(2 * 14336 * 16 * 128 * 1e9 / (14336 * 128 * 0.625 + 16 * 128 + 14336 * 16 * 2) / 1e12)


def test_one_gemm_by_hand() -> None:
    """8192 cubed: 16 x 43 clusters on 66 pairs are 11 rounds; few tokens: memory delivers the weight."""
    cycles = 11 * (128 * 1248 + 3072) + 1500
    assert accounts.predicted(256, 192, 2, 1248, 8192, 8192, 8192, 3e12) == pytest.approx(2 * 8192**3 / (cycles / 1.75e9) / 1e12)
    few = accounts.predicted(128, 16, 1, 352, 14336, 16, 64, 1e9)
    assert few == pytest.approx(2 * 14336 * 16 * 64 * 1e9 / (14336 * 64 * 1.125 + 16 * 64 * 2 + 14336 * 16 * 2) / 1e12)


def test_the_innermost_loop_around_the_products_is_counted() -> None:
    products = ["HGMMA.SP.64x8x32.F32 R0", "HGMMA.SP.64x8x32.F32 R0"]
    code = ["NOP", "MOV R1, R2", "IADD3 R1, R1, R2, RZ", *products, "MOV R3, R4", "@P0 BRA 0x10", "NOP"]
    code += ["@P1 BRA 0x0", "BRA 0x20"]  # the loop over tiles; what waits longer jumps back from the end
    lines = (f"        /*{16 * i:04x}*/ {line:>40} ;   /* 0x0000000000007947 */\n" for i, line in enumerate(code))
    assert accounts.loops("Function : kernel\n" + "".join(lines)) == {"kernel": 3}


def test_the_table_was_made_from_these_sources() -> None:
    assert {row["digest"] for row in tidy.load(accounts.PATH)} == {resources.digest(path) for path in accounts.SOURCES}, accounts.REWRITE


@pytest.mark.slow
@pytest.mark.skipif(not resources.tools().ok, reason=resources.tools().reason)
def test_the_table_is_what_the_compiler_makes() -> None:
    """Of the 16-bit kernels."""
    made = [{name: str(value) for name, value in asdict(t).items()} for t in accounts.compiled(accounts.SOURCES[:1])]
    assert made and made == tidy.load(accounts.PATH)[: len(made)], f"rewrite it: {accounts.REWRITE}"
