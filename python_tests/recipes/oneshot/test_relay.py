"""The relay: what it stores is what a whole pass of the pruned model computes, whatever the model passes to its blocks."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from nmkernels.pattern import Pattern
from nmkernels.recipes.oneshot.base import resolve
from nmkernels.recipes.oneshot.data import call
from nmkernels.recipes.oneshot.prune import choose
from nmkernels.recipes.oneshot.relay import Relay
from nmkernels.recipes.oneshot.results import Results
from nmkernels.recipes.oneshot.units import prune_units, write
from python_tests.recipes.oneshot.families import NAMES, built

P = Pattern("2:4")
QUICK = ("llama", "qwen3_moe", "gpt2", "albert", "t5", "mamba", "llava")
"""Those with a difficulty of their own; the others are slow tests."""


def pruned(model, batches, method="wanda", **options):
    """The relay after all units, its model's outputs by stored blocks, and by the pruned model."""
    chosen, _ = choose(model, P, None, resolve(method))
    relay, results = Relay(model, chosen, batches, call), Results(None, {})
    with relay.running():
        prune_units(relay, P, resolve(method), results, **options)
        named = {c.name: c for c in chosen}
        for number in range(len(relay.units) + 1):
            write(model, results.load(number), named)
        stored = list(relay.final(len(batches)))
    with torch.no_grad():
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
