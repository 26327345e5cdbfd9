"""FSDP2 (fully_shard) over gloo: every recipe equals one process; what is gathered, how much, and what is refused."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import nmkernels as nm
from python_tests.distributed import test_tensor_parallel as tp
from python_tests.distributed.ranks import Conv1D, assert_equal, needs_gloo, on_ranks, raised, whole
from python_tests.moe import mixture

if dist.is_available():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

pytestmark = needs_gloo
RANKS, STEPS, DIM = 2, tp.STEPS, tp.DIM
R = nm.recipes
NEED_WHOLE = ("bimask", "lbc", "maskllm", "maxq", "proxsparse", "slope", "vnm")


CASES: dict[str, dict[str, Any]] = {
    "sparsified before": {},
    "sparsified after": {"after": True},
    "attached after a forward pass": {"late": True},
    "only the root sharded": {"blocks": False},
    "kept unsharded after forward": {"reshard_after_forward": False},
    "uneven rows": {"hidden": 63},
    "accumulated": {"passes": 3},
    "accumulated without reducing": {"passes": 3, "no_sync": True},
    "clipped": {"clip": True},
    "recomputed": {"recompute": True},
    "offloaded": {"offload": True},
    "evaluated": {"evaluate": True},
    "moved": {"move": True},
    "from the meta device": {"meta": True},
    "compiled": {"compiled": "layers"},
    "Conv1D": {"linear": lambda features, outputs: Conv1D(outputs, features)},
    "AdamW": {"optimizer": torch.optim.AdamW},
}


def shard(model: nn.Module, blocks: bool = True, offload: bool = False, **keywords: Any) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    keywords |= {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    for block in model if blocks else ():
        fully_shard(block, mesh=mesh, **keywords)
    fully_shard(model, mesh=mesh, **keywords)


def trained(recipes: tuple[str, ...], cases: tuple[str, ...]) -> dict[str, Any]:
    share = dist.get_rank()
    return {f"{r}/{case}": tp.train(tp.RECIPES[r](), shard, RANKS, share=share, **CASES[case]) for r in recipes for case in cases}


FIRST = next(iter(CASES))
QUICK = ("srste", "step", "sste")


def drawn() -> Any:
    """MVUE draws by rank, so with it S-STE is compared with DDP."""
    return [tp.train(R.SSTE("2:4", seed=1), wrap, RANKS, share=dist.get_rank()) for wrap in (shard, DistributedDataParallel)]


def test_recipes_equal_one_process(tmp_path: Path) -> None:
    tp.check(on_ranks(RANKS, trained, tmp_path, QUICK, (FIRST,)), CASES, RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name for name in tp.RECIPES if name not in QUICK])
def test_every_recipe_equals_one_process(tmp_path: Path, recipe: str) -> None:
    tp.check(on_ranks(RANKS, trained, tmp_path, (recipe,), (FIRST,)), CASES, RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_way_to_train_equals_one_process(tmp_path: Path, case: str) -> None:
    tp.check(on_ranks(RANKS, trained, tmp_path, ("srste", "sste", "mdgf"), (case,)), CASES, RANKS)


@pytest.mark.slow
def test_what_is_drawn_is_drawn_as_by_ddp(tmp_path: Path) -> None:
    for sharded, replicated in on_ranks(RANKS, drawn, tmp_path):
        assert_equal("drawn", sharded, replicated)


# ---- fp32 and bf16: what is gathered


def mixed(recipe: nm.recipes.Recipe, steps: int = 3, **keywords: Any) -> tuple[nn.Module, nm.recipes.Handle, Any, list[float]]:
    model = tp.build().float()
    handle = nm.sparsify_(model, recipe)
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), **keywords)
    optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=1e-2))
    return model, handle, optimizer, tp.losses_of(model, optimizer, steps, dist.get_rank())


def autocasted(packed: bool) -> list[float]:
    """Losses of three steps under autocast, with float32 weights that are gathered packed or not."""
    model = tp.build().float()
    handle = nm.sparsify_(model, R.SRSTE("2:4", packed=packed))
    shard(model)
    optimizer = handle.attach(torch.optim.SGD(model.parameters(), lr=1e-2))
    with torch.autocast("cpu", torch.bfloat16):
        return tp.losses_of(model, optimizer)


def large_storages() -> list[tuple[str, int]]:
    """Dtype and bytes of every piece of memory alive that holds a matrix and is as large as a shard of a layer; FSDP2's own are flat."""
    gc.collect()
    found = {
        t.untyped_storage().data_ptr(): (str(t.dtype), t.untyped_storage().size())
        for t in gc.get_objects()
        if isinstance(t, Tensor) and type(t) in (Tensor, nn.Parameter) and t.dim() == 2
    }
    return sorted(entry for pointer, entry in found.items() if pointer and entry[1] >= 256 * 256 * 4)


