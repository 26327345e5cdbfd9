"""How the CPU's ops do their GEMM: by what was measured, and where nothing is by a roofline; every way gives the same result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import nmkernels as nm
from nmkernels import capability
from nmkernels.autograd import gemms
from nmkernels.backends.cpu import ways
from nmkernels.backends.cpu.linear import DGRAD, FPROP, WGRAD, packed_wins
from nmkernels.backends.cpu.ways import DENSE, EXPAND, FLOAT32, SPARSE, Problem, seconds
from nmkernels.capability import compiled_core
from nmkernels.tuning import TABLE

pytestmark = pytest.mark.skipif(not compiled_core().ok, reason=compiled_core().reason)

LARGE = Problem("fprop", torch.float32, 4096, 4096, 1, 2, 4)


@pytest.fixture(autouse=True)
def free(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("NMKERNELS_CHOICE", raising=False)
    yield
    ways._known.clear()


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Measures with a clock on which expanding wins, and tells what was measured."""
    seen: list[Problem] = []
    real = ways.search

    def fake(p: Problem, *args: Any, **options: Any) -> Any:
        seen.append(p)
        return real(p, *args, timer=lambda task: 0.5 if task.name == "expand" else 1.0, **options)

    monkeypatch.setattr(ways, "search", fake)
    return seen


def _operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, nm.Compressed]:
    return torch.randn(20, 32).to(dtype), nm.ops.compress(torch.randn(16, 32).to(dtype), "2:4")


# ---- the choice


def test_the_first_call_of_a_shape_measures_it(searched: list[Problem], cache: Path) -> None:
    x, c = _operands()
    y = nm.ops.linear(x, c)
    torch.testing.assert_close(y, x @ c.dense().t())
    assert searched == [Problem("fprop", torch.float32, 16, 32, 20, 2, 4)]
    assert torch.equal(nm.ops.linear(x, c), y) and nm.ops.linear(x[:17], c).shape == (17, 16) and len(searched) == 1
    nm.ops.linear(x[:16], c)
    nm.ops.linear_dgrad(torch.randn(20, 16), c)
    g = torch.randn(20, 16)
    nm.ops.linear_wgrad(nm.ops.mvue_compress(g, "2:4", dim=0, seed=1), x)
    assert [(p.role, p.rows, p.cols, p.width) for p in searched[1:]] == [
        ("fprop", 16, 32, 16),
        ("dgrad", 16, 32, 20),
        ("wgrad", 16, 20, 32),
    ]
    lines = json.loads((cache / "tuning.json").read_text())["lines"]
    assert len(lines) == 4 and {(line["choice"], line["by"]) for line in lines.values()} == {("expand", "first use")}
    gemms.forget()
    nm.ops.linear(x, c)
    assert len(searched) == 4, "what was stored is found again"


def test_where_nothing_is_measured_the_roofline_answers(searched: list[Problem], monkeypatch: pytest.MonkeyPatch) -> None:
    x, c = _operands()
    rule = Mock(return_value=SPARSE)
    monkeypatch.setattr(ways, "rule", rule)
    for setting in ("table", "dense", "packed"):
        monkeypatch.setenv("NMKERNELS_CHOICE", setting)
        gemms.forget()
        nm.ops.linear(x, c)
    monkeypatch.setenv("NMKERNELS_CHOICE", "measured")
    gemms.forget()
    with torch.profiler.profile():
        nm.ops.linear(x, c)
    gemms.forget()
    monkeypatch.setattr(ways, "LARGEST", 20 * 16 * 32 - 1)
    nm.ops.linear(x, c)
    nm.ops.linear(x[:0], c)
    assert rule.call_count == 6 and not searched
    monkeypatch.setattr(ways, "LARGEST", 20 * 16 * 32)
    gemms.forget()
    nm.ops.linear(x, c)
    assert len(searched) == 1


def test_deterministic_algorithms_follow_no_measurement(searched: list[Problem], monkeypatch: pytest.MonkeyPatch) -> None:
    x, c = _operands()
    nm.ops.linear(x, c)
    rule = Mock(return_value=SPARSE)
    monkeypatch.setattr(ways, "rule", rule)
    torch.use_deterministic_algorithms(True)
    try:
        nm.ops.linear(x, c)
        assert rule.call_count == 1
    finally:
        torch.use_deterministic_algorithms(False)
    nm.ops.linear(x, c)
    assert rule.call_count == 1 and len(searched) == 1


def test_a_line_that_names_no_way_is_ignored(searched: list[Problem]) -> None:
    x, c = _operands()
    p = FPROP.problem(x, c.values, c.indices, 2, 4, 32)
    for choice in ("magic", FLOAT32, None, 3):
        TABLE.store({p.line(): {"choice": choice}})
        nm.ops.linear(x, c)
    assert len(searched) == 4


