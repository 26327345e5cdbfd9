"""prune_(permute=True): channels move between layers of one block, or outside blocks, and the model stays the same function."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.prune import prune as engine
from nmkernels.recipes import search_permutation


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x)))


class Model(nn.Module):
    """A stem whose channels may move, blocks, and a chain from the stem into the first block, which may not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(autouse=True)
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "search_permutation", functools.partial(search_permutation, escapes=2))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:  # neighbours of very different size, so that an order matters
                p.mul_(torch.rand(p.shape[1]).mul(3))
    return model


DATA = [torch.randn(128, 16, generator=torch.Generator().manual_seed(1)) for _ in range(2)]


@pytest.mark.parametrize("sequential", [True, False])
def test_an_order_lowers_the_error_and_keeps_the_function(model: nn.Module, sequential: bool) -> None:
    x = DATA[0]
    errors = {}
    for permute in (False, True):
        pruned = copy.deepcopy(model)
        handle = nm.prune_(pruned, "2:4", DATA, method="wanda", permute=permute, sequential=sequential)
        errors[permute] = float((pruned(x) - model(x)).detach().square().mean())
        readers = {name: row.error for name, row in handle.report.pruned.items() if name in ("stem.2", "blocks.0.second")}
        errors[permute, "readers"] = sum(readers.values())
    assert errors[True] < errors[False] and errors[True, "readers"] < 0.8 * errors[False, "readers"]
    said = handle.report.channels
    assert said["stem.2"].startswith("reordered with the outputs of stem.0") and "blocks.1.first" in said["blocks.1.second"]
    assert said["blocks.0.first"].startswith("left alone")
    # every weight that is kept as it was (Wanda) is one of the dense model's, in another place
    rows = {tuple(sorted(row.tolist())) for row in model.stem[0].weight.detach()}
    kept = [row[row != 0] for row in pruned.stem[0].weight.detach()]
    assert all(any(set(row.tolist()) <= set(old) for old in rows) for row in kept)
    assert sorted(pruned.stem[0].bias.tolist()) == sorted(model.stem[0].bias.tolist())


def test_an_order_resumes(model: nn.Module, tmp_path) -> None:
    whole, stopped = copy.deepcopy(model), copy.deepcopy(model)
    nm.prune_(whole, "2:4", DATA, permute=True)

    def stop(done: int, total: int, what: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        nm.prune_(stopped, "2:4", DATA, permute=True, folder=tmp_path, progress=stop)
    assert all(map(torch.equal, stopped.parameters(), model.parameters()))
    nm.prune_(stopped, "2:4", DATA, permute=True, folder=tmp_path)
    assert all(map(torch.equal, stopped.parameters(), whole.parameters()))
