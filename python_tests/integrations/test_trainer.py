"""Hugging Face's Trainer under a recipe: as by hand, resumed to the bit, logged, the best sparse model at the end; and what it refuses."""

from __future__ import annotations

import gc
import json
import os
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.optim import AnnealedAdamW, MaskedAdamW
from python_tests.distributed.ranks import needs_gloo, on_ranks, whole
from python_tests.recipes.loop import distance, snapshot

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from nmkernels.integrations.trainer import RecipeCallback, prepare
from nmkernels.train.optimizers import unwrapped

R = nm.recipes
STEPS = 8
RECIPES = {
    "step": R.STEP("2:4", t_min=2, t_max=6, threshold=1e-30),
    "asp": R.ASP("2:4", start=3),
    "srste": R.SRSTE("2:4", decay=1e-3),
    "sste": R.SSTE("2:4"),
    "slope": R.SLoPe("2:4", total_steps=STEPS, rank=2, start=5),
    "mdgf": R.MdGf("2:4", total_steps=STEPS),
    "maskllm": R.MaskLLM("2:4", total_steps=STEPS),
    "ast": R.AST("2:4", total_steps=STEPS),
}
STARTS = torch.randint(0, 64, (40, 1), generator=torch.Generator().manual_seed(1))
DATA = [{"input_ids": x, "labels": x} for x in (STARTS + torch.arange(12)) % 64]


