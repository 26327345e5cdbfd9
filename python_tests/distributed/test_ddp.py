"""DistributedDataParallel over gloo: two ranks with different data keep equal weights, masks and switching step, and draw by themselves.

Of linear layers, and of stacks of experts in both orders of memory.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nmkernels as nm
from python_tests.distributed.ranks import needs_gloo, on_ranks
from python_tests.moe import mixture

if dist.is_available():
    from torch.distributed.optim import ZeroRedundancyOptimizer

RANKS, STEPS = 2, 10
R, FUSED = nm.recipes, partial(torch.optim.AdamW, fused=True)
CASES: dict[str, tuple[nm.recipes.Recipe, Any]] = {
    "srste": (R.SRSTE("2:4", decay=1e-3), None),
    "step": (R.STEP("2:4", t_min=2, t_max=5), None),
    "srste_packed": (R.SRSTE("2:4", decay=1e-3, packed=True), None),
    "sste": (R.SSTE("2:4", seed=1), None),
    "srste_zero": (R.SRSTE("2:4", decay=1e-3), None),
    "asp_zero": (R.ASP("2:4", start=4), None),
    "srste of experts": (R.SRSTE(decay=0.1), mixture),
    "srste of transposed experts": (R.SRSTE(decay=0.1), partial(mixture, transposed=True)),
    "sste of transposed experts": (R.SSTE(mvue=None), partial(mixture, transposed=True)),
    "step of transposed experts": (R.STEP(t_min=2, t_max=4), partial(mixture, transposed=True)),
    "asp of transposed experts, zero": (R.ASP(start=3), partial(mixture, transposed=True)),
}
"""Recipes, and what makes the model where that is not two linear layers."""


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def shard(step: int, rank: int) -> torch.Tensor:
    return torch.randn(12, 16, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def train(name: str, wrap, batch, zero: bool = False) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """``STEPS`` steps, with ``zero`` the moments shared out among the ranks; the model, finished, and its last metrics."""
    recipe, build = CASES[name]
    model = (build or two_layers)().double()
    handle = nm.sparsify_(model, recipe)
    wrapped = wrap(model)
    make = FUSED if name == "srste of transposed experts" else recipe.optimizer
    make = partial(ZeroRedundancyOptimizer, optimizer_class=nm.optim.MaskedAdamW) if zero else make
    optimizer = handle.attach(make(wrapped.parameters(), lr=1e-2))
    for step in range(STEPS):
        x = batch(step)
        optimizer.zero_grad()
        y = wrapped(x)
        nn.functional.mse_loss(y, x[:, : y.shape[1]]).backward()
        optimizer.step()
    metrics = handle.metrics()
    metrics |= {f"seed of {name}": layer.seed.clone() for name, layer in handle.layers.items() if layer.seed is not None}
    handle.finish()
    return model, metrics


def on_rank() -> dict[str, Any]:
    rank, trained = dist.get_rank(), {}
    for i, name in enumerate(CASES):
        wrap = partial(DistributedDataParallel, gradient_as_bucket_view=i % 2 > 0)
        model, metrics = train(name, wrap, lambda step: shard(step, rank), name.endswith("zero"))
        trained[name] = {"model": model.state_dict(), "metrics": metrics}
    return trained


@needs_gloo
@pytest.mark.slow
def test_ranks_agree_with_each_other_and_with_one_process(tmp_path: Path) -> None:
    found = on_ranks(RANKS, on_rank, tmp_path)
    for name in CASES:
        results = [trained[name] for trained in found]
        # the same data in one batch: the mean of the two shards' gradients is its gradient
        whole, metrics = train(name, lambda m: m, lambda step: torch.cat([shard(step, rank) for rank in range(RANKS)]))
        for key, want in whole.state_dict().items():
            assert torch.equal(results[0]["model"][key], results[1]["model"][key]), (name, key)
            if name != "sste":  # other batches draw other estimates
                torch.testing.assert_close(results[0]["model"][key], want, atol=1e-9, rtol=1e-9, msg=f"{name} {key}")
        # no rank's share of the optimizer sees the largest update of all
        assert metrics.keys() - results[0]["metrics"].keys() == ({"max_update"} if name.endswith("zero") else set())
        for key in results[0]["metrics"]:
            ours, theirs = (result["metrics"][key] for result in results)
            if key.startswith("seed"):
                assert ours[0] != theirs[0] and ours[1] == theirs[1] == STEPS, "each rank draws by itself"
            else:
                assert torch.equal(ours, theirs)
        assert "switch_step" not in metrics or metrics["switch_step"] == results[0]["metrics"]["switch_step"] > 0
        assert "experts" in name or nm.ops.is_nm(results[0]["model"]["0.weight"], "2:4")


LAZY = {
    "plain": {},
    "buckets are gradients": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "adamw, buckets are gradients": {"gradient_as_bucket_view": True},
    "closure": {},
}
"""DistributedDataParallel's options for SLoPe, whose adapters train in the last steps alone."""


