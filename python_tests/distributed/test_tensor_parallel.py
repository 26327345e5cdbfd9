"""Tensor parallelism (parallelize_module) over gloo: every recipe equals one process; compressed layers, streams, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nmkernels as nm
from nmkernels.shards import local
from python_tests.distributed.ranks import Conv1D, assert_equal, needs_gloo, on_ranks, raised, whole

if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

pytestmark = [needs_gloo, pytest.mark.filterwarnings("ignore:finish. the recipe fst")]
RANKS, STEPS, DIM, TOKENS = 2, 12, 32, 4
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
    "layerwise": lambda: R.get("layerwise", total_steps=STEPS),
    "dense": lambda: R.get("dense"),
}
CASES: dict[str, dict[str, Any]] = {
    "sparsified before": {},
    "sparsified after": {"after": True},
    "sequence parallel": {"sequence": True},
    "sequence parallel, AdamW": {"sequence": True, "optimizer": torch.optim.AdamW},
    "sequence parallel, MaskedAdamW": {"sequence": True, "optimizer": nm.optim.MaskedAdamW},
    "attached after a forward pass": {"late": True},
    "accumulated": {"passes": 3},
    "clipped": {"clip": True, "sequence": True},  # torch takes no norm of plain tensors and DTensors
    "evaluated": {"evaluate": True},
    "loaded": {"load": True},
    "scaled, one step skipped": {"scale": True, "sequence": True},
    "compiled": {"compiled": "model"},
    "recomputed": {"recompute": True},
}


class Block(nn.Module):
    def __init__(self, hidden: int, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), linear(DIM, hidden), linear(hidden, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Sequential):
    recompute = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def build(hidden: int = 64, linear: Callable[[int, int], nn.Module] = nn.Linear) -> Net:
    torch.manual_seed(0)
    return Net(Block(hidden, linear), Block(hidden, linear)).double()


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randn(4, TOKENS, DIM, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def mesh_of(size: int = RANKS) -> DeviceMesh:
    return init_device_mesh("cpu", (size,))


def split(model: nn.Sequential, mesh: DeviceMesh, sequence: bool = False) -> None:
    """Column and row parallel, the rest replicated; with ``sequence`` the tokens between the blocks are split."""
    for block in model:
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            tokens = Shard(1)
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=tokens),
                "down": RowwiseParallel(output_layouts=tokens),
            }
        parallelize_module(block, mesh, plan)
    if sequence:
        first = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
        last = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        parallelize_module(model, mesh, {"0": first, "1": last})


def train(
    recipe: nm.recipes.Recipe,
    wrap: Callable[..., Any] | None,
    shares: int = 1,
    *,
    share: int = 0,
    after: bool = False,
    late: bool = False,
    passes: int = 1,
    no_sync: bool = False,
    clip: bool = False,
    evaluate: bool = False,
    move: bool = False,
    load: bool = False,
    meta: bool = False,
    scale: bool = False,
    compiled: str = "",
    recompute: bool = False,
    hidden: int = 64,
    linear: Callable[[int, int], nn.Module] = nn.Linear,
    optimizer: Any = None,
    first: int = 0,
    halfway: Callable[[nn.Module, Any], None] = lambda model, optimizer: None,
    **keywords: Any,
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """``STEPS`` steps in float64, from the ``first`` one, ``halfway`` called in their midst; the finished weights, the metrics of each.

    ``wrap`` splits the model, with ``keywords``, or returns it wrapped, which then sees the ``share``-th of ``shares`` parts of each batch;
    None: one process, which sees all of them.
    """
    model = build(hidden, linear)
    model.recompute = recompute
    dense, net = model.state_dict(), model
    if meta and wrap:
        model = model.to("meta")
    if wrap and after:
        net = wrap(model, **keywords) or model
    handle = nm.sparsify_(model, recipe)
    if wrap and not after:
        net = wrap(model, **keywords) or model
    if meta and wrap:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        model.to_empty(device="cpu")
        set_model_state_dict(model, dict(dense), options=StateDictOptions(full_state_dict=True, strict=False))
    for layer in handle.layers.values() if compiled == "layers" and wrap else ():
        layer.compile(backend="aot_eager")
    if late:
        net(batch(0))
    if load:
        model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
    steps = handle.attach((optimizer or recipe.optimizer)(model.parameters(), lr=1e-2))
    net = torch.compile(model, backend="aot_eager") if compiled == "model" and wrap else net
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scale)
    metrics = []
    for step in range(first, STEPS):
        if step == STEPS // 2:
            halfway(model, steps)
        steps.zero_grad()
        for i in range(passes):
            parts = [batch(step * passes + i, j) for j in range(shares)]
            x = parts[share] if wrap else torch.cat(parts)
            if no_sync and wrap:
                model.set_requires_gradient_sync(i == passes - 1)
            scaler.scale(nn.functional.mse_loss(net(x), x.roll(1, -1)) / passes).backward()
        if scale and step == 3 and (not wrap or dist.get_rank() == RANKS - 1):
            local(model[0].up.weight.grad)[0, 0] = torch.inf  # of one rank
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(steps)
        scaler.update()
        metrics.append({name: float(value) for name, value in handle.metrics().items()})
        if evaluate and step % 4 == 3:
            model.eval()
            with torch.no_grad():
                net(x)
                with handle.deployable():
                    net(x)
                net(x)  # FSDP2 leaves the root's weights unsharded, which finish must not take for the model's
            model.train()
        if move and step == STEPS // 2:
            model.to("cpu")
    handle.finish()
    return whole(model.state_dict()), metrics


def trained(recipes: tuple[str, ...], cases: tuple[str, ...]) -> dict[str, Any]:
    mesh = mesh_of()
    return {f"{r}/{case}": train(RECIPES[r](), lambda m, **k: split(m, mesh, **k), **CASES[case]) for r in recipes for case in cases}


def check(results: list[dict[str, Any]], cases: dict[str, dict[str, Any]] = CASES, shares: int = 1) -> None:
    """Every rank has got what one process gets from all the data."""
    for what in results[0]:
        recipe, _, case = what.partition("/")
        want = train(RECIPES[recipe](), None, shares, **cases[case])
        for result in results:
            assert_equal(what, result[what], want)


@pytest.mark.slow
def test_recipes_equal_one_process(tmp_path: Path) -> None:
    check(on_ranks(RANKS, trained, tmp_path, ("srste", "step", "sste", "mdgf", "fst", "asp"), ("sequence parallel",)))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_equals_one_process(tmp_path: Path, recipe: str) -> None:
    check(on_ranks(RANKS, trained, tmp_path, (recipe,), ("sparsified before", "sequence parallel")))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_way_to_train_equals_one_process(tmp_path: Path, case: str) -> None:
    check(on_ranks(RANKS, trained, tmp_path, ("srste", "sste", "fst"), (case,)))


# ---- checkpoints


Wrap = Callable[[nn.Sequential], None] | None
PARTS = ("model", "optimizer")


def resumed(names: tuple[str, ...], folder: str, ways: dict[str, Wrap]) -> dict[tuple[str, str], Any]:
    """Runs saved in their midst as the first of ``ways`` has it and resumed as each has it: finished weights and metrics by (recipe, way),
    "" for the run that was not interrupted. Every rank sees all data."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def save(path: str, model: nn.Module, optimizer: Any) -> None:
        dcp.save(dict(zip(PARTS, get_state_dict(model, optimizer), strict=True)), checkpoint_id=path)

    def load(path: str, model: nn.Module, optimizer: Any) -> None:
        both = get_state_dict(model, optimizer)
        dcp.load(dict(zip(PARTS, both, strict=True)), checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=both[0], optim_state_dict=both[1])

    found: dict[tuple[str, str], Any] = {}
    for name in names:
        recipe, path = RECIPES[name](), f"{folder}/{name}"
        weights, metrics = train(recipe, next(iter(ways.values())), halfway=partial(save, path))
        found[name, ""] = weights, metrics[STEPS // 2 :]
        for way, wrap in ways.items():
            found[name, way] = train(recipe, wrap, first=STEPS // 2, halfway=partial(load, path))
    return found


def check_resumed(results: list[Any]) -> None:
    for result in results:
        for (name, way), got in result.items():
            assert_equal(f"{name}, resumed {way}", got, result[name, ""])


def resumed_split_or_whole(folder: str) -> Any:
    mesh = mesh_of()
    names = ("srste", "step", "sste", "fst", "asp")
    return resumed(names, folder, {"split": lambda model: split(model, mesh, sequence=True), "whole": None})


@pytest.mark.slow
def test_saved_split_and_resumed_split_or_whole(tmp_path: Path) -> None:
    check_resumed(on_ranks(RANKS, resumed_split_or_whole, tmp_path, str(tmp_path)))


# ---- one layer


def on_mesh(layer: nn.Module, mesh: DeviceMesh, weight: Any, bias: Any, x: Any, y: Any) -> nn.Module:
    """``layer`` with these placements, for those that the styles of ``parallelize_module`` do not know."""

    def partition(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        module.register_parameter("weight", nn.Parameter(distribute_tensor(module.weight, mesh, [weight])))
        if module.bias is not None:
            module.register_parameter("bias", nn.Parameter(distribute_tensor(module.bias, mesh, [bias])))

    def prepare_input(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, [Replicate()]).redistribute(placements=[x])

    def prepare_output(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.redistribute(placements=[y]).to_local()

    return distribute_module(layer, mesh, partition, prepare_input, prepare_output)


def layers() -> dict[str, float]:
    """The largest error of a step of one layer against one process, for the ways to split it that ``parallelize_module`` has not."""
    mesh, found = mesh_of(), {}
    torch.manual_seed(0)
    whole_, rows, columns = Replicate(), Shard(0), Shard(1)
    ways: dict[str, tuple[Any, ...]] = {
        "replicated": (nn.Linear(24, 16), whole_, whole_, whole_),
        "uneven columns": (nn.Linear(24, 33), rows, rows, whole_),
        "no bias": (nn.Linear(24, 33, bias=False), rows, rows, whole_),
        "rows": (nn.Linear(24, 17), columns, whole_, Shard(2)),
        "Conv1D, columns": (Conv1D(17, 24), columns, rows, whole_),
        "Conv1D, rows": (Conv1D(17, 24), rows, whole_, Shard(2)),
    }
    x = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for name, (layer, weight, bias, given) in ways.items():
        results = []
        start = {key: value.double() for key, value in layer.state_dict().items()}
        for parallel in (False, True):
            model = nn.Sequential(
                layer.__class__(*((17, 24) if "Conv" in name else (24, layer.out_features, layer.bias is not None)))
            ).double()
            model[0].load_state_dict(start)
            handle = nm.sparsify_(model, R.SRSTE("2:4", decay=1e-2), filter_fn=lambda *_: True)
            if parallel:
                on_mesh(model[0], mesh, weight, bias, given, whole_)
            optimizer = handle.attach(nm.optim.MaskedAdamW(model.parameters(), lr=1e-2))
            z = x.clone().requires_grad_()
            for _ in range(2):
                y = model(z)
                y.square().sum().backward()
                optimizer.step()
            handle.finish()
            last = model(z)
            results.append([y, last, z.grad, *whole(model.state_dict()).values()])
        found[name] = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
    return found


def collectives(sparse: bool) -> dict[str, int]:
    """What one forward and backward pass of a split model sends."""
    model = build()
    handle = nm.sparsify_(model, R.STE("2:4")) if sparse else None
    split(model, mesh_of(), sequence=True)
    if handle is not None:
        handle.attach(torch.optim.SGD(model.parameters()))
    with CommDebugMode() as counted:
        model(batch(0)).sum().backward()
    return {str(op): count for op, count in counted.get_comm_counts().items()}


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, rank: int = 0) -> list[float]:
    losses = []
    for step in range(steps):
        x = batch(step, rank).float()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def packed_is_dense() -> bool:
    losses = []
    for packed in (False, True):
        model = build().float()
        handle = nm.sparsify_(model, R.SRSTE("2:4", decay=2e-4, packed=packed))
        split(model, mesh_of())
        optimizer = handle.attach(R.SRSTE("2:4").optimizer(model.parameters(), lr=1e-2))
        for step in range(3):
            loss = model(batch(step).float()).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0] == losses[1]


def autocast() -> list[Any]:
    """dtype and largest difference of an output in bf16, against a model in one process."""
    outputs = []
    for parallel in (False, True):
        model = build().float()
        nm.sparsify_(model, R.STE("2:4"))
        if parallel:
            split(model, mesh_of())
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(model[0].up(batch(0).float()))
    whole_, mine = outputs
    return [mine.dtype == whole_.dtype, torch.equal(mine, whole_.chunk(RANKS, -1)[dist.get_rank()])]


def copied() -> float:
    """The largest difference between a model in training and its copy, as an EMA makes it; and the copy stays when the model steps."""
    model = build()
    handle = nm.sparsify_(model, R.SRSTE("2:4"))
    split(model, mesh_of())
    optimizer = handle.attach(torch.optim.SGD(model.parameters(), lr=1e-2))
    model(batch(0)).square().sum().backward()
    copy_ = copy.deepcopy(model)
    want = model(batch(1)).detach()
    optimizer.step()
    return float((copy_(batch(1)) - want).abs().max())


# ---- MVUE


def drawn() -> dict[str, Any]:
    """Row-parallel layers draw one estimate; the keys of a layer in each way to split it."""
    found: dict[str, Any] = {}
    mesh = mesh_of()
    for parallel in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)).double()
        recipe = R.SSTE("2:4", seed=3)
        handle = nm.sparsify_(model, recipe)
        if parallel:
            parallelize_module(
                model, mesh, {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel(output_layouts=Replicate())}
            )
        optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=1e-2))
        found[f"keys {parallel}"] = [int(layer.seed[0]) for layer in handle.layers.values()]
        grads = []
        for step in range(2):
            optimizer.zero_grad()
            model(batch(step)).square().sum().backward()
            grads.append(whole({"": model[0].weight.grad})[""])
            break
        found[f"gradient {parallel}"] = grads[0]
    return found


