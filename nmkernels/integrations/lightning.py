"""Lightning: with the callback ``Sparsity``, ``trainer.fit`` follows a recipe. For ``lightning.pytorch`` and ``pytorch_lightning``."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from ..nn.weight import NMWeight
from ..pattern import RecipeError
from ..recipes import Handle, Recipe, sparsify_
from ..recipes.registry import resolve
from ..train.sparsify import FilterFn
from .ending import finish_or_warn

UNSUPPORTED = {
    "FSDPStrategy": "flattens weights (FSDP1); use ModelParallelStrategy, with fully_shard in configure_model",
    "DeepSpeedStrategy": "updates flat copies of the weights in its own engine; use DDPStrategy or ModelParallelStrategy",
}
"""Strategies with which no recipe can run, and why."""


class Sparsity(Callback):
    """Make ``trainer.fit(module)`` follow a recipe, from the first step to the finished model.

    The module becomes sparse in place when fitting starts, before a checkpoint is loaded; the recipe is attached to the optimizers of
    ``configure_optimizers``, so checkpoints include its state and ``fit(ckpt_path=...)`` continues exactly. Its metrics are logged by
    ``self.log`` as ``nm/density`` etc. Validation and tests run the model that ``handle.finish()`` would leave.

    Searches before training (``Tuner``, ``LearningRateFinder``, ``BatchSizeFinder``) do not advance the recipe. With ``finish=False`` a
    further ``fit`` of the module continues with the new optimizers. Another module starts its own run.

    Checkpoints hold the training weights, which are not pruned yet. To finish the best model instead of the last one, pass
    ``finish=False`` and, once ``fit`` is done, load that checkpoint's weights and optimizer state, which has their masks, and finish::

        best = torch.load(saver.best_model_path)                        # saver: the ModelCheckpoint
        module.load_state_dict(best["state_dict"])
        trainer.optimizers[0].load_state_dict(best["optimizer_states"][0])
        sparsity.handle.finish()

    List the callback before ``WeightAveraging``. An average over ASP's dense phase (``start=``) is validated without the masks, which
    ``finish`` then applies to it.

    Args:
        recipe: an instance, or a name such as ``"step:2:4"``; ``total_steps``, if needed and not set, is
            ``trainer.estimated_stepping_batches``.
        filter_fn: ``filter_fn(module, name) -> bool``, which layers become sparse, as for ``sparsify_``.
        finish: call ``handle.finish()`` at the end of ``fit``, after the last checkpoint. If that fails (training has diverged, say), there
            is a warning and the module stays as it was trained.

    Attributes: ``handle``, the module's, once ``fit`` has begun.

    Raises, when ``fit`` begins:
        RecipeError: the strategy shards weights in an unsupported way, an earlier ``fit`` has finished the module, the number of steps is
            unknown or has changed, ``WeightAveraging`` cannot follow the recipe, or as ``sparsify_`` and ``handle.attach``: STEP, for one,
            needs ``nm.optim.MaskedAdamW`` from ``configure_optimizers``.

    Example::

        sparsity = Sparsity("srste:2:4")
        lightning.pytorch.Trainer(callbacks=[sparsity]).fit(module)     # every weight is 2:4 at the end
        nm.compress_(module)
    """

    def __init__(self, recipe: Recipe | str, filter_fn: FilterFn | None = None, finish: bool = True) -> None:
        self.recipe, self.filter_fn, self.finish = recipe, filter_fn, finish
        self.handle: Handle | None = None
        self._steps: int | None = None  # the trainer's, if the recipe's total_steps came from it
        self._begun = False
        self._checkpoint: dict[str, Any] | None = None
        self._preview, self._swap = ExitStack(), ExitStack()

    # ---- training

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Swap the layers once the module has them: after this hook and the module's own ``setup``, in ``configure_model``."""
        if stage != "fit":
            return
        why = next((why for kind in type(trainer.strategy).__mro__ for name, why in UNSUPPORTED.items() if kind.__name__ == name), None)
        if why is not None:
            raise RecipeError(f"fit: {type(trainer.strategy).__name__} {why}.")
        self._checkpoint = None
        handle = self.handle
        if handle is not None and handle.model is pl_module:
            if handle.finished:
                raise RecipeError(
                    "fit: an earlier fit has finished the recipe of this module. To train in parts, pass Sparsity(..., finish=False) and "
                    "call sparsity.handle.finish() after the last fit. To train the finished module further, call sparsity.handle.remove() "
                    "and use a new Sparsity: with nm.recipes.ASP(score='existing') it keeps the present zeros."
                )
            if self._begun:  # continue the run of an earlier fit
                handle.detach()
                return
            handle.remove()  # after a tuner's search; the number of steps may have changed
        self.handle, self._steps, self._begun = None, None, False
        configure = pl_module.configure_model

        def count() -> int:
            self._steps = _steps(trainer)
            return self._steps

        def configure_model() -> None:
            self._swap.close()
            late = not any(isinstance(module, (nn.Linear, NMWeight)) for module in pl_module.modules())
            if late:
                configure()  # creates the layers
            with torch.device("cpu"):  # not on the default device that the strategy has set
                self.handle = sparsify_(pl_module, resolve(self.recipe, count), self.filter_fn)
            if not late:
                configure()  # may shard them, which has to come after swapping

        # no callback hook runs between the module's own setup and the loading of a checkpoint
        pl_module.configure_model = configure_model
        self._swap.callback(delattr, pl_module, "configure_model")

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Remember the checkpoint that ``fit`` resumes from until the optimizers have loaded its state."""
        self._checkpoint = checkpoint

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the recipe to the optimizers, before they load their state and after Lightning's tuners have run."""
        if self._steps not in (None, _steps(trainer)):
            raise RecipeError(
                f"fit: the recipe's schedule was made for {self._steps} steps, and now the trainer counts {_steps(trainer)}: its limits or "
                "its batch size were changed in between. Set the recipe's total_steps."
            )
        checkpoint, self._checkpoint = self._checkpoint, None
        if self._begun and checkpoint is not None:
            trainer.strategy.load_optimizer_state_dict(checkpoint)  # replaces the state of the run so far
        try:
            self._own().attach(*trainer.optimizers)
        except RecipeError as error:
            if not self._begun:
                raise
            raise RecipeError(f"{error} Or resume from a checkpoint of the earlier fit: fit(..., ckpt_path=...).") from error
        _check_averages(trainer, pl_module)
        self._begun = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the metrics."""
        metrics = {f"nm/{name}": value.float() for name, value in self._own().metrics().items()}
        pl_module.log_dict(metrics, on_step=True, on_epoch=False)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Finish, after the last checkpoint."""
        if self.finish:
            with finish_or_warn("fit"):
                self._own().finish()

    # ---- evaluation

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Run the model that ``finish`` would leave."""
        if self.handle is not None and self.handle.model is pl_module:
            self._preview.enter_context(self.handle.deployable())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Switch back to the training form."""
        self._preview.close()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Clean up if a validation or the start of ``fit`` raises."""
        self._preview.close()
        self._swap.close()

    # ----

    def _own(self) -> Handle:
        assert self.handle is not None
        return self.handle


def _check_averages(trainer: Any, pl_module: Any) -> None:
    """Raise ``RecipeError`` if a callback averages a copy of the module that lacks tensors which the recipe has added since, and would
    take one tensor for another."""
    for callback in trainer.callbacks:
        if all(kind.__name__ != "WeightAveraging" for kind in type(callback).__mro__):
            continue
        # it pairs them by position; tensors after the last one of the copy do not matter
        present, copied = ([*dict(m.named_parameters()), *dict(m.named_buffers())] for m in (pl_module, callback._average_model.module))
        if added := next((mine for mine, its in zip(present, copied, strict=False) if mine != its), None):
            raise RecipeError(
                f"fit: {type(callback).__name__} copied the module before the recipe added {added!r} to it. List Sparsity before it; if "
                "it is, average the module in a callback of your own, with torch.optim.swa_utils.AveragedModel(module) in on_train_start."
            )


def _steps(trainer: Any) -> int:
    steps = trainer.estimated_stepping_batches
    if not 0 < steps < float("inf"):
        raise RecipeError("fit: the trainer has neither max_steps nor a known length of its data; set the recipe's total_steps.")
    return int(steps)
