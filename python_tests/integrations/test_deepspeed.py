"""DeepSpeed's ZeRO-1 and ZeRO-2 on two gloo ranks train what one process trains. Without DeepSpeed the tests skip, as in CI."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import nmkernels as nm
from python_tests.distributed.ranks import Conv1D, needs_gloo, on_ranks, raised

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

R, STEPS = nm.recipes, 8
RECIPES = {
    "SR-STE": R.SRSTE("2:4", decay=0.05),
    "S-STE": R.SSTE("2:4", mvue=None),
    "STE": R.STE("2:4"),
    "ASP later": R.ASP("2:4", start=3),
    "adopted": R.ASP("2:4", score="existing"),
    "MdGf": R.MdGf("2:4", total_steps=STEPS),
    "SdGf": R.SdGf("2:4", total_steps=STEPS),
    "FST": R.FST("2:4", total_steps=STEPS, every=2, decay=0.05, mvue=None),
}
CASES = [(name, stage, dtype) for name in RECIPES for stage, dtype in ((1, "fp32"), (2, "fp32"))]
CASES += [("SR-STE", 1, "bf16"), ("SR-STE", 2, "bf16"), ("adopted", 2, "bf16"), ("adopted", 1, "bf16, gradients in fp32")]


class Model(nn.Module):
    """Weights of which the ranks' parts cut rows and groups, one of them stored (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift = nn.Parameter(torch.zeros(3))
        self.up, self.mix, self.down = nn.Linear(16, 36), Conv1D(36, 36), nn.Linear(36, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.mix(nn.functional.gelu(self.up(x))))) + self.shift.sum()


def built(name: str) -> tuple[nn.Module, nm.recipes.Handle]:
    model = Model()
    if name == "adopted":
        with torch.no_grad():
            for layer in (model.up, model.down):
                layer.weight.copy_(nm.ops.prune(layer.weight, "2:4"))
            model.mix.weight.copy_(nm.ops.prune(model.mix.weight.t().contiguous(), "2:4").t())
    return model, nm.sparsify_(model, RECIPES[name], filter_fn=lambda *_: True)


