"""FSDP2 (fully_shard) over gloo: every recipe equals one process; what is gathered, how much, and what is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import nmkernels as nm
from python_tests.distributed.ranks import assert_equal, needs_gloo, on_ranks, raised, whole

if dist.is_available():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

pytestmark = needs_gloo
RANKS, STEPS, DIM = 2, 12, 32
R = nm.recipes

RECIPES: dict[str, Callable[[], nm.recipes.Recipe]] = {
    "srste": lambda: R.SRSTE("2:4", decay=1e-2),
    "srste 1:8": lambda: R.SRSTE("1:8", decay=1e-2, packed=True),
    "step": lambda: R.STEP("2:4", t_min=2, t_max=8),
    "step by norm": lambda: R.STEP("2:4", switch="relative_norm", t_min=2, t_max=8),
    "step by staleness": lambda: R.STEP("2:4", switch="staleness", t_min=2, t_max=8),
    "sste": lambda: R.SSTE("2:4", mvue=None),
    "mdgf": lambda: R.get("mdgf:2:4", total_steps=STEPS, gradient="chain", end=0.75),  # which needs W itself
    "sdgf": lambda: R.get("sdgf:1:4", total_steps=STEPS),
    "asp": lambda: R.ASP("2:4", start=4),
    "fst": lambda: R.FST("2:4", total_steps=16, mvue=None),
    "ast": lambda: R.get("ast", total_steps=STEPS),
    "dense": lambda: R.get("dense"),
    "layerwise": lambda: R.get("layerwise", total_steps=STEPS),
}
NEED_WHOLE = ("bimask", "lbc", "maskllm", "maxq", "proxsparse", "slope", "vnm")

CASES: dict[str, dict[str, Any]] = {
    "sparsified before": {},
    "sparsified after": {"after": True},
    "attached after a forward pass": {"late": True},
    "only the root sharded": {"blocks": False},
    "kept unsharded after forward": {"keywords": {"reshard_after_forward": False}},
    "uneven rows": {"hidden": 63},
    "accumulated": {"passes": 3},
    "accumulated without reducing": {"passes": 3, "no_sync": True},
    "clipped": {"clip": True},
    "recomputed": {"recompute": True},
    "offloaded": {"offload": True},
    "evaluated": {"evaluate": True},
    "moved": {"move": True},
    "from the meta device": {"meta": True},
    "compiled": {"compiled": True},
    **({"Conv1D": {"conv1d": True}} if find_spec("transformers") else {}),
    "AdamW": {"optimizer": torch.optim.AdamW},
}


def conv1d_of(features: int, outputs: int) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(outputs, features)


class Net(nn.Module):
    def __init__(self, hidden: int = 64, recompute: bool = False, conv1d: bool = False) -> None:
        super().__init__()
        linear = conv1d_of if conv1d else nn.Linear
        self.blocks = nn.ModuleList(nn.Sequential(linear(DIM, hidden), nn.GELU(), linear(hidden, DIM)) for _ in range(2))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return x


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, DIM, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def shard(model: Net, blocks: bool = True, **keywords: Any) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks if blocks else ():
        fully_shard(block, mesh=mesh, **keywords)
    fully_shard(model, mesh=mesh, **keywords)


def train(
    recipe: nm.recipes.Recipe,
    wrap: str,
    *,
    after: bool = False,
    late: bool = False,
    blocks: bool = True,
    keywords: dict[str, Any] | None = None,
    hidden: int = 64,
    passes: int = 1,
    no_sync: bool = False,
    clip: bool = False,
    recompute: bool = False,
    offload: bool = False,
    evaluate: bool = False,
    move: bool = False,
    meta: bool = False,
    compiled: bool = False,
    conv1d: bool = False,
    optimizer: Any = None,
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """``STEPS`` steps in float64; the finished weights and the metrics of each step. ``wrap``: "", "ddp" or "fsdp"."""
    torch.manual_seed(0)
    model, keywords = Net(hidden, recompute, conv1d).double(), dict(keywords or {})
    if offload and wrap:
        keywords["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    dense = model.state_dict()
    if meta and wrap:
        model = model.to("meta")
    if wrap == "fsdp" and after:
        shard(model, blocks, **keywords)
    handle = nm.sparsify_(model, recipe)
    if wrap == "fsdp" and not after:
        shard(model, blocks, **keywords)
    if compiled and wrap:
        for layer in handle.layers.values():
            layer.compile(backend="aot_eager")
    if meta and wrap:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        model.to_empty(device="cpu")
        set_model_state_dict(model, dict(dense), options=StateDictOptions(full_state_dict=True, strict=False))
    net: nn.Module = DistributedDataParallel(model) if wrap == "ddp" else model
    if late:
        net(batch(0, 0))
    steps = handle.attach((optimizer or recipe.optimizer)(net.parameters(), lr=1e-2))
    metrics = []
    for step in range(STEPS):
        steps.zero_grad()
        for i in range(passes):
            if no_sync and wrap == "fsdp":
                model.set_requires_gradient_sync(i == passes - 1)
            mine = [batch(step * passes + i, rank) for rank in range(RANKS)]
            x = mine[dist.get_rank()] if wrap else torch.cat(mine)
            (nn.functional.mse_loss(net(x), x) / passes).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        steps.step()
        metrics.append({name: float(value) for name, value in handle.metrics().items()})
        if evaluate and step == STEPS // 2:
            model.eval()
            with torch.no_grad():
                net(x)
                with handle.deployable():
                    net(x)
            model.train()
        if move and step == STEPS // 2:
            model.to("cpu")
    if evaluate:  # FSDP2 leaves the root's weights unsharded, which finish must not take for the model's
        with torch.no_grad():
            net(x)
    handle.finish()
    return whole(model.state_dict()), metrics


def trained(recipes: tuple[str, ...], cases: tuple[str, ...]) -> dict[str, Any]:
    return {f"{recipe}, {case}": train(RECIPES[recipe](), "fsdp", **CASES[case]) for recipe in recipes for case in cases}


FIRST = next(iter(CASES))


QUICK = ("srste", "step", "sste")


def drawn() -> dict[str, Any]:
    """MVUE draws by rank, so with it S-STE is compared with DDP."""
    recipe = R.SSTE("2:4", seed=1)
    return {"drawn": (train(recipe, "fsdp"), train(recipe, "ddp"))}


def check(results: list[dict[str, Any]]) -> None:
    for ranks in zip(*(result.items() for result in results), strict=True):
        what = ranks[0][0]
        recipe, _, case = what.partition(", ")
        want = None if what == "drawn" else train(RECIPES[recipe](), "", **CASES[case])
        for _, got in ranks:
            assert_equal(what, *(got if want is None else (got, want)))


def test_recipes_equal_one_process(tmp_path: Path) -> None:
    check(on_ranks(RANKS, trained, tmp_path, QUICK, (FIRST,)))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in QUICK])
def test_every_recipe_equals_one_process(tmp_path: Path, recipe: str) -> None:
    check(on_ranks(RANKS, trained, tmp_path, (recipe,), (FIRST,)))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_way_to_train_equals_one_process(tmp_path: Path, case: str) -> None:
    check(on_ranks(RANKS, trained, tmp_path, ("srste", "sste", "mdgf"), (case,)))


@pytest.mark.slow
def test_what_is_drawn_is_drawn_as_by_ddp(tmp_path: Path) -> None:
    check(on_ranks(RANKS, drawn, tmp_path))


# ---- fp32 and bf16: what is gathered


def mixed(recipe: nm.recipes.Recipe, steps: int = 3, hidden: int = 64, **keywords: Any) -> tuple[Net, nm.recipes.Handle, Any, list[float]]:
    torch.manual_seed(0)
    model = Net(hidden)
    handle = nm.sparsify_(model, recipe)
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), **keywords)
    optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=1e-2))
    losses = []
    for step in range(steps):
        x = batch(step, dist.get_rank()).float()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, handle, optimizer, losses


def autocasted(packed: bool) -> list[float]:
    """Losses of three steps under autocast, with float32 weights that are gathered packed or not."""
    torch.manual_seed(0)
    model = Net()
    handle = nm.sparsify_(model, R.SRSTE("2:4", packed=packed))
    shard(model)
    optimizer, losses = handle.attach(torch.optim.SGD(model.parameters(), lr=1e-2)), []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(4, DIM)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def gathered_bytes(recipe: nm.recipes.Recipe) -> int:
    """Bytes that this rank hands to the all-gathers of one step's weights; forward and backward gather once each."""
    sent = [0]
    names = [name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)]
    originals = {name: getattr(dist, name) for name in names}

    def counted(fn: Any) -> Any:
        def call(output: Tensor, given: Tensor, *args: Any, **keywords: Any) -> Any:
            sent[0] += given.numel() * given.element_size()
            return fn(output, given, *args, **keywords)

        return call

    for name in names:
        setattr(dist, name, counted(originals[name]))
    try:
        mixed(recipe, steps=1, hidden=256)
    finally:
        for name in names:
            setattr(dist, name, originals[name])
    biases = 2 * 2 * (256 + DIM) // RANKS * 2  # two blocks, twice, bf16
    statistics = 9 * 8
    return sent[0] - biases - statistics


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
    for block in model.blocks:
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
    weights, x = whole(new), torch.randn(4, DIM)
    with torch.no_grad():
        y, want = model(x).float(), x.bfloat16()
        for i in range(2):
            hidden = want
            for j in (0, 2):
                w = nm.ops.prune(weights[f"blocks.{i}.{j}.weight"], "2:4").bfloat16()
                hidden = nn.functional.linear(hidden, w, weights[f"blocks.{i}.{j}.bias"].bfloat16())
                hidden = nn.functional.gelu(hidden) if j == 0 else hidden
            want = want + hidden
    return float((y - want.float()).abs().max())