# ---- compressed


def compressed(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = build()
    handle = nm.sparsify_(model, R.STE("2:4"))
    split(model, mesh_of(), sequence=True)
    optimizer = handle.attach(torch.optim.AdamW(model.parameters(), lr=1e-2))
    model(batch(0)).square().sum().backward()
    optimizer.step()
    handle.finish()
    model.eval()
    one = build().eval()
    finished = nm.sparsify_(one, R.STE("2:4"))
    one.load_state_dict(whole(model.state_dict()))
    finished.finish(allow_unused=True)
    nm.compress_(one)
    nm.compress_(model)
    outputs, gradients = [], []
    for net in (one, model):
        x = batch(1).requires_grad_()
        net(x).square().sum().backward()
        outputs.append(net(x).detach())
        gradients.append(x.grad)
    found["output"] = float((outputs[0] - outputs[1]).abs().max())
    found["gradient"] = float((gradients[0] - gradients[1]).abs().max())
    found["bytes"] = sum(layer.weight.nbytes for layer in model.modules() if isinstance(layer, nm.CompressedLinear))
    found["whole bytes"] = sum(layer.weight.nbytes for layer in one.modules() if isinstance(layer, nm.CompressedLinear))
    state, want = model.state_dict(), one.state_dict()
    nm.save_compressed(model, f"{folder}/parts.safetensors")  # all ranks call it, the first writes
    if dist.get_rank() == 0:
        nm.save_compressed(one, f"{folder}/one.safetensors")
        found["file"] = Path(folder, "parts.safetensors").read_bytes() == Path(folder, "one.safetensors").read_bytes()
    found["state"] = state.keys() == want.keys() and all(torch.equal(value, want[key]) for key, value in whole(state).items())
    model.load_state_dict({key: value * 2 if key.endswith("values") else value for key, value in state.items()})
    one.load_state_dict({key: value * 2 if key.endswith("values") else value for key, value in want.items()})
    with torch.no_grad():
        found["loaded"] = float((model(batch(2)) - one(batch(2))).abs().max())
    return found


def rounded(folder: str) -> dict[str, Any]:
    """Compressed layers with integers, split before and after rounding, from files of whole models and to files of parts."""

    def finished(hidden: int = 64, pattern: str = "2:4", parallel: bool = False) -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(DIM, hidden), nn.GELU(), nn.Linear(hidden, DIM))
        nm.sparsify_(model, R.STE(pattern)).finish(allow_unused=True)
        return in_parts(model) if parallel else model

    def in_parts(model: nn.Sequential) -> nn.Sequential:
        parallelize_module(model, mesh_of(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return model

    def empty(hidden: int = 64) -> nn.Sequential:
        return in_parts(nn.Sequential(nn.Linear(DIM, hidden), nn.GELU(), nn.Linear(hidden, DIM)))

    def error(one: nn.Module, other: nn.Module) -> float:
        x = torch.linspace(-1, 1, 3 * DIM).view(3, DIM)
        with torch.no_grad():
            return float((one(x) - other(x)).abs().max())

    found: dict[str, Any] = {"errors": {}, "refused": {}}
    for values, group in (("int8", None), ("int4", 16)):
        one, path = nm.compress_(finished(), values=values, group=group), f"{folder}/{values} {dist.get_rank()}.safetensors"
        nm.save_compressed(one, path)
        loaded = nm.load_compressed(empty(), path)
        found["errors"][values, "loaded"] = error(loaded, one)
        parts = nm.compress_(finished(parallel=True), values=values, group=group)
        nm.save_compressed(parts, f"{folder}/parts.safetensors")
        dist.barrier()
        again = nm.load_compressed(nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM)), f"{folder}/parts.safetensors")
        found["errors"][values, "parts"] = error(parts, again)
        found[values] = [again[2].weight.group, again[2].step.shape[1], whole(loaded.state_dict())["2.step"].shape[1]]
        found["errors"][values, "dense"] = error(parts, one) * (values == "int4")  # whole groups are rounded alike
        parts.load_state_dict(loaded.state_dict())
        found["errors"][values, "state"] = error(parts, one)
        dist.barrier()
    for name, hidden, pattern, group in (("groups", 96, "2:4", 32), ("halves", 64, "1:32", 0)):
        path = f"{folder}/{name} {dist.get_rank()}.safetensors"
        nm.save_compressed(nm.compress_(finished(hidden, pattern), values="int4", group=group), path)
        found["refused"][name] = raised(lambda path=path, hidden=hidden: nm.load_compressed(empty(hidden), path))
    found["refused"]["halves, compress_"] = raised(lambda: nm.compress_(finished(64, "1:32", parallel=True), values="int4", group=0))
    return found


