"""What a method does on a model besides transforming its weights and updating them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..nn import NMWeight
from .base import Stage

if TYPE_CHECKING:
    from .run import Run


class Hooks:
    """What a method changes on one model that no ``Stage`` describes; every method of this base does nothing.

    A recipe that needs one subclasses it in its own file and names it in ``Setup(hooks=partial(MyHooks, self))``; ``sparsify_`` calls that
    with the ``Run``. Adapters (SLoPe), frozen parameters (MaskLLM), a proximal step (ProxSparse) and the order of channels (ASP) are
    made so.

    Attributes:
        recipe: the recipe that has named it, also inside another one.
        run: the run; its ``model``, ``layers`` (name -> layer), ``state``, ``masks``, ``tensors`` and ``report`` may be used.
        metrics: 0-d tensors by name, which ``handle.metrics()`` returns with the others.

    Example:
        >>> class FreezeInTheEnd(Hooks):
        ...     def enter(self, stage):
        ...         for layer in self.run.layers.values():
        ...             layer.parameter.requires_grad_(stage.phase < 2)
    """

    def __init__(self, recipe: Any, run: Run) -> None:
        self.recipe, self.run = recipe, run
        self.metrics: dict[str, Tensor] = {}
        self.begin()

    def begin(self) -> None:
        """``sparsify_`` has swapped the layers; raise ``RecipeError`` where the method cannot work on this model."""

    def enter(self, stage: Stage) -> None:
        """Bring the model in line with ``stage``: as it begins, when a run resumes in it, and after a preview of ``deploy``.

        ``run.state`` is the new one already, while layers and held masks are still those of the stage before.
        """

    def after_step(self, updated: Iterable[tuple[NMWeight, float | Tensor]], found_inf: Tensor | None) -> None:
        """An optimizer has stepped: ``updated`` are the layers that had a gradient, each with its learning rate; where ``found_inf``, a
        number on the device, is not 0, a ``GradScaler`` has skipped the step."""

    def deploy(self) -> None:
        """Put the model into the form that ``finish`` leaves, before weights are pruned; after a preview ``enter`` is called."""

    def close(self) -> None:
        """The recipe ends, by ``finish`` or ``remove``: undo what was for training only."""
