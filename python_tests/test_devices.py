"""The same job on a GPU: training agrees with the CPU, and files move across."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import nmkernels as nm


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


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [False, True])
def test_training_agrees_and_the_file_moves_across(capturable: bool, tmp_path) -> None:
    sparse = trained("cuda", capturable)
    want = trained("cpu", False)
    for a, b in zip(sparse.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), atol=1e-4, rtol=1e-4)
    x = torch.randn(4, 32)
    dense = copy.deepcopy(sparse)(x.cuda())
    nm.compress_(sparse)
    torch.testing.assert_close(sparse(x.cuda()), dense, atol=1e-5, rtol=1e-4)
    nm.save_compressed(sparse, tmp_path / "m.safetensors")
    again = nm.load_compressed(model(), tmp_path / "m.safetensors")
    torch.testing.assert_close(again(x), dense.cpu(), atol=1e-5, rtol=1e-4)
