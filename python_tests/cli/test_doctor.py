"""``doctor`` tells the truth: about versions, capabilities, backends, and about a backend that computes wrongly."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nmkernels import capability, dispatch
from nmkernels.cli import doctor, main


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers a backend that is preferred to all others, until the end of the test."""
    monkeypatch.setattr(dispatch, "_impls", dict(dispatch._impls))

    def register(op: str, fn: Callable[..., Any], **words: Any) -> dict[str, Any]:
        dispatch.impl(op, backend="broken", priority=99, **words)(fn)
        return doctor.check(op, doctor.samples()[op])

    return register


def _report(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, Any]:
    status, text = main(["doctor", *options]), capsys.readouterr().out
    return status, json.loads(text) if options else text


def test_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = _report(capsys)
    assert status == 0 and set(doctor.samples()) == set(dispatch._impls)
    assert f"torch {torch.__version__}" in text
    assert f"{len(doctor.samples())} of {len(doctor.samples())} ops agree with the reference" in text
    for name, probe in capability.probes().items():
        assert f"{'yes' if probe.ok else 'no ':<4}{name}" in text and probe.reason in text
    status, found = _report(capsys, "--json")
    assert status == 0 and found["healthy"] is True and set(found["capabilities"]) == set(capability.probes())
    expected = "cpu" if capability.compiled_core().ok else "reference"
    if found["device"] == "cpu":
        # a CPU has no kernel for what only a GPU's tensor cores read
        others = {"nm_metadata", "nm_quantize", "nm_linear_quantized"}
        assert {op["backend"] for name, op in found["ops"].items() if name not in others} == {expected}


def test_wrong_backend_is_found(capsys: pytest.CaptureFixture[str], broken: Any) -> None:
    broken("nm_mask", lambda w, n, m, out=None: torch.zeros_like(w, dtype=torch.bool))
    status, text = _report(capsys)
    assert status == 1 and "nm_mask" in text and "WRONG: AssertionError" in text and "1 DO NOT" in text


@pytest.mark.parametrize("op", ["nm_linear", "nm_linear_dgrad", "nm_linear_wgrad", "nm_soft_threshold_scale", "nm_compress"])
def test_slightly_wrong_backend_is_found(op: str, broken: Any) -> None:
    reference = next(i.fn for i in dispatch.implementations(op) if i.backend == "reference")

    def off_by_little(*args: Any, out: Any = None) -> Any:
        result = reference(*args)
        return result * (1 + 1e-4) if isinstance(result, torch.Tensor) else (result[0] * (1 + 1e-4), result[1])

    found = broken(op, off_by_little)
    assert found["backend"] == "broken" and not found["ok"]


def test_wrong_update_in_place_and_what_raises_are_found(broken: Any) -> None:
    reference = next(i.fn for i in dispatch.implementations("nm_masked_adamw_") if i.backend == "reference")

    def forgets_the_step(*args: Any, out: Any = None) -> Any:
        stats = reference(*args)
        args[5][0].sub_(1)
        return stats

    assert not broken("nm_masked_adamw_", forgets_the_step)["ok"]
    found = broken("nm_prune", lambda *args, out=None: 1 // 0)
    assert found["problem"].startswith("ZeroDivisionError: ") and not found["ok"]


def test_declining_backend_is_told_with_its_reason(capsys: pytest.CaptureFixture[str], broken: Any) -> None:
    for op in ("nm_mask", "nm_prune"):
        broken(op, print, supports=lambda *a: (False, "not on a Friday"))
    status, text = _report(capsys)
    assert status == 0 and text.count("not on a Friday") == 1 and "broken declined 2 of them: not on a Friday" in text


def test_forced_backend_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NMKERNELS_BACKEND", "reference")
    status, found = _report(capsys, "--json")
    assert status == 0 and found["forced_backend"] == "reference"
    assert {op["backend"] for op in found["ops"].values()} == {"reference"}
    monkeypatch.setenv("NMKERNELS_BACKEND", "nonsense")
    status, text = _report(capsys)
    assert status == 1 and "BackendError" in text and "names no backend" in text
