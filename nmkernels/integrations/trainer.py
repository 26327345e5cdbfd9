"""Hugging Face's Trainer, TRL's trainers among them: ``prepare`` has ``trainer.train()`` follow a recipe. Written for transformers 5.

A callback alone would not do: it cannot choose the optimizer, and the layers have to be swapped before a checkpoint is read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import torch

from ..pattern import RecipeError
from ..recipes import Handle, Recipe, sparsify_
from ..recipes.attach import unwrapped
from ..recipes.registry import parse, resolve
from ..recipes.sparsify import FilterFn
from .ending import keeping_the_run

ADAMW = ("adamw_torch", "adamw_torch_fused")
"""The values of ``TrainingArguments.optim`` in whose place the recipe's optimizer comes."""

IN_BACKWARD = ("lomo", "layerwise")
"""Parts of the names of those that update weights in the backward pass."""


def prepare(trainer: Any, recipe: Recipe | str, filter_fn: FilterFn | None = None, finish: bool = True) -> Handle:
    """Have ``trainer.train()`` follow a recipe, from the first step to the finished model; call it last before ``train()``.

    The trainer's model is made sparse in place. Where the trainer would use torch's AdamW it uses the recipe's optimizer, with the
    trainer's parameter groups, learning rate, betas, ε and weight decay; another optimizer stays. ``train()`` attaches the recipe to it,
    so that checkpoints have its state and ``train(resume_from_checkpoint=True)`` goes on as if never stopped. The recipe's metrics are
    logged along with the loss, as ``nm/density`` and so on. Evaluation measures the model that ``handle.finish()`` would leave, so the
    best model is the best sparse one.

    Args:
        trainer: a ``transformers.Trainer``, or what is derived from it, before ``train()``.
        recipe: an instance, or a name such as ``"step:2:4"``; one that needs ``total_steps`` and does not say them has those of the
            trainer.
        filter_fn: ``filter_fn(module, name) -> bool``, which layers, as for ``sparsify_``.
        finish: call ``handle.finish()`` at the end of ``train()``, once the best model is loaded. If that fails, say because training
            diverged, a warning says so, and the model stays as it was trained.

    Returns:
        The handle: ``str(handle.report)`` tells of every layer.

    Raises:
        RecipeError: the trainer has an optimizer already (it has trained, or was given one), or is one with which the recipe cannot run:
            one with DeepSpeed, FSDP1, ``DataParallel`` over several GPUs, ``model_init``, or an optimizer that is not the recipe's.
            Otherwise as ``sparsify_``. The trainer and its model are then as they were.

    An example::

        trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
        handle = prepare(trainer, "step:2:4")
        trainer.train()                             # every weight is 2:4 at the end
        nm.compress_(model)
    """
    _check(trainer)
    said = not isinstance(recipe, str) or "total_steps" in parse(recipe)[2]
    recipe = resolve(recipe, lambda: _steps(trainer))
    keywords = _own_optimizer(trainer, recipe)
    handle = sparsify_(trainer.model, recipe, filter_fn)
    if keywords is not None:
        trainer.optimizer_cls_and_kwargs = (_optimizer_class(handle), keywords)
    drive = _callback_class()(handle, None if said else recipe.total_steps, finish)
    # before those that write the log, and before those that upload the model at the end
    trainer.callback_handler.callbacks.insert(0, drive)
    trainer.train = _unfinished(handle, trainer.train)
    trainer.create_scheduler = _attaching(trainer, drive, trainer.create_scheduler)
    trainer.evaluation_loop = _deployed(handle, trainer.evaluation_loop)
    return handle


