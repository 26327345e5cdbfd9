"""Stacks of experts under DistributedDataParallel and ZeRO, in both orders of memory; sharded ones are refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import nmkernels as nm
from nmkernels.pattern import RecipeError
from python_tests.distributed.ranks import needs_gloo, on_ranks
from python_tests.moe import mixture
from python_tests.recipes.loop import batches

RANKS = 2
DATA = batches(6)
MASKED = nm.optim.MaskedAdamW
FUSED = partial(torch.optim.AdamW, fused=True)
CASES = {
    "srste": (nm.recipes.SRSTE(decay=0.1), MASKED, {}),
    "srste transposed": (nm.recipes.SRSTE(decay=0.1), FUSED, {"transposed": True}),
    "sste transposed": (nm.recipes.SSTE(mvue=None), MASKED, {"transposed": True}),
    "step transposed": (nm.recipes.STEP(t_min=2, t_max=4), MASKED, {"transposed": True}),
    "zero transposed": (nm.recipes.ASP(start=3), MASKED, {"transposed": True}),
}


def train(name, wrap, rank=None):
    """The finished weights; ``rank``: of whose half of each batch, None for all of it."""
    recipe, make, options = CASES[name]
    model = mixture(**options)
    handle = nm.sparsify_(model, recipe)
    wrapped = wrap(model)
    if name.startswith("zero") and rank is not None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        make = partial(ZeroRedundancyOptimizer, optimizer_class=make)
    optimizer = handle.attach(make(wrapped.parameters(), lr=1e-2))
    for x, y in DATA:
        part = slice(None) if rank is None else slice(6 * rank, 6 * rank + 6)
        optimizer.zero_grad()
        F.mse_loss(wrapped(x[part]), y[part]).backward()
        optimizer.step()
    handle.finish()
    return model.state_dict()


def refused():
    from torch.distributed.fsdp import fully_shard

    model = mixture()
    fully_shard(model)
    with pytest.raises(RecipeError, match="experts.gate_up_proj.*is sharded"):
        nm.sparsify_(model, "ste:2:4", lambda module, name: "proj" in name)
    model = mixture()
    handle = nm.sparsify_(model, "ste:2:4")
    fully_shard(model)
    with pytest.raises(RecipeError, match="'experts.gate_up_proj', a StackedWeight, is sharded"):
        handle.attach(MASKED(model.parameters()))


def on_rank() -> list[dict[str, torch.Tensor]]:
    rank = dist.get_rank()
    wraps = DistributedDataParallel, partial(DistributedDataParallel, gradient_as_bucket_view=True)
    trained = [train(name, wraps[i % 2], rank) for i, name in enumerate(CASES)]
    refused()
    return trained


@needs_gloo
@pytest.mark.slow
def test_ranks_agree_with_each_other_and_with_one_process(tmp_path: Path) -> None:
    for name, first, second in zip(CASES, *on_ranks(RANKS, on_rank, tmp_path), strict=True):
        for key, want in train(name, lambda model: model).items():
            assert torch.equal(first[key], second[key]), (name, key)
            torch.testing.assert_close(first[key], want, atol=1e-9, rtol=1e-9, msg=f"{name} {key}")
