"""The targets are those of the design, and their verdicts and reasons are told right."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import tables, targets
from bench.registry import FAMILIES, Target
from bench.targets import TARGETS


def _row(target: Target, value: float, index: int = 0) -> dict[str, str]:
    spec = target.specs[index]
    keys = {"op": spec.op, "provider": target.provider, "pattern": spec.pattern, "dtype": spec.dtype, "shape": spec.shape}
    return {**keys, "metric": target.metric, "p20": str(value), "p50": str(value), "p80": str(value)}


def _target(key: str) -> Target:
    return next(t for t in TARGETS if t.key == key)


def _verdict(key: str, *values: float, reasons: dict[str, str] | None = None) -> targets.Verdict:
    target = _target(key)
    found = targets.verdicts([_row(target, v, i) for i, v in enumerate(values)], reasons=reasons or {})
    return next(v for v in found if v.target is target)


def test_targets_are_sound() -> None:
    assert len({t.key for t in TARGETS}) == len(TARGETS)
    for t in TARGETS:
        assert t.specs and all(spec.op in FAMILIES for spec in t.specs)
        assert t.stretch is None or (t.stretch > t.bound) == t.higher


def test_states() -> None:
    assert _verdict("mask").state == "unmeasured"
    assert _verdict("mask", 0.8).state == "unmeasured"
    assert _verdict("mask", 0.8, 0.7).state == "met"
    assert _verdict("mask", 0.95, 0.9).state == "stretch"
    assert _verdict("mask", 0.95, 0.69).state == "missed"
    # one case that is missed is enough, measured or not the others
    assert _verdict("mask", 0.5).state == "missed"
    assert _verdict("adamw", 1.04).state == "stretch" and _verdict("adamw", 1.26).state == "missed"


def test_markdown_tells_every_case_and_the_reason() -> None:
    text = tables.targets_markdown([_verdict("mask", 0.956, 0.5, reasons={"mask": "it computes"})])
    assert text.splitlines()[-1] == (
        "| mask, `out=`, 4096×11008 | bandwidth of `copy_` | ≥ 0.7 (0.9) | fp32 0.96, bf16 **0.50** | **missed**: it computes |"
    )
    line = tables.targets_markdown([_verdict("layer", *[1.0 + i / 100 for i in range(16)])]).splitlines()[-1]
    assert "| ≤ 1.2 (1) | 1.00 to 1.15; worst bf16 4096×4096 2048 tokens 1.15 | met |" in line
    assert tables.targets_markdown([_verdict("step", 1.01)]).splitlines()[-1].endswith("| ≤ 1.05 | 1.01 | met |")
    assert tables.targets_markdown([_verdict("step")]).splitlines()[-1].endswith("| ≤ 1.05 |  | unmeasured |")


def test_reasons_are_read(tmp_path: Path) -> None:
    path = tmp_path / "shortfalls.txt"
    assert targets.load_reasons(path) == {}
    path.write_text("# why\n\nlinear-1-2:4: DRAM: 68 GB/s are read\n")
    assert targets.load_reasons(path) == {"linear-1-2:4": "DRAM: 68 GB/s are read"}
    for text in ("nosuch: why", "mask", "mask: "):
        path.write_text(text)
        with pytest.raises(ValueError, match="line 1: write 'key: reason'"):
            targets.load_reasons(path)


def test_committed_reasons_name_targets() -> None:
    targets.load_reasons()