class Drive:
    """What the callback does: log, finish, and attach where that has not been done yet."""

    def __init__(self, handle: Handle, total: int | None, finish: bool) -> None:
        self.handle, self.total, self.finish = handle, total, finish
        self.attached: torch.optim.Optimizer | None = None
        self.best: tuple[int, dict[str, Any]] | None = None

    def attach(self, optimizer: Any) -> None:
        found = unwrapped(optimizer)
        if found is not self.attached:
            self.handle.detach()  # an earlier one
            self.handle.attach(found)
            self.attached = found

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if self.total is not None and state.max_steps != self.total:
            raise RecipeError(
                f"train: prepare counted {self.total} steps, and now there are {state.max_steps}: the trainer was changed in between. Call "
                "prepare last, or give the recipe its total_steps."
            )
        self.attach(optimizer)
        _save_by_hub_names(self.handle.model, False)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs or self.handle.finished:
            return  # an evaluation, or the summary of the run
        metrics = {f"nm/{name}": float(value) for name, value in self.handle.metrics().items()}  # writers drop tensors
        logs.update(metrics)
        state.log_history[-1].update(metrics)  # a copy of what the logs were before

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.load_best_model_at_end and state.best_global_step == state.global_step:
            self.best = state.global_step, self.handle.state_dict()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        best, self.best = self.best, None
        _save_by_hub_names(self.handle.model, True)
        with keeping_the_run("train"):
            if best is not None and best[0] != state.global_step:
                self.handle.load_state_dict(best[1])  # the trainer has loaded the weights; held masks are of those
            if self.finish:
                self.handle.finish()


def _save_by_hub_names(model: Any, on: bool) -> None:
    """Whether ``model`` is saved by the names that it has on the hub, where it has others in memory, as the experts of Mixtral have.

    The trainer reads its checkpoints by the names in memory, and goes on without what it does not find (transformers 5.23).
    """
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        vars(model).pop("save_pretrained", None)
        if not on:
            model.save_pretrained = partial(model.save_pretrained, save_original_format=False)


@cache
def _callback_class() -> type[Any]:
    from transformers import TrainerCallback

    return type("NMCallback", (Drive, TrainerCallback), {})