def between_passes(packed: bool) -> list[tuple[str, int]]:
    """What is alive between forward and backward of three layers of 512 x 256."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(512, 256)), nn.Sequential(nn.Linear(256, 512)), nn.Sequential(nn.Linear(512, 256)))
    handle = nm.sparsify_(model, R.STE("2:4", packed=packed))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (RANKS,)), mp_policy=policy, reshard_after_forward=True)
    optimizer = handle.attach(torch.optim.SGD(model.parameters(), lr=1e-2))
    for _ in range(3):
        loss = model(torch.randn(4, 512)).sum()
        alive = large_storages()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return alive


def not_gathered_anew() -> str:
    model, _, optimizer, _ = mixed(R.SRSTE("2:4"))
    model.set_reshard_after_backward(False)
    for block in model:
        block.set_reshard_after_backward(False)

    def train() -> None:
        for _ in range(2):
            model(torch.randn(4, DIM)).sum().backward()
            optimizer.step()

    return raised(train)


def cast() -> str:
    model, _, _, _ = mixed(R.SRSTE("2:4"))
    model.double()
    return raised(lambda: model(torch.randn(4, DIM).double()))


def loaded(assign: bool) -> float:
    """The largest error of a forward pass after other weights were loaded."""
    model, _, _, _ = mixed(R.SRSTE("2:4"))
    new = {key: value * 2 for key, value in model.state_dict().items()}
    model.load_state_dict(new, assign=assign)
    plain, x = tp.build().bfloat16(), torch.randn(4, DIM)
    plain.load_state_dict({key: nm.ops.prune(value, "2:4") if value.dim() == 2 else value for key, value in whole(new).items()})
    with torch.no_grad():
        return float((model(x).float() - plain(x.bfloat16()).float()).abs().max())


def refused(recipe: str, after: bool) -> str:
    def attach() -> None:
        model = tp.build().float()
        made = R.get(recipe, total_steps=STEPS)
        if after:
            shard(model)
        handle = nm.sparsify_(model, made)
        if not after:
            shard(model)
        handle.attach(made.optimizer(model.parameters(), lr=1e-2))

    return raised(attach)


def stacks() -> list[str]:
    """Experts sharded before and after sparsify_."""
    model, other = mixture(), mixture()
    fully_shard(model)
    said = [raised(lambda: nm.sparsify_(model, "ste:2:4", lambda module, name: "proj" in name))]
    handle = nm.sparsify_(other, "ste:2:4")
    fully_shard(other)
    return [*said, raised(lambda: handle.attach(nm.optim.MaskedAdamW(other.parameters())))]


def sharded_after_attach() -> str:
    model = tp.build().float()
    optimizer = nm.sparsify_(model, R.SRSTE("2:4")).attach(torch.optim.SGD(model.parameters()))
    shard(model)
    model(torch.randn(4, DIM)).sum().backward()
    return raised(optimizer.step)


def staged() -> list[str]:
    """Two stages of a pipeline on a rank each: STEP that watches, and STEP with a fixed step."""
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("pp", "dp"))
    said = []
    for recipe in (R.STEP("2:4", t_min=2, t_max=8), R.STEP("2:4", switch="fixed", start=2)):
        model = tp.build().float()
        handle = nm.sparsify_(model, recipe)
        fully_shard(model, mesh=mesh["dp"])
        said.append(raised(lambda h=handle, r=recipe, m=model: h.attach(r.optimizer(m.parameters()))))
    return said


def tuned() -> list[tuple[int, int]]:
    """The sizes for which ``nm.tune`` would measure."""
    model = tp.build().float()
    handle = nm.sparsify_(model, R.SRSTE("2:4"))
    shard(model)
    handle.attach(torch.optim.SGD(model.parameters()))
    return [(gemm.rows, gemm.cols) for layer in handle.layers.values() for together in layer.problems(8) for gemm in together]


def flattened() -> list[str]:
    """FSDP1 before and after sparsify_."""
    said = []
    for keep in (False, True):
        wrap = partial(FullyShardedDataParallel, use_orig_params=keep, device_id=torch.device("cpu"))
        said.append(raised(lambda wrap=wrap: nm.sparsify_(wrap(tp.build().float()), R.SRSTE("2:4"))))
        model = tp.build().float()
        handle = nm.sparsify_(model, R.SRSTE("2:4"))
        wrapped = wrap(model)
        said.append(raised(lambda h=handle, w=wrapped: h.attach(torch.optim.SGD(w.parameters()))))
    return said


def smaller_mesh() -> str:
    """FSDP2 has no smaller mesh with two ranks, so it is faked."""
    model = tp.build().float()
    handle = nm.sparsify_(model, R.SRSTE("2:4"))
    shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            for param in (p for group in (state._fsdp_param_group,) if group is not None for p in group.fsdp_params):
                param.post_forward_mesh_info = object()
    return raised(lambda: handle.attach(torch.optim.AdamW(model.parameters())))


def behaviour() -> dict[str, Any]:
    return {
        "packed is dense": [
            mixed(make(True))[-1] == mixed(make(False))[-1]
            for make in (lambda p: R.SRSTE("2:4", packed=p), lambda p: R.SSTE("2:4", packed=p, mvue=None))
        ],
        "autocast": [autocasted(packed) for packed in (True, False)],
        "dense, then packed": mixed(R.STEP("2:4", switch="fixed", start=2), steps=5)[1].metrics()["phase"].item(),
        "alive": {packed: between_passes(packed) for packed in (True, False)},
        "stale": not_gathered_anew(),
        "cast": cast(),
        "loaded": [loaded(assign) for assign in (False, True)],
        "refused": {(name, after): refused(name, after) for name in NEED_WHOLE for after in (False, True)},
        "stacks": stacks(),
        "sharded after attach": sharded_after_attach(),
        "flattened": flattened(),
        "stages of a pipeline": staged(),
        "tuned": tuned(),
        "smaller mesh": smaller_mesh(),
    }


@pytest.mark.slow
def test_what_is_gathered_and_what_is_refused(tmp_path: Path) -> None:
    for found in on_ranks(RANKS, behaviour, tmp_path):
        assert found["packed is dense"] == [True, True]
        assert found["autocast"][0] == found["autocast"][1]
        assert found["dense, then packed"] == 1
        # the masters alone: neither W, nor W̃, nor what was gathered
        for packed, alive in found["alive"].items():
            assert alive == [("torch.float32", 512 * 256 // RANKS * 4)] * 3, packed
        assert "not gathered since it last changed" in found["stale"] and found["stale"].startswith("NMError")
        assert found["cast"].startswith("DtypeError")
        assert max(found["loaded"]) < 0.1
        for (name, after), said in found["refused"].items():
            assert said.startswith("RecipeError") and "whole" in said, (name, after, said)
        before, after = found["stacks"]
        assert "experts.gate_up_proj" in before and "is sharded" in before
        assert "'experts.gate_up_proj', a StackedWeight, is sharded" in after
        assert "sharded after handle.attach" in found["sharded after attach"]
        assert all(said.startswith("RecipeError") and "fully_shard" in said for said in found["flattened"]), found["flattened"]
        watching, fixed = found["stages of a pipeline"]
        assert "pipeline" in watching and not fixed
        assert set(found["tuned"]) == {(64, DIM), (DIM, 64)}
        assert "reshard_after_forward" in found["smaller mesh"]
