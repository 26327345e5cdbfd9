"""Hugging Face's Trainer and its subclasses, such as TRL's: after ``prepare``, ``trainer.train()`` follows a recipe. For transformers 5.

A callback is not enough: it cannot choose the optimizer, and the layers have to be swapped before a checkpoint is read.
"""

from __future__ import annotations

import warnings
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel
from transformers.trainer_callback import TrainerCallback

from ..pattern import RecipeError
from ..recipes import Handle, Recipe, sparsify_
from ..recipes.compose import innermost
from ..recipes.registry import parse, resolve
from ..train.optimizers import STATE_KEY, unwrapped
from ..train.sparsify import FilterFn
from .ending import finish_or_warn

ADAMW = ("adamw_torch", "adamw_torch_fused")
"""The values of ``TrainingArguments.optim`` that are replaced by the recipe's optimizer."""

OF_TORCH = ("fused", "foreach", "differentiable", "decoupled_weight_decay", "param_names")
"""Entries of a parameter group of torch's AdamW that the recipe's optimizer does not take over."""

IN_BACKWARD = ("lomo", "layerwise")
"""Name parts of optimizers that update weights in the backward pass."""


def prepare(trainer: Any, recipe: Recipe | str, filter_fn: FilterFn | None = None, finish: bool = True) -> Handle:
    """Make ``trainer.train()`` follow a recipe, from the first step to the finished model. Call it last before ``train()``.

    The trainer's model becomes sparse in place. If the trainer would use torch's AdamW, it uses the recipe's optimizer instead, with the
    same parameter groups, learning rate, betas, ε and weight decay; any other optimizer is kept, also one that a subclass makes.
    ``train()`` attaches the recipe to the optimizer, so checkpoints include its state and ``train(resume_from_checkpoint=True)`` continues
    exactly. The recipe's metrics are logged with the loss, as ``nm/density`` etc. Evaluation runs the model that ``handle.finish()`` would
    leave, so the best model is the best sparse one.

    Args:
        trainer: a ``transformers.Trainer``, or a subclass, before ``train()``.
        recipe: an instance, or a name such as ``"step:2:4"``; ``total_steps``, if needed and not set, is the trainer's.
        filter_fn: ``filter_fn(module, name) -> bool``, which layers become sparse, as for ``sparsify_``.
        finish: call ``handle.finish()`` at the end of ``train()``, after the best model is loaded. If that fails (training has diverged,
            say), there is a warning and the model stays as it was trained.

    Returns:
        The handle; ``str(handle.report)`` lists every layer.

    Raises:
        RecipeError: the trainer already has an optimizer, or uses what the recipe cannot run with: DeepSpeed, FSDP1, ``DataParallel`` over
            several GPUs, ``model_init``, frozen weights only, another optimizer than the recipe needs. Otherwise as ``sparsify_``. Trainer
            and model are then unchanged.

    Example::

        trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
        handle = prepare(trainer, "step:2:4")
        trainer.train()                             # every weight is 2:4 at the end
        nm.compress_(model)
    """
    _check(trainer)
    has_steps = not isinstance(recipe, str) or "total_steps" in parse(recipe)[2]
    recipe = resolve(recipe, lambda: _steps(trainer))
    keywords = _own_optimizer(trainer, recipe)
    handle = sparsify_(trainer.model, recipe, filter_fn)
    if not any(p.requires_grad for layer in handle.layers.values() for p in (layer.parameter, *layer.learned().values())):
        handle.remove()
        raise RecipeError(
            "prepare: all weights of the sparse layers are frozen, as those under a LoRA adapter are. Make the model sparse and finish it "
            "before adding the adapter, which then trains on the sparse weights without a recipe; or unfreeze them."
        )
    callback = RecipeCallback(handle, None if has_steps else recipe.total_steps, finish)
    # first, before the callbacks that write the log or upload the model at the end
    trainer.callback_handler.callbacks.insert(0, callback)

    def train(original: Any, *args: Any, **kwargs: Any) -> Any:
        if handle.finished:  # before it loads a checkpoint
            raise RecipeError(
                "train: the recipe has been finished by an earlier train(). To train in parts, prepare(trainer, recipe, finish=False) and "
                "call handle.finish() after the last one. To train again, from a checkpoint or from the start, prepare a new Trainer with "
                "a new model."
            )
        return original(*args, **kwargs)

    def create_optimizer(original: Any, *args: Any, **kwargs: Any) -> Any:
        if keywords is None or trainer.optimizer is not None:
            return original(*args, **kwargs)
        made = original(*args, **kwargs)
        if type(made) is not torch.optim.AdamW:  # made by a subclass
            _check_kept(handle.recipe, type(made), "make torch.optim.AdamW in create_optimizer")
            return made
        # with what the trainer has set for single groups, such as a learning rate or amsgrad
        groups = [
            {k: v for k, v in group.items() if k == "params" or (k not in OF_TORCH and (k not in keywords or v != keywords[k]))}
            for group in made.param_groups
        ]
        # the trainer leaves out frozen parameters, but attach finds the layers by their weights
        updated = {id(p) for group in groups for p in group["params"]}
        frozen = [layer.parameter for layer in handle.layers.values() if layer.learned() and id(layer.parameter) not in updated]
        if frozen:
            groups.append({"params": frozen, "weight_decay": 0.0})
        trainer.optimizer = handle.recipe.optimizer(groups, **keywords)
        return trainer.optimizer

    def create_scheduler(original: Any, *args: Any, **kwargs: Any) -> Any:
        # by now FSDP2 has replaced the parameters, and no checkpoint has been loaded. Loading before attaching would work in one process
        # only: of several ranks the first one reads the optimizer's state, and sends the others only the entries that they have
        callback.attach(trainer.optimizer)
        return original(*args, **kwargs)

    def evaluation_loop(original: Any, *args: Any, **kwargs: Any) -> Any:
        with handle.deployable():
            return original(*args, **kwargs)

    for wrapper in (train, create_optimizer, create_scheduler, evaluation_loop):
        theirs = getattr(trainer, wrapper.__name__)
        setattr(trainer, wrapper.__name__, update_wrapper(partial(wrapper, theirs), theirs))
    return handle


