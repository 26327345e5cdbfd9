"""torchtitan's smallest model, built, initialised, trained and checkpointed by its own functions.

Its attention is replaced: a CPU has no backward pass of it.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nmkernels as nm

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
from torch.distributed import checkpoint as dcp
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig, default_adamw
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.linear import Linear
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.module import Module

from nmkernels.integrations.torchtitan import NMConverter, NMLinear, NMOptimizersContainer, drive
from python_tests.distributed.ranks import needs_gloo, on_ranks, whole

R = nm.recipes
RECIPES = {
    "srste": R.SRSTE("2:4", decay=1e-3),
    "step": R.STEP("2:4", t_min=2, t_max=4),
    "sste": R.SSTE("2:4", mvue=None),
    "asp": R.ASP("2:4", start=3),
}
KEYWORDS = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Attention(ScaledDotProductAttention):
    """Causal over the whole sequence, whatever the documents in it."""

    class Config(ScaledDotProductAttention.Config):
        __slots__ = ()

    # torchtitan shards the arguments by these names
    def forward(self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: Any = None, **keywords: Any) -> Tensor:
        return super().forward(q_BLNH, k_BLNH, v_BLNH, **keywords)


def spec(recipe: Any = "srste:2:4", sparse: bool = True, **keywords: Any) -> Any:
    """The smallest model with two layers in place of six."""
    found = model_registry("debugmodel", converters=[NMConverter.Config(recipe=recipe, **keywords)] if sparse else None)
    found.model.layers = found.model.layers[:2]
    for layer in found.model.layers:
        layer.attention.inner_attention = Attention.Config()
    return found


def build(config: Any) -> Any:
    """As torchtitan's trainer does: on the meta device, then empty memory, then its own initialisation."""
    with torch.device("meta"):
        model = config.build()
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train()


def optimizers(model: nn.Module, name: str = "MaskedAdamW", implementation: str = "fused") -> NMOptimizersContainer:
    groups = [ParamGroupConfig(pattern=".*", optimizer_name=name, optimizer_kwargs=dict(KEYWORDS))]
    return NMOptimizersContainer.Config(param_groups=groups, implementation=implementation).build(model_parts=[model])


def tokens(step: int) -> Tensor:
    return torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(step))


def step_once(model: nn.Module, steps: Any, step: int) -> float:
    ids = tokens(step)
    positions = torch.arange(32).expand(2, 32)
    steps.zero_grad()
    logits = model(ids[:, :-1], positions=positions)
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    steps.step()
    return loss.item()


def start(recipe: Any, name: str = "MaskedAdamW") -> tuple[Any, NMOptimizersContainer]:
    given = spec(recipe)
    given.post_optimizer_build_fn = drive(recipe)
    model = build(given.model)
    steps = optimizers(model, name)
    given.post_optimizer_build_fn(steps, [model], None)
    return model, steps


# ---- conversion and build


def test_conversion() -> None:
    converter = NMConverter.Config(recipe="srste:2:4").build()
    config = converter.convert(model_registry("debugmodel").model)
    found = {name: type(c) for name, c, _, _ in config.traverse(Linear.Config)}
    assert len(found) == 31 and found.pop("lm_head") is Linear.Config
    assert set(found.values()) == {NMLinear.Config} and all(name.startswith("layers.") for name in found)
    assert "output head" in str(converter.report) and len([e for e in converter.report.entries if e.sparse]) == 30


def test_the_filter_and_the_pattern() -> None:
    config = spec("srste:1:8", filter_fn=lambda module, name: "feed_forward" in name and module.out_features > 1).model
    found = {name: c for name, c, _, _ in config.traverse(Linear.Config) if type(c) is NMLinear.Config}
    assert found and all("feed_forward" in name and c.pattern == "1:8" for name, c in found.items())


def test_other_modules_stay() -> None:
    class Own(Linear):
        class Config(Linear.Config):
            __slots__ = ()

    given = spec(sparse=False).model
    old = given.layers[0].feed_forward.w2
    given.layers[0].feed_forward.w2 = Own.Config(in_features=old.in_features, out_features=old.out_features, param_init=old.param_init)
    NMConverter.Config().build().convert(given)
    assert type(given.layers[0].feed_forward.w2) is Own.Config and type(given.layers[1].feed_forward.w2) is NMLinear.Config


def test_refused_in_words() -> None:
    with pytest.raises(nm.RecipeError, match="no layer of the model can be made"):
        spec(filter_fn=lambda module, name: False)
    model = build(spec(sparse=False).model)
    with pytest.raises(nm.RecipeError, match=r"NMConverter\.Config"):
        drive("srste:2:4")(optimizers(model), [model], None)
    with pytest.raises(NotImplementedError):
        optimizers(model, "Adamax")


