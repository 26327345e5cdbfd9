"""tune on a CPU: every GEMM is measured, the fastest right way is kept and followed. Launches are tested beside the Triton backend."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.autograd import GemmPlan, HardMask, gemms
from nmkernels.backends.triton import interpreted
from nmkernels.capability import compiled_core
from nmkernels.nn import compressed
from nmkernels.recipes.methods.fst import TransposableMask
from python_tests.autograd.test_gemms import clock

pytestmark = [
    pytest.mark.skipif(interpreted() or not compiled_core().ok, reason="the CPU's kernels are what is chosen here"),
    pytest.mark.usefixtures("cache"),
]


def _packed(cols: int = 8, keep_dense: bool = True, dtype: torch.dtype = torch.float32) -> nm.CompressedLinear:
    return nm.CompressedLinear(nm.ops.compress(torch.randn(4, cols, dtype=dtype), "2:4"), keep_dense=keep_dense)


def _model() -> nn.Module:
    trained = nm.SparseLinear(8, 4)
    trained.plan = trained.plan.dense_layout
    return nn.Sequential(_packed(), _packed(), _packed(16), trained, _packed(keep_dense=False))


def test_every_gemm_is_measured_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "SMALL_BYTES", 0)  # no dense copy unasked
    told: list[tuple[int, int, str]] = []
    report = nm.tune(_model(), tokens=20, timer=clock(cpu_rows=0.25, expand=4.0), progress=lambda *what: told.append(what))
    assert [(e.layers, e.kind, e.gemm, e.shape, e.tokens) for e in report.choices] == [
        (["0", "1"], "CompressedLinear", "fprop", (4, 8), 20),
        (["2"], "CompressedLinear", "fprop", (4, 16), 20),
        (["4"], "CompressedLinear", "fprop", (4, 8), 20),
    ]
    assert [(e.choice, e.default, e.best, e.gain) for e in report.choices] == [("cpu rows", 1.0, 0.25, 4.0)] * 2 + [("auto", 1.0, 1.0, 1.0)]
    assert told == [(i, 3, f"fprop 4x{cols} 2:4, 20 tokens") for i, cols in enumerate((8, 16, 8))]
    # layers whose GEMMs are fixed are told why
    assert [(e.layers, e.choice) for e in report.entries] == [(["3"], "its GEMMs are dense until nm.compress_")]
    assert report.changed == report.choices[:2] and report.path == str(cache / "tuning.json")
    assert len(json.loads((cache / "tuning.json").read_text())["lines"]) == 4, "of the last layer also what its op does"
    text = str(report).splitlines()
    assert text[0].split() == ["layer", "GEMM", "shape", "tokens", "default", "ms", "best", "ms", "gain", "choice"]
    assert " ".join(text[1].split()) == "CompressedLinear x2 fprop 2:4 float32 (4,8) 20 1000.0000 250.0000 4.00x cpu rows"
    assert text[-2].startswith("SparseLinear ") and text[-1] == f"stored in {cache / 'tuning.json'}" and len(text) == 6


def test_the_layer_does_as_was_measured() -> None:
    layer, x = _packed(dtype=torch.bfloat16), torch.randn(20, 8, dtype=torch.bfloat16)
    (gemm,) = layer.gemms(20)
    assert gemms.choose(gemm) == "dense"  # by rule, in 16 bits
    nm.tune(layer, tokens=20, timer=clock(cpu_rows=0.5))
    assert gemms.choose(gemm) == "cpu rows"
    with torch.no_grad():
        layer(x)
        assert "dense" not in layer.weight._layouts
        torch.testing.assert_close(layer(x), x @ layer.dense().t())
    nm.tune(layer, tokens=20, timer=clock(cpu_rows=2.0))
    with torch.no_grad():
        assert torch.equal(layer(x), nn.functional.linear(x, layer.dense())) and "dense" in layer.weight._layouts


def test_several_token_counts_and_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = nm.tune(_packed(), tokens=(1, 300), timer=clock())
    assert [(e.tokens, e.dtype) for e in report.choices] == [(1, "bfloat16"), (300, "bfloat16")]
    for tokens in (0, -1, (), (8, 0)):
        with pytest.raises(nm.NMError, match="at least 1"):
            nm.tune(nn.Linear(3, 3), tokens=tokens)


@pytest.mark.parametrize(("mask", "dgrad"), [("magnitude", ("dense", "rows")), ("transposable", ("dense", "rows", "columns"))])
def test_layers_in_training_ask_for_what_their_plan_leaves_open(mask: str, dgrad: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nm.SparseLinear(8, 16)
    transform = HardMask(layer.pattern) if mask == "magnitude" else TransposableMask(layer.pattern)
    layer.nm_mask = nm.ops.transposable_mask(layer.weight.detach(), "2:4")
    layer.use(transform, GemmPlan("auto", "auto", "mvue", 2, 4))
    report = nm.tune(layer, tokens=20, timer=clock(cpu_rows=0.25))
    assert [(e.gemm, e.tokens, e.shape, e.choice) for e in report.choices] == [(r, 20, (16, 8), "cpu rows") for r in gemms.ROLES]
    assert [p.forms for p in layer.gemms(20)] == [("dense", "rows"), dgrad, ("dense", "rows")] and not report.entries
    assert [p.changing for p in layer.gemms(20)] == [True, True, False]  # an estimate is made by its call in any case
    # and it asks for nothing else
    known = {gemms.key(p) for p in layer.gemms(20)}
    monkeypatch.setattr(gemms, "_measure_now", lambda gemm: pytest.fail(f"{gemm} is unknown"))
    monkeypatch.setenv("NMKERNELS_CHOICE", "measured")
    gemms.forget()
    layer(torch.randn(20, 8, requires_grad=True)).sum().backward()
    assert {gemms.key(p) for p in gemms._known} == known
    layer.use(transform, GemmPlan("packed", "packed", "dense", 2, 4))
    assert layer.gemms(20) == () and len(nm.SparseLinear(8, 16).gemms(20)) == 2


def _raises(*args: object, **kwargs: object) -> str:
    raise torch.OutOfMemoryError("no\nmemory")


def test_what_is_refused_or_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemms, "function", _raises)
    report = nm.tune(_packed(), tokens=20, timer=clock())
    assert report.choices[0].choice == "dense" and "cpu rows: OutOfMemoryError: no" in report.choices[0].refused
    assert "refused, fprop 4x8: cpu rows: OutOfMemoryError: no" in str(report)
    monkeypatch.setattr(gemms, "measure", _raises)
    (entry,) = nm.tune(_packed(), tokens=20).choices
    assert entry.choice == "not measured: no" and entry.gain is None


def test_choices_that_cannot_be_written_hold_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NMKERNELS_CACHE", str(tmp_path / "file" / "below"))
    layer = _packed(dtype=torch.bfloat16)
    report = nm.tune(layer, tokens=20, timer=clock(cpu_rows=0.5))
    assert report.path is None and "for this process only" in str(report)
    assert gemms.choose(*layer.gemms(20)) == "cpu rows"


def test_a_forced_backend_leaves_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _packed()
    monkeypatch.setenv("NMKERNELS_BACKEND", "cpu")
    report = nm.tune(layer, tokens=20, timer=clock())
    assert not report.choices and report.path is None and "declined" in report.entries[0].choice
    monkeypatch.setenv("NMKERNELS_BACKEND", "nosuch")
    assert "declined" in nm.tune(layer).entries[0].choice


def test_a_model_without_such_layers_is_fine(cache: Path) -> None:
    report = nm.tune(nn.Linear(3, 3))
    assert not report.entries and not report.choices and str(report).endswith("nothing to store") and not cache.exists()
    assert not nm.tune(_packed().to("meta"), tokens=4).choices


def test_with_the_realclock() -> None:
    (entry,) = nm.tune(_packed(64), tokens=3).choices
    assert entry.choice in ("dense", "cpu rows") and not entry.refused and entry.best is not None and entry.best > 0