def refused(recipe: str, after: bool) -> str:
    def attach() -> None:
        model = Net()
        made = R.get(recipe, total_steps=STEPS)
        if after:
            shard(model)
        handle = nm.sparsify_(model, made)
        if not after:
            shard(model)
        handle.attach(made.optimizer(model.parameters(), lr=1e-2))

    return raised(attach)


def sharded_after_attach() -> str:
    model = Net()
    optimizer = nm.sparsify_(model, R.SRSTE("2:4")).attach(torch.optim.SGD(model.parameters()))
    shard(model)
    model(torch.randn(4, DIM)).sum().backward()
    return raised(optimizer.step)


def staged() -> list[str]:
    """Two stages of a pipeline on a rank each: STEP that watches, and STEP with a fixed step."""
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("pp", "dp"))
    said = []
    for recipe in (R.STEP("2:4", t_min=2, t_max=8), R.STEP("2:4", switch="fixed", start=2)):
        model = Net()
        handle = nm.sparsify_(model, recipe)
        fully_shard(model, mesh=mesh["dp"])
        said.append(raised(lambda h=handle, r=recipe, m=model: h.attach(r.optimizer(m.parameters()))))
    return said


def tuned() -> list[tuple[int, int]]:
    """The sizes for which ``nm.tune`` would measure."""
    model = Net()
    handle = nm.sparsify_(model, R.SRSTE("2:4"))
    shard(model)
    handle.attach(torch.optim.SGD(model.parameters()))
    return [(gemm.rows, gemm.cols) for layer in handle.layers.values() for together in layer.problems(8) for gemm in together]


