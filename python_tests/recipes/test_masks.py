"""Masks that are held: the bits that they write and the models that they fit; test_asp.py and the conformance suite train with them."""

import pytest
import torch

import nmkernels as nm
from nmkernels.pattern import CheckpointError
from nmkernels.recipes.masks import HeldMasks
from python_tests.recipes.loop import mlp


@pytest.mark.parametrize("pattern", ["2:4", "1:16", "3:8"])
def test_masks_survive_packing_and_are_refused_by_other_layers(pattern):
    def masks(*sizes):
        model = mlp(torch.float32) if not sizes else torch.nn.Sequential(*(torch.nn.Linear(32, size) for size in sizes))
        return HeldMasks(nm.sparsify_(model, nm.recipes.Dense(pattern)).layers, "magnitude")

    chosen, again, state = masks(), masks(), {}
    chosen.adopt(state)
    again.adopt(state)
    for name, mask in chosen.masks.items():
        assert torch.equal(again.masks[name], mask) and torch.equal(mask, again.layers[name].weight != 0)
        assert torch.equal(mask, nm.ops.mask(mlp(torch.float32).get_submodule(name).weight.detach(), pattern))
    with pytest.raises(CheckpointError, match="only one of them has 2"):
        masks(32).adopt(state)
    del state["masks"]["2"]
    with pytest.raises(CheckpointError, match=r"'0' is of another shape than its weight \(64, 32\)"):
        masks(64).adopt(state)
