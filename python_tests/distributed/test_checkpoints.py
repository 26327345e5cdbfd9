"""Sharded runs (FSDP2): saved, resumed on another number of ranks, begun from a dense checkpoint, finished, written to files."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import nmkernels as nm
from python_tests.distributed.ranks import Conv1D, assert_equal, needs_gloo, on_ranks, raised, whole

if dist.is_available():
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
        set_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

pytestmark = [
    needs_gloo,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:finish"),
]
STEPS, DIM = 10, 32
PROBE = torch.linspace(-1, 1, 4 * DIM, dtype=torch.float64).view(4, DIM)
R = nm.recipes
Make = Callable[[], nm.recipes.Recipe]


def momentum(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=10 * lr, momentum=0.9)


CASES: dict[str, tuple[Make, int, dict[str, Any]]] = {
    "srste": (lambda: R.SRSTE("2:4", decay=1e-2), 4, {}),
    "step, before its switch": (lambda: R.STEP("2:4", t_min=4, t_max=6), 3, {}),
    "step, after its switch": (lambda: R.STEP("2:4", t_min=2, t_max=3, decay=1e-2), 6, {}),
    "step with fst, before": (lambda: R.STEP("2:4", t_min=4, t_max=5, total_steps=STEPS, inner="fst(every=2, mvue=None, end=None)"), 3, {}),
    "step with fst, after": (lambda: R.STEP("2:4", t_min=2, t_max=3, total_steps=STEPS, inner="fst(every=2, mvue=None, end=None)"), 7, {}),
    "sste": (lambda: R.SSTE("2:4", mvue=None), 4, {}),
    "asp, before pruning": (lambda: R.ASP("2:4", start=6), 4, {}),
    "asp": (lambda: R.ASP("2:4", start=3), 5, {}),
    "asp, flattened": (lambda: R.ASP("2:4", start=3), 5, {"flat": True}),
    "asp, uneven rows": (lambda: R.ASP("2:4", start=3), 5, {"hidden": 63}),
    "asp, in one file": (lambda: R.ASP("2:4", start=3), 5, {"full": True}),
    "asp of a Conv1D": (lambda: R.ASP("2:4", start=3), 5, {"conv": True}),
    "asp with a frozen layer": (lambda: R.ASP("2:4", start=3), 5, {"frozen": True}),
    "asp of parts": (lambda: R.ASP("2:4", start=3), 5, {"parts": True}),
    "fst of parts": (lambda: R.FST("2:4", total_steps=STEPS, every=3, end=8, mvue=None), 4, {"parts": True}),
    "asp with replicas": (lambda: R.ASP("2:4", start=3), 5, {"replicas": True}),
    "fst with a frozen layer": (lambda: R.FST("2:4", total_steps=STEPS, every=3, end=None, mvue=None), 5, {"frozen": True}),
    "asp by momentum": (lambda: R.ASP("2:4", start=3), 5, {"optimizer": momentum}),
    "fst": (lambda: R.FST("2:4", total_steps=STEPS, every=3, end=8, mvue=None), 4, {}),
    "fst, at its dense end": (lambda: R.FST("2:4", total_steps=STEPS, every=3, end=6, mvue=None), 8, {"optimizer": torch.optim.AdamW}),
    "mdgf": (lambda: R.get("mdgf:2:4", total_steps=STEPS), 4, {}),
}


class Run:
    """A small model under ``recipe``, sharded by FSDP2 where there are ranks."""

    def __init__(
        self,
        recipe: nm.recipes.Recipe | None,
        seed: int = 0,
        optimizer: Any = None,
        hidden: int = 64,
        flat: bool = False,
        full: bool = False,
        conv: bool = False,
        frozen: bool = False,
        replicas: bool = False,
        parts: bool = False,
    ) -> None:
        torch.manual_seed(seed)
        first = Conv1D(hidden, DIM) if conv else nn.Linear(DIM, hidden)
        self.model = nn.Sequential(first, nn.GELU(), nn.Linear(hidden, DIM)).double()
        self.model[0].weight.requires_grad_(not frozen)
        self.handle = None if recipe is None else nm.sparsify_(self.model, recipe)
        self.ranks, self.rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.shares = 1 if parts else self.ranks
        if dist.is_initialized() and parts:
            split(self.model)
        elif dist.is_initialized():
            both = replicas and self.ranks > 2
            sizes, names = ((2, self.ranks // 2), ("replicas", "shards")) if both else ((self.ranks,), ("shards",))
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
            for layer in self.model:
                if hasattr(layer, "weight"):
                    fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        make = optimizer or (torch.optim.AdamW if recipe is None else recipe.optimizer)
        self.optimizer = make(self.model.parameters(), lr=1e-2)
        self.full, self.options = full, StateDictOptions(flatten_optimizer_state_dict=flat)

    def attach(self) -> Run:
        assert self.handle is not None
        self.handle.attach(self.optimizer)
        return self

    def train(self, first: int, last: int) -> Run:
        for step in range(first, last):
            data = torch.randn(16, DIM, generator=torch.Generator().manual_seed(step), dtype=torch.float64).chunk(self.shares)
            x = data[self.rank % self.shares]
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(x), x).backward()
            self.optimizer.step()
        return self

    def save(self, path: Path) -> None:
        if self.full:  # one file, as of one process
            both = get_state_dict(self.model, self.optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if self.rank == 0:
                path.parent.mkdir(exist_ok=True)
                torch.save(both, path)
            return
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def load(self, path: Path, partial: bool = False) -> Run:
        if self.full:
            model, optimizer = torch.load(path, weights_only=True) if self.rank == 0 else ({}, {})
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=self.ranks > 1)
            set_model_state_dict(self.model, model, options=options)
            set_optimizer_state_dict(self.model, self.optimizer, optimizer, options=options)
            return self
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        planner = dcp.DefaultLoadPlanner(allow_partial_load=partial)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path, planner=planner)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=self.options)
        return self

    def end(self) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
        assert self.handle is not None
        metrics = [{name: float(value) for name, value in self.handle.metrics().items()}]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.handle.finish()
        return whole(self.model.state_dict()), metrics


QUICK = ("step, before its switch", "step with fst, after", "sste", "asp, flattened", "fst, at its dense end")


def start(name: str, seed: int = 0) -> Run:
    make, _, how = CASES[name]
    return Run(make(), seed, **how).attach()


def resumed(names: tuple[str, ...], path: Path) -> dict[str, Any]:
    return {name: start(name, seed=5).load(path / name).train(CASES[name][1], STEPS).end() for name in names}


def save_all(names: tuple[str, ...], path: Path) -> None:
    for name in names:
        start(name).train(0, CASES[name][1]).save(path / name)


def uninterrupted(names: tuple[str, ...]) -> dict[str, Any]:
    return {name: start(name).train(0, STEPS).end() for name in names}


def there_and_back(names: tuple[str, ...], folder: Path) -> dict[str, Any]:
    save_all(names, folder / "from 2")
    return {way: resumed(names, folder / way) for way in ("from 1", "from 2")}


def check_all(names: tuple[str, ...], folder: Path, on_both: list[dict[str, Any]]) -> None:
    want = uninterrupted(names)
    for way in ("from 1", "from 2"):
        for where, results in (*enumerate(on_both), ("one process", {way: resumed(names, folder / way)})):
            for name in names:
                assert_equal(f"{name}, {way} on {where}", results[way][name], want[name])


# ---- the state dict before the first step


EARLY_STATE: dict[str, tuple[Make, Any]] = {
    "masked": (lambda: R.SRSTE("2:4", decay=1e-2), None),
    "adamw": (lambda: R.FST("2:4", total_steps=STEPS, every=2, mvue=None), torch.optim.AdamW),
    "momentum": (lambda: R.ASP("2:4", start=2), momentum),
}


def with_early_state() -> dict[str, Any]:
    """Four steps of each, without and with ``get_state_dict`` before them."""
    results = {}
    for name, (make, optimizer) in EARLY_STATE.items():
        runs = [Run(make(), optimizer=optimizer).attach() for _ in range(2)]
        get_state_dict(runs[1].model, runs[1].optimizer)
        results[name] = [run.train(0, 4).end() for run in runs]
    return results


# ---- a dense checkpoint


def save_dense_run(path: Path) -> None:
    Run(None).train(0, 3).save(path)


def sparsified(path: Path, make: Make, first: bool) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """A run that goes on sparse from the dense checkpoint; its optimizer is attached ``first``, or once all is loaded."""
    run = Run(make(), seed=5)
    if first:
        run.attach().load(path, partial=True)
    else:
        run.load(path).attach()
    return run.train(3, STEPS).end()


DENSE: dict[str, tuple[Make, bool]] = {
    "srste, attached first": (lambda: R.SRSTE("2:4", decay=1e-2), True),
    "step, attached first": (lambda: R.STEP("2:4", t_min=2, t_max=3), True),
    "asp, attached first": (lambda: R.ASP("2:4", start=2), True),
    "srste": (lambda: R.SRSTE("2:4", decay=1e-2), False),
    "step": (lambda: R.STEP("2:4", t_min=2, t_max=3), False),
    "asp": (lambda: R.ASP("2:4"), False),
    "fst": (lambda: R.FST("2:4", total_steps=STEPS, every=3, end=None, mvue=None), False),
}


def from_dense(path: Path) -> dict[str, Any]:
    return {name: sparsified(path, make, first) for name, (make, first) in DENSE.items()}


# ---- finished, and written to files


def mixed(seed: int = 0) -> nn.Sequential:
    """Rows that split unevenly, a Conv1D whose groups a rank has a part of, tied weights, and one that stays dense."""
    torch.manual_seed(seed)
    first, tied = nn.Linear(DIM, 63), nn.Linear(DIM, DIM, bias=False)
    model = nn.Sequential(first, nn.GELU(), nn.Linear(63, DIM), Conv1D(24, DIM), nn.Linear(24, DIM), tied, nn.GELU(), tied)
    return model.double()


def finished(sharded: bool = True) -> tuple[nn.Sequential, nm.recipes.Handle, dict[str, Tensor]]:
    """The model after four steps, an evaluation, and ``finish``, which changes the weights used; what a preview of that computed."""
    model = mixed()
    handle = nm.sparsify_(model, R.get("mdgf:2:4", total_steps=STEPS))
    if sharded:
        shard_each(model)
    optimizer = handle.attach(nm.optim.MaskedAdamW(model.parameters(), lr=1e-2))
    ranks = dist.get_world_size() if sharded else 1
    for step in range(4):
        x = torch.randn(16, DIM, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        x = x.chunk(ranks)[dist.get_rank() if sharded else 0]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
    with torch.no_grad():
        training = model(PROBE)  # FSDP2 leaves the root's weights unsharded
        with handle.deployable():
            preview = model(PROBE)
        again = model(PROBE)
        handle.finish()
        seen = {"training": training, "preview": preview, "again": again, "finished": model(PROBE)}
    return model, handle, seen


def shard_each(model: nn.Sequential) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model[:4]:
        if any(True for _ in module.parameters()):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def endings(folder: Path) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    model, _, seen = finished()
    results: dict[str, Any] = {"seen": seen, "refused": raised(lambda: nm.compress_(model))}
    results["refused int8"] = raised(lambda: nm.compress_(model, values="int8"))
    sizes, gather = [], DTensor.full_tensor

    def counted(tensor: Any, **keywords: Any) -> Tensor:
        sizes.append(tuple(tensor.shape))
        return gather(tensor, **keywords)  # type: ignore[no-any-return]

    DTensor.full_tensor = counted  # type: ignore[method-assign, assignment]
    try:
        nm.save_compressed(model, folder / "sharded.safetensors")
    finally:
        DTensor.full_tensor = gather  # type: ignore[method-assign]
    nm.save_dense(model, folder / "dense.safetensors")
    results["gathered"] = sizes
    results["no folder"] = raised(lambda: nm.save_compressed(model, folder / "nowhere" / "m.safetensors"))
    results["load"] = raised(lambda: nm.load_compressed(model, folder / "sharded.safetensors"))
    results["state"] = whole(model.state_dict())
    plain = nm.load_compressed(mixed(seed=3), folder / "sharded.safetensors")
    fully_shard(plain, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with torch.no_grad():
        results["loaded"] = plain(PROBE)
    if dist.get_rank() == 1:
        model[0].weight.detach().to_local()[0] = 1.0  # one rank's part alone
    saves = (nm.save_compressed, nm.save_dense)
    results["not N:M"] = [raised(functools.partial(save, model, folder / "m.safetensors")) for save in saves]
    diverged = start("srste")
    assert diverged.handle is not None
    if dist.get_rank() == 1:
        diverged.model[0].weight.detach().to_local()[0] = torch.nan
    results["not finite"] = raised(functools.partial(diverged.handle.finish, allow_unused=True))
    return results


def split(model: nn.Module) -> None:
    """Tensor parallelism: the first layer by its outputs, the second by its inputs."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), {"0": ColwiseParallel(), "2": RowwiseParallel()})


