"""The same job on every device: training agrees with the CPU, and files move across."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import nmkernels as nm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def trained(device: str, capturable: bool) -> nn.Module:
    """A model after twelve steps of STEP 2:4 that cross the switch, finished."""
    sparse = model().to(device)
    recipe = nm.recipes.STEP("2:4", t_min=3, t_max=5, decay=1e-4)
    handle = nm.sparsify_(sparse, recipe)
    optimizer = handle.attach(recipe.optimizer(sparse.parameters(), lr=1e-2, capturable=capturable))
    gen = torch.Generator().manual_seed(1)
    for _ in range(12):
        x = torch.randn(16, 32, generator=gen).to(device)
        optimizer.zero_grad()
        nn.functional.mse_loss(sparse(x), x).backward()
        optimizer.step()
    assert handle.metrics()["phase"].item() == 1
    return handle.finish()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capturable", [False, True])
def test_training_agrees_and_the_file_moves_across(device: str, capturable: bool, tmp_path) -> None:
    if capturable and device == "cpu":
        pytest.skip("torch has capturable optimizers on accelerators only")
    sparse = trained(device, capturable)
    want = trained("cpu", False)
    for a, b in zip(sparse.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), atol=1e-4, rtol=1e-4)
    x = torch.randn(4, 32)
    dense = copy.deepcopy(sparse)(x.to(device))
    nm.compress_(sparse)
    torch.testing.assert_close(sparse(x.to(device)), dense, atol=1e-5, rtol=1e-4)
    nm.save_compressed(sparse, tmp_path / "m.safetensors")
    again = nm.load_compressed(model(), tmp_path / "m.safetensors")
    torch.testing.assert_close(again(x), dense.cpu(), atol=1e-5, rtol=1e-4)