def test_tuning_a_layer_times_the_ways_of_its_op(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmkernels.nn.compressed.SMALL_BYTES", 0)
    x, c = _operands()
    nm.tune(nm.CompressedLinear(c), tokens=20, timer=lambda task: 0.5 if task.name == "sparse" else 1.0)
    line = TABLE.get(FPROP.problem(x, c.values, c.indices, 2, 4, 32).line())
    assert line is not None and (line["choice"], line["by"]) == ("sparse", "nm.tune")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_way_gives_the_same_result(dtype: torch.dtype) -> None:
    x, c = _operands(dtype)
    g = torch.randn(20, 16).to(dtype)
    e = nm.ops.mvue_compress(g, "2:4", dim=0, seed=1)
    bias = torch.randn(16).to(dtype)
    calls = (
        (FPROP, (x, c.values, c.indices, 2, 4, 32, bias), x.double() @ c.dense().double().t() + bias),
        (DGRAD, (g, c.values, c.indices, 2, 4, 32), g.double() @ c.dense().double()),
        (WGRAD, (e.values, e.indices, 2, 4, 20, x), e.dense().double() @ x.double()),
    )
    for gemm, args, exact in calls:
        for way in gemm.problem(*args).ways():
            y = gemm.by(way, dtype, *args)
            assert y.dtype == dtype and y.is_contiguous()
            torch.testing.assert_close(y.double(), exact, atol=20 * torch.finfo(dtype).eps, rtol=2 * torch.finfo(dtype).eps)
            out = torch.full_like(y, torch.nan)
            assert gemm.by(way, dtype, *args, out=out) is out and out.equal(y)


# ---- the roofline


@pytest.fixture(params=[("avx2", "AVX2", {}), ("avx512", "AVX512", {}), ("avx512_bf16", "AVX512", {"avx512_bf16": True, "amx_tile": True})])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    isa, theirs, others = request.param
    monkeypatch.setattr(capability, "instruction_set", lambda: isa)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: theirs)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: others, raising=False)
    return str(isa)


def test_few_tokens_are_bytes_and_many_are_arithmetic(machine: str) -> None:
    few, many = LARGE, LARGE._replace(width=2048)
    assert 1.6 < seconds(DENSE, few) / seconds(SPARSE, few) < 32 / 17
    assert seconds(DENSE, many) / seconds(SPARSE, many) == pytest.approx(2 * ways.SPARSE_SHARE, rel=0.01)
    assert ways.rule(few) == ways.rule(many) == SPARSE
    assert ways.rule(many._replace(n=3)) == EXPAND, "3:4 does three quarters of the work at six tenths of the rate"
    assert seconds(EXPAND, few) > seconds(DENSE, few)


def test_packed_wins_where_the_gain_is_clear(machine: str) -> None:
    cpu, size = torch.device("cpu"), (4096, 4096)
    assert packed_wins("fprop", torch.float32, 1, *size, 2, 4, cpu) and packed_wins("dgrad", torch.float32, 2048, *size, 1, 8, cpu)
    assert packed_wins("wgrad", torch.float32, 2048, *size, 1, 8, cpu)
    assert not packed_wins("fprop", torch.float32, 2048, *size, 2, 4, cpu), "0.6 of the rate for half the work is no clear gain"
    assert not packed_wins("fprop", torch.float32, 1, 128, 128, 2, 4, cpu), "a small one takes less than a call of ours"
    assert not packed_wins("fprop", torch.float64, 1, *size, 2, 4, cpu) and not packed_wins(
        "fprop", torch.float32, 1, *size, 2, 4, torch.device("meta")
    )


def test_in_bf16_expansion_saves_no_arithmetic_and_pairs_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    many = LARGE._replace(width=2048, dtype=torch.bfloat16, n=1, m=4)
    gains = {}
    for isa in ("avx512_bf16", "amx"):
        monkeypatch.setattr(capability, "instruction_set", lambda isa=isa: isa)
        for role in ("fprop", "dgrad"):
            gains[isa, role] = seconds(DENSE, many._replace(role=role)) / seconds(SPARSE, many._replace(role=role))
    paired = gains.pop(("avx512_bf16", "fprop"))
    assert paired == pytest.approx(4 * ways.PAIRED_SHARE, rel=0.01)
    assert all(gain == pytest.approx(1, rel=0.01) for gain in gains.values()), gains


def test_16_bits_without_instructions_for_them_are_multiplied_in_float32(machine: str) -> None:
    many = LARGE._replace(width=2048, dtype=torch.bfloat16, n=7, m=8)
    assert ways.rule(many) == (EXPAND if machine == "avx512_bf16" else FLOAT32)
    assert many.ways() == (SPARSE, EXPAND, FLOAT32) and LARGE.ways() == (SPARSE, EXPAND)