def of_parts(folder: Path) -> dict[str, Any]:
    """A finished model that tensor parallelism has split: written from dense parts and packed ones, and loaded into such a model."""
    model = two_layers(0)
    split(model)
    handle = nm.sparsify_(model, "srste:2:4")
    handle.finish(allow_unused=True)
    nm.save_compressed(model, folder / "parts.safetensors")
    nm.save_dense(model, folder / "dense parts.safetensors")
    nm.save_compressed(nm.compress_(model), folder / "packed parts.safetensors")
    nm.save_dense(model, folder / "dense of packed.safetensors")
    other, odd = two_layers(5), two_layers(5, inside=40)
    split(other)
    split(odd)
    nm.load_compressed(other, folder / "parts.safetensors")
    files = [(folder / f"{name}.safetensors").read_bytes() for name in ("parts", "packed parts", "dense parts", "dense of packed")]
    refused = raised(lambda: nm.load_compressed(odd, folder / "odd.safetensors"))
    return {"files": files, "loaded": other(PROBE), "packed": model(PROBE), "bias": whole(other.state_dict())["2.bias"], "refused": refused}


def two_layers(seed: int, inside: int = 48) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(DIM, inside), nn.GELU(), nn.Linear(inside, DIM)).double()


def removed() -> dict[str, Tensor]:
    """Training goes on dense once the recipe is removed."""
    run = start("srste").train(0, 3)
    with torch.no_grad():
        run.model(torch.zeros(1, DIM, dtype=torch.float64))
    assert run.handle is not None
    run.handle.remove()
    return whole(run.train(3, 6).model.state_dict())