def _unfinished(handle: Handle, train: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse to train a finished model at once, and not when ``train`` has loaded a checkpoint into it."""

    @wraps(train)
    def unfinished(*args: Any, **kwargs: Any) -> Any:
        if handle.finished:
            raise RecipeError(
                "train: the recipe has been finished by an earlier train(). To train in parts, prepare(trainer, recipe, finish=False) and "
                "call handle.finish() after the last one; to train again, from a checkpoint or from the start, make a new model and a new "
                "Trainer and prepare it."
            )
        return train(*args, **kwargs)

    return unfinished


def _attaching(trainer: Any, drive: Drive, create_scheduler: Callable[..., Any]) -> Callable[..., Any]:
    """Attach when the trainer makes its schedule: FSDP2 has exchanged the parameters by then, and nothing has been loaded. To load first
    would do for one process; but of the ranks only the first one reads the state, and gives the others what they look for."""

    @wraps(create_scheduler)
    def attaching(*args: Any, **kwargs: Any) -> Any:
        drive.attach(trainer.optimizer)
        return create_scheduler(*args, **kwargs)

    return attaching


def _deployed(handle: Handle, evaluation_loop: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(evaluation_loop)
    def deployed(*args: Any, **kwargs: Any) -> Any:
        with handle.deployable():
            return evaluation_loop(*args, **kwargs)

    return deployed


def _check(trainer: Any) -> None:
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        raise RecipeError(f"prepare: a transformers.Trainer is wanted; got {type(trainer).__name__}.")
    args = trainer.args
    if any(isinstance(callback, Drive) for callback in trainer.callback_handler.callbacks):
        raise RecipeError("prepare: this trainer has a recipe already; make a new Trainer for another one.")
    if trainer.model_init is not None:
        raise RecipeError(
            "prepare: with model_init the trainer makes a new, dense model in each train(). Build the model yourself, give it as model=; "
            "to search hyperparameters, make and prepare a Trainer for each trial."
        )
    if trainer.state.global_step or trainer.is_in_train:
        raise RecipeError("prepare: the trainer has trained already, its optimizer knows no recipe; prepare a new one before train().")
    if trainer.optimizer is not None:
        raise RecipeError(
            "prepare: the trainer has an optimizer already, made before the layers are swapped. Give it none (optimizers=), or its class: "
            "Trainer(..., optimizer_cls_and_kwargs=(nm.optim.MaskedAdamW, {'lr': ...}))."
        )
    if trainer.is_deepspeed_enabled:
        raise RecipeError(
            "prepare: DeepSpeed updates flat copies of the weights by an engine of its own. Train with DistributedDataParallel, or with "
            "FSDP2: fsdp_config={'version': 2}."
        )
    if trainer.is_fsdp_enabled and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
        raise RecipeError("prepare: FSDP1 flattens weights. Use FSDP2, which keeps them apart: fsdp_config={'version': 2}.")
    if args.n_gpu > 1:
        raise RecipeError(
            f"prepare: with {args.n_gpu} GPUs in one process the trainer uses DataParallel, which copies the model at every step. Start "
            "one process for each by torchrun, or show it a single one: CUDA_VISIBLE_DEVICES=0."
        )
    if trainer.optimizer_cls_and_kwargs is None and any(part in _optim(args) for part in IN_BACKWARD):
        raise RecipeError(f"prepare: optim={_optim(args)!r} updates weights in the backward pass, where no recipe follows; leave it out.")


def _optim(args: Any) -> str:
    return str(getattr(args.optim, "value", args.optim))


def _steps(trainer: Any) -> int:
    """How many optimizer steps ``train()`` will do, as the trainer itself counts them."""
    args = trainer.args
    if args.max_steps > 0:
        return int(args.max_steps)
    if args.auto_find_batch_size:
        raise RecipeError(
            "prepare: with auto_find_batch_size the number of steps is not known before training. Set max_steps, or give the recipe its "
            "total_steps."
        )
    if trainer.train_dataset is None:
        raise RecipeError("prepare: the trainer has no train_dataset to count steps by; give the recipe its total_steps.")
    return int(trainer.set_initial_training_values(args, trainer.get_train_dataloader())[-1])


def _own_optimizer(trainer: Any, recipe: Recipe) -> dict[str, Any] | None:
    """The keywords of the recipe's own optimizer, from the trainer's AdamW; None where the trainer's optimizer stays."""
    wanted, given = recipe.setup.optimizer, trainer.optimizer_cls_and_kwargs
    if given is not None:
        kind = given[0]
        if wanted is not None and not (isinstance(kind, type) and issubclass(kind, wanted)):
            raise RecipeError(_not_with(recipe, getattr(kind, "__name__", str(kind)), "leave optimizer_cls_and_kwargs out"))
        return None
    if _optim(trainer.args) in ADAMW:
        _, keywords = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
        return {name: value for name, value in keywords.items() if name != "fused"}
    if wanted is not None or recipe.setup.freezes:
        raise RecipeError(_not_with(recipe, f"optim={_optim(trainer.args)!r}", "set optim='adamw_torch'"))
    return None


def _not_with(recipe: Recipe, given: str, way: str) -> str:
    needs = recipe.setup.needs or "makes parameter groups of its own"
    return f"prepare: {type(recipe).__name__} {needs}, which {given} cannot: {way}, and the trainer has an optimizer that can."


def _optimizer_class(handle: Handle) -> type[torch.optim.Optimizer]:
    """A class to the trainer, which makes ``recipe.optimizer`` of its parameter groups."""

    class RecipeOptimizer(torch.optim.Optimizer):
        def __new__(cls, params: Any, **keywords: Any) -> Any:
            groups = [dict(group) for group in params]
            # the trainer leaves frozen parameters out, and attach finds the layers by their weights
            own = {id(p) for group in groups for p in group["params"]}
            frozen = [layer.parameter for layer in handle.layers.values() if id(layer.parameter) not in own]
            if handle.recipe.setup.freezes and frozen:
                groups.append({"params": frozen, "weight_decay": 0.0})
            return handle.recipe.optimizer(groups, **keywords)

    return RecipeOptimizer
