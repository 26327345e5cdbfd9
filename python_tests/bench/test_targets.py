"""The targets are those of the design, and their verdicts and reasons are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import tables, targets
from bench.cases import FAMILIES, _ours, integers
from bench.registry import Spec
from bench.targets import TARGETS
from python_tests.for_each import for_each


def _verdict(key: str, *values: float, reasons: dict[str, str] | None = None) -> targets.Verdict:
    t = next(t for t in TARGETS if t.key == key)
    rows = [_row(spec, t.provider, t.metric, value) for spec, value in zip(t.specs, values, strict=False)]
    return next(v for v in targets.verdicts(rows, reasons=reasons or {}) if v.target is t)


def test_targets_are_sound() -> None:
    assert len({t.key for t in TARGETS}) == len(TARGETS)
    for t in TARGETS:
        assert t.specs and all(spec.op in FAMILIES for spec in t.specs)
        assert t.stretch is None or (t.stretch > t.bound) == t.higher
        assert t.instead is None or (t.instead.bound > t.bound) == t.higher


@for_each(
    "key, values, state",
    [
        ("mask", (0.8,), "unmeasured"),
        ("mask", (0.8, 0.7), "met"),
        ("mask", (0.95, 0.9), "stretch"),
        ("mask", (0.5,), "missed"),  # one case that is missed is enough, measured or not the others
        ("int8-1-2:4", (2.0,), "met"),
        ("int8-avx2-1-2:4", (1.49,), "missed"),
        ("adamw", (1.04,), "stretch"),
        ("adamw", (1.26,), "missed"),
    ],
)
def test_states(key: str, values: tuple[float, ...], state: str) -> None:
    assert _verdict(key, *values).state == state


def test_targets_of_integers_name_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ours, "other_isas", lambda: ["avx2"])
    monkeypatch.setattr(integers, "COPIES", 1)
    work = FAMILIES["nm_linear_integers"].build(Spec("nm_linear_integers", "2:4", "bfloat16", 64, 256, 1), "cpu")
    named = {(ratio.of, ratio.metric) for ratio in work.ratios}
    some = [t for t in TARGETS if t.specs[0].op == "nm_linear_integers"]
    assert len(some) == 11 and {(t.provider, t.metric) for t in some} <= named


def test_markdown_tells_every_case_and_the_reason() -> None:
    text = tables.targets_markdown([_verdict("mask", 0.956, 0.5, reasons={"mask": "it computes"})])
    assert "| ≥ 0.7 (0.9) | fp32 0.96, bf16 **0.50** | 0.96, 0.50 | **missed**: it computes |" in text
    text = tables.targets_markdown([_verdict("layer", *[0.9 + i / 100 for i in range(16)])])
    assert "| ≤ 1.05 | 0.90 to 1.05; worst bf16 4096×4096 2048 tokens 1.05 |  | met |" in text
    assert "| ≤ 1 |  |  | unmeasured |" in tables.targets_markdown([_verdict("step-srste")])


def _row(spec: Spec, provider: str, metric: str, value: float) -> dict[str, str]:
    names = ("op", "pattern", "dtype", "shape")
    return {**{name: getattr(spec, name) for name in names}, "provider": provider, "metric": metric, "p50": str(value)}


@for_each(
    "key, provider, metric, value, bound",
    [
        ("linear-bf16-16-2:4", "torch dense", "has AMX", 0.0, 1.0),
        ("linear-bf16-16-2:4", "torch dense", "has AMX", 1.0, 1.5),
        ("step-fst", "nmkernels, one GEMM", "x dense", 1.49, 1.1),
        ("ffn-sste", "nmkernels, one GEMM", "x dense", 1.5, 0.85),
        ("ffn-srste", "nmkernels, one GEMM", "x dense", 1.5, 1.0),
    ],
)
def test_more_is_asked_where_the_same_rows_say_so(key: str, provider: str, metric: str, value: float, bound: float) -> None:
    (spec,) = next(t for t in TARGETS if t.key == key).specs
    found = next(v for v in targets.verdicts([_row(spec, provider, metric, value)], reasons={}) if v.target.key == key)
    assert found.target.bound == bound


def test_slow_opponents_are_flagged() -> None:
    (spec,) = next(t for t in TARGETS if t.key == "linear-16-2:4").specs
    for speed, flagged in ((2.0, False), (2.2, True)):
        figures = {"x fastest dense": speed, "x roofline allows": 2.0, "share of roofline": 0.4}
        rows = [_row(spec, "nmkernels cpu", metric, value) for metric, value in figures.items()]
        found = next(v for v in targets.verdicts(rows, reasons={}) if v.target.key == "linear-16-2:4")
        text = tables.targets_markdown([found])
        assert ("slow opponent, 2.00 is allowed" in text) == flagged == found.slow_opponent(spec) and "| 0.40 | met |" in text


def test_reasons_are_read(tmp_path: Path) -> None:
    targets.load_reasons()  # the committed ones name targets
    path = tmp_path / "missed.txt"
    assert targets.load_reasons(path) == {}
    path.write_text("# why\n\nlinear-1-2:4: DRAM: 68 GB/s are read\n")
    assert targets.load_reasons(path) == {"linear-1-2:4": "DRAM: 68 GB/s are read"}
    path.write_text("mask: always\n[AMD]\nprune: slow there\n[Intel]\nmask: as slow here\n")
    assert targets.load_reasons(path, "AMD EPYC, 2 threads") == {"mask": "always", "prune": "slow there"}
    assert targets.load_reasons(path, "Intel Xeon, 2 threads") == {"mask": "as slow here"}
    for text in ("nosuch: why", "mask", "mask: "):
        path.write_text(text)
        with pytest.raises(ValueError, match="line 1: write 'key: reason'"):
            targets.load_reasons(path)