def test_build_and_initialisation_are_the_dense_models() -> None:
    dense, sparse = build(spec(sparse=False).model), build(spec().model)
    want, got = dense.state_dict(), sparse.state_dict()
    assert list(want) == list(got) and all(torch.equal(want[key], got[key]) for key in want)
    layers = {name: m for name, m in sparse.named_modules() if isinstance(m, NMLinear)}
    assert len(layers) == 10 and all(isinstance(m, (nn.Linear, Module)) and not m.governed for m in layers.values())
    sparse.load_state_dict(want)


# ---- training


def reference(recipe: R.Recipe, count: int) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """The same model with plain linear layers, by ``sparsify_`` and an optimizer of our own making."""
    model = build(spec(sparse=False).model)
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if type(child) is Linear and key != "lm_head":
                plain = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None, device="meta")
                plain.weight = child.weight
                parent._modules[key] = plain
    handle = nm.sparsify_(model, recipe)
    steps = handle.attach(nm.optim.MaskedAdamW(model.parameters(), **KEYWORDS))
    told = []
    for step in range(count):
        step_once(model, steps, step)
        told.append({name: float(value) for name, value in handle.metrics().items()})
    handle.finish()
    return model.state_dict(), told


@pytest.mark.parametrize("name", RECIPES)
def test_training_equals_that_of_plain_layers(name: str) -> None:
    recipe = RECIPES[name]
    model, steps = start(recipe)
    (handle,) = steps.handles
    assert len(handle.layers) == 10 and type(next(iter(steps))) is nm.optim.MaskedAdamW
    told = []
    for step in range(6):
        step_once(model, steps, step)
        told.append({key: float(value) for key, value in handle.metrics().items()})
    handle.finish()
    want, figures = reference(recipe, 6)
    got = model.state_dict()
    assert got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in want)
    assert str(told) == str(figures)
    assert nm.ops.is_nm(model.layers["0"].feed_forward.w1.weight, "2:4")


def test_torchs_adamw_and_back() -> None:
    model, steps = start(RECIPES["srste"], "AdamW")
    step_once(model, steps, 0)
    (handle,) = steps.handles
    assert float(handle.metrics()["density"]) == pytest.approx(0.5, abs=0.01)
    handle.remove()
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {Linear}
    model.verify_module_protocol()


