"""What nvcc makes of ``csrc/cuda``: the instructions that ``ptx.h`` means, and a probe that answers without a driver too."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
import torch

CSRC = Path(__file__).resolve().parents[2] / "csrc"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
_BESIDE_TRITON = Path(sysconfig.get_paths()["purelib"]) / "triton" / "backends" / "nvidia" / "bin" / "cuobjdump"
CUOBJDUMP = shutil.which("cuobjdump") or (str(_BESIDE_TRITON) if _BESIDE_TRITON.is_file() else None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NVCC is None or not CSRC.is_dir(), reason="no nvcc, or not a source checkout")]

CALLS = """
#include "cuda/ptx.h"
using namespace nm;
using namespace nm::cuda;

template <class T>
__global__ void calls(const uint4* from, float* to, int filled) {
    using Tile = uint4[96];
    NM_SHARED(Tile, tile);
    const int lane = int(threadIdx.x);
    cp_async<16>(&tile[lane], from + lane, filled);
    cp_async<16, true>(&tile[lane + 32], from + lane + 32);
    cp_async<16, false, true>(&tile[lane + 48], from + lane + 48);
    cp_async_commit();
    cp_async<8>(&tile[lane + 64], from + lane + 64);
    cp_async<4>(reinterpret_cast<char*>(&tile[lane + 64]) + 8, from + lane + 65, filled);
    cp_async_commit();
    cp_async_wait<1>();
    cp_async_wait<0>();
    __syncthreads();
    uint32_t one[1], two[2], four[4], one_transposed[1], two_transposed[2], four_transposed[4];
    ldmatrix(one, &tile[lane]);
    ldmatrix(two, &tile[lane + 1]);
    ldmatrix(four, &tile[lane + 2]);
    ldmatrix_trans(one_transposed, &tile[lane + 3]);
    ldmatrix_trans(two_transposed, &tile[lane + 4]);
    ldmatrix_trans(four_transposed, &tile[lane + 5]);
    float d[4] = {};
    mma_m16n8k16<T>(d, four, two);
    mma_m16n8k8<T>(d, two_transposed, one);
    mma_sp_m16n8k32<T, 0>(d, four, four_transposed, one[0]);
    mma_sp_m16n8k32<T, 1>(d, four_transposed, four, one_transposed[0]);
    for (int i = 0; i < 4; ++i) to[4 * lane + i] = d[i];
    auto* const out = reinterpret_cast<char*>(to + 128) + 32 * lane;
    st_global(out, make_uint4(four[0], four[1], four[2], four[3]));
    st_global(out + 16, make_uint2(two[0], two[1]));
    st_global(out + 24, one[0]);
    st_global(out + 28, uint16_t(filled));
    st_global(out + 30, uint8_t(filled));
}
template __global__ void calls<bf16>(const uint4*, float*, int);
template __global__ void calls<fp16>(const uint4*, float*, int);
"""
COPIES = "LDGSTS.E.BYPASS.128.ZFILL LDGSTS.E.128 LDGSTS.E.BYPASS.LTC128B.128 LDGSTS.E.64 LDGSTS.E.ZFILL LDGDEPBAR LDGDEPBAR"
LOADS = "LDSM.16.M88 LDSM.16.M88.2 LDSM.16.M88.4 LDSM.16.MT88 LDSM.16.MT88.2 LDSM.16.MT88.4"
STORES = "STG.E STG.E STG.E STG.E STG.E STG.E.128 STG.E.64 STG.E.U16 STG.E.U8"
GEMMS = {"HMMA.16816.F32": 1, "HMMA.1688.F32": 1, "HMMA.SP.16832.F32": 2}

MAIN = """
#include <cstdio>
#include "cuda/kernels.h"

int main() {
    for (int device : {0, 1000}) {
        const nm::cuda::Probe found = nm::cuda::probe(device);
        std::printf("%d|%d|%s\\n", found.driver, found.runtime, found.error.c_str());
    }
    try {
        const nm::cuda::Gpu gpu = nm::cuda::gpu(0);
        std::printf("%d|%d\\n", gpu.capability, gpu.processors);
    } catch (const std::exception& error) {
        std::printf("none|%s\\n", error.what());
    }
}
"""


def compiled(source: Path, text: str, *words: str) -> tuple[Path, str]:
    """What nvcc makes of ``text``, and what it says."""
    source.write_text(text)
    made = source.with_suffix(".out")
    command = [str(NVCC), "-std=c++17", f"-I{CSRC}", *words, "-o", str(made), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    return made, built.stderr


@pytest.mark.skipif(CUOBJDUMP is None, reason="no cuobjdump")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_the_instructions_are_those_that_are_meant(tmp_path: Path, architecture: str) -> None:
    cubin, said = compiled(tmp_path / "calls.cu", CALLS, "-O3", f"-arch={architecture}", "-cubin")
    assert "Advisory" not in said
    text = subprocess.run([str(CUOBJDUMP), "-sass", str(cubin)], capture_output=True, text=True, timeout=120, check=True).stdout
    found = Counter(re.findall(r"\b(?:LDGSTS|LDGDEPBAR|LDSM|HMMA|STG)[A-Z0-9.]*", text))
    expected = dict(Counter(2 * f"{COPIES} {LOADS} {STORES} ".split()))
    expected |= GEMMS | {f"{name}.BF16": count for name, count in GEMMS.items()}
    assert dict(found) == expected
    assert "DEPBAR.LE SB0, 0x1" in text and "DEPBAR.LE SB0, 0x0" in text
    assert re.search(r"HMMA\.SP\.\S+ .*, 0x0 ;", text) and re.search(r"HMMA\.SP\.\S+ .*, 0x1 ;", text)


def test_the_probe_answers_here(tmp_path: Path) -> None:
    program, _ = compiled(tmp_path / "main.cpp", MAIN, "-arch=sm_80", *(str(CSRC / "cuda" / file) for file in ("probe.cu", "queue.cu")))
    said = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    (driver, runtime, error), (*_, beyond), (capability, _) = (line.split("|") for line in said)
    assert int(runtime) >= 12000 and "cudaError" in beyond
    if torch.cuda.is_available():
        assert int(driver) >= 12000 and (error == "") == (capability != "none")
    else:
        assert "cudaError" in error and capability == "none"
