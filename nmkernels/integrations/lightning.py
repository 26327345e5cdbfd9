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
        finish: call ``handle.finish()`` at the end of ``fit``, after the last checkpoint.

    Attributes: ``handle``, that of the module, once ``fit`` has begun.

    Raises, when ``fit`` begins:
        RecipeError: the strategy shards weights in a way that no recipe can follow, the callback has been through a ``fit`` already, the
            number of steps is not known, or as ``sparsify_`` and ``handle.attach`` do: STEP for instance needs
            ``nm.optim.MaskedAdamW`` from ``configure_optimizers``.

    An example::

        sparsity = Sparsity("srste:2:4")
        lightning.pytorch.Trainer(callbacks=[sparsity]).fit(module)     # every weight is 2:4 at the end
        nm.compress_(module)
    """

    def __init__(self, recipe: Recipe | str, filter_fn: FilterFn | None = None, finish: bool = True) -> None:
        self.recipe, self.filter_fn, self.finish = recipe, filter_fn, finish
        self.handle: Handle | None = None
        self._preview = ExitStack()

    # ---- training

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Swap the layers as soon as the module has its layers and its data: once this and its own ``setup`` are over."""
        if stage != "fit":
            return
        if self.handle is not None:
            raise RecipeError(
                "fit: this Sparsity has been through a fit, and another one has other optimizers. To go on, build the module, "
                "the trainer and the callback anew and give fit the checkpoint: ckpt_path=..."
            )
        why = next((why for kind in type(trainer.strategy).__mro__ for name, why in OTHERS.items() if kind.__name__ == name), None)
        if why is not None:
            raise RecipeError(f"fit: {type(trainer.strategy).__name__} {why}.")
        configure = pl_module.configure_model

        def configure_model() -> None:
            del pl_module.configure_model
            late = not any(isinstance(module, (nn.Linear, NMWeight)) for module in pl_module.modules())
            if late:
                configure()  # it makes the layers
            with torch.device("cpu"):  # and not where the strategy would make new ones
                self.handle = sparsify_(pl_module, resolve(self.recipe, partial(_steps, trainer)), self.filter_fn)
            if not late:
                configure()  # it may shard them, which has to come after

        # no hook of a callback lies between the module's own setup and the loading of a checkpoint
        pl_module.configure_model = configure_model

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the recipe to the optimizers, before they load their state."""
        self._own().attach(*trainer.optimizers)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the metrics."""
        metrics = {f"nm/{name}": value.float() for name, value in self._own().metrics().items()}
        pl_module.log_dict(metrics, on_step=True, on_epoch=False)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Finish, after the last checkpoint."""
        if self.finish:
            self._own().finish()

    # ---- evaluation

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Have the module compute what ``finish`` would leave."""
        if self.handle is not None:
            self._preview.enter_context(self.handle.deployable())

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
        """As at the end of a validation, where it breaks off."""
        self._preview.close()

    # ----

    def _own(self) -> Handle:
        assert self.handle is not None
        return self.handle


def _steps(trainer: Any) -> int:
    steps = trainer.estimated_stepping_batches
    if not 0 < steps < float("inf"):
        raise RecipeError("fit: the trainer has neither max_steps nor a length of its data; give the recipe its total_steps.")
    return int(steps)