# ---- checkpoints


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("after", [1, 4])
def test_a_resumed_run_is_the_uninterrupted_one(name: str, after: int, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    model, steps = start(recipe)
    for step in range(6):
        step_once(model, steps, step)
        if step + 1 == after:
            dcp.save({"model": model.state_dict(), "optimizer": steps.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    again, new = start(recipe)
    state = {"model": again.state_dict(), "optimizer": new.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    again.load_state_dict(state["model"])
    new.load_state_dict(state["optimizer"])
    for step in range(after, 6):
        step_once(again, new, step)
    want, got = model.state_dict(), again.state_dict()
    assert all(torch.equal(want[key], got[key]) for key in want)
    metrics = [{key: float(value) for key, value in each.handles[0].metrics().items()} for each in (steps, new)]
    assert str(metrics[0]) == str(metrics[1])


@pytest.mark.parametrize("name", ["step", "asp"])
def test_asking_for_the_state_before_the_first_step_is_no_step(name: str) -> None:
    (model, steps), (asked, others) = start(RECIPES[name]), start(RECIPES[name])
    assert others.state_dict() and int(others.handles[0].state["t"]) == 0
    for step in range(4):
        step_once(model, steps, step)
        step_once(asked, others, step)
    want, got = model.state_dict(), asked.state_dict()
    assert all(torch.equal(want[key], got[key]) for key in want)


def test_in_a_trainers_config() -> None:
    """What torchtitan does with a config before it builds anything: the command line is read into it, and it is logged."""
    import tyro
    from torchtitan.config.manager import custom_registry
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", converters=[NMConverter.Config(recipe=RECIPES["step"])])
    config.model_spec.post_optimizer_build_fn = drive(RECIPES["step"])
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="MaskedAdamW", optimizer_kwargs=dict(KEYWORDS))]
    config.optimizer = NMOptimizersContainer.Config(param_groups=groups)
    found = tyro.cli(type(config), args=["--training.steps", "7"], default=config, registry=custom_registry)
    assert found.training.steps == 7 and type(found.optimizer) is NMOptimizersContainer.Config
    assert found.model_spec.post_optimizer_build_fn is config.model_spec.post_optimizer_build_fn
    assert type(found.model_spec.model.layers[0].feed_forward.w2) is NMLinear.Config
    assert "MaskedAdamW" in str(found.to_dict()["optimizer"])


def test_a_dense_run_loads() -> None:
    dense = build(spec(sparse=False).model)
    groups = default_adamw(**KEYWORDS).param_groups
    old = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=[dense])
    for step in range(2):
        step_once(dense, old, step)
    model, steps = start(RECIPES["step"])
    step_once(model, steps, 0)
    model.load_state_dict(dense.state_dict())
    steps.load_state_dict(copy.deepcopy(old.state_dict()))
    (handle,) = steps.handles
    assert int(handle.state["t"]) == 0, "the recipe starts from its beginning"
    state = next(iter(steps)).state[model.layers["0"].attention.wo.weight]
    theirs = next(iter(old)).state[dense.layers["0"].attention.wo.weight]
    assert torch.equal(state["exp_avg"], theirs["exp_avg"]) and int(state["step"]) == 2
    step_once(model, steps, 2)
    assert int(handle.state["t"]) == 1


# ---- sharded


def sharded(recipe: Any, tensor_parallel: int) -> tuple[Any, NMOptimizersContainer]:
    """By torchtitan's own function, on two ranks that see the same data, so that the mean of gradients is each one's."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import distribute_tensor
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    parallel_dims.device_type = "cpu"  # without a GPU torchtitan takes CUDA for granted
    config, given = llama3_debugmodel(), spec(recipe)
    config.parallelism.tensor_parallel_degree, config.parallelism.spmd_backend = tensor_parallel, "partial_dtensor"
    config.training.mixed_precision_param = "float32"
    config.model_spec = given
    shards = 2 // tensor_parallel
    dims = ParallelDims(1, shards, cp=1, tp=tensor_parallel, pp=1, ep=1, world_size=2, spmd_backend="partial_dtensor")
    given.model.update_from_config(config=config)
    with torch.device("meta"):
        model = given.model.build()
    model = given.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):  # torchtitan divides by itself; gloo has no scaled sums
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(float(shards))
    model.to_empty(device="cpu")
    weights = dict(build(spec(sparse=False).model).named_parameters())
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        for name, p in model.named_parameters():
            p.copy_(distribute_tensor(weights[name].detach(), p.device_mesh, p.placements))
    steps = optimizers(model.train())
    drive(recipe)(steps, [model], dims)
    return model, steps


SHARDED = [(name, tensor_parallel) for tensor_parallel in (1, 2) for name in ("srste", "step", "sste")]


def on_two_ranks(folder: str) -> dict[Any, Any]:
    found = {}
    for name, tensor_parallel in SHARDED:
        place = f"{folder}/{name}{tensor_parallel}"
        model, steps = sharded(RECIPES[name], tensor_parallel)
        for step in range(4):
            step_once(model, steps, step)
            if step == 1:
                dcp.save({"model": model.state_dict(), "optimizer": steps.state_dict()}, checkpoint_id=place)
        again, new = sharded(RECIPES[name], tensor_parallel)
        state = {"model": again.state_dict(), "optimizer": new.state_dict()}
        dcp.load(state, checkpoint_id=place)
        again.load_state_dict(state["model"])
        new.load_state_dict(state["optimizer"])
        for step in range(2, 4):
            step_once(again, new, step)
        found[name, tensor_parallel] = [
            (whole(each.state_dict()), {key: float(value) for key, value in own.handles[0].metrics().items()})
            for each, own in ((model, steps), (again, new))
        ]
    return found


@pytest.mark.slow
@needs_gloo
def test_sharded_by_torchtitan_and_resumed(tmp_path: Path) -> None:
    results = on_ranks(2, on_two_ranks, tmp_path, str(tmp_path))
    for name, tensor_parallel in SHARDED:
        model, steps = start(RECIPES[name])
        for step in range(4):
            step_once(model, steps, step)
        want, what = model.state_dict(), (name, tensor_parallel)
        figures = {key: float(value) for key, value in steps.handles[0].metrics().items()}
        for rank in results:
            (weights, told), (resumed, later) = rank[what]
            assert str(told) == str(later) and all(torch.equal(resumed[key], weights[key]) for key in weights), what
            # STEP's first sparse updates are divided by second moments of a few steps
            most = 0.05 if name == "step" else 1e-3
            assert max((weights[key].float() - want[key].float()).abs().max().item() for key in want) < most, what
            assert told == pytest.approx(figures, rel=1e-3), what


def test_parts_that_do_not_tell_of_each_other_are_refused() -> None:
    dims = SimpleNamespace(tp_enabled=True, spmd_backend="spmd_types")
    model = build(spec().model)
    with pytest.raises(nm.RecipeError, match="partial_dtensor"):
        drive("srste:2:4")(optimizers(model), [model], dims)