def refreshed() -> list[Tensor]:
    """Weights written behind the layers' back, before and after ``refresh``."""
    run = start("srste")
    assert run.handle is not None
    seen = [run.model(PROBE).detach()]
    with torch.no_grad():
        for p in run.model.parameters():
            (p.to_local() if hasattr(p, "to_local") else p).mul_(2.0)
    run.handle.refresh()
    return [*seen, run.model(PROBE).detach()]


# ---- the tests


def everything(folder: Path) -> dict[str, Any]:
    save_dense_run(folder / "dense from 2")
    return {
        "resumed": there_and_back(QUICK, folder),
        "early state": with_early_state(),
        "dense": from_dense(folder / "dense from 2"),
        "endings": endings(folder),
        "of parts": of_parts(folder),
        "removed": removed(),
        "refreshed": refreshed(),
    }


Ranks = tuple[Path, list[dict[str, Any]]]


def another_number_of_ranks_goes_on_alike(ranks: Ranks) -> None:
    check_all(QUICK, ranks[0], [results["resumed"] for results in ranks[1]])


def asking_for_the_state_changes_nothing(ranks: Ranks) -> None:
    for where, results in (*enumerate(results["early state"] for results in ranks[1]), ("one process", with_early_state())):
        for name, (without, after) in results.items():
            assert_equal(f"{name} on {where}", after, without)


