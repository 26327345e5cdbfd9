"""Lightning: ``Sparsity``, the callback by which ``trainer.fit`` follows a recipe. Of ``lightning.pytorch`` or ``pytorch_lightning``."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from ..nn import NMWeight
from ..pattern import RecipeError
from ..recipes import Handle, Recipe, sparsify_
from ..recipes.registry import resolve
from ..recipes.sparsify import FilterFn
from .ending import keeping_the_run

OTHERS = {
    "FSDPStrategy": "flattens weights (FSDP1); use ModelParallelStrategy, with fully_shard in configure_model",
    "DeepSpeedStrategy": "updates flat copies of the weights by an engine of its own; use DDPStrategy or ModelParallelStrategy",
}
"""Strategies with which no recipe runs, and why."""


class Sparsity(Callback):
    """Have ``trainer.fit(module)`` follow a recipe, from the first step to the finished model.

    The module is made sparse in place when fitting starts, before a checkpoint is loaded; the recipe is attached to the optimizers of
    ``configure_optimizers``, so that checkpoints have its state and ``fit(ckpt_path=...)`` goes on as if never stopped. Its metrics are
    logged by ``self.log`` as ``nm/density`` and so on. Validation and tests measure the model that ``handle.finish()`` would leave.

    Searches before training (``Tuner``, ``LearningRateFinder``, ``BatchSizeFinder``) leave the recipe at its beginning. With
    ``finish=False`` a further ``fit`` of the module goes on with the new optimizers. Another module begins its own run.

    Checkpoints hold the weights that training goes on from, which are not pruned yet. To have the best model instead of the last one, take
    ``finish=False`` and, once ``fit`` is done, load its weights and its optimizer's state, with the masks of these weights, and finish::

        best = torch.load(saver.best_model_path)                        # saver: the ModelCheckpoint
        module.load_state_dict(best["state_dict"])
        trainer.optimizers[0].load_state_dict(best["optimizer_states"][0])
        sparsity.handle.finish()

    Args:
        recipe: an instance, or a name such as ``"step:2:4"``; one that needs ``total_steps`` and does not say them has
            ``trainer.estimated_stepping_batches``.
        filter_fn: ``filter_fn(module, name) -> bool``, which layers, as for ``sparsify_``.
        finish: call ``handle.finish()`` at the end of ``fit``, after the last checkpoint. If that fails, say because training diverged,
            a warning says so, and the module stays as it was trained.

    Attributes: ``handle``, that of the module, once ``fit`` has begun.

    Raises, when ``fit`` begins:
        RecipeError: the strategy shards weights in a way that no recipe can follow, an earlier ``fit`` has finished the module, the
            number of steps is not known or has changed, or as ``sparsify_`` and ``handle.attach`` do: STEP for instance needs
            ``nm.optim.MaskedAdamW`` from ``configure_optimizers``.

    An example::

        sparsity = Sparsity("srste:2:4")
        lightning.pytorch.Trainer(callbacks=[sparsity]).fit(module)     # every weight is 2:4 at the end
        nm.compress_(module)
    """

    def __init__(self, recipe: Recipe | str, filter_fn: FilterFn | None = None, finish: bool = True) -> None:
        self.recipe, self.filter_fn, self.finish = recipe, filter_fn, finish
        self.handle: Handle | None = None
        self._steps: int | None = None  # of the trainer, where the recipe was given them
        self._begun = False
        self._checkpoint: dict[str, Any] | None = None
        self._preview, self._swap = ExitStack(), ExitStack()

    # ---- training

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Swap the layers as soon as the module has its layers and its data: once this and its own ``setup`` are over."""
        if stage != "fit":
            return
        why = next((why for kind in type(trainer.strategy).__mro__ for name, why in OTHERS.items() if kind.__name__ == name), None)
        if why is not None:
            raise RecipeError(f"fit: {type(trainer.strategy).__name__} {why}.")
        self._checkpoint = None
        if self._of(pl_module) and self._goes_on():
            return
        self.handle, self._steps, self._begun = None, None, False
        configure = pl_module.configure_model

        def configure_model() -> None:
            self._swap.close()
            late = not any(isinstance(module, (nn.Linear, NMWeight)) for module in pl_module.modules())
            if late:
                configure()  # it makes the layers
            with torch.device("cpu"):  # and not where the strategy would make new ones
                self.handle = sparsify_(pl_module, resolve(self.recipe, partial(self._count, trainer)), self.filter_fn)
            if not late:
                configure()  # it may shard them, which has to come after

        # no hook of a callback lies between the module's own setup and the loading of a checkpoint
        pl_module.configure_model = configure_model
        self._swap.callback(delattr, pl_module, "configure_model")

    def _goes_on(self) -> bool:
        """Whether the run of an earlier ``fit`` goes on; one that has not begun, as after a tuner's search, is taken back."""
        handle = self._own()
        if handle.finished:
            raise RecipeError(
                "fit: an earlier fit has finished the recipe of this module. To train in parts, take Sparsity(..., finish=False) and call "
                "sparsity.handle.finish() after the last fit. To train the finished module on, call sparsity.handle.remove() and give the "
                "trainer a new Sparsity: with nm.recipes.ASP(score='existing') it holds the zeros that are there."
            )
        if self._begun:
            handle.detach()
            return True
        handle.remove()  # the number of steps may be another one now
        return False

    def _count(self, trainer: Any) -> int:
        self._steps = _steps(trainer)
        return self._steps

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the checkpoint that ``fit`` resumes from until the optimizers have its state."""
        self._checkpoint = checkpoint

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the recipe to the optimizers, before they load their state; Lightning's tuners have finished by then."""
        if self._steps not in (None, _steps(trainer)):
            raise RecipeError(
                f"fit: the recipe's schedule was made for {self._steps} steps, and now the trainer counts {_steps(trainer)}: its limits or "
                "its batch size were changed in between. Give the recipe its total_steps."
            )
        checkpoint, self._checkpoint = self._checkpoint, None
        if self._begun and checkpoint is not None:
            trainer.strategy.load_optimizer_state_dict(checkpoint)  # it replaces the run that would go on
        try:
            self._own().attach(*trainer.optimizers)
        except RecipeError as error:
            if not self._begun:
                raise
            raise RecipeError(f"{error} Or resume from a checkpoint of the earlier fit: fit(..., ckpt_path=...).") from error
        self._begun = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the metrics."""
        metrics = {f"nm/{name}": value.float() for name, value in self._own().metrics().items()}
        pl_module.log_dict(metrics, on_step=True, on_epoch=False)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Finish, after the last checkpoint."""
        if self.finish:
            with keeping_the_run("fit"):
                self._own().finish()

    # ---- evaluation

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Have the module compute what ``finish`` would leave."""
        if self._of(pl_module):
            self._preview.enter_context(self._own().deployable())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Go back to what training computes."""
        self._preview.close()

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """As for validation."""
        self.on_validation_start(trainer, pl_module)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """As for validation."""
        self._preview.close()

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """As for validation."""
        self.on_validation_start(trainer, pl_module)

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        """As for validation."""
        self._preview.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """As at the end of a validation, where it breaks off, and as before ``fit`` where its beginning does."""
        self._preview.close()
        self._swap.close()

    # ----

    def _of(self, pl_module: Any) -> bool:
        return self.handle is not None and self.handle.model is pl_module

    def _own(self) -> Handle:
        assert self.handle is not None
        return self.handle


def _steps(trainer: Any) -> int:
    steps = trainer.estimated_stepping_batches
    if not 0 < steps < float("inf"):
        raise RecipeError("fit: the trainer has neither max_steps nor a length of its data; give the recipe its total_steps.")
    return int(steps)
