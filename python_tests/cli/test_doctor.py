"""``doctor`` tells the truth: about versions, capabilities, backends, and about a backend that computes wrongly."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from nmkernels import capability, dispatch
from nmkernels.cli import doctor, main


@pytest.fixture
def restore() -> Any:
    before = {op: list(entries) for op, entries in dispatch._impls.items()}
    yield
    dispatch._impls.clear()
    dispatch._impls.update(before)


def _wrong_mask(w: torch.Tensor, n: int, m: int, out: Any = None) -> torch.Tensor:
    return torch.zeros_like(w, dtype=torch.bool)


def _report(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    status = main(["doctor", *options])
    return status, capsys.readouterr().out


def test_every_op_is_examined() -> None:
    assert set(doctor.samples()) == set(dispatch._impls)


def test_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = _report(capsys)
    assert status == 0
    assert f"torch {torch.__version__}" in text
    assert f"{len(doctor.samples())} of {len(doctor.samples())} ops agree with the reference" in text
    for name, probe in capability.probes().items():
        assert f"{'yes' if probe.ok else 'no ':<4}{name}" in text and probe.reason in text


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = _report(capsys, "--json")
    found = json.loads(text)
    assert status == 0 and found["healthy"] is True
    assert set(found["capabilities"]) == set(capability.probes())
    expected = "cpu" if capability.compiled_core().ok else "reference"
    if found["device"] == "cpu":
        # the order of a GPU's tensor cores is nothing that a CPU has a kernel for
        assert {op["backend"] for name, op in found["ops"].items() if name != "nm_metadata"} == {expected}


def test_wrong_backend_is_found(capsys: pytest.CaptureFixture[str], restore: None) -> None:
    dispatch.impl("nm_mask", backend="broken", priority=99)(_wrong_mask)
    status, text = _report(capsys)
    assert status == 1
    assert "nm_mask" in text and "WRONG: AssertionError" in text and "1 DO NOT" in text


@pytest.mark.parametrize("op", ["nm_linear", "nm_linear_dgrad", "nm_linear_wgrad", "nm_soft_threshold_scale", "nm_compress"])
def test_slightly_wrong_backend_is_found(op: str, restore: None) -> None:
    reference = next(i.fn for i in dispatch.implementations(op) if i.backend == "reference")

    def off_by_little(*args: Any, out: Any = None) -> Any:
        result = reference(*args)
        return result * (1 + 1e-4) if isinstance(result, torch.Tensor) else (result[0] * (1 + 1e-4), result[1])

    dispatch.impl(op, backend="broken", priority=99)(off_by_little)
    found = doctor.check(op, doctor.samples()[op])
    assert found["backend"] == "broken" and not found["ok"]


def test_wrong_update_in_place_is_found(restore: None) -> None:
    reference = next(i.fn for i in dispatch.implementations("nm_masked_adamw_") if i.backend == "reference")

    def forgets_the_step(*args: Any, out: Any = None) -> Any:
        stats = reference(*args)
        args[5][0].sub_(1)
        return stats

    dispatch.impl("nm_masked_adamw_", backend="broken", priority=99)(forgets_the_step)
    assert not doctor.check("nm_masked_adamw_", doctor.samples()["nm_masked_adamw_"])["ok"]


def test_backend_that_raises_is_a_finding(restore: None) -> None:
    def breaks(*args: Any, out: Any = None) -> Any:
        raise ZeroDivisionError("by zero")

    dispatch.impl("nm_prune", backend="broken", priority=99)(breaks)
    found = doctor.check("nm_prune", doctor.samples()["nm_prune"])
    assert found["problem"] == "ZeroDivisionError: by zero" and not found["ok"]


def test_declining_backend_is_told_with_its_reason(capsys: pytest.CaptureFixture[str], restore: None) -> None:
    for op in ("nm_mask", "nm_prune"):
        dispatch.impl(op, backend="shy", priority=99, supports=lambda *a: (False, "not on a Friday"))(_wrong_mask)
    status, text = _report(capsys)
    assert status == 0 and text.count("not on a Friday") == 1 and "shy declined 2 of them: not on a Friday" in text


def test_forced_backend_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NMKERNELS_BACKEND", "reference")
    status, text = _report(capsys, "--json")
    found = json.loads(text)
    assert status == 0 and found["forced_backend"] == "reference"
    assert {op["backend"] for op in found["ops"].values()} == {"reference"}


def test_unknown_forced_backend_is_no_crash(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NMKERNELS_BACKEND", "nonsense")
    status, text = _report(capsys)
    assert status == 1 and "BackendError" in text and "names no backend" in text