@pytest.mark.slow
def test_integers(tmp_path: Path) -> None:
    for found in on_ranks(RANKS, rounded, tmp_path, str(tmp_path)):
        assert max(found["errors"].values()) < 1e-5, found["errors"]
        assert found["int8"] == [32, 2, 2], "a step per row and rank"
        assert found["int4"] == [16, 4, 4]
        for name, words in {
            "groups": "cut groups of 32 columns",
            "halves": "cut bytes of two integers",
            "halves, compress_": "cut a byte of two in half",
        }.items():
            assert words in found["refused"][name], found["refused"]


def split_later() -> dict[str, float]:
    """What splitting and then compressing changes in the output of a finished model."""
    found = {}
    styles: dict[str, Callable[[], dict[str, Any]]] = {
        "slope:2:4": lambda: {"0": ColwiseParallel(), "2": RowwiseParallel()},  # with adapters
        "complementary:2:4": lambda: {"0": ColwiseParallel(output_layouts=Replicate()), "2": ColwiseParallel(output_layouts=Replicate())},
    }
    for name, style in styles.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM)).double()
        recipe = R.get(name, **({"total_steps": 3} if name.startswith("slope") else {}))
        handle = nm.sparsify_(model, recipe)
        optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=1e-2))
        for step in range(3):
            model(batch(step)).square().sum().backward()
            optimizer.step()
        handle.finish()
        with torch.no_grad():
            want = model(batch(5))
            parallelize_module(model, mesh_of(), style())
            outputs = [model(batch(5)), nm.compress_(model)(batch(5))]
        found[name] = max(float((y - want).abs().max()) for y in outputs)
    return found


