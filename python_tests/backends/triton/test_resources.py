"""What the compiler makes of the kernels on sm_80 and sm_90: no spills, 16 bytes at once, tensor cores; and the committed table says so."""

from __future__ import annotations

import pytest

from bench import triton_resources as resources
from bench.triton_cases import OpCall, cases
from nmkernels.backends.triton import interpreted
from nmkernels.dispatch import _impls

TOOLS = resources.tools()
pytestmark = [
    pytest.mark.skipif(interpreted(), reason="TRITON_INTERPRET=1 compiles nothing; run it without"),
    pytest.mark.skipif(not TOOLS.ok, reason=TOOLS.reason),
]

CASES = cases()
SAMPLED = [c for c in CASES if c.sampled]


@pytest.mark.slow
@pytest.mark.parametrize("arch", resources.ARCHITECTURES)
@pytest.mark.parametrize("case", SAMPLED, ids=lambda case: f"{case.op} {case.name}")
def test_compiled(case: OpCall, arch: int) -> None:
    kernels = resources.compiled(case, arch)
    assert resources.missed(case, arch, kernels) == []
    known = {k.key: k for k in resources.read()}
    for k in kernels:
        assert k.key in known, f"{k.key} is not in {resources.PATH.name}; write it: {resources.REWRITE}"
        row = known[k.key]
        if (row.triton, row.ptxas) == (k.triton, k.ptxas):
            assert k == row, f"{resources.PATH.name} says something else of {k.key}; rewrite it: {resources.REWRITE}"


def test_the_table_has_every_case() -> None:
    listed = list(dict.fromkeys(k.case for k in resources.read()))
    assert listed == [f"{c.op} {c.name}" for c in CASES], f"rewrite {resources.PATH.name}: {resources.REWRITE}"


def test_every_op_is_compiled() -> None:
    served = {op for op, entries in _impls.items() if any(i.backend == "triton" for i in entries)}
    assert served == {c.op for c in SAMPLED}, "add a line for each to bench/triton_cases.py, one of them sampled"


def test_no_committed_kernel_falls_short() -> None:
    """The cases that are not compiled here, by what the table says of them."""
    rows = resources.read()
    for case in CASES:
        for arch in resources.ARCHITECTURES:
            kernels = [k for k in rows if (k.case, k.arch) == (f"{case.op} {case.name}", f"sm_{arch}")]
            assert resources.missed(case, arch, kernels) == [], f"{case.op} {case.name}"