class RecipeCallback(TrainerCallback):
    """Attaches the recipe if that has not been done yet, logs its metrics, and finishes it."""

    def __init__(self, handle: Handle, total: int | None, finish: bool) -> None:
        self.handle, self.total, self.finish = handle, total, finish
        self.attached: torch.optim.Optimizer | None = None
        self.best: tuple[int, dict[str, Any]] | None = None

    def attach(self, optimizer: Any) -> None:
        optimizer = unwrapped(optimizer)
        if optimizer is not self.attached:
            self.handle.detach()  # the optimizer of an earlier train()
            self.handle.attach(optimizer)
            self.attached = optimizer

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if self.total is not None and state.max_steps != self.total:
            raise RecipeError(
                f"train: prepare counted {self.total} steps, and now there are {state.max_steps}: the trainer was changed in between. Call "
                "prepare last, or set the recipe's total_steps."
            )
        self.attach(optimizer)
        _save_by_hub_names(self.handle.model, False)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs or self.handle.finished:
            return  # logs of an evaluation, or the summary of the run
        metrics = {f"nm/{name}": float(value) for name, value in self.handle.metrics().items()}  # log writers ignore tensors
        logs.update(metrics)
        state.log_history[-1].update(metrics)  # which has a copy of the logs from before

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.load_best_model_at_end and state.best_global_step == state.global_step:
            self.best = state.global_step, self.handle.state_dict()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        best, self.best = self.best, None
        _save_by_hub_names(self.handle.model, True)
        with finish_or_warn("train"):
            if args.load_best_model_at_end and state.best_model_checkpoint and state.best_global_step != state.global_step:
                # the trainer has loaded the best weights, but not their masks
                if best is not None and best[0] == state.best_global_step:
                    self.handle.load_state_dict(best[1])
                else:
                    self.load_masks(Path(state.best_model_checkpoint))
            if self.finish:
                self.handle.finish()

    def load_masks(self, checkpoint: Path) -> None:
        """Load the recipe's state of a checkpoint that an earlier process wrote, with the optimizer's."""
        file, handle = checkpoint / "optimizer.pt", self.handle
        if file.exists() and self.attached is not None:
            self.attached.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        elif "held" in handle.state_dict()[STATE_KEY]:
            learned = any(layer.learned() for layer in handle.layers.values())
            if not learned:
                handle.renew_masks()
            warnings.warn(
                f"train: {file} is missing, so the masks of the best model are "
                f"{'those of the last step' if learned else 'chosen again from its weights'}. Checkpoints have it "
                "without save_only_model and FSDP.",
                stacklevel=2,
            )


def _save_by_hub_names(model: Any, on: bool) -> None:
    """Switch whether ``model`` is saved with the tensor names of the hub, which may differ from those in memory (experts of Mixtral).

    The trainer reads its checkpoints by the names in memory, and ignores what it does not find (transformers 5.23).
    """
    if isinstance(model, PreTrainedModel):
        vars(model).pop("save_pretrained", None)
        if not on:
            model.save_pretrained = partial(model.save_pretrained, save_original_format=False)


