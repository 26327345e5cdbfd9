"""What nvcc makes of the CUDA kernels: no local memory, wide accesses, nothing contracted; the committed table says so; how it is read."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import cuda_expected
from bench import cuda_resources as resources
from python_tests.for_each import for_each

GOOD = resources.Kernel(
    "a.cu", "groups_kernel<Mask, bf16, 2:4>", "sm_90a", 32, 0, 0, 1024, "128:4 16:8", "64:4 8:8", "", "", "", 429, "", "13.0.88"
)
SERIALISED = f"""
#include "{resources.SOURCES}/ptx_hopper.h"
using namespace nm;
using namespace nm::cuda;
__global__ void __launch_bounds__(128) wgmma_kernel(float* x) {{
    float d[8] = {{}};
    wgmma_fence();
    wgmma_sp<bf16, 0, false>(d, 0, 64, 0x44444444u, true);
    wgmma_commit();
    d[0] += 1.0f;
    wgmma_sp<bf16, 1, false>(d, 0, 64, 0x44444444u, true);
    wgmma_commit();
    wgmma_wait<0>();
    for (int i = 0; i < 8; ++i) x[threadIdx.x * 8 + i] = d[i];
}}
"""
HERE = resources.tools()
compiles = pytest.mark.skipif(not HERE.ok, reason=HERE.reason)


def kernel_files() -> list[Path]:
    """Those that have a kernel, or include one."""
    parts = {path: [p for p in resources.with_includes(path) if resources.SOURCES in p.parents] for path in resources.sources()}
    return [path for path, includes in parts.items() if any("__global__" in p.read_text() for p in includes)]


def test_the_table_was_made_from_these_sources() -> None:
    """So that what it says of spills and widths holds of the kernels as they are, and few have to be compiled for every test."""
    made = {(k.source, k.arch, k.digest) for k in resources.read()}
    wanted = {(path.name, arch, resources.digest(path)) for path in kernel_files() for arch in resources.architectures(path)}
    assert made == wanted, f"{sorted({each[0] for each in made ^ wanted})} changed; rewrite {resources.PATH.name}: {resources.REWRITE}"


def test_a_digest_is_of_what_is_compiled(tmp_path: Path) -> None:
    source, header = tmp_path / "a.cu", tmp_path / "b.h"
    source.write_text('#include "b.h"\n__global__ void f() { g(1); }')
    header.write_text("void g(int);")
    before = resources.digest(source)
    header.write_text("// what it is for\nvoid   g(int); /* and\nwhy */")
    assert resources.digest(source) == before
    header.write_text("void g(long);")
    assert resources.digest(source) != before


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch"), [("compress.cu", "sm_80"), ("compress.cu", "sm_90"), ("mma_sp.cu", "sm_120")])
def test_compiled(name: str, arch: str) -> None:
    """The rows of some files are what the compiler makes of them."""
    (source,) = (path for path in resources.sources() if path.name == name)
    kernels = resources.compiled(source, arch)
    assert resources.missed(kernels) == []
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


@compiles
def test_serialised_wgmma_are_an_error(tmp_path: Path) -> None:
    """A sum that is touched while products are under way makes ptxas wait for each of them; it says so and goes on."""
    source = tmp_path / "wgmma.cu"
    source.write_text(SERIALISED)
    with pytest.raises(RuntimeError, match=r"\(C75\d\d\).*serialized"):
        resources._compile(source, "sm_90a")


def test_nothing_in_the_table_falls_short() -> None:
    """Also where nothing can be compiled; and every exception is of use."""
    listed = resources.read()
    assert resources.missed(listed) == []
    for pattern in [*cuda_expected.WIDTHS, *cuda_expected.NARROW, *cuda_expected.LOOSE]:
        assert any(re.search(pattern, f"{k.source} {k.kernel}") for k in listed), f"bench/cuda_expected.py excuses no kernel by {pattern}"


def test_the_build_has_the_same_architectures_and_flags() -> None:
    cmake = resources.ROOT / "cmake"
    check: dict[str, Any] = runpy.run_path(str(cmake / "check_wheel.py"))
    compiled = [arch for path in resources.sources() for arch in resources.architectures(path)]
    assert {*compiled, "compute_90"} == {*check["architectures"]()} and {*compiled} == {*resources.FRONT_END}
    hopper = [path.name for path in resources.sources() if resources.architectures(path) == ("sm_90a",)]
    assert hopper == ["wgmma_sp.cu", "wgmma_sp_8bit.cu"]
    build = (cmake / "cuda.cmake").read_text()
    assert "PRIVATE -O3 $<$<STREQUAL:${part},kernels>:-fmad=false>" in build and "cuda/linear*.cu" in build and "cuda/gemm/*.cu" in build
    assert "cuda/gemm/wgmma*.cu" in build and "arch=compute_90a,code=sm_90a -DNM_SM90A" in build
    assert resources.LATER_AS_PTX.pattern in build


def test_the_table_is_of_the_tool_chain_of_the_wheels() -> None:
    """Its front end's and its assembler's versions are those that ``cmake/toolkit.sh`` installs."""
    script = (resources.ROOT / "cmake" / "toolkit.sh").read_text()
    compiler, assembler = (re.search(pattern, script) for pattern in (r"cuda-toolkit\[.*\]==([\d.]+)\.\*", r"nvcc-cu12==([\d.]+)"))
    assert compiler and assembler
    for versions in {k.nvcc for k in resources.read()}:
        front, _, back = versions.partition(" ")
        assert front.startswith(f"{compiler[1]}.") and back == assembler[1], resources.REWRITE


@for_each(
    "lines, narrow",
    [
        # one value of 16 bytes in four stores, and in one
        (["STG.E [R2.64], R8", "STG.E [R2.64+0x4], R9", "LEA R4, R6", "STG.E [R2.64+0x8], R10", "STG.E [R2.64+0xc], R11"], "32:4"),
        (["STG.E.64 [R2.64], R8", "STG.E.64 [R2.64+0x8], R10", "STG.E.64 [R2.64+0x20], R4"], "64:2"),
        # a ragged end, each element under its own condition
        (["@P1 STG.E.U16 [R2.64+0x4], R9", "@P2 STG.E.U16 [R2.64+0x6], R4", "STG.E.U16 [R2.64+0x2], R4"], ""),
        # adjacent in different iterations of a loop, and where another path joins
        (["STG.E [R2.64], R9", "IMAD.WIDE R2, R7, 0x4, R4", "STG.E [R2.64+0x4], R4"], ""),
        (["STG.E [R2.64], R9", "@P0 EXIT", "STG.E [R2.64+0x4], R4"], ""),
        (["STG.E [R2.64], R9", "STG.E [R2.64+0x4], R4", "@P0 BRA 0x7320"], ""),
        (["STG.E [R2.64], R9", "NOP", "STG.E [R2.64+0x4], R4", "@P0 BRA 0x7320"], ""),
        # other words, other addresses, shared and local memory
        (["STG.E [R2.64+0x4], R9", "STG.E [R2.64+0x8], R4", "STG.E [R4.64+0xc], R4", "STG.E.U16 [R2.64], R4"], ""),
        (["STS [R2], R9", "STS [R2+0x4], R4", "STL [R1], R9", "STL [R1+0x4], R4", "LDG.E R4, [R2.64]", "LDG.E R5, [R2.64+0x4]"], ""),
    ],
)
def test_adjacent_narrow_stores(lines: list[str], narrow: str) -> None:
    # as cuobjdump prints them
    code = "".join(f"        /*{0x7310 + 16 * i:04x}*/ {line:>40} ;   /* 0x0000000000007947 */\n" for i, line in enumerate(lines))
    assert resources.narrow(code) == narrow


SPARSE = {"source": "mma_sp.cu", "kernel": "mma_sp_kernel<bf16>", "stores": "128:1"}
SUMS = {"source": "threshold.cu", "kernel": "scale_sums_kernel<bf16, 2:4>"}
ANY = {"source": "threshold.cu", "kernel": "any_scale_sums_kernel<bf16>"}


@for_each(
    "changes, word",
    [
        ({}, ""),
        ({"spills": 1}, "local memory"),
        ({"spills": 2, "stack_bytes": 16, "arch": "sm_120"}, ""),
        ({"spills": 3, "stack_bytes": 24, "arch": "sm_120"}, "local memory"),
        ({"loads": "64:8"}, "reads 64"),
        ({"stores": "16:8 8:3"}, "writes 16"),
        ({"narrow": "32:4"}, "adjacent data in narrow stores: 32:4"),
        ({"inexact": "fma.rn.f32 2"}, "not exact: fma.rn.f32"),
        ({**SPARSE, "matrix": "HMMA 64 LDSM 32"}, "should by HMMA.SP"),
        # exceptions, and their end
        ({**SUMS, "inexact": "fma.rn.f64 4", "narrow": "64:2"}, ""),
        ({**ANY, "loads": "16:3", "stores": "8:1"}, ""),
    ],
)
def test_falling_short(changes: dict[str, Any], word: str) -> None:
    found = resources.missed([replace(GOOD, **changes)])
    assert len(found) == bool(word) and all(word in text and "sm_" in text for text in found)
