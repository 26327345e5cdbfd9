"""What nvcc makes of the CUDA kernels: no local memory, wide accesses, nothing contracted; the committed table says so; how it is read."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench import cuda_expected
from bench import cuda_resources as resources

pytestmark = pytest.mark.slow

GOOD = resources.Kernel(
    "a.cu", "groups_kernel<Mask, bf16, 2:4>", "sm_90a", 32, 0, 0, 1024, "128:4 16:8", "64:4 8:8", "", "", "", 429, "13.0.88"
)
HERE = resources.tools()
compiles = pytest.mark.skipif(not HERE.ok, reason=HERE.reason)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("source", resources.sources(), ids=lambda path: path.name)
def test_compiled(source: Path) -> None:
    for arch in resources.ARCHITECTURES:
        _check(source, arch)


def _check(source: Path, arch: str) -> None:
    kernels = resources.compiled(source, arch)
    assert resources.shortfalls(kernels) == []
    known = [k for k in resources.read() if (k.source, k.arch) == (source.name, arch)]
    if {k.nvcc for k in known} <= {k.nvcc for k in kernels}:
        differ = sorted({k.kernel for k in {*known} ^ {*kernels}})
        assert not differ, f"{resources.PATH.name} says something else of {source.name} {differ[:5]}; rewrite it: {resources.REWRITE}"


@compiles
def test_contraction_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The flag that keeps sums of GEMMs in two roundings is what the test sees."""
    source = tmp_path / "sum.cu"
    source.write_text("__global__ void sum_kernel(float4* x) { x->x = x->x * x->y + x->z; }")
    (exact,) = resources._compile(source, "sm_80")
    monkeypatch.setattr(resources, "_flags", lambda _: ["-O3"])
    (fused,) = resources._compile(source, "sm_80")
    assert (exact.kernel, exact.inexact, fused.inexact) == ("sum_kernel", "", "fma.rn.f32 1")


def test_the_table_has_every_file() -> None:
    """Also where nothing can be compiled."""
    listed = {(k.source, k.arch) for k in resources.read()}
    files = [path.name for path in resources.sources() if "__global__" in path.read_text()]
    wanted = {(name, arch) for name in files for arch in resources.ARCHITECTURES}
    assert listed == wanted, f"rewrite {resources.PATH.name}: {resources.REWRITE}"


def test_no_committed_kernel_falls_short() -> None:
    assert resources.shortfalls(resources.read()) == []


def test_every_exception_is_of_use() -> None:
    names = [f"{k.source} {k.kernel}" for k in resources.read()]
    for table in (cuda_expected.WIDTHS, cuda_expected.NARROW, cuda_expected.LOCAL, cuda_expected.LOOSE):
        for pattern in table:
            assert any(re.search(pattern, name) for name in names), f"bench/cuda_expected.py excuses no kernel by {pattern}"


def test_architectures_and_flags_are_those_of_the_build() -> None:
    cmake = resources.ROOT / "cmake"
    assert '"80-real;90a-real;' in (cmake / "architectures.cmake").read_text()
    assert resources.ARCHITECTURES == ("sm_80", "sm_90a")
    build = (cmake / "cuda.cmake").read_text()
    assert "PRIVATE -O3 $<$<STREQUAL:${part},kernels>:-fmad=false>" in build and "cuda/linear*.cu" in build and "cuda/gemm/*.cu" in build
    assert "-fmad=false" in resources._flags(Path("groups.cu")) and "-fmad=false" not in resources._flags(Path("linear_few.cu"))
    assert "-fmad=false" not in resources._flags(Path("gemm/mma_sp.cu"))


def machine_code(*lines: str) -> str:
    """Lines as cuobjdump prints them, from address 0x7310 on."""
    return "".join(f"        /*{0x7310 + 16 * i:04x}*/ {line:>40} ;   /* 0x0000000000007947 */\n" for i, line in enumerate(lines))


CUT = [
    "@!P0 BRA 0x7390",
    "STG.E.U16 desc[UR8][R12.64+0xc], R11",
    "BRA 0x7390",
    "STG.E desc[UR8][R12.64], R8",
    "STG.E desc[UR8][R12.64+0x4], R9",
    "LOP3.LUT R20, R20, 0xffff, RZ, 0xc0, !PT",
    "STG.E desc[UR8][R12.64+0x8], R10",
    "STG.E desc[UR8][R12.64+0xc], R11",
    "BSYNC B1",
]
"""One value of 16 bytes in four stores: mvue_columns_kernel of bf16 at 2:4, where the store was written in C++."""
WHOLE = [*CUT[:3], "LEA R12, P0, R2, UR10, 0x1", "LEA.HI.X R13, R2, UR11, R11, 0x1, P0", "STG.E.128 desc[UR8][R12.64], R8", "BSYNC B1"]
"""The same kernel with st_global."""


