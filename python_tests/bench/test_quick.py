"""The quick benchmark times only what is right, and writes tidy rows."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import quick, rows
from nmkernels import _dispatch, reference

SMALL = ["--device", "cpu", "--rows", "16", "--cols", "32", "--rounds", "3"]


@pytest.fixture
def restore() -> Iterator[None]:
    before = {op: list(entries) for op, entries in _dispatch._impls.items()}
    yield
    _dispatch._impls.clear()
    _dispatch._impls.update(before)


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_case_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "here.csv"
    assert quick.main([*SMALL, "--out", str(out)]) == 0
    found = _read(out)
    assert ",".join(found[0]) == "op,provider,pattern,dtype,shape,metric,p20,p50,p80,machine,versions,commit,date"
    assert {r["op"] for r in found} == {"nm_mask", "nm_prune", "nm_compress", "nm_linear", "copy"}
    assert {r["metric"] for r in found} == {"us", "GB/s"}
    for op in ("nm_mask", "nm_prune", "nm_compress", "nm_linear"):
        providers = {r["provider"] for r in found if r["op"] == op}
        assert len(providers) == 2 and any(p.startswith("nmkernels ") for p in providers)
    assert all(0 < float(r["p20"]) <= float(r["p50"]) <= float(r["p80"]) for r in found)
    assert str(out) in capsys.readouterr().out


def test_second_run_replaces_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "here.csv"
    quick.main([*SMALL, "--out", str(out)])
    first = _read(out)
    quick.main([*SMALL, "--out", str(out)])
    assert len(_read(out)) == len(first)


def test_wrong_op_is_not_timed(tmp_path: Path, restore: None, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(w: torch.Tensor, n: int, m: int, out: Any = None) -> torch.Tensor:
        result = ~reference.mask(w, n, m)
        return result if out is None else out.copy_(result)

    _dispatch.impl("nm_mask", backend="broken", priority=99)(wrong)
    out = tmp_path / "here.csv"
    assert quick.main([*SMALL, "--out", str(out)]) == 1
    assert "nm_mask" not in {r["op"] for r in _read(out)} and "nm_prune" in {r["op"] for r in _read(out)}
    assert "nm_mask 16x32: not timed, it differs from the reference" in capsys.readouterr().err


def test_torch_formulations_compute_the_same() -> None:
    w = torch.randn(8, 32)
    values, indices = quick.torch_compress(w, 2, 4)
    expected = reference.compress(w, 2, 4)
    assert torch.equal(quick.torch_mask(w, 2, 4), reference.mask(w, 2, 4))
    assert torch.equal(values, expected[0])
    # two groups of one nibble each make a byte, the earlier group in the low half
    assert torch.equal(indices, expected[1])


def test_providers_take_turns() -> None:
    order: list[str] = []
    seconds = quick.measure({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, "cpu", 4)
    assert order == ["a", "b"] * 6
    assert {name: len(values) for name, values in seconds.items()} == {"a": 4, "b": 4}


def test_file_is_named_after_the_machine() -> None:
    assert rows.slug("NVIDIA H200, 1 thread") == "nvidia-h200-1-thread"
