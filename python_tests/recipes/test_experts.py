"""Stacks of experts under recipes: each expert is trained as a linear layer of its own would be."""

import pytest
import torch

from nmkernels.optim import MaskedAdamW
from nmkernels.recipes import ASP, SRSTE, SSTE, STE, STEP, MdGf, SdGf
from python_tests.moe import mixture
from python_tests.recipes.loop import batches
from python_tests.recipes.running import figures, run

RECIPES = [
    STE(),
    SRSTE(decay=0.1),
    STEP(t_min=2, t_max=4, threshold=1e-30),
    STEP("1:4", total_steps=10, switch="fixed", start=3, inner="mdgf(end=0.8)"),
    ASP(start=3),
    SSTE(mvue=None),
    MdGf(total_steps=10),
    SdGf("1:8", total_steps=10),
    SdGf("1:8", total_steps=10, gradient="chain"),
]
DATA = batches(10)


def masters(handle):
    """The weights as matrices, one for each expert, in the order of the experts."""
    for name, layer in handle.layers.items():
        master = layer.master.detach()
        yield from layer.by_expert(master) if name.endswith("_proj") else (master,)


@pytest.mark.parametrize("make", [MaskedAdamW, torch.optim.AdamW])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_equals_linear_layers(recipe, transposed, make):
    make = recipe.optimizer if recipe.setup.optimizer else make
    results = []
    for apart in (True, False):
        _, handle, _ = run(recipe, data=DATA, model=mixture(apart, transposed=transposed), make=make)
        told = figures(handle)
        handle.finish()
        results.append((told, list(masters(handle))))
    (theirs, a), (ours, b) = results
    assert ours == pytest.approx(theirs, rel=1e-9)
    assert len(a) == len(b) == 6
    for x, y in zip(a, b, strict=True):
        assert (x - y).abs().max() < 1e-12
        assert torch.equal(x != 0, y != 0)
