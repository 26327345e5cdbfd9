"""The instruction sets of the core: which there are, which one runs, and how another is forced."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ORDER = ["portable", "avx2", "avx512", "avx512_bf16", "amx"]
"""From the smallest to the largest; each includes the ones before it."""


def chosen(core, wanted: str) -> str:
    """The set that the module takes by itself in another process, which imports it without torch."""
    code = f"import sys; sys.path.insert(0, {str(Path(core.__file__).parent)!r}); import _C; print(_C.isa())"
    env = os.environ | {"NMKERNELS_ISA": wanted}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_isa_selection(core):
    assert core.isas() == ORDER[: len(core.isas())] and core.isas()
    assert chosen(core, "") == core.isas()[-1]
    assert [chosen(core, name) for name in core.isas()] == core.isas()


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists() or platform.machine() != "x86_64", reason="asks the kernel about an x86-64 processor"
)
def test_what_the_processor_has_is_found(core):
    flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)[1].split())
    v3 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm"} <= flags
    v4 = v3 and {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags
    bf16 = v4 and {"avx512vbmi", "avx512_vbmi2", "avx512_vnni", "avx512_bf16"} <= flags
    amx = bf16 and {"amx_tile", "amx_bf16"} <= flags and "amx" in core.isas()  # a system may refuse the state of the tiles
    assert core.isas() == ORDER[: 1 + v3 + v4 + bf16 + amx]


def test_another_is_used_from_then_on(core):
    before = core.isa()
    try:
        for name in core.isas():
            core.use_isa(name)
            assert core.isa() == name and core.bf16_dots() is (name in ("avx512_bf16", "amx")), "fast bf16 needs instructions"
        with pytest.raises(ValueError, match=f"'sse9' is unknown.*{', '.join(core.isas()[:2])}"):
            core.use_isa("sse9")
        assert core.isa() == core.isas()[-1]
    finally:
        core.use_isa(before)


@pytest.mark.slow
def test_an_environment_that_cannot_be_followed_is_an_error():
    code = "import torch, nmkernels as nm; nm.ops.mask(torch.ones(4), '2:4')"
    env = os.environ | {"NMKERNELS_ISA": "sse9"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert re.search(r"BackendError: .*'sse9' is unknown or not in this build; NMKERNELS_ISA may be one of portable", done.stderr)


def test_objects_are_linked_from_the_smallest_set_to_the_largest(core):
    """The linker keeps the first copy of an inline function: it must be one that runs wherever it is called."""
    found = sorted(ROOT.glob("build/cmake-*/build.ninja"), key=lambda path: path.stat().st_mtime)
    if not found:
        pytest.skip("the core was built elsewhere")
    link = re.search(r"^build _C\S*: \S+ (.*?)(?: \||$)", found[-1].read_text(), re.M)[1]
    sets = [m[1] for m in re.finditer(r"nmkernels_cpu(?:_(\w+))?\.dir", link)]
    ranks = [-1 if name is None else ORDER.index(name) for name in sets]
    assert ranks == sorted(ranks) and ranks[0] == -1 and 0 in ranks