def test_narrow_stores_beside_each_other() -> None:
    for lines, narrow in [
        (CUT, "32:4"),
        (WHOLE, ""),
        ([line.replace("desc[UR8]", "") for line in CUT], "32:4"),  # as for sm_80
        ([line.replace("STG.E ", "STG.E.64 ").replace("0x4]", "0x20]") for line in CUT], "64:2"),
        (["ST.E.U8 [R2.64+0x6], R1", "ST.E.U8 [R2.64+0x7], R4", "ST.E.U8 [R2.64+0x8], R5"], "8:2"),
        (["@P1 STG.E [R2.64+-0x8], R1", "@P1 STG.E [R2.64+-0x4], R4"], "32:2"),
        # a ragged end, each element under its own condition
        (["@P1 STG.E.U16 [R2.64+0x4], R9", "@P2 STG.E.U16 [R2.64+0x6], R4", "STG.E.U16 [R2.64+0x2], R4"], ""),
        (["@P1 STG.E [R2.64], R9", "ISETP.GE.AND P1, PT, R7, 0x7, PT", "@P1 STG.E [R2.64+0x4], R4"], ""),
        # beside each other in a loop's rounds, and where another path joins
        (["STG.E [R2.64], R9", "IMAD.WIDE R2, R7, 0x4, R4", "STG.E [R2.64+0x4], R4"], ""),
        (["STG.E [R2.64], R9", "IADD3.X R3, R7, R4, RZ, P0, !PT", "STG.E [R2.64+0x4], R4"], ""),
        (["STG.E [R2.64], R9", "@P0 EXIT", "STG.E [R2.64+0x4], R4"], ""),
        (["@P0 BRA 0x7330", "STG.E [R2.64], R9", "STG.E [R2.64+0x4], R4"], ""),
        # other words, other addresses, shared and local memory
        (["STG.E [R2.64+0x4], R9", "STG.E [R2.64+0x8], R4", "STG.E [R4.64+0xc], R4", "STG.E.U16 [R2.64], R4"], ""),
        (["STS [R2], R9", "STS [R2+0x4], R4", "STL [R1], R9", "STL [R1+0x4], R4", "LDG.E R4, [R2.64]", "LDG.E R5, [R2.64+0x4]"], ""),
        (["STG.E.128 [R2.64], R8", "STG.E.128 [R2.64+0x10], R4"], ""),
    ]:
        assert resources.narrow(machine_code(*lines)) == narrow


def test_falling_short() -> None:
    for changes, word in [
        ({"spills": 1}, "local memory"),
        ({"stack_bytes": 8}, "local memory"),
        ({"loads": "64:8"}, "reads 64"),
        ({"loads": ""}, "reads 0"),
        ({"stores": "16:8 8:3"}, "writes 16"),
        ({"narrow": "32:4"}, "word by word what lies beside each other: 32:4"),
        ({"inexact": "fma.rn.f32 2"}, "not exact: fma.rn.f32"),
        ({"source": "mma_sp.cu", "kernel": "mma_sp_kernel<bf16>", "stores": "128:1", "matrix": "HMMA 64 LDSM 32"}, "should by HMMA.SP"),
        ({"source": "mma_sp.cu", "kernel": "mma_sp_kernel<bf16>", "stores": "128:1", "matrix": "LDSM 32"}, "should by HMMA.SP"),
        ({"source": "linear_mma.cu", "kernel": "mma_kernel<bf16>", "matrix": "HMMA.SP 4 LDSM 32"}, "should by HMMA"),
        ({"source": "groups.cu", "kernel": "groups_kernel<Prune, bf16, 2:4>"}, "writes 64"),
    ]:
        assert resources.shortfalls([GOOD]) == []
        (text,) = resources.shortfalls([replace(GOOD, **changes)])
        assert word in text and "sm_90a" in text


def test_exceptions_have_an_end() -> None:
    k = replace(GOOD, source="threshold.cu", kernel="scale_sums_kernel<bf16, 2:4>", inexact="fma.rn.f64 4")
    assert resources.shortfalls([k]) == []
    assert "fma.rn.f32" in resources.shortfalls([replace(k, inexact="fma.rn.f32 1 fma.rn.f64 4")])[0]
    assert resources.shortfalls([replace(k, narrow="64:2")]) == []
    assert "32:2 16:2" in resources.shortfalls([replace(k, narrow="32:2 16:2")])[0]
    assert resources.shortfalls([replace(k, kernel="any_scale_sums_kernel<bf16>", loads="16:3", stores="8:1")]) == []
