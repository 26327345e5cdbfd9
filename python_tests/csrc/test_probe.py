"""``csrc/cuda/probe.cu`` as nvcc builds it: it answers on every machine, without a driver too, and its errors stay with it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from python_tests.csrc.test_ptx_compiles import CSRC, NVCC

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


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.skipif(not CSRC.is_dir(), reason="not a source checkout")
def test_it_answers_here(tmp_path: Path) -> None:
    assert NVCC is not None
    main, program = tmp_path / "main.cpp", tmp_path / "main"
    main.write_text(MAIN)
    command = [NVCC, "-std=c++17", f"-I{CSRC}", "-arch=sm_80", "-o", str(program), str(main), str(CSRC / "cuda" / "probe.cu")]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    said = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    (driver, runtime, error), (*_, beyond), (capability, _) = (line.split("|") for line in said)
    assert int(runtime) >= 12000 and beyond.startswith("probe: ") and "cudaError" in beyond
    if torch.cuda.is_available():
        assert int(driver) >= 12000 and (error == "") == (capability != "none")
    else:
        assert error.startswith("probe: ") and "cudaError" in error and capability == "none"