def a_dense_checkpoint_begins_a_sparse_run(ranks: Ranks) -> None:
    """With the moments of the dense steps; attached before it is loaded or after."""
    folder, on_both = ranks
    want = from_dense(folder / "dense from 1")
    for name in ("srste", "step"):
        assert_equal(name, want[f"{name}, attached first"], want[name])
    for results in on_both:
        for name in want:
            assert_equal(name, results["dense"][name], want[name])


def finishing_after_an_evaluation(ranks: Ranks) -> None:
    """Preview and finished model are those of one process; what is finished is the shards."""
    model, _, seen = finished(sharded=False)
    for results in (results["endings"] for results in ranks[1]):
        for name, want in seen.items():
            torch.testing.assert_close(results["seen"][name], want, atol=1e-10, rtol=0)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(results["state"][name], value, atol=1e-10, rtol=0)
        for name in ("0.weight", "4.weight", "5.weight"):
            assert nm.ops.is_nm(results["state"][name], "2:4"), name
        assert nm.ops.is_nm(results["state"]["3.weight"].t().contiguous(), "2:4")


def files_of_shards(ranks: Ranks) -> None:
    """The packed form alone is gathered, and the file is what one process writes, byte for byte; so is the dense one."""
    folder, on_both = ranks
    state = on_both[0]["endings"]["state"]
    plain = mixed(seed=3)
    handle = nm.sparsify_(plain, "srste:2:4")
    plain.load_state_dict(state)
    handle.finish(allow_unused=True)
    nm.save_dense(plain, folder / "want_dense.safetensors")
    nm.save_compressed(nm.compress_(plain), folder / "want.safetensors")
    for got, want in (("sharded", "want"), ("dense", "want_dense")):
        assert (folder / f"{got}.safetensors").read_bytes() == (folder / f"{want}.safetensors").read_bytes()
    for results in (results["endings"] for results in on_both):
        weights = {tuple(value.shape) for name, value in state.items() if name.endswith("weight")} - {(DIM, 63)}
        assert results["gathered"] and not weights & set(results["gathered"]), results["gathered"]
        torch.testing.assert_close(results["loaded"], plain(PROBE), atol=1e-10, rtol=0)


