"""The relay: what it stores is what a whole pass of the pruned model computes, whatever the model passes to its blocks."""

from __future__ import annotations

import copy
import functools
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from nmkernels import ops
from nmkernels.pattern import Pattern
from nmkernels.prune import prune_
from nmkernels.prune.base import resolve
from nmkernels.prune.data import call
from nmkernels.prune.prune import Pruning, choose
from nmkernels.prune.relay import Relay, on_device
from nmkernels.prune.results import Results
from python_tests.prune.families import NAMES, built, inputs_of

P = Pattern("2:4")
QUICK = ("llama", "qwen3_moe", "gpt2", "albert", "t5", "mamba", "llava")
"""Those with a difficulty of their own; the others are slow tests."""


@torch.no_grad()
def pruned(model, batches):
    """The relay after all units, its model's outputs by stored blocks, and by the pruned model."""
    method = resolve("wanda")
    pruning = Pruning(model, *choose(model, P, None, method), P, method)
    relay = Relay(model, pruning.chosen, batches, call)
    pruning.run(relay, Results(None, {}), "", len(batches))
    for number in range(len(pruning.units)):
        pruning.write(pruning.results.load(number))
    with relay.running():
        stored = [relay.output(number) for number in range(len(batches))]
    return relay, stored, [call(model, batch) for batch in batches]


