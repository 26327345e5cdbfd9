"""Meshes of two dimensions on four ranks: HSDP, and FSDP2 with tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import nmkernels as nm
from python_tests.distributed import test_tensor_parallel as tp
from python_tests.distributed.ranks import needs_gloo, on_ranks, raised

if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = [needs_gloo, pytest.mark.slow, pytest.mark.filterwarnings("ignore:finish. the recipe fst")]
RANKS = 4
R = nm.recipes

RECIPES = {name: tp.RECIPES[name] for name in ("srste", "srste 1:8", "step", "step by staleness", "sste", "mdgf", "fst", "asp")}
FSDP_TP: dict[str, dict[str, Any]] = {
    "sparsified before": {},
    "sparsified after": {"after": True},
    "sequence parallel": {"sequence": True},
    "sequence parallel, AdamW": {"sequence": True, "optimizer": torch.optim.AdamW},
    "evaluated": {"evaluate": True},
    "accumulated": {"passes": 2},
}
HSDP: dict[str, dict[str, Any]] = {key: FSDP_TP[key] for key in ("sparsified before", "sparsified after", "evaluated")}


def meshes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def shard(model: nn.Module, mesh: DeviceMesh, **keywords: Any) -> None:
    for block in model:
        fully_shard(block, mesh=mesh, **keywords)
    fully_shard(model, mesh=mesh, **keywords)


def of_hsdp(name: str) -> dict[str, Any]:
    mesh, rank = meshes(), dist.get_rank()
    return {
        f"{name}/{case}": tp.train(RECIPES[name](), lambda m: shard(m, mesh), RANKS, share=rank, **keywords)
        for case, keywords in HSDP.items()
        if case == "sparsified before" or name in ("srste", "sste")
    }


def of_fsdp_and_tensor_parallel(name: str) -> dict[str, Any]:
    mesh = meshes()

    def both(model: nn.Sequential, sequence: bool = False) -> None:
        tp.split(model, mesh["tp"], sequence)
        shard(model, mesh["dp"])

    return {
        f"{name}/{case}": tp.train(RECIPES[name](), both, 2, share=mesh["dp"].get_local_rank(), **keywords)
        for case, keywords in FSDP_TP.items()
        if case == "sequence parallel" or name in ("srste", "sste") or (name == "mdgf" and "optimizer" not in keywords)
    }


def of_replicas_and_tensor_parallel() -> dict[str, Any]:
    """Replicas whose gradients are averaged, as DistributedDataParallel does it, of a model that is split."""
    mesh = meshes()
    group = mesh.get_group("dp")

    def average(p: torch.Tensor) -> None:
        grad = getattr(p.grad, "_local_tensor", p.grad)
        dist.all_reduce(grad, group=group)
        grad /= 2

    def both(model: nn.Sequential) -> None:
        tp.split(model, mesh["tp"])
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(average)

    share = mesh["dp"].get_local_rank()
    return {f"{name}/sparsified after": tp.train(RECIPES[name](), both, 2, share=share, after=True) for name in ("srste", "step", "sste")}


@pytest.mark.parametrize("recipe", RECIPES)
def test_hsdp_equals_one_process(tmp_path: Path, recipe: str) -> None:
    tp.check(on_ranks(RANKS, of_hsdp, tmp_path, recipe), HSDP, RANKS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_fsdp_with_tensor_parallelism_equals_one_process(tmp_path: Path, recipe: str) -> None:
    tp.check(on_ranks(RANKS, of_fsdp_and_tensor_parallel, tmp_path, recipe), FSDP_TP, 2)


def test_replicas_of_a_split_model_equal_one_process(tmp_path: Path) -> None:
    tp.check(on_ranks(RANKS, of_replicas_and_tensor_parallel, tmp_path), FSDP_TP, 2)


def resumed_on_other_meshes(folder: str) -> Any:
    mesh = meshes()

    def both(model: nn.Sequential) -> None:
        tp.split(model, mesh["tp"])
        shard(model, mesh["dp"])

    ways = {"fsdp, tp": both, "hsdp": lambda model: shard(model, mesh), "one": None}
    return tp.resumed(("srste", "step", "fst", "asp"), folder, ways)


def test_saved_on_two_dimensions_and_resumed_on_others(tmp_path: Path) -> None:
    tp.check_resumed(on_ranks(RANKS, resumed_on_other_meshes, tmp_path, str(tmp_path)))


# ---- streams, packed gathers, refusals


def keys(wrap: str) -> list[int]:
    """The keys of a row-parallel and a column-parallel layer's streams."""
    mesh = meshes()
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    recipe = R.SSTE("2:4", seed=3)
    handle = nm.sparsify_(model, recipe)
    if wrap != "hsdp":
        parallelize_module(model, mesh["tp"], {"0": RowwiseParallel(), "1": ColwiseParallel()})
    if wrap != "tp":
        fully_shard(model, mesh=mesh if wrap == "hsdp" else mesh["dp"])
    handle.attach(recipe.optimizer(model.parameters()))
    return [int(layer.seed[0]) for layer in handle.layers.values()]


def mixed(recipe: nm.recipes.Recipe, steps: int = 6) -> list[float]:
    """Losses of FSDP2 with tensor parallelism in bf16."""
    mesh = meshes()
    model = tp.build().float()
    handle = nm.sparsify_(model, recipe)
    tp.split(model, mesh["tp"])
    shard(model, mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=1e-2))
    return tp.losses_of(model, optimizer, steps, mesh["dp"].get_local_rank())


def refused(verb: str) -> str:
    mesh = meshes()
    model = tp.build(40)
    handle = nm.sparsify_(model, R.FST("2:4", total_steps=8) if verb == "attach" else R.STE("2:4"))
    tp.split(model, mesh["tp"])
    shard(model, mesh["dp"])
    if verb == "attach":
        return raised(lambda: handle.attach(torch.optim.AdamW(model.parameters())))
    handle.finish(allow_unused=True)
    return raised(lambda: nm.compress_(model))


def behaviour() -> dict[str, Any]:
    return {
        "keys": {wrap: keys(wrap) for wrap in ("hsdp", "tp", "fsdp, tp")},
        "packed is dense": [
            mixed(make(True)) == mixed(make(False))
            for make in (lambda p: R.SRSTE("1:8", packed=p), lambda p: R.SSTE("2:4", packed=p, mvue=None))
        ],
        "dense, then packed": len(mixed(R.STEP("2:4", switch="fixed", start=3))),
        "refused": {verb: refused(verb) for verb in ("attach", "compress_")},
    }


def test_streams_packed_gathers_and_refusals(tmp_path: Path) -> None:
    results = on_ranks(RANKS, behaviour, tmp_path)
    drawn = {wrap: [list(layer) for layer in zip(*(found["keys"][wrap] for found in results), strict=True)] for wrap in results[0]["keys"]}
    for rows_or_columns in drawn["hsdp"]:
        assert len(set(rows_or_columns)) == RANKS, "replicas see different data"
    for wrap in ("tp", "fsdp, tp"):
        row, column = drawn[wrap]
        # without FSDP2 nobody knows of the data-parallel ranks but by their numbers
        assert row[0] == row[1] != row[2] == row[3], wrap
        assert len(set(column)) == RANKS, wrap
    for found in results:
        assert found["packed is dense"] == [True, True]
        assert "sharded 4 ways along out=40" in found["refused"]["attach"]
        assert "fully_shard" in found["refused"]["compress_"]