def with_adapters(name: str, accumulate: int, wrap) -> dict[str, torch.Tensor]:
    """The model after six steps of SLoPe, of which two train the adapters; ``accumulate`` backward passes each."""
    model = two_layers()
    recipe = R.SLoPe("2:4", 6, rank=4, start=4, every=2, seed=1)
    handle = nm.sparsify_(model, recipe)
    wrapped = wrap(model)
    make = torch.optim.AdamW if "adamw" in name else recipe.optimizer
    optimizer = handle.attach(make(wrapped.parameters(), lr=1e-2, weight_decay=0.1))
    left = model[0].nm_left.detach().clone()
    for step in range(6):

        def backward(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            for part in range(accumulate):
                x = shard(accumulate * step + part, 0).float()
                last = part == accumulate - 1 or wrapped is model
                last |= name == "static graph" and step == 0  # whose first pass torch does not allow in no_sync, of dense models either
                with contextlib.nullcontext() if last else wrapped.no_sync():
                    loss = nn.functional.mse_loss(wrapped(x), x)
                    loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            return loss

        if name == "closure":
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()
        trains = step >= 4
        assert (model[0].nm_left in optimizer.state) == trains != torch.equal(model[0].nm_left, left)
    return model.state_dict()


def lazy_adapters() -> dict[str, Any]:
    return {
        f"{name}, {count}": with_adapters(name, count, partial(DistributedDataParallel, **options))
        for name, options in LAZY.items()
        for count in (1, 2)
    }


@needs_gloo
@pytest.mark.slow
def test_adapters_that_train_late_need_no_search_for_unused_parameters(tmp_path: Path) -> None:
    """With equal data on both ranks, the mean of whose gradients is each one's, to the last bit."""
    for trained in on_ranks(RANKS, lazy_adapters, tmp_path):
        for name in LAZY:
            for count in (1, 2):
                for key, want in with_adapters(name, count, lambda model: model).items():
                    assert torch.equal(trained[f"{name}, {count}"][key], want), (name, count, key)


def by_wanda() -> dict[str, Any]:
    rank, found = dist.get_rank(), {}
    for calls in (1, 2):
        model = two_layers().double()
        handle = nm.sparsify_(model, R.ASP("2:4", score="wanda"))
        for call in range(calls):
            with handle.calibrate(), torch.no_grad():
                model(shard(call, rank))
        optimizer = handle.attach(torch.optim.SGD(DistributedDataParallel(model).parameters(), lr=0.0))
        found[str(calls)] = {name: mask.clone() for name, mask in handle.run.held.masks.items()}
        handle.detach(optimizer)
    return found


@needs_gloo
@pytest.mark.slow
def test_ranks_calibrate_together(tmp_path: Path) -> None:
    first, second = on_ranks(RANKS, by_wanda, tmp_path)
    for calls in (1, 2):
        model = two_layers().double()
        handle = nm.sparsify_(model, R.ASP("2:4", score="wanda"))
        with handle.calibrate(), torch.no_grad():
            model(torch.cat([shard(call, rank) for call in range(calls) for rank in range(RANKS)]))
        handle.attach(torch.optim.SGD(model.parameters(), lr=0.0))
        for name, mask in handle.run.held.masks.items():
            assert torch.equal(first[str(calls)][name], second[str(calls)][name]) and torch.equal(first[str(calls)][name], mask)


class Adapted(nn.Module):
    """Something trained next to compressed layers, which DDP needs, and a buffer that changes."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.norm = base, nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.base(x) + self.down(x))


def sent_when_compressed() -> dict[str, Any]:
    sent: list[int] = []
    whole = dist._broadcast_coalesced

    def counted(group: Any, tensors: Any, *rest: Any) -> None:
        sent.append(sum(t.nbytes for t in tensors))
        whole(group, tensors, *rest)

    dist._broadcast_coalesced = counted
    found: dict[str, Any] = {}
    try:
        for values in (None, "int8"):
            torch.manual_seed(dist.get_rank())  # the first rank's weights are those of all
            base = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
            nm.sparsify_(base, "ste:2:4").finish(allow_unused=True)
            nm.compress_(base, values=values).requires_grad_(False)
            sent.clear()
            model = DistributedDataParallel(Adapted(base))
            found[f"{values} at first"] = sum(sent)
            for _ in range(2):
                sent.clear()
                model(torch.randn(8, 64)).sum().backward()
            found[f"{values} in a step"] = sum(sent)
            found[str(values)] = base.state_dict()
        bare = nn.Sequential(Adapted(base).base, nn.Linear(64, 64))  # no buffer is left to send
        DistributedDataParallel(bare)(torch.randn(8, 64)).sum().backward()
    finally:
        dist._broadcast_coalesced = whole
    return found


@needs_gloo
@pytest.mark.slow
def test_compressed_weights_are_sent_once(tmp_path: Path) -> None:
    first, second = on_ranks(RANKS, sent_when_compressed, tmp_path)
    for values in ("None", "int8"):
        assert first[values].keys() == second[values].keys()
        for key in first[values]:
            assert torch.equal(first[values][key], second[values][key]), key
        assert first[f"{values} at first"] > sum(t.nbytes for t in first[values].values())
        norm = nn.BatchNorm1d(64)
        assert first[f"{values} in a step"] == sum(b.nbytes for b in norm.buffers()), "running statistics alone"