def equal(one, other):
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def test_stored_outputs_are_those_of_the_pruned_model(name):
    model, batches = built(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    relay, stored, whole = pruned(model, batches)
    assert equal(stored, whole)
    assert relay.rereads == (name == "llava")  # reads the last but one block of its vision tower
    blocks = [unit for unit in relay.units if unit.block]
    assert len(blocks) == {"albert": 0, "clip": 4, "t5": 6, "bart": 6, "whisper": 4, "llava": 7}.get(name, 3)
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert len(changed) == sum(len(unit.layers) for unit in relay.units) + len(relay.idle) > 0


# ---- what blocks tell each other in another way than by their outputs


class Block(nn.Module):
    def __init__(self, number, how, width=64):
        super().__init__()
        self.number, self.how = number, how
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.seen = None

    def forward(self, x, shared):
        h = torch.tanh(self.a(x))
        if self.how in ("a dict", "a dict that must have it") and self.number == 0:
            shared["h"] = h
        if self.how == "a dict" and "h" in shared:
            h = h + 3.0 * shared["h"]
        if self.how == "a dict that must have it":
            h = h + 3.0 * shared["h"]
        if self.how == "in place":
            shared["total"].add_(h)
            h = h + shared["total"]
        self.seen = x + self.b(h)
        return self.seen


class Net(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.blocks = how, nn.ModuleList(Block(i, how) for i in range(4))
        self.late = nn.Linear(64, 64)
        if how == "a layer that is called again":
            self.again = (self.blocks[1].a,)  # no module of this one

    def forward(self, x):
        shared = {"total": torch.zeros_like(x)}
        first = x
        for block in self.blocks:
            x = block(x, shared)
            if self.how == "an output that is read again" and block.number == 1:
                first = x
        if self.how == "an attribute":
            first = self.blocks[1].seen
        return x + self.late(first) + (self.again[0](x) if self.how == "a layer that is called again" else 0.0)


def skewed(count=4):
    """Batches in each of which other inputs are large."""
    g = torch.Generator().manual_seed(1)
    return [torch.randn(96, 64, generator=g) * torch.linspace(0.01, 3.0, 64).roll(16 * i) for i in range(count)]


@torch.no_grad()
def by_hand(model, data):
    """Wanda's masks on the layers' inputs in whole passes of the dense model."""
    inputs = inputs_of(model, lambda: [model(batch) for batch in data])
    return {name: ops.mask(model.get_submodule(name).weight * torch.cat(x).square().sum(0).sqrt(), P) for name, x in inputs.items()}


ALONE = {"nothing": False, "an output that is read again": True}
"""How blocks speak to each other -> whether all outputs are stored, where blocks can answer from a store."""
WHOLE = {
    "a dict": "layer 'blocks.1.b' gets other inputs when blocks before it answer from a store",
    "a dict that must have it": "when blocks answer from a store, KeyError: 'h'",
    "an attribute": "layer 'late' gets other inputs",
    "a layer that is called again": "layer 'blocks.1.a' gets other inputs",
    "in place": "layer 'blocks.1.b' gets other inputs",
}
"""The same -> why not."""


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("how", [*ALONE, *WHOLE])
def test_masks_are_those_of_whole_passes(how, sequential):
    """Of the dense model, or as pruning the layers of each block by hand, one block after the other."""
    model, other, data = Net(how).eval(), Net(how).eval(), skewed()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        handle = prune_(model, P, data, method="wanda", sequential=sequential)
    messages = [str(w.message) for w in said if "cannot be run one by one" in str(w.message)]
    assert len(messages) == (how in WHOLE) and all(WHOLE[how] in message for message in messages)
    assert (WHOLE.get(how, "nothing") in handle.report.remark) == (how in WHOLE)
    for parts in [(f"blocks.{i}.",) for i in range(4)] + [("late",)] if sequential else [("blocks", "late")]:
        for name, mask in by_hand(other, data).items():
            if name.startswith(parts):
                other.get_submodule(name).weight.data *= mask
    assert list(handle.report.pruned) == [name for name, m in other.named_modules() if isinstance(m, nn.Linear)]
    for name in handle.report.pruned:
        assert torch.equal(model.get_submodule(name).weight != 0, other.get_submodule(name).weight != 0), name


@pytest.mark.parametrize("how", ALONE)
def test_only_outputs_that_are_read_again_are_stored(how):
    relay, stored, whole = pruned(Net(how).eval(), skewed())
    assert equal(stored, whole) and (relay.rereads, relay.whole) == (ALONE[how], "")


class Pyramid(nn.Module):
    """Blocks whose outputs have other sizes than each other's, all of which the head reads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, stride=s, padding=1), nn.ReLU()) for i, o, s in ((4, 16, 1), (16, 32, 2), (32, 64, 2))
        )
        self.merge, self.head = nn.Conv2d(96, 32, 1), nn.Conv2d(48, 8, 1)

    def forward(self, x):
        seen = []
        for stage in self.stages:
            x = stage(x)
            seen.append(x)
        x = self.merge(torch.cat([nn.functional.interpolate(seen[2], scale_factor=2.0), seen[1]], 1))
        return self.head(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), seen[0]], 1))


def test_outputs_of_several_sizes():
    g = torch.Generator().manual_seed(1)
    data = [torch.randn(2, 4, 16, 16, generator=g) for _ in range(3)]
    relay, stored, whole = pruned(Pyramid().eval(), data)
    assert equal(stored, whole) and relay.rereads and not relay.whole
    assert [unit.name for unit in relay.units if unit.block] == ["stages.0", "stages.1", "stages.2"]


@pytest.mark.parametrize("name", ["llama", "t5", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_whole_passes_give_what_stored_ones_do(name, monkeypatch):
    (model, data), (other, _) = built(name), built(name)
    prune_(model, P, data, method="wanda")
    monkeypatch.setattr(Relay, "_difference", lambda *args: "a test says so")
    with pytest.warns(UserWarning, match="cannot be run one by one: a test says so"):
        handle = prune_(other, P, data, method="wanda")
    assert handle.report.remark.endswith("; each pass ran the whole model: a test says so")
    assert equal(model.state_dict(), other.state_dict())


class Routed(nn.Module):
    """Three experts, one of which gets each batch."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, batch):
        x, expert = batch
        return x + self.experts[expert](x), expert


def test_a_layer_that_only_later_batches_reach_gets_their_inputs():
    torch.manual_seed(0)
    model = nn.Sequential(Routed(), Routed()).eval()
    data = [[(x, expert)] for x, expert in zip(skewed(), (0, 0, 0, 1), strict=True)]
    report = prune_(model, P, data, method="wanda").report
    tokens = {name: row.tokens for name, row in report.pruned.items()}
    assert tokens == {f"{block}.experts.{expert}": (288, 96, 0)[expert] for block in range(2) for expert in range(3)}
    assert report.pruned["1.experts.2"].note == "magnitude: no tokens reached it"


# ---- on another device


class Moved(nn.Module):
    """Notes where it is moved instead of moving."""

    def __init__(self):
        super().__init__()
        self.place, self.moves = torch.device("cpu"), []

    def parameters(self, recurse=True):
        return iter([SimpleNamespace(device=self.place)])

    def to(self, device):
        self.moves.append(str(device))
        self.place = device
        return self


def test_a_block_moves_once_and_back():
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
def test_a_gpu_gives_what_the_cpu_gives(name):
    model, batches = built(name)
    other = copy.deepcopy(model)
    here, there = prune_(model, "2:4", batches), prune_(other, "2:4", batches, device="cuda")
    assert {p.device.type for p in other.parameters()} == {"cpu"}
    for (key, one), (_, two) in zip(here.report.pruned.items(), there.report.pruned.items(), strict=True):
        assert one.tokens == two.tokens and one.note == two.note, key
        assert one.error is None or abs(one.error - two.error) < 0.02 * one.error + 1e-6, key
    same = [torch.eq(a.ne(0), b.ne(0)).float().mean() for a, b in zip(model.parameters(), other.parameters(), strict=True) if a.dim() == 2]
    assert min(same) > 0.9  # near ties may fall otherwise
