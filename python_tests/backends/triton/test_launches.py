"""Measured launches: found by tune, kept on disk, followed by the GEMMs; and never wrong ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nmkernels as nm
from bench.cases.linear import triton_methods
from bench.registry import Provider, Spec
from nmkernels import dispatch
from nmkernels.autograd import GemmPlan
from nmkernels.backends.triton import launches, linear
from nmkernels.backends.triton.launches import Tiling
from nmkernels.timing import TABLE, table

ROWS, COLS, TOKENS = 32, 64, 20
DTYPE = torch.bfloat16
SIZES = ("fprop", DTYPE, ROWS, COLS, TOKENS, 2, 4)


def _forget() -> None:
    """As in a new process."""
    TABLE.forget()
    launches._plans.clear()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("NMKERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NMKERNELS_BACKEND", "triton")
    monkeypatch.setattr(table, "device_name", lambda device: "a GPU")
    _forget()
    yield tmp_path / "cache"
    _forget()


def _gemm(device: torch.device | str = "cpu", tokens: int = TOKENS, **other: Any) -> launches.Gemm:
    return launches.Gemm(*SIZES[:4], tokens, 2, 4, torch.device(device), 90)._replace(**other)


def _choose(**other: Any) -> Tiling:
    return launches.choose(*_gemm(**other))


def _line(plan: Tiling) -> dict[str, Any]:
    return {"choice": plan._asdict(), "us": {}}


def _store(lines: dict[str, Any]) -> Path:
    path = TABLE.store(lines)
    launches._plans.clear()
    return path


DEFAULT = launches.plan(*SIZES, 90)
OTHER = Tiling("gemm", 128, 32, 64, 8, 5, 2)


def test_what_is_stored_is_followed_and_found_again(cache: Path) -> None:
    assert _choose() == DEFAULT and not cache.exists()
    _store({launches.name(_gemm()): _line(OTHER)})
    assert _choose() == OTHER
    _forget()
    # as many tokens as round up to the same power of two, and nothing else
    assert _choose() == _choose(width=17) == _choose(width=32) == OTHER
    assert _choose(width=16) != OTHER and _choose(width=33) != OTHER
    for other in ({"rows": 33}, {"cols": 128}, {"dtype": torch.float16}, {"n": 1}, {"kind": "dgrad"}):
        assert _choose(**other) == launches.plan(*_gemm(**other)[:-2], 90)
    few = Tiling("few", 16, 8, 4, 2, 2, 1)
    _store({launches.name(_gemm(tokens=t)): _line(few) for t in (4, 8)})
    assert _choose(width=4) == _choose(width=3) == few
    assert _choose(width=8) == launches.plan(*_gemm(tokens=8)[:-2], 90), "for more tokens it is no way"


def test_lookup_is_cached_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "REMEMBERED", 4)
    for width in range(1, 20):
        found = _choose(width=width)
    assert len(launches._plans) <= 4
    monkeypatch.setattr(launches, "measured", lambda gemm: pytest.fail("looked up again"))
    assert _choose(width=19) is found


def test_tokens_of_wgrad_are_its_columns() -> None:
    gemm = _gemm(kind="wgrad", cols=20, width=96)
    _store({launches.name(gemm): _line(OTHER)})
    assert launches.choose(*gemm._replace(cols=32)) == OTHER
    assert launches.choose(*gemm._replace(cols=36)) != OTHER and launches.choose(*gemm._replace(width=95)) != OTHER


@pytest.mark.parametrize(
    "change", [{"method": "magic"}, {"rows": 0}, {"rows": "64"}, {"rows": True}, {"warps": 64}, {"stages": 99}, {"more": 1}, None]
)
def test_a_line_that_is_no_plan_is_ignored(change: dict[str, Any] | None) -> None:
    line = {"choice": {**OTHER._asdict(), **change}} if change else {"choice": "gemm"}
    _store({launches.name(_gemm()): line})
    assert _choose() == DEFAULT


@pytest.fixture
def layer(device: str) -> nm.CompressedLinear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nm.CompressedLinear(nm.ops.compress(torch.randn(ROWS, COLS, dtype=DTYPE).to(device), "2:4"))


@pytest.fixture
def candidates(layer: nm.CompressedLinear, monkeypatch: pytest.MonkeyPatch) -> list[Tiling]:
    """The plans that are tried, the heuristic's first."""
    first = launches.plan(*SIZES, linear.capability(layer.values))
    found = [first, first._replace(stages=5), first._replace(splits=2, warps=2), Tiling("scratch")]
    monkeypatch.setattr(launches, "candidates", lambda *sizes: found)
    return found


def _timer(seconds: dict[Tiling, float], layer: nm.CompressedLinear) -> Callable[[Callable[[], object]], float]:
    """A clock that knows what each plan takes."""

    def timer(call: Callable[[], object]) -> float:
        call()
        plan = next(p for q, p in launches._plans.items() if q.kind == "fprop" and q.width == TOKENS)
        return seconds.get(plan, 1.0)

    return timer