# ---- refusals


def refused(hidden: int, recipe: nm.recipes.Recipe, *names: str) -> str:
    model = build(hidden)
    handle = nm.sparsify_(model, recipe)
    for block in model:
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh_of(), {name: styles[name] for name in names})
    return raised(lambda: handle.attach(torch.optim.AdamW(model.parameters())))


def plain_input(finish: bool = False) -> str:
    model = nn.Sequential(nn.Linear(DIM, 64), nn.GELU())
    handle = nm.sparsify_(model, R.STE("2:4"))
    model[0].register_parameter("weight", nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh_of(), [Shard(0)])))
    handle.attach(torch.optim.AdamW(model.parameters()))
    if finish:
        handle.finish(allow_unused=True)
        nm.compress_(model)
    return raised(lambda: model(torch.randn(2, DIM)))


def on_two_dimensions() -> str:
    model = nn.Sequential(nn.Linear(DIM, 64), nn.GELU())
    handle = nm.sparsify_(model, R.STE("2:4"))
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("a", "b"))
    model[0].register_parameter("weight", nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0), Shard(1)])))
    return raised(lambda: handle.attach(torch.optim.AdamW(model.parameters())))


def half_bytes() -> str:
    model = build(24)
    handle = nm.sparsify_(model, R.STE("2:4"))
    split(model, mesh_of())
    handle.finish(allow_unused=True)
    return raised(lambda: nm.compress_(model))


