"""tune where nothing can be tuned: a report that says so per layer, and no file. Choosing is tested beside the Triton backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.backends.triton import interpreted


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NMKERNELS_CACHE", str(tmp_path))
    return tmp_path


def _model() -> nn.Module:
    packed = [nm.CompressedLinear(nm.ops.compress(torch.randn(4, 8), "2:4")) for _ in range(3)]
    return nn.Sequential(packed[0], packed[1], nm.CompressedLinear(nm.ops.compress(torch.randn(4, 16), "2:4")), nm.SparseLinear(8, 4))


@pytest.mark.skipif(interpreted(), reason="Triton takes CPU tensors in its interpreter")
def test_on_a_cpu_every_layer_is_told_why(cache: Path) -> None:
    report = nm.tune(_model(), tokens=4)
    assert [e.layers for e in report.entries] == [["0", "1"], ["2"], ["3"]]
    assert report.entries[0].shape == (4, 8) and "declined" in report.entries[0].choice
    assert report.entries[2].kind == "SparseLinear" and report.entries[2].choice == "its products are dense until nm.compress_"
    assert report.path is None and not report.changed and not list(cache.iterdir())
    text = str(report).splitlines()
    assert text[1].startswith("CompressedLinear x2") and text[-1] == "nothing to store" and len(text) == 5


def test_a_model_without_such_layers_is_fine() -> None:
    assert nm.tune(nn.Linear(3, 3)).entries == []


@pytest.mark.parametrize("tokens", [0, -1, (), (8, 0)])
def test_tokens_must_be_counts(tokens: object) -> None:
    with pytest.raises(nm.NMError, match="at least 1"):
        nm.tune(nn.Linear(3, 3), tokens=tokens)  # type: ignore[arg-type]


@pytest.mark.skipif(interpreted(), reason="Triton takes CPU tensors in its interpreter")
def test_a_forced_backend_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NMKERNELS_BACKEND", "nosuch")
    layer = nm.CompressedLinear(nm.ops.Compressed(torch.zeros(4, 4), torch.zeros(4, 1, dtype=torch.uint8), "2:4", (4, 8)))
    assert "declined" in nm.tune(layer).entries[0].choice