@pytest.fixture(autouse=True, scope="module")
def _quick():
    """``train()`` begins with a garbage collection, which looks at every object of every library."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _quiet():
    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    yield
    if before:
        logging.enable_progress_bar()


def llama(**given: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **config, **given))


def settings(folder: Path, **given: Any) -> TrainingArguments:
    fixed = {"max_steps": STEPS, "learning_rate": 1e-2, "per_device_train_batch_size": 4, "weight_decay": 0.1, "adam_beta2": 0.95}
    quiet = {"save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "report_to": [], "use_cpu": True}
    return TrainingArguments(output_dir=str(folder), **{**fixed, **quiet, **given})


def trainer_of(folder: Path, model: nn.Module | None = None, more: dict[str, Any] | None = None, **given: Any) -> Trainer:
    return Trainer(
        model=llama() if model is None else model,
        args=settings(folder, **given),
        train_dataset=DATA,
        eval_dataset=DATA[:8],
        **(more or {}),
    )


def is_pruned(model: nn.Module, pattern: str = "2:4") -> bool:
    layers = [m for m in model.modules() if isinstance(m, nm.SparseLinear)]
    return len(layers) == 7 and all(nm.ops.is_nm(m.weight, pattern) for m in layers)


# ---- training


def test_train_is_what_one_would_do_by_hand(tmp_path):
    model, recipe = llama(), RECIPES["step"]
    handle = nm.sparsify_(model, recipe)
    by_hand = trainer_of(tmp_path, model)
    decayed = set(by_hand.get_decay_parameter_names(model))
    groups = [
        {"params": [p for name, p in model.named_parameters() if (name in decayed) is flag], "weight_decay": 0.1 * flag}
        for flag in (True, False)
    ]
    by_hand.optimizer = handle.attach(MaskedAdamW(groups, lr=1e-2, betas=(0.9, 0.95)))
    by_hand.train()
    assert handle.metrics()["phase"] == 1.0
    handle.finish()

    trainer = trainer_of(tmp_path)
    assert prepare(trainer, recipe).recipe is recipe
    trainer.train()
    assert distance(snapshot(trainer.model), snapshot(model)) == 0.0 and is_pruned(trainer.model)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", RECIPES)
def test_resuming_is_training_uninterrupted(tmp_path, name):
    """With accumulation, and with evaluation in only one of the two runs."""

    def run(**given):
        trainer = trainer_of(
            tmp_path, gradient_accumulation_steps=2, **{"save_strategy": "steps", "save_steps": 4, "eval_steps": 1, **given}
        )
        return trainer, prepare(trainer, RECIPES[name], finish=False)

    whole, handle = run()
    whole.train()
    resumed, other = run(eval_strategy="steps", save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert [log["step"] for log in resumed.state.log_history if "eval_loss" in log] == [5, 6, 7, 8]
    assert distance(snapshot(resumed.model), snapshot(whole.model)) == 0.0
    before, after = whole.state.log_history[-2], resumed.state.log_history[-3]
    assert before["step"] == after["step"] == STEPS
    for key in before.keys() - {"grad_norm"}:
        assert before[key] == after[key], key
    for done in (handle, other):
        assert not done.finished
        done.finish()
    assert distance(snapshot(resumed.model), snapshot(whole.model)) == 0.0 and is_pruned(resumed.model)


def test_experts_are_resumed_too(tmp_path):
    """The trainer does not find those of Mixtral in its own checkpoints, and would go on with those that are there."""
    config = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}

    def run(seed, **given):
        torch.manual_seed(seed)
        mixtral = MixtralForCausalLM(MixtralConfig(**config, num_hidden_layers=1, num_local_experts=4, max_position_embeddings=32))
        trainer = trainer_of(tmp_path, mixtral, save_strategy="steps", save_steps=4)
        handle = prepare(trainer, RECIPES["step"])
        trainer.train(**given)
        return trainer, handle

    (whole, handle), (resumed, _) = run(0), run(1, resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert any("experts" in name for name in handle.layers)
    assert distance(snapshot(resumed.model), snapshot(whole.model)) == 0.0
    whole.save_model(str(tmp_path / "out"))
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in names, "once trained, by the names of the hub"
    for folder in ("out", "checkpoint-8"):
        loaded = MixtralForCausalLM.from_pretrained(tmp_path / folder)
        assert (distance(snapshot(loaded), snapshot(whole.model)) == 0.0) is (folder == "out")


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 4


def test_training_in_parts(tmp_path):
    one = trainer_of(tmp_path / "whole")
    prepare(one, "srste:2:4")
    one.train()
    trainer = trainer_of(tmp_path, save_strategy="steps", save_steps=4)
    stop = Stop()
    trainer.add_callback(stop)
    handle = prepare(trainer, "srste:2:4", finish=False)
    trainer.train()
    assert trainer.state.global_step == 4 and not handle.finished
    trainer.remove_callback(stop)
    trainer.train(resume_from_checkpoint=True)
    handle.finish()
    assert distance(snapshot(trainer.model), snapshot(one.model)) == 0.0
    handle = prepare(other := trainer_of(tmp_path), "srste:2:4")
    other.train()
    assert handle.finished and other.evaluate()["eval_loss"] > 0
    with pytest.raises(nm.RecipeError, match="finish=False"):
        other.train()


def test_resuming_for_more_steps(tmp_path):
    """The schedule is that of the checkpoint, which the trainer has set."""
    first = trainer_of(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    prepare(first, "mdgf:2:4", finish=False)
    first.train()
    longer = trainer_of(tmp_path, max_steps=6)
    prepare(longer, "mdgf:2:4")
    with pytest.raises(nm.CheckpointError, match="4 there and 6 here.*than max_steps or epochs gave, set total_steps=4 in the recipe"):
        longer.train(resume_from_checkpoint=True)
    longer = trainer_of(tmp_path, max_steps=6)
    prepare(longer, "mdgf:2:4(total_steps=4)")
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step == 6 and is_pruned(longer.model)


# ---- the end

BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}


def test_the_best_model_is_the_best_sparse_one(tmp_path):
    """The models of the dense phase are better than those after it, but not once they are pruned."""
    trainer = trainer_of(tmp_path, llama(initializer_range=0.3), **BEST, max_steps=6)
    dense = trainer.evaluation_loop
    handle = prepare(trainer, "asp:1:16(start=4)")
    seen = []

    class Before(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(dense(trainer.get_eval_dataloader(), "dense").metrics["eval_loss"])

    trainer.add_callback(Before())
    trainer.train()
    assert handle.finished and is_pruned(trainer.model, "1:16")
    logged = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    assert min(logged) == trainer.state.best_metric and min(seen) < min(logged) - 0.5
    assert seen[3:] == logged[3:] and all(pruned > whole for pruned, whole in zip(logged[:3], seen, strict=False))
    assert trainer.state.best_global_step > 4
    # the figure by which it was chosen is that of the model that is left
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, abs=1e-6)


@pytest.mark.parametrize("resumed", ["", "resumed", "without its optimizer"])
@pytest.mark.parametrize("recipe", ["asp:2:4(start=3)", "lbc:2:4"])
def test_a_best_model_is_finished_by_masks_of_its_own(tmp_path, recipe, resumed):
    """Where it is older than those that are held at the end, or than the process."""
    worst = {**BEST, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = trainer_of(tmp_path, llama(initializer_range=0.3), **worst, max_steps=5)
    lost = resumed == "without its optimizer"
    if resumed:
        trainer.add_callback(Stop())
        prepare(trainer, recipe, finish=False)
        trainer.train()
        if lost:
            (tmp_path / "checkpoint-1" / "optimizer.pt").unlink()
        trainer = trainer_of(tmp_path, llama(initializer_range=0.3), **worst, max_steps=5)
    prepare(trainer, recipe)
    with pytest.warns(UserWarning) as caught:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4") if resumed else None)
    messages = "\n".join(str(w.message) for w in caught)
    if lost:
        by = "those of the last step" if recipe == "lbc:2:4" else "chosen again from its weights"
        assert f"is missing, so the masks of the best model are {by}" in messages
        if recipe == "lbc:2:4":
            return
    assert "has not been trained in the form" in messages or lost
    assert trainer.state.best_global_step == 1 and is_pruned(trainer.model)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, abs=1e-6)


def test_a_saved_model_is_pruned(tmp_path):
    trainer = trainer_of(tmp_path)
    handle = prepare(trainer, "srste:2:4", filter_fn=lambda module, name: name.endswith("down_proj"))
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    dense = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert list(handle.layers) == ["model.layers.0.mlp.down_proj"]
    assert nm.ops.is_nm(dense.model.layers[0].mlp.down_proj.weight, "2:4")
    assert not nm.ops.is_nm(dense.model.layers[0].mlp.up_proj.weight, "2:4")


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.spare, self.top = nn.Embedding(64, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.top(self.body(self.embed(input_ids)).relu())
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.mark.parametrize("diverges", [False, True])
def test_the_end_of_train_keeps_the_run(tmp_path, diverges):
    """With a layer that never ran, and where training has diverged."""

    class Last(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if diverges and state.global_step == STEPS:
                model.body.weight.data[0, 0] = torch.nan

    trainer = trainer_of(tmp_path, Spare(), {"callbacks": [Last()]})
    handle = prepare(trainer, "srste:2:4")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert trainer.train().global_step == STEPS
    said = "\n".join(str(w.message) for w in caught)
    assert "never ran and are pruned like the others: spare" in said and ("could not be finished" in said) == diverges
    trainer.save_model(str(tmp_path / "out"))
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
    if diverges:
        assert "'body' has NaN or infinite values" in said and saved["body.weight"].isnan().sum() == 1
        assert not handle.finished and not nm.ops.is_nm(saved["spare.weight"], "2:4")
        with torch.no_grad():
            trainer.model.body.weight[0, 0] = 0.0
        handle.finish(allow_unused=True)
        saved = dict(trainer.model.state_dict())
    assert handle.finished and all(nm.ops.is_nm(saved[f"{name}.weight"], "2:4") for name in handle.layers)


def test_a_finished_model_is_refused_before_loading(tmp_path):
    trainer = trainer_of(tmp_path, save_strategy="steps", save_steps=4)
    prepare(trainer, "srste:2:4")
    trainer.train()
    before = snapshot(trainer.model)
    for given in ({}, {"resume_from_checkpoint": True}):
        with pytest.raises(nm.RecipeError, match="has been finished by an earlier train.*finish=False"):
            trainer.train(**given)
    assert distance(snapshot(trainer.model), before) == 0.0 and is_pruned(trainer.model)


def test_a_second_train_goes_on_with_another_optimizer_too(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=2)
    handle = prepare(trainer, "asp:2:4", finish=False)
    trainer.train()
    masks = {name: layer.weight != 0 for name, layer in handle.layers.items()}
    trainer.train()
    trainer.optimizer = None  # the trainer makes another one
    trainer.train()
    assert all(torch.equal(handle.layers[name].weight != 0, mask) for name, mask in masks.items())
    assert handle.state["t"] == 6
    handle.finish()
    assert is_pruned(trainer.model)


# ---- metrics


class Writer(TrainerCallback):
    """As those of transformers that write the log."""

    def __init__(self):
        self.rows = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.rows.append({**logs, "step": state.global_step})


def test_metrics_are_logged_as_plain_numbers(tmp_path):
    writer = Writer()
    given = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 6, "max_steps": 6}
    trainer = trainer_of(tmp_path, more={"callbacks": [writer]}, **given)
    handle = prepare(trainer, R.STEP("2:4", t_min=2, t_max=3, threshold=1e-30), finish=False)
    assert isinstance(trainer.callback_handler.callbacks[0], RecipeCallback), "before those that write the log"
    trainer.train()
    want = {f"nm/{name}": value.item() for name, value in handle.metrics().items()}
    history = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["nm/phase"] for log in history] == [0.0, 1.0, 1.0] and {key: history[-1][key] for key in want} == want
    assert not any(key.startswith("nm/") for log in trainer.state.log_history if "loss" not in log for key in log)
    written = [log for log in writer.rows if "loss" in log]
    assert [log["step"] for log in written] == [2, 4, 6]
    for log, logged in zip(written, history, strict=True):
        assert {key: logged[key] for key in want}.items() <= log.items() and all(type(log[key]) is float for key in want)
    saved = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert saved["log_history"][2 + 1]["nm/phase"] == 1.0


# ---- steps, optimizers, refusals


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({"max_steps": 5}, 5),
        ({"max_steps": -1, "num_train_epochs": 3}, 30),
        ({"max_steps": -1, "num_train_epochs": 1.5, "gradient_accumulation_steps": 4}, 5),
        ({"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 16}, 6),
        ({"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 16, "dataloader_drop_last": True}, 4),
    ],
)
def test_steps_are_counted_as_the_trainer_does(tmp_path, given, steps):
    trainer = trainer_of(tmp_path, **given)
    state = torch.get_rng_state()
    handle = prepare(trainer, "mdgf:2:4(end=0.5)")
    assert handle.recipe.total_steps == steps and handle.recipe.stages[-1][0] == round(0.5 * steps)
    assert torch.equal(torch.get_rng_state(), state), "the data come in the order in which they would come without a recipe"
    assert prepare(trainer_of(tmp_path, **given), "mdgf:2:4(total_steps=77)").recipe.total_steps == 77
    assert prepare(trainer_of(tmp_path, **given), "srste:2:4").recipe.total_steps is None, "another number may resume it"
    if steps == 6:
        trainer.train()
        assert trainer.state.global_step == 6 and is_pruned(trainer.model)
        return
    trainer.args.max_steps = steps + 1
    with pytest.raises(nm.RecipeError, match=f"counted {steps} steps, and now there are {steps + 1}"):
        trainer.train()


def test_the_optimizer_is_the_recipe_s(tmp_path):
    dense = trainer_of(tmp_path)
    dense.create_optimizer()

    def groups(trainer):
        found = [{**group, "params": len(group["params"])} for group in trainer.optimizer.param_groups]
        return [{key: value for key, value in group.items() if key not in ("fused", "nm_recipe")} for group in found]

    for recipe, kind in (("srste:2:4", MaskedAdamW), ("ast:2:4", AnnealedAdamW)):
        trainer = trainer_of(tmp_path)
        prepare(trainer, recipe)
        trainer.create_optimizer()
        assert type(trainer.optimizer) is kind and groups(trainer) == groups(dense)
    # its own learning rate for the logits, and the frozen weights, by which attach finds the layers
    trainer = trainer_of(tmp_path)
    prepare(trainer, "maskllm:2:4(lr_multiplier=3.0)")
    trainer.create_optimizer()
    assert [(group["lr"], len(group["params"])) for group in trainer.optimizer.param_groups] == [(0.03, 7), (0.01, 7)]
    assert not any(p.requires_grad for p in trainer.optimizer.param_groups[1]["params"])


@pytest.mark.parametrize("how", ["optim", "optimizer_cls_and_kwargs"])
def test_another_optimizer_stays(tmp_path, how):
    by_name = how == "optim"
    more = {} if by_name else {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})}
    given = {"max_steps": 2, **({"optim": "sgd"} if by_name else {})}
    trainer = trainer_of(tmp_path, more=more, **given)
    prepare(trainer, "srste:2:4")
    trainer.train()
    assert type(trainer.optimizer.optimizer) is torch.optim.SGD and is_pruned(trainer.model)
    trainer = trainer_of(tmp_path, more=more, **given)
    with pytest.raises(nm.RecipeError, match="STEP freezes the second moment, which .*SGD|sgd.* cannot: (set optim|leave optimizer_cls)"):
        prepare(trainer, "step:2:4")
    assert not any(isinstance(m, nm.SparseLinear) for m in trainer.model.modules())
    if not by_name:
        trainer = trainer_of(tmp_path, more={how: (MaskedAdamW, {"lr": 0.1})})
        prepare(trainer, "step:2:4")
        trainer.create_optimizer()
        assert type(trainer.optimizer) is MaskedAdamW and trainer.optimizer.param_groups[0]["lr"] == 0.1


class Own(Trainer):
    """A subclass that makes its own optimizer: ``kind``, of two groups."""

    kind, keywords = torch.optim.SGD, {"momentum": 0.9}

    def create_optimizer(self, model=None):
        weights = list(self.model.parameters())
        self.optimizer = self.kind([{"params": weights[:4], **self.keywords}, {"params": weights[4:], "lr": 0.02}], lr=0.05)
        return self.optimizer


class ByClass(Trainer):
    @staticmethod
    def get_optimizer_cls_and_kwargs(args, model=None):
        return torch.optim.RMSprop, {"lr": 1e-3, "alpha": 0.9}


@pytest.mark.parametrize(
    ("parent", "kind", "keywords"),
    [
        (Own, torch.optim.SGD, {"momentum": 0.9}),
        (Own, torch.optim.Adam, {"weight_decay": 0.3, "amsgrad": True}),
        (Own, torch.optim.AdamW, {"betas": (0.8, 0.9), "amsgrad": True, "maximize": True, "weight_decay": 0.3}),
        (ByClass, torch.optim.RMSprop, {"alpha": 0.9}),
    ],
)
def test_an_optimizer_of_a_subclass_stays(tmp_path, parent, kind, keywords):
    def make(recipe):
        cls = type("Sub", (parent,), {"kind": kind, "keywords": keywords} if parent is Own else {})
        trainer = cls(model=llama(), args=settings(tmp_path, max_steps=1), train_dataset=DATA)
        prepare(trainer, recipe)
        return trainer

    trainer = make("srste:2:4")
    trainer.train()
    of_torch = kind is torch.optim.AdamW
    optimizer = unwrapped(trainer.optimizer)
    assert type(optimizer) is (MaskedAdamW if of_torch else kind) and is_pruned(trainer.model)
    assert keywords.items() <= optimizer.param_groups[0].items()
    if parent is Own:
        assert [group["initial_lr"] for group in optimizer.param_groups] == [0.05, 0.02] and len(optimizer.param_groups[0]["params"]) == 4
        assert optimizer.param_groups[1]["weight_decay"] == kind([nn.Parameter(torch.zeros(1))], lr=0.1).defaults["weight_decay"]
    if not of_torch:
        with pytest.raises(nm.RecipeError, match=f"STEP freezes the second moment, which {kind.__name__} cannot: (make|return) torch"):
            make("step:2:4").train()


def edited(trainer, **values):
    for name, value in values.items():
        setattr(trainer, name, value)
    return trainer


def test_what_cannot_work_is_refused(tmp_path, monkeypatch):
    def refused(match, trainer, recipe="srste:2:4"):
        model, kept = trainer.model, getattr(trainer, "optimizer_cls_and_kwargs", None)
        with pytest.raises(nm.RecipeError, match=match):
            prepare(trainer, recipe)
        assert not any(isinstance(m, nm.SparseLinear) for m in model.modules())
        if isinstance(trainer, Trainer):
            assert trainer.optimizer_cls_and_kwargs is kept
            assert not any(isinstance(callback, RecipeCallback) for callback in trainer.callback_handler.callbacks)

    model = llama()
    given = {"optimizers": (torch.optim.AdamW(model.parameters()), None)}
    refused("already has an optimizer.*optimizer_cls_and_kwargs", trainer_of(tmp_path, model, given))
    trained = trainer_of(tmp_path, max_steps=1)
    trained.train()
    refused("has already trained", trained)
    by_init = Trainer(model_init=lambda: llama(), args=settings(tmp_path), train_dataset=DATA)
    refused("model_init.*model=", by_init)
    refused("DeepSpeed.*FSDP2", edited(trainer_of(tmp_path), is_deepspeed_enabled=True))
    flat = trainer_of(tmp_path)
    monkeypatch.setitem(flat.accelerator.state._shared_state, "fsdp_plugin", types.SimpleNamespace(fsdp_version=1))
    refused("FSDP1.*'version': 2", edited(flat, is_fsdp_enabled=True))
    several = trainer_of(tmp_path)
    several.args._n_gpu = 4
    refused("4 GPUs.*torchrun", several)
    refused("backward pass", trainer_of(tmp_path, optim="lomo"))
    refused("auto_find_batch_size", trainer_of(tmp_path, max_steps=-1, auto_find_batch_size=True), "mdgf:2:4")
    refused("no train_dataset", edited(trainer_of(tmp_path, max_steps=-1), train_dataset=None), "mdgf:2:4")
    refused("no recipe is called 'srst'", trainer_of(tmp_path), "srst:2:4")
    refused("MaskLLM makes parameter groups of its own.*adamw_torch", trainer_of(tmp_path, optim="sgd"), "maskllm:2:4")
    frozen = llama()
    frozen.model.requires_grad_(False)  # as PEFT's LoRA does
    refused("are frozen.*finish it before adding the adapter", trainer_of(tmp_path, frozen))
    refused("expected a transformers.Trainer; got SimpleNamespace", types.SimpleNamespace(model=model))
    twice = trainer_of(tmp_path)
    prepare(twice, "srste:2:4")
    with pytest.raises(nm.RecipeError, match="already has a recipe"):
        prepare(twice, "srste:2:4")


def test_a_run_that_ends_in_its_dense_phase_is_reported(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=2)
    prepare(trainer, R.ASP("2:4", start=5))
    with pytest.warns(UserWarning, match="still in its dense phase"), warnings.catch_warnings():
        trainer.train()
    assert is_pruned(trainer.model)


# ---- trainers derived from it


@pytest.mark.slow  # importing TRL
def test_trl_s_sft_trainer(tmp_path):
    """On texts in memory, tokenised by the trainer."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]
    known = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    known.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=known, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    texts = [" ".join(f"w{(start + i) % 61}" for i in range(10)) for start in range(40)]
    args = {"max_steps": 10, "learning_rate": 1e-2, "per_device_train_batch_size": 4, "max_length": 16, "save_steps": 5}
    quiet = {"disable_tqdm": True, "report_to": [], "use_cpu": True, "bf16": False, "logging_steps": 1}

    def run(resume: bool) -> Trainer:
        trainer = trl.SFTTrainer(
            model=llama(),
            args=trl.SFTConfig(output_dir=str(tmp_path), **args, **quiet),
            train_dataset=datasets.Dataset.from_dict({"text": texts}),
            eval_dataset=datasets.Dataset.from_dict({"text": texts[:4]}),
            processing_class=tokenizer,
        )
        handle = prepare(trainer, "step:2:4(t_min=2, t_max=0.7)")
        assert handle.recipe.total_steps == 10
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5") if resume else None)
        assert isinstance(unwrapped(trainer.optimizer), MaskedAdamW)
        return trainer

    whole, resumed = run(False), run(True)
    logs = [log for log in whole.state.log_history if "loss" in log]
    assert len(logs) == 10 and logs[-1]["loss"] < logs[0]["loss"] and [logs[0]["nm/phase"], logs[-1]["nm/phase"]] == [0.0, 1.0]
    assert is_pruned(whole.model) and distance(snapshot(resumed.model), snapshot(whole.model)) == 0.0
    assert whole.evaluate()["eval_loss"] < logs[0]["loss"]