def _in_use(layer: nm.CompressedLinear) -> Tiling:
    return launches.choose(*SIZES, layer.values.device, linear.capability(layer.values))


def test_the_fastest_is_chosen_and_kept(layer: nm.CompressedLinear, candidates: list[Tiling], cache: Path) -> None:
    told: list[tuple[int, int, str]] = []
    report = nm.tune(layer, TOKENS, timer=_timer({candidates[2]: 0.25}, layer), progress=lambda *what: told.append(what))
    (entry,) = report.choices
    assert (entry.default, entry.best, entry.gain, entry.layers) == (1.0, 0.25, 4.0, ["(root)"])
    assert entry.choice.startswith("gemm ") and "splits=2" in entry.choice and report.changed == [entry]
    assert told == [(0, 1, f"fprop {ROWS}x{COLS} 2:4, {TOKENS} tokens")]
    assert report.path == str(cache / "tuning.json") and str(report).endswith(f"stored in {report.path}")
    _forget()
    assert _in_use(layer) == candidates[2]
    (line,) = [line for key, line in json.loads((cache / "tuning.json").read_text())["lines"].items() if key.startswith("triton|")]
    assert line["choice"] == candidates[2]._asdict() and line["us"][launches.words(candidates[2])] == 0.25e6
    assert line["us"][launches.words(candidates[0])] == 1e6 and line["by"] == "nm.tune"
    # and the layer runs by it
    x = torch.randn(TOKENS, COLS, dtype=DTYPE, device=layer.values.device)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), x @ layer.weight.dense().t())


def test_a_choice_that_stops_winning_is_dropped(layer: nm.CompressedLinear, candidates: list[Tiling]) -> None:
    nm.tune(layer, TOKENS, timer=_timer({candidates[1]: 0.5}, layer))
    assert _in_use(layer) == candidates[1]
    nm.tune(layer, TOKENS, timer=_timer({candidates[1]: 0.99}, layer))
    assert not any(key.startswith("triton|") for key in TABLE.lines()) and _in_use(layer) == candidates[0]


def test_wrong_launches_are_refused(layer: nm.CompressedLinear, candidates: list[Tiling], monkeypatch: pytest.MonkeyPatch) -> None:
    right, *others = sorted(dispatch.implementations("nm_linear"), key=lambda i: i.backend != "triton")
    wrong = {5}

    def sometimes(*args: Any, out: torch.Tensor | None = None) -> Any:
        result = right.fn(*args, out=out)
        if out is not None and _in_use(layer).stages in wrong:
            result.view(-1)[-1] += 1
        return result

    monkeypatch.setitem(dispatch._impls, "nm_linear", [dataclasses.replace(right, fn=sometimes), *others])
    nm.tune(layer, TOKENS, timer=_timer({candidates[1]: 0.01, candidates[2]: 0.5}, layer))
    (line,) = [line for key, line in TABLE.lines().items() if key.startswith("triton|")]
    ((name, refused),) = line["refused"].items()
    assert "stages=5" in name and "against float64" in refused and _in_use(layer) == candidates[2]
    wrong.update(plan.stages for plan in candidates)
    nm.tune(layer, TOKENS, timer=_timer({}, layer))
    assert not any(key.startswith("triton|") for key in TABLE.lines())


def test_a_layer_in_training_has_its_plans_gemms(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(nm.SparseLinear(16, 8), nm.SparseLinear(16, 8)).to(device)
    model[0].plan = model[1].plan = GemmPlan("packed", "packed", "dense", 2, 4)  # type: ignore[union-attr]
    searched = []
    monkeypatch.setattr(launches, "candidates", lambda *sizes: searched.append((sizes[0], sizes[4])) or [launches.plan(*sizes)])
    report = nm.tune(model, (6, 20), timer=lambda call: 1.0)
    found = [(e.gemm, e.tokens, e.shape, e.layers) for e in report.choices]
    assert found == [(kind, t, (8, 16), ["0", "1"]) for t in (6, 20) for kind in ("fprop", "dgrad")]
    assert {("fprop", 6), ("dgrad", 6), ("fprop", 20), ("dgrad", 20)} <= set(searched)
    assert all(e.best == 1.0 and not e.refused for e in report.choices)


def test_both_ways_of_many_tokens_are_providers(layer: nm.CompressedLinear) -> None:
    spec = Spec("nm_linear", "2:4", "bfloat16", ROWS, COLS, TOKENS)
    x, used = torch.randn(TOKENS, COLS, dtype=DTYPE, device=layer.values.device), []

    def call() -> torch.Tensor:
        used.append(_in_use(layer))
        return nm.ops.linear(x, layer.weight)

    for p in triton_methods(spec, x, lambda: Provider("", call)):
        with p.under():
            torch.testing.assert_close(p.call(), x @ layer.weight.dense().t())
    assert [plan.method for plan in used] == ["scratch", "gemm"] and _in_use(layer) == DEFAULT