def batch(step: int) -> torch.Tensor:
    return torch.randn(12, 16, generator=torch.Generator().manual_seed(step))


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    kind = nm.optim.MaskedAdamW if name == "SR-STE" else torch.optim.AdamW
    biases = [p for p in model.parameters() if p.dim() < 2]
    return kind(
        [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": biases, "weight_decay": 0.0}], lr=1e-2, weight_decay=0.1
    )


def initialized(model: nn.Module, optimizer: torch.optim.Optimizer, stage: int, dtype: str = "fp32") -> Any:
    import deepspeed

    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled now
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.3,
        "bf16": {"enabled": "bf16" in dtype},
        **({"data_types": {"grad_accum_dtype": "fp32"}} if "gradients" in dtype else {}),
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def engine_of(name: str, stage: int, dtype: str) -> tuple[Any, Any]:
    model, handle = built(name)
    engine = initialized(model, optimizer_of(name, model), stage, dtype)
    nm.integrations.deepspeed.attach(handle, engine)
    return engine, handle


def steps(engine: Any, handle: Any, first: int, last: int) -> list[dict[str, float]]:
    metrics = []
    for step in range(first, last):
        x = batch(step).to(engine.module.up.weight.dtype)
        share = x.chunk(dist.get_world_size())[dist.get_rank()]
        engine.backward(nn.functional.mse_loss(engine(share), share))
        engine.step()
        metrics.append({key: float(value) for key, value in handle.metrics().items() if key != "max_update"})
    return metrics


def on_rank(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, stage, dtype in CASES:
        engine, handle = engine_of(name, stage, dtype)
        metrics = steps(engine, handle, 0, 5)
        engine.save_checkpoint(str(folder / f"{name}{stage}{dtype}"))
        metrics += steps(engine, handle, 5, STEPS)
        resumed, other = engine_of(name, stage, dtype)
        resumed.load_checkpoint(str(folder / f"{name}{stage}{dtype}"))
        again = steps(resumed, other, 5, STEPS)
        state = {key: value.float().clone() for key, value in engine.module.state_dict().items()}
        equal = all(torch.equal(value.float(), state[key]) for key, value in resumed.module.state_dict().items())
        masks = {name: mask for name, mask in handle.run.held.masks.items()}
        pieces = [(n, layer.parameter._hp_mapping) for n, layer in handle.layers.items()]
        kept = all(
            not m.hp_fragment[~nm.integrations.deepspeed._part(handle.layers[n], m, masks[n])].any()
            for n, m in pieces
            if m is not None and n in masks
        )
        handle.finish()
        results[f"{name} {stage} {dtype}"] = {
            "state": state,
            "metrics": metrics,
            "resumed": equal and again == metrics[5:],
            "zeros": kept,
            "finished": name == "FST" or all(nm.ops.is_nm(layer.master.detach(), "2:4") for layer in handle.layers.values()),
        }
    return results


def one_process(name: str) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    model, handle = built(name)
    optimizer = handle.attach(optimizer_of(name, model))
    metrics = []
    for step in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch(step)), batch(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        metrics.append({key: float(value) for key, value in handle.metrics().items() if key != "max_update"})
    return model.state_dict(), metrics


@needs_gloo
@pytest.mark.slow
def test_zero_trains_what_one_process_trains(tmp_path: Path) -> None:
    ranks = on_ranks(2, on_rank, tmp_path, tmp_path)
    for name, stage, dtype in CASES:
        results = [rank[f"{name} {stage} {dtype}"] for rank in ranks]
        state, metrics = one_process(name)
        for result in results:
            assert result["resumed"] and result["zeros"] and result["finished"], (name, stage, dtype)
            for key, want in state.items():
                assert torch.equal(result["state"][key], results[0]["state"][key]), (name, stage, dtype, key)
                error = float((result["state"][key] - want.float()).norm() / want.float().norm().clamp_min(1e-3))
                # masks of 16-bit weights differ where two magnitudes are nearly equal
                assert error <= (1e-5 if dtype == "fp32" else 0.1), (name, stage, dtype, key, error)
            for mine, theirs in zip(result["metrics"], metrics, strict=True):
                assert mine.keys() == theirs.keys()
                assert dtype != "fp32" or mine == pytest.approx(theirs, rel=1e-3, nan_ok=True), (name, stage)


def refusals() -> dict[str, str]:
    results = {}
    for name, recipe in {"STEP": R.STEP("2:4", 10), "SLoPe": R.SLoPe("2:4", 10), "ZeRO-3": R.SRSTE("2:4")}.items():
        model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
        handle = nm.sparsify_(model, recipe)
        engine = initialized(model, recipe.optimizer(model.parameters(), lr=1e-3), 3 if name == "ZeRO-3" else 1)
        results[name] = raised(lambda handle=handle, engine=engine: nm.integrations.deepspeed.attach(handle, engine))
        assert name == "ZeRO-3" or not (handle.run.attachments or "step" in vars(engine.optimizer))
    results["handle.attach"] = raised(lambda: handle.attach(engine.optimizer))
    dense = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    initialized(dense, torch.optim.AdamW(dense.parameters()), 3)
    results["sparsify_"] = raised(lambda: nm.sparsify_(dense, "srste:2:4"))
    model, handle = built("STE")
    engine = initialized(model, handle.attach(optimizer_of("STE", model)), 1)
    results["attached before"] = raised(lambda: steps(engine, handle, 0, 1))
    # detached, DeepSpeed's own step is left
    engine, handle = engine_of("adopted", 2, "fp32")
    steps(engine, handle, 0, 1)
    handle.detach()
    assert "step" not in vars(engine.optimizer) and not engine.optimizer.optimizer._optimizer_step_pre_hooks
    steps(engine, handle, 0, 1)
    return results


@needs_gloo
@pytest.mark.slow
def test_what_is_refused(tmp_path: Path) -> None:
    (said,) = on_ranks(1, refusals, tmp_path)
    for name, words in {
        "STEP": "STEP freezes the second moment.*fully_shard",
        "SLoPe": "SLoPe prunes the columns.*DistributedDataParallel",
        "ZeRO-3": "ZeRO-3 shards.*fully_shard",
        "sparsify_": "DeepSpeed's ZeRO-3 has sharded.*fully_shard",
        "handle.attach": r"nm\.integrations\.deepspeed\.attach\(handle, engine\)",
        "attached before": r"as after deepspeed\.initialize\. Call nm\.integrations\.deepspeed\.attach",
    }.items():
        assert re.search(words, said[name]) and said[name].startswith("RecipeError"), said[name]