# ---- the public ops on DTensors


def ops_of_dtensors() -> dict[str, Any]:
    """Whether each op equals that of the whole tensor, where the result lies, and what is refused."""
    mesh, ops = mesh_of(), nm.ops
    w = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = {"equal": [], "lies": {}}
    for dim in (0, 1, 2, None):
        where = Replicate() if dim is None else Shard(dim)
        parameter = nn.Parameter(distribute_tensor(w, mesh, [where]))  # whose autograd kernel comes first
        shared = parameter.detach()
        for op in (ops.mask, ops.prune, ops.soft_threshold, ops.soft_threshold_scale, ops.transposable_mask):
            result = op(parameter if op is ops.mask else shared, "2:4")
            found["equal"].append((dim, op.__name__, torch.equal(result.full_tensor(), op(w, "2:4"))))
            found["lies"][dim, op.__name__] = str(result.placements[0])
        packed, want = ops.compress(shared, "2:4", mask=ops.mask(shared, "1:4")), ops.compress(w, "2:4", mask=ops.mask(w, "1:4"))
        same = [torch.equal(a.full_tensor(), b) for a, b in ((packed.values, want.values), (packed.indices, want.indices))]
        found["equal"].append((dim, "compress", all(same)))
        found["equal"].append((dim, "decompress", torch.equal(packed.dense().full_tensor(), want.dense())))
        one_wrong = ops.prune(w, "2:4")
        one_wrong[0, 0, :4] = 1.0  # on one rank only
        nm_of = [ops.is_nm(distribute_tensor(x, mesh, [where]), "2:4") for x in (one_wrong, ops.prune(w, "2:4"))]
        found["equal"].append((dim, "is_nm", nm_of == [False, True]))
    found["out"] = raised(lambda: ops.prune(shared, "2:4", out=shared))
    found["mvue"] = raised(lambda: ops.mvue(shared, "2:4"))
    return found


