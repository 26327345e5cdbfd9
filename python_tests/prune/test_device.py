"""prune_(device=...): one block at a time is computed and solved there, and the model stays where it is."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.prune.relay import on_device
from python_tests.prune.families import built


class Moved(nn.Module):
    """Notes where it is moved instead of moving."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.moves = torch.device("cpu"), []

    def parameters(self, recurse: bool = True) -> Any:
        return iter([SimpleNamespace(device=self.place)])

    def to(self, device: torch.device) -> Moved:  # type: ignore[override]
        self.moves.append(str(device))
        self.place = device
        return self


def test_a_block_moves_once_and_back() -> None:
    residence, block, other = functools.partial(on_device, device=torch.device("cuda:0")), Moved(), Moved()
    with residence(block):
        with residence(block), residence(other):
            pass
        assert block.moves == ["cuda:0"] and other.moves == ["cuda:0", "cpu"]
    assert block.moves == ["cuda:0", "cpu"]
    with pytest.raises(KeyboardInterrupt), residence(block):
        raise KeyboardInterrupt
    assert block.moves == ["cuda:0", "cpu"] * 2
    with on_device(other, None):
        assert other.moves == ["cuda:0", "cpu"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "t5", "vit"])
def test_a_gpu_gives_what_the_cpu_gives(name: str) -> None:
    model, batches = built(name)
    other = copy.deepcopy(model)
    here, there = nm.prune_(model, "2:4", batches), nm.prune_(other, "2:4", batches, device="cuda")
    assert {p.device.type for p in other.parameters()} == {"cpu"}
    for (key, one), (_, two) in zip(here.report.pruned.items(), there.report.pruned.items(), strict=True):
        assert one.tokens == two.tokens and one.note == two.note, key
        assert one.error is None or abs(one.error - two.error) < 0.02 * one.error + 1e-6, key
    same = [torch.eq(a.ne(0), b.ne(0)).float().mean() for a, b in zip(model.parameters(), other.parameters(), strict=True) if a.dim() == 2]
    assert min(same) > 0.9  # near ties may fall otherwise
