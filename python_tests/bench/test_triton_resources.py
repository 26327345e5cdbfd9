"""The reading of compiled kernels: widths, instructions, the table, what counts as missed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench import triton_resources as resources
from bench.triton_cases import OpCall
from python_tests.for_each import for_each

pytestmark = pytest.mark.slow

GOOD = resources.Kernel("mask_kernel", "nm_mask 2:4 bf16", "sm_90", 26, 0, 0, 0, 128, 128, "", 0, "", 156, "3.6.0", "12.9.86")
CASE = OpCall("nm_mask", "2:4 bf16", (), load=128, store=128, kernel="mask_kernel")


FED = "HGMMA.64x16x16.F32.BF16 R24, R{0}, gdesc[UR16], R24, gsb0"


@for_each(
    "code, found",
    [
        ([FED.format(32), "MOV R35, R1"], ["MOV R35, R1"]),
        ([FED.format(32).replace(", gsb0", ""), "MOV R32, R1"], ["MOV R32, R1"]),
        ([FED.format(32), "WARPGROUP.DEPBAR.LE gsb0, 0x0", "MOV R35, R1"], []),
        ([FED.format(32), FED.format(40), "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R35, R1", "MOV R43, R1"], ["MOV R43, R1"]),
        # what an instruction writes: several registers, none
        ([FED.format(32), "LDS.128 R30, [R16+0x12000]", "LDS.128 R28, [R16]"], ["LDS.128 R30, [R16+0x12000]"]),
        ([FED.format(32), "LDSM.16.M88.2 R31, [R3]", "LDSM.16.MT88.4 R29, [R3]"], ["LDSM.16.M88.2 R31, [R3]", "LDSM.16.MT88.4 R29, [R3]"]),
        ([FED.format(32), "LOP3.LUT P0, R33, R8, 0xff, RZ, 0xc0, !PT"], ["LOP3.LUT P0, R33, R8, 0xff, RZ, 0xc0, !PT"]),
        ([FED.format(32), "IMAD.WIDE.U32 R31, R4, 0x2, R2"], ["IMAD.WIDE.U32 R31, R4, 0x2, R2"]),
        ([FED.format(32), "STS.128 [R32], R32", "UMOV UR32, 0x1", "ISETP.GE.AND P0, PT, R32, R33, PT"], []),
        # only the next round of the loop shows it
        ([".L_x_0:", "MOV R32, R1", FED.format(32), "@P0 BRA `(.L_x_0)", "WARPGROUP.DEPBAR.LE gsb0, 0x0"], ["MOV R32, R1"]),
        # and here only one of two paths
        ([FED.format(32), "@P0 BRA `(.L_x_0)", "WARPGROUP.DEPBAR.LE gsb0, 0x0", ".L_x_0:", "MOV R32, R1"], ["MOV R32, R1"]),
        ([FED.format(32), "BRA `(.L_x_0)", "MOV R32, R1", ".L_x_0:", "EXIT", "MOV R32, R1"], []),
        ([FED.format(32), "CALL.REL.NOINC `(.L_x_0)", "EXIT", ".L_x_0:", "MOV R32, R1", "RET.REL.NODEC R4 `(k)"], ["MOV R32, R1"]),
    ],
)
def test_overwrites(code: list[str], found: list[str]) -> None:
    assert resources.overwrites(machine_code(*code, "EXIT")) == found


def machine_code(*code: str) -> Any:
    lines = [line if line.endswith(":") else f"        /*{16 * i:04x}*/ {line} ;" for i, line in enumerate(code)]
    return resources.machine_code("\n".join(lines))


def test_a_jump_that_cannot_be_followed_is_no_zero() -> None:
    with pytest.raises(ValueError, match="BRX"):
        resources.overwrites(machine_code(FED.format(32), "BRX R4 -0x10"))


@for_each(
    "ptx, found",
    [
        ("\tadd.rn.f32 \t%r1, %r2, %r3;\n\tdiv.rn.f32 %r1, %r2, %r3;\n\tsqrt.rn.f64 %rd1, %rd2;", ""),
        ("\t@%p1 add.f32 %r1, %r2, %r3;", "add.f32 1"),
        ("\tmul.rn.ftz.f32 %r1, %r2, %r3;\n\tmul.bf16x2 %r1, %r2, %r3;", "mul.bf16x2 1 mul.rn.ftz.f32 1"),
        ("\tadd.s32 %r1, %r2, 1;\n\tmad.lo.s32 %r1, %r2, %r3, %r4;\n\tmul.wide.u32 %rd1, %r1, 4;", ""),
    ],
)
def test_inexact(ptx: str, found: str) -> None:
    assert resources.inexact(ptx) == found


@for_each(
    "case, changes, word",
    [
        ({}, {}, ""),
        ({}, {"spills": 1}, "spills"),
        ({}, {"widest_load": 64}, "reads 64"),
        ({}, {"inexact": "fma.rn.f32 2"}, "not exact"),
        ({}, {"overwrites": 66}, "wgmma still reads: 66"),
        ({"loose": (".f64",)}, {"inexact": "fma.rn.f64 128"}, ""),
        ({"matrix": True}, {"matrix_instructions": "wgmma 64"}, ""),
        ({"matrix": True}, {}, "no tensor cores"),
    ],
)
def test_falling_short(case: dict[str, Any], changes: dict[str, Any], word: str) -> None:
    table = replace(GOOD, kernel="table_kernel", widest_load=8)  # of several kernels, widths are the main one's
    found = resources.missed(replace(CASE, **case), 90, [table, replace(GOOD, **changes)])
    assert len(found) == bool(word) and all(word in text for text in found)
