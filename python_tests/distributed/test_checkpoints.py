"""torch.distributed.checkpoint: a run goes on alike on another number of ranks, in every phase of a recipe; and what a dense one loads into."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import nmkernels as nm
from python_tests.distributed.ranks import needs_gloo, on_ranks, whole

if dist.is_available():
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

pytestmark = needs_gloo
STEPS, DIM = 10, 32
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
    "asp by momentum": (lambda: R.ASP("2:4", start=3), 5, {"optimizer": momentum}),
    "fst": (lambda: R.FST("2:4", total_steps=STEPS, every=3, end=8, mvue=None), 4, {}),
    "fst, at its dense end": (lambda: R.FST("2:4", total_steps=STEPS, every=3, end=6, mvue=None), 8, {"optimizer": torch.optim.AdamW}),
    "mdgf": (lambda: R.get("mdgf:2:4", total_steps=STEPS), 4, {}),
}


class Run:
    """A small model under ``recipe``, sharded by FSDP2 where there are ranks."""

    def __init__(self, recipe: nm.recipes.Recipe | None, seed: int = 0, optimizer: Any = None, hidden: int = 64, flat: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(DIM, hidden), nn.GELU(), nn.Linear(hidden, DIM)).double()
        self.handle = None if recipe is None else nm.sparsify_(self.model, recipe)
        self.ranks, self.rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (self.ranks,))
            for layer in self.model:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        make = optimizer or (torch.optim.AdamW if recipe is None else recipe.optimizer)
        self.optimizer = make(self.model.parameters(), lr=1e-2)
        self.options = StateDictOptions(flatten_optimizer_state_dict=flat)
        self.told: dict[str, float] = {}

    def attach(self) -> Run:
        assert self.handle is not None
        self.handle.attach(self.optimizer)
        return self

    def train(self, first: int, last: int) -> Run:
        for step in range(first, last):
            data = torch.randn(16, DIM, generator=torch.Generator().manual_seed(step), dtype=torch.float64).chunk(self.ranks)
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(data[self.rank]), data[self.rank]).backward()
            self.optimizer.step()
        return self

    def save(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def load(self, path: Path, partial: bool = False) -> Run:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        planner = dcp.DefaultLoadPlanner(allow_partial_load=partial)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path, planner=planner)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=self.options)
        return self

    def end(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        assert self.handle is not None
        told = {name: float(value) for name, value in self.handle.metrics().items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.handle.finish()
        return whole(self.model.state_dict()), told


def assert_equal(what: str, got: Any, want: Any) -> None:
    for key, value in want[0].items():
        assert (got[0][key] - value).abs().max() < 1e-10, (what, key)
    assert got[1] == pytest.approx(want[1], rel=1e-9, abs=1e-12, nan_ok=True), what


def resumed(path: Path) -> dict[str, Any]:
    """Every case, from the checkpoints under ``path``."""
    results = {}
    for name, (make, at, how) in CASES.items():
        results[name] = Run(make(), seed=5, **how).attach().load(path / name).train(at, STEPS).end()
    return results


def save_all(path: Path) -> None:
    for name, (make, at, how) in CASES.items():
        Run(make(), **how).attach().train(0, at).save(path / name)


def on_two(folder: Path) -> dict[str, Any]:
    save_all(folder / "from 2")
    return {"from 2 on 2": resumed(folder / "from 2"), "from 1 on 2": resumed(folder / "from 1")}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    save_all(folder / "from 1")
    return folder, on_ranks(2, on_two, folder, folder)


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Any]:
    return {name: Run(make(), **how).attach().train(0, STEPS).end() for name, (make, _, how) in CASES.items()}


def test_another_number_of_ranks_goes_on_alike(checkpoints: tuple[Path, list[Any]], uninterrupted: dict[str, Any]) -> None:
    folder, on_both = checkpoints
    for name, want in uninterrupted.items():
        for rank, results in enumerate(on_both):
            for way, got in results.items():
                assert_equal(f"{name}, {way}, rank {rank}", got[name], want)
    for way in ("from 2", "from 1"):
        for name, got in resumed(folder / way).items():
            assert_equal(f"{name}, {way} on 1", got, uninterrupted[name])


@pytest.mark.slow
def test_four_ranks(checkpoints: tuple[Path, list[Any]], uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    for rank, results in enumerate(on_ranks(4, resumed, tmp_path, checkpoints[0] / "from 2")):
        for name, got in results.items():
            assert_equal(f"{name}, from 2 on 4, rank {rank}", got, uninterrupted[name])
