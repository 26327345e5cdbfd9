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


class Two(nn.Module):
    """Two layers that read the same channels, one of them maybe by another function."""

    def __init__(self, other=torch.relu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.a, self.b, self.other = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(32, 16), other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        used = torch.relu(h)
        return self.a(used) + self.b(used if self.other is torch.relu else self.other(h))


def test_a_layer_that_is_pruned_already_keeps_its_mask() -> None:
    model = nn.ModuleList([Two()]).append(Two())
    forward = lambda model, x: model[1](model[0](x))  # noqa: E731
    before = forward(model, DATA[0])
    nm.prune_(model, "2:4", DATA, lambda module, name: name in ("0.a", "1.up"), method="wanda", forward=forward)
    mask = model[0].a.weight == 0
    handle = nm.prune_(
        model, "2:4", DATA, lambda module, name: name in ("0.b", "1.a", "1.b"), method="wanda", forward=forward, permute=True
    )
    assert handle.report.channels["0.b"] == "left alone: 0.a is 2:4 already" and torch.equal(model[0].a.weight == 0, mask)
    assert handle.report.channels["1.b"].startswith("reordered with the outputs of 1.up")  # the rows of a sparse layer may move
    after = forward(model, DATA[0])
    handle.finish(allow_unused=True)
    assert all(nm.ops.is_nm(layer.weight.detach(), "2:4") for layer in handle.layers.values())
    assert torch.equal(forward(model, DATA[0]), after) and not torch.equal(after, before)


def test_layers_with_different_inputs_do_not_take_each_other_s_order() -> None:
    model = Two(nn.functional.gelu)
    handle = nm.prune_(model, "2:4", DATA, method="wanda", permute=True)
    assert handle.report.channels["a"] == "left alone: b has another input, and is pruned separately"
    assert all(nm.ops.is_nm(layer.weight.detach(), "2:4") for layer in handle.layers.values())


@pytest.mark.parametrize("kept", [False, True], ids=["memory", "folder"])
def test_results_of_a_layer_follow_the_order_of_its_outputs(tmp_path, kept: bool) -> None:
    """The first layer is pruned and rounded before the second one reorders its rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    handle = nm.prune_(model, "2:4", DATA, values="int4", permute=True, folder=tmp_path if kept else None)
    assert handle.report.channels["2"].startswith("reordered")
    for layer in handle.layers.values():
        assert layer.as_pruned() is not None
        w, q = layer.weight.detach(), layer.effective.rounded.dense()
        assert not q[w == 0].any() and (q - w).norm() < 0.3 * w.norm()


def test_a_transposable_mask_keeps_its_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    handle = nm.prune_(model, "2:4", DATA, method="admm(transposable=True)", permute=True)
    assert handle.report.channels["2"] == "left alone: the mask of 0 is transposable"
    assert all(nm.ops.is_nm(layer.weight.detach().t(), "2:4") for layer in handle.layers.values())


@pytest.mark.parametrize("transposable", [True, False])
def test_a_layer_that_was_pruned_earlier_keeps_its_rows_if_its_mask_is_transposable(transposable: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    nm.prune_(model, "2:4", DATA, lambda module, name: name == "0", method=f"admm(transposable={transposable})")
    channels = nm.prune_(model, "2:4", DATA, lambda module, name: name == "2", permute=True).report.channels
    if transposable:
        assert channels["2"] == "left alone: the mask of 0 is transposable"
        assert nm.ops.is_nm(model[0].weight.detach().t(), "2:4")
    else:
        assert channels["2"].startswith("reordered")
