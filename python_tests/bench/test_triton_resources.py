"""The reading of compiled kernels: widths, instructions, the table, what counts as falling short."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import kernel_rows
from bench import triton_resources as resources
from bench.triton_cases import Case

GOOD = resources.Kernel("mask_kernel", "nm_mask 2:4 bf16", "sm_90", 26, 0, 0, 0, 128, 128, "", "", 156, "3.6.0", "12.9.86")
CASE = Case("nm_mask", "2:4 bf16", (), load=128, store=128)


@pytest.mark.parametrize(
    ("ptx", "load", "store"),
    [
        ("@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];", 128, 0),
        ("ld.global.L1::evict_last.v2.b32 {%r1, %r2}, [%rd1];\nld.global.b8 %rs1, [%rd2];", 64, 0),
        ("st.global.v2.b64 [%rd1], {%rd2, %rd3};", 0, 128),
        ("ld.volatile.global.u16 %rs1, [%rd1];\nst.shared.v4.b32 [%r1], {};", 16, 0),
        ("ld.shared.v4.b32 {}, [%r1];\nred.global.add.f32 [%rd1], %f1;", 0, 0),
        ("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r9;", 128, 0),
    ],
)
def test_widest(ptx: str, load: int, store: int) -> None:
    assert (resources.widest("ld", ptx), resources.widest("st", ptx)) == (load, store)


def test_opcodes() -> None:
    sass = """
.text.mask_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 EXIT ;
        /*0020*/             @!UPT UIADD3 URZ, URZ, URZ, URZ ;
        /*1fa30*/                  LDG.E.128 R4, desc[UR4][R2.64] ;
        /*1fa40*/                  NOP ;
"""
    assert resources.opcodes_of(sass) == ["LDC", "EXIT", "UIADD3", "LDG.E.128"]


def test_matrix_instructions() -> None:
    assert resources.matrix_instructions("mma.sync.aligned.m16n8k16 ...\nmma.sync.aligned.m16n8k16 ...") == "mma.sync 2"
    assert resources.matrix_instructions("wgmma.mma_async.sync.aligned.m64n128k16\nwgmma.fence.sync.aligned;") == "wgmma.mma_async 1"


@pytest.mark.parametrize(
    ("ptx", "found"),
    [
        ("\tadd.rn.f32 \t%r1, %r2, %r3;\n\tdiv.rn.f32 %r1, %r2, %r3;\n\tsqrt.rn.f64 %rd1, %rd2;", ""),
        ("\t@%p1 add.f32 %r1, %r2, %r3;", "add.f32 1"),
        ("\tfma.rn.f32 %r1, %r2, %r3, %r4;\n\tfma.rn.f32 %r1, %r2, %r3, %r4;", "fma.rn.f32 2"),
        ("\tsqrt.approx.ftz.f32 %r1, %r2;\n\tdiv.full.f32 %r1, %r2, %r3;", "div.full.f32 1 sqrt.approx.ftz.f32 1"),
        ("\tmul.rn.ftz.f32 %r1, %r2, %r3;\n\tmul.bf16x2 %r1, %r2, %r3;", "mul.bf16x2 1 mul.rn.ftz.f32 1"),
        ("\tadd.s32 %r1, %r2, 1;\n\tmad.lo.s32 %r1, %r2, %r3, %r4;\n\tmul.wide.u32 %rd1, %r1, 4;", ""),
        ("\tcvt.rn.bf16x2.f32 %r1, %r2, %r3;\n\tmax.f32 %r1, %r2, %r3;\n\tmov.b64 {%f1, %f2}, %rd1;", ""),
    ],
)
def test_inexact(ptx: str, found: str) -> None:
    assert resources.inexact(ptx) == found


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"spills": 1}, "spills"),
        ({"stack_bytes": 8}, "spills"),
        ({"widest_load": 64}, "reads 64"),
        ({"widest_store": 32}, "writes 32"),
        ({"inexact": "fma.rn.f32 2"}, "not exact"),
        ({"shared_bytes": 233472}, "shared memory"),
    ],
)
def test_falling_short(changes: dict[str, Any], word: str) -> None:
    assert resources.shortfalls(CASE, 90, [GOOD]) == []
    (text,) = resources.shortfalls(CASE, 90, [replace(GOOD, **changes)])
    assert word in text


def test_only_the_first_kernel_must_be_wide_and_none_may_spill() -> None:
    narrow = replace(GOOD, kernel="sum_kernel", widest_load=32, widest_store=32)
    assert resources.shortfalls(CASE, 90, [GOOD, narrow]) == []
    assert len(resources.shortfalls(CASE, 90, [GOOD, replace(narrow, spills=3)])) == 1


def test_what_a_case_allows() -> None:
    k = replace(GOOD, inexact="fma.rn.f64 128 rcp.approx.ftz.f64 8")
    assert resources.shortfalls(replace(CASE, loose=(".f64",)), 90, [k]) == []
    (text,) = resources.shortfalls(replace(CASE, loose=(".f32",)), 90, [k])
    assert text == "mask_kernel is not exact: fma.rn.f64 rcp.approx.ftz.f64"
    other = replace(GOOD, kernel="table_kernel", widest_load=8)
    assert resources.shortfalls(replace(CASE, kernel="mask_kernel"), 90, [other, GOOD]) == []


def test_tensor_cores_of_the_architecture() -> None:
    case = replace(CASE, matrix=True)
    with_mma = [replace(GOOD, matrix_instructions="mma.sync 64")]
    assert resources.shortfalls(case, 80, with_mma) == []
    assert "wgmma" in resources.shortfalls(case, 90, with_mma)[0]


def test_the_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [GOOD, replace(GOOD, arch="sm_80", matrix_instructions="mma.sync 64")]
    kernel_rows.write(resources.Kernel, rows, tmp_path / "t.csv")
    assert resources.read(tmp_path / "t.csv") == rows
    assert resources.read(tmp_path / "none.csv") == []