def files_of_parts(ranks: Ranks) -> None:
    """Under tensor parallelism; again byte for byte those of one process."""
    folder, on_both = ranks
    model = two_layers(0)
    nm.sparsify_(model, "srste:2:4").finish(allow_unused=True)
    nm.save_dense(model, folder / "want.safetensors")
    dense = (folder / "want.safetensors").read_bytes()
    nm.save_compressed(nm.compress_(model), folder / "want.safetensors")
    packed = (folder / "want.safetensors").read_bytes()
    for results in (results["of parts"] for results in on_both):
        assert results["files"] == [packed, packed, dense, dense]
        for name in ("loaded", "packed"):
            torch.testing.assert_close(results[name], model(PROBE), atol=1e-12, rtol=0)
        assert torch.equal(results["bias"], model[2].bias)
        assert "layer '2': it is split 2 ways along in=40, which would cut bytes" in results["refused"]


def what_sharded_models_refuse_they_refuse_on_every_rank(ranks: Ranks) -> None:
    for results in (results["endings"] for results in ranks[1]):
        assert "fully_shard" in results["refused"] and "compress_" in results["refused"]
        assert results["refused int8"].endswith("nm.load_compressed(plain_model, path) and compress_(plain_model, values='int8').")
        assert results["no folder"].startswith("CheckpointError") and "nowhere does not exist" in results["no folder"]
        assert results["load"].startswith("CheckpointError") and "plain model on each rank" in results["load"]
        assert "layer '0' has NaN or infinite values" in results["not finite"]
        for said in results["not N:M"]:
            assert said.startswith("RecipeError") and "layer '0' is not 2:4" in said


def removed_and_refreshed(ranks: Ranks) -> None:
    want, (before, after) = removed(), refreshed()
    for results in ranks[1]:
        for name, value in want.items():
            torch.testing.assert_close(results["removed"][name], value, atol=1e-10, rtol=0)
        torch.testing.assert_close(results["refreshed"][0], before)
        torch.testing.assert_close(results["refreshed"][1], after)


CHECKS = (
    another_number_of_ranks_goes_on_alike,
    asking_for_the_state_changes_nothing,
    a_dense_checkpoint_begins_a_sparse_run,
    finishing_after_an_evaluation,
    files_of_shards,
    files_of_parts,
    what_sharded_models_refuse_they_refuse_on_every_rank,
    removed_and_refreshed,
)


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    """One start of two ranks, which takes longest, for all of these."""
    save_all(QUICK, tmp_path / "from 1")
    save_dense_run(tmp_path / "dense from 1")
    odd = two_layers(0, inside=40)  # two ranks would share a byte of indices
    nm.sparsify_(odd, "srste:1:4").finish(allow_unused=True)
    nm.save_compressed(nm.compress_(odd), tmp_path / "odd.safetensors")
    ranks = tmp_path, on_ranks(2, everything, tmp_path, tmp_path)
    for check in CHECKS:
        check(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_case_on_two_ranks(tmp_path: Path, name: str) -> None:
    save_all((name,), tmp_path / "from 1")
    check_all((name,), tmp_path, on_ranks(2, there_and_back, tmp_path, (name,), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_four_ranks(tmp_path: Path, name: str) -> None:
    save_all((name,), tmp_path / "from 1")
    want = uninterrupted((name,))
    for rank, results in enumerate(on_ranks(4, resumed, tmp_path, (name,), tmp_path / "from 1")):
        assert_equal(f"{name} on rank {rank} of 4", results[name], want[name])