def _check(trainer: Any) -> None:
    from transformers import Trainer  # slow to import

    if not isinstance(trainer, Trainer):
        raise RecipeError(f"prepare: expected a transformers.Trainer; got {type(trainer).__name__}.")
    args = trainer.args
    if any(isinstance(callback, RecipeCallback) for callback in trainer.callback_handler.callbacks):
        raise RecipeError("prepare: this trainer already has a recipe; make a new Trainer for another one.")
    if trainer.model_init is not None:
        raise RecipeError(
            "prepare: with model_init the trainer builds a new dense model in each train(). Build the model yourself and pass model=; "
            "to search hyperparameters, make and prepare a Trainer for each trial."
        )
    if trainer.state.global_step or trainer.is_in_train:
        raise RecipeError("prepare: the trainer has already trained, without a recipe; prepare a new one before train().")
    if trainer.optimizer is not None:
        raise RecipeError(
            "prepare: the trainer already has an optimizer, created before the layers are swapped. Pass none (optimizers=), or its class: "
            "Trainer(..., optimizer_cls_and_kwargs=(nm.optim.MaskedAdamW, {'lr': ...}))."
        )
    if trainer.is_deepspeed_enabled:
        raise RecipeError(
            "prepare: DeepSpeed updates flat copies of the weights in its own engine. Train with DistributedDataParallel, or with "
            "FSDP2: fsdp_config={'version': 2}."
        )
    if trainer.is_fsdp_enabled and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
        raise RecipeError("prepare: FSDP1 flattens weights. Use FSDP2, which does not: fsdp_config={'version': 2}.")
    if args.n_gpu > 1:
        raise RecipeError(
            f"prepare: with {args.n_gpu} GPUs in one process the trainer uses DataParallel, which copies the model at every step. Start "
            "one process per GPU with torchrun, or expose a single one: CUDA_VISIBLE_DEVICES=0."
        )
    if trainer.optimizer_cls_and_kwargs is None and any(part in _optim(args) for part in IN_BACKWARD):
        raise RecipeError(f"prepare: optim={_optim(args)!r} updates weights in the backward pass, which no recipe supports; leave it out.")


def _optim(args: Any) -> str:
    return str(getattr(args.optim, "value", args.optim))


def _steps(trainer: Any) -> int:
    """The number of optimizer steps of ``train()``, as the trainer counts them."""
    args = trainer.args
    if args.max_steps > 0:
        return int(args.max_steps)
    if args.auto_find_batch_size:
        raise RecipeError(
            "prepare: with auto_find_batch_size the number of steps is not known before training. Set max_steps, or the recipe's "
            "total_steps."
        )
    if trainer.train_dataset is None:
        raise RecipeError("prepare: the trainer has no train_dataset to count steps; set the recipe's total_steps.")
    return int(trainer.set_initial_training_values(args, trainer.get_train_dataloader())[-1])


def _own_optimizer(trainer: Any, recipe: Recipe) -> dict[str, Any] | None:
    """The keywords for the recipe's own optimizer, from the trainer's AdamW; None if the trainer's optimizer is kept."""
    chosen = trainer.optimizer_cls_and_kwargs
    if chosen is not None:
        _check_kept(recipe, chosen[0], "leave optimizer_cls_and_kwargs out")
        return None
    if _optim(trainer.args) in ADAMW:
        kind, keywords = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
        if kind is torch.optim.AdamW:
            return {name: value for name, value in keywords.items() if name not in OF_TORCH}
        _check_kept(recipe, kind, "return torch.optim.AdamW from get_optimizer_cls_and_kwargs")
        return None
    if recipe.setup.optimizer is not None or type(innermost(recipe)).optimizer is not Recipe.optimizer:
        raise RecipeError(_not_with(recipe, f"optim={_optim(trainer.args)!r}", "set optim='adamw_torch'"))
    return None


def _check_kept(recipe: Recipe, kind: Any, way_out: str) -> None:
    """Raise ``RecipeError`` if ``recipe`` cannot run with the trainer's optimizer of class ``kind``."""
    needed = recipe.setup.optimizer
    if needed is not None and not (isinstance(kind, type) and issubclass(kind, needed)):
        raise RecipeError(_not_with(recipe, getattr(kind, "__name__", str(kind)), way_out))


def _not_with(recipe: Recipe, optimizer: str, way_out: str) -> str:
    needs = recipe.setup.needs or "makes parameter groups of its own"
    return f"prepare: {type(recipe).__name__} {needs}, which {optimizer} cannot: {way_out}; the trainer then uses one that can."