# ---- all of it by one start of the ranks


def behaviour(folder: str) -> dict[str, Any]:
    return {
        "layers": layers(),
        "collectives": [collectives(sparse) for sparse in (False, True)],
        "packed is dense": packed_is_dense(),
        "autocast": autocast(),
        "copied": copied(),
        "drawn": drawn(),
        "compressed": compressed(folder),
        "ops": ops_of_dtensors(),
        "split later": split_later(),
        "refused": {
            "row, cut": refused(80, R.SRSTE("8:16"), "down"),
            "row, whole": refused(64, R.SRSTE("8:16"), "down"),
            "tiles cut": refused(36, R.FST("2:4", total_steps=16), "up"),
            "tiles whole": refused(40, R.FST("2:4", total_steps=16), "up"),
            "not adjacent": refused(64, R.get("complementary:2:4"), "down"),
            "not adjacent, column": refused(64, R.get("complementary:2:4"), "up"),
            "learned": refused(64, R.get("slope:2:4", total_steps=STEPS), "up"),
            "plain input": plain_input(),
            "plain input, compressed": plain_input(finish=True),
            "two dimensions": on_two_dimensions(),
            "half bytes": half_bytes(),
        },
    }


@pytest.mark.slow
def test_layers_streams_compressed_and_refusals(tmp_path: Path) -> None:
    results = on_ranks(RANKS, behaviour, tmp_path, str(tmp_path))
    for found in results:
        assert max(found["layers"].values()) < 1e-12, found["layers"]
        dense, sparse = found["collectives"]
        assert sparse == dense
        assert found["packed is dense"]
        assert found["autocast"] == [True, True]
        assert found["copied"] == 0
        assert found["compressed"].pop("state") and found["compressed"].pop("file", True)
        assert found["compressed"].pop("bytes") == found["compressed"].pop("whole bytes") // RANKS
        assert max(found["compressed"].values()) < 1e-12
        assert max(found["split later"].values()) < 1e-12
        check_ops(found["ops"])
        said = found["refused"]
        fine = ("row, whole", "tiles whole", "not adjacent, column")
        assert not any(said[name] for name in fine), said
        for name, words in {
            "row, cut": "cuts groups of M=16",
            "tiles cut": "cuts groups of M=4",
            "not adjacent": "not adjacent",
            "learned": "whole",
            "plain input": "plain tensor",
            "plain input, compressed": "plain tensor",
            "two dimensions": "a mesh of one",
            "half bytes": "bytes of packed 2:4 indices",
        }.items():
            assert said[name].startswith(("ShapeError", "RecipeError")) and words in said[name], (name, said[name])
    row, column = zip(*(found["drawn"]["keys True"] for found in results), strict=True)
    assert len(set(row)) == 1 and len(set(column)) == RANKS, "peers of a row-parallel layer draw alike"
    for found in results:
        one_process = results[0]["drawn"]["gradient False"]
        torch.testing.assert_close(found["drawn"]["gradient True"], one_process, rtol=0, atol=1e-12)


def check_ops(found: dict[str, Any]) -> None:
    assert not [case for case in found["equal"] if not case[-1]]
    lies = found["lies"]
    for name in ("mask", "prune", "soft_threshold"):
        assert (lies[0, name], lies[1, name], lies[2, name]) == ("S(0)", "S(1)", "R"), name
    assert (lies[0, "transposable_mask"], lies[1, "transposable_mask"]) == ("S(0)", "R")
    assert lies[0, "soft_threshold_scale"] == "R"
    assert found["out"].startswith("NMError") and "out=" in found["out"]
    assert found["mvue"].startswith("NMError") and "to_local" in found["mvue"]
