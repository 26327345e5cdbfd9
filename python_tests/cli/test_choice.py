"""``doctor --choice`` times what users run, and calls slower what is slower."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from nmkernels.cli import choice, main
from nmkernels.cli.choice import INFERENCE, TRAINING, Cell
from nmkernels.timing.timer import Turns
from python_tests.nn.test_effective import Calls

CPU = torch.device("cpu")


def test_cells() -> None:
    few, every = (list(choice.cells(CPU, everything)) for everything in (False, True))
    assert 28 <= len(few) <= 34 and len(every) >= 60 and len(set(every)) == len(every)
    for some in (few, every, list(choice.cells(torch.device("cuda"), False))):
        assert {(c.use, c.dtype) for c in some} == {(u, d) for u in (INFERENCE, TRAINING) for d in (torch.float32, torch.bfloat16)}


@pytest.mark.parametrize("use", [INFERENCE, TRAINING])
@pytest.mark.parametrize(
    ("tokens", "dense", "ours", "slower"),
    [
        (8, 100e-6, 100e-6, False),
        (1024, 100e-6, 107e-6, True),
        (1024, 100e-6, 105e-6, False),
        (8, 10e-6, 10.9e-6, False),  # less than a microsecond
        (8, 100e-6, 119e-6, True),
        (8, 100e-6, 110e-6, None),  # making W̃ is a large part of a step of few tokens
    ],
)
def test_what_is_slower(use: str, tokens: int, dense: float, ours: float, slower: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        def __init__(self, device: torch.device) -> None:
            pass

        def turns(self, calls: dict[str, Any], seconds: float) -> Turns:
            results = {name: [call() for call in some] for name, some in calls.items()}
            if use == INFERENCE:
                torch.testing.assert_close(results["ours"][0], results["dense"][0])
            return Turns([{"dense": dense, "ours": ours}] * 3)

    slower = use == INFERENCE if slower is None else slower
    monkeypatch.setattr(choice, "Timer", Clock)
    row = choice.compare(Cell(use, 32, 64, tokens, torch.float32), CPU)
    assert row["slower"] is slower and row["speed"] == pytest.approx(dense / ours, abs=1e-3)
    assert ("SLOWER" in choice.text(row)) is slower and ("1 of 1 cells are SLOWER" in choice.verdict([row])) is slower
    assert row["choice"]


def test_training_makes_the_weight_again_and_asks_for_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 64)
    layer, calls = choice._training(torch.nn.Linear(64, 32), x)
    (step,) = calls(layer)
    step()
    for _ in range(2):
        with Calls() as seen:
            step()
        assert {"prune", "pack", "compress"} & {name.removesuffix("_out") for name in seen.names}, "W̃ is made in every step"
        assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None


def test_the_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    some = [Cell(INFERENCE, 16, 32, 2, torch.float32), Cell(TRAINING, 16, 32, 2, torch.bfloat16)]
    monkeypatch.setattr(choice, "cells", lambda device, everything: some)
    monkeypatch.setattr(choice, "SECONDS", 1e-3)
    assert main(["doctor", "--choice"]) == 0
    text = capsys.readouterr().out
    assert choice.HEADER in text and text.count("16x32") == 2 and "of 2 cells" in text
    assert main(["doctor", "--choice", "all", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [cell["use"] for cell in found["cells"]] == [INFERENCE, TRAINING] and found["threads"] == torch.get_num_threads()
    assert all(cell["dense_us"] > 0 and cell["ours_us"] > 0 for cell in found["cells"])