def on_a_rank(folder: str, fsdp: bool) -> dict[str, list[tuple[dict[str, torch.Tensor], dict[str, float], list[str]]]]:
    """Of an uninterrupted run and a resumed one: the weights, the metrics, and the layers that are 2:4 once finished."""
    from accelerate.state import DistributedType, PartialState

    logging.disable_progress_bar()
    rank = str(torch.distributed.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")  # the group is there already
    wrapped = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}} if fsdp else {}

    def run(name: str, resume: bool) -> Any:
        out = Path(folder, name)
        args = settings(out, **wrapped, save_strategy="steps", save_steps=4, per_device_train_batch_size=2)
        if fsdp:
            # Accelerate shards on accelerators only, and asks no more than this
            assert args.device.type == "cpu"
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        trainer = Trainer(model=llama(), args=args, train_dataset=DATA)
        assert trainer.is_fsdp_enabled == fsdp and args.world_size == 2
        handle = prepare(trainer, RECIPES[name], finish=False)
        trainer.train(resume_from_checkpoint=str(out / "checkpoint-4") if resume else None)
        metrics = {key: value.item() for key, value in handle.metrics().items()}
        model = trainer.accelerator.unwrap_model(trainer.model)
        trained = {key: value.clone() for key, value in whole(model.state_dict()).items()}
        handle.finish()
        finished = whole(model.state_dict())
        return trained, metrics, [key for key in handle.layers if nm.ops.is_nm(finished[f"{key}.weight"], "2:4")]

    return {name: [run(name, resume) for resume in (False, True)] for name in ("step", "asp")}


@needs_gloo
@pytest.mark.slow  # two processes
@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_on_two_ranks(tmp_path, fsdp):
    """Under FSDP2 only the first rank reads the optimizer's state, and the others must look for all that it has."""
    mine, other = on_ranks(2, on_a_rank, tmp_path, str(tmp_path), fsdp)
    for name, runs in mine.items():
        weights, metrics, pruned = runs[0]
        assert len(pruned) == 7 and metrics["phase"] > 0
        for done in (runs[1], *other[name]):
            assert distance(done[0], weights) == 0.0 and done[1] == metrics and done[2] == pruned