def flattened() -> list[str]:
    """FSDP1 before and after sparsify_."""
    said = []
    for keep in (False, True):
        wrap = partial(FullyShardedDataParallel, use_orig_params=keep, device_id=torch.device("cpu"))
        said.append(raised(lambda wrap=wrap: nm.sparsify_(wrap(Net()), R.SRSTE("2:4"))))
        model = Net()
        handle = nm.sparsify_(model, R.SRSTE("2:4"))
        wrapped = wrap(model)
        said.append(raised(lambda h=handle, w=wrapped: h.attach(torch.optim.SGD(w.parameters()))))
    return said


def smaller_mesh() -> str:
    """FSDP2 has no smaller mesh with two ranks, so it is faked."""
    model = Net()
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
        "bytes": {pattern: gathered_bytes(R.SRSTE(pattern, packed=True)) for pattern in ("2:4", "1:8")},
        "alive": {packed: between_passes(packed) for packed in (True, False)},
        "stale": not_gathered_anew(),
        "cast": cast(),
        "loaded": [loaded(assign) for assign in (False, True)],
        "refused": {(name, after): refused(name, after) for name in NEED_WHOLE for after in (False, True)},
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
        weights = 2 * 2 * DIM * 256  # elements
        for pattern, share in (("2:4", 0.5625), ("1:8", 0.15625)):
            assert found["bytes"][pattern] == 2 * weights * 2 * share / RANKS, pattern
        # the masters alone: neither W, nor W̃, nor what was gathered
        for packed, alive in found["alive"].items():
            assert alive == [("torch.float32", 512 * 256 // RANKS * 4)] * 3, packed
        assert "not gathered since it last changed" in found["stale"] and found["stale"].startswith("NMError")
        assert found["cast"].startswith("DtypeError")
        assert max(found["loaded"]) < 0.1
        for (name, after), said in found["refused"].items():
            assert said.startswith("RecipeError") and "whole" in said, (name, after, said)
        assert "sharded after handle.attach" in found["sharded after attach"]
        assert all(said.startswith("RecipeError") and "fully_shard" in said for said in found["flattened"]), found["flattened"]
        watching, fixed = found["stages of a pipeline"]
        assert "pipeline" in watching and not fixed
        assert set(found["tuned"]) == {(64, DIM), (DIM, 64)}
        assert "reshard_after_forward" in found["smaller mesh"]
