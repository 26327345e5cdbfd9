"""``doctor`` tells the truth: about versions, capabilities, backends, and about a backend that computes wrongly."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import nmkernels as nm
from nmkernels import capability, dispatch, ops, reference
from nmkernels.cli import doctor, main
from nmkernels.cli import verify as every
from nmkernels.ops import verify

WITHOUT_CPU = {"nm_metadata", "nm_quantize", "nm_linear_quantized", "nm_masked_adamw_pack_", "nm_pack_forms_"}
"""Ops for which a CPU has no kernel: only a GPU's tensor cores read what they make."""


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
    return status, json.loads(text) if "--json" in options else text


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
        assert {op["backend"] for name, op in found["ops"].items() if name not in WITHOUT_CPU} == {expected}


def test_wrong_backend_is_found(capsys: pytest.CaptureFixture[str], broken: Any) -> None:
    broken("nm_mask", lambda w, n, m, out=None: torch.zeros_like(w, dtype=torch.bool))
    status, text = _report(capsys)
    assert status == 1 and "nm_mask" in text and "WRONG: differed from the reference" in text and "1 DO NOT" in text


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
    assert found["problem"].startswith("failed: ZeroDivisionError: ") and not found["ok"]


def test_a_declining_backend_is_reported(capsys: pytest.CaptureFixture[str], broken: Any) -> None:
    for op in ("nm_mask", "nm_prune"):
        broken(op, print, supports=lambda *a: (False, "not on a Friday"))
    status, text = _report(capsys)
    assert status == 0 and text.count("not on a Friday") == 1 and "broken cannot run 2 of these " in text


def test_a_forced_backend_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NMKERNELS_BACKEND", "reference")
    status, found = _report(capsys, "--json")
    assert status == 0 and found["forced_backend"] == "reference"
    assert {op["backend"] for op in found["ops"].values()} == {"reference"}
    monkeypatch.setenv("NMKERNELS_BACKEND", "nonsense")
    status, text = _report(capsys)
    assert status == 1 and "BackendError" in text and "names no backend" in text


# ---- what first use has found, and --verify


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and smaller calls."""
    monkeypatch.setattr(every, "SIZES", {"cpu": (64, 128)})
    monkeypatch.setattr(every, "table", partial(every.table, dtypes=(torch.float32,), patterns=((2, 4), (1, 8)), tokens=(1, 8)))


def test_it_tells_what_first_use_has_found(capsys: pytest.CaptureFixture[str], broken: Any, cache: Any, monkeypatch: Any) -> None:
    assert f"Kernels are not checked at first use: {verify.ENV}=0" in _report(capsys)[1]
    monkeypatch.setenv(verify.ENV, "1")
    assert "0 kinds of calls right, 0 switched off" in _report(capsys)[1]
    broken("nm_prune", lambda w, n, m, out=None: w)
    with pytest.warns(RuntimeWarning, match="nm_prune by broken"):
        ops.prune(torch.randn(64, 128), "2:4")
    status, text = _report(capsys)
    assert status == 0 and "1 switched off\n  broken nm_prune(float32[192, 128], 2, 4): differed from the reference: " in text
    assert "doctor --verify" in text and f"of {len(doctor.samples())} ops agree" in text
    found = _report(capsys, "--json")[1]["checked"]
    assert found["enabled"] and list(found["switched_off"]) == ["broken nm_prune(float32[192, 128], 2, 4)"]


def test_verify_checks_every_kernel_and_is_followed(
    capsys: pytest.CaptureFixture[str], broken: Any, cache: Any, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(verify.ENV, "1")
    right = False

    def fn(w: torch.Tensor, n: int, m: int, out: Any = None) -> torch.Tensor:
        assert m == 4, "only with M = 4"
        return reference.prune(w, n, m) + (w.shape[0] == 64 and not right)

    broken("nm_prune", fn)
    status, text = _report(capsys, "--verify")
    assert status == 1 and "2 of " in text and "calls are WRONG; their kernels are switched off here. Please report" in text
    assert "nm_prune                broken         0 of   2 calls right" in text
    assert "    WRONG: nm_prune(float32[64, 128], 1, 8): differed from the reference: only with M = 4" in text
    if capability.compiled_core().ok:
        assert all(f"  {op} " in text for op in dispatch._impls if op not in WITHOUT_CPU)
    explained = nm.explain("nm_prune", torch.randn(192, 128), 2, 4)
    assert "  broken     declined: differed from the reference" in explained, "of the same family, though its small call is right"
    # when it is right it is back
    right = True
    status, found = _report(capsys, "--verify", "--json")
    assert status == 1 and [row["call"] for row in found["checks"] if row["wrong"]] == ["nm_prune(float32[64, 128], 1, 8)"]
    assert found["machine"] == verify.machine(torch.device("cpu")) and f"torch {torch.__version__}" in found["versions"]
    assert "  broken     chosen" in nm.explain("nm_prune", torch.randn(192, 128), 2, 4)
    assert "  broken     declined" in nm.explain("nm_prune", torch.randn(192, 128), 1, 8)


def test_verify_where_only_the_reference_runs(capsys: pytest.CaptureFixture[str], few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    only = {op: [i for i in entries if i.backend == "reference"] for op, entries in dispatch._impls.items()}
    monkeypatch.setattr(dispatch, "_impls", only)
    status, text = _report(capsys, "--verify")
    assert status == 0 and "there is nothing to check" in text


@pytest.mark.slow
def test_verify_in_full(capsys: pytest.CaptureFixture[str], cache: Any) -> None:
    status, text = _report(capsys, "--verify")
    assert status == 0 and "calls are right." in text


def test_verify_and_choice_are_two_reports(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--verify", "--choice"])
    assert "not allowed with argument --verify" in capsys.readouterr().err
