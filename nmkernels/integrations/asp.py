"""NVIDIA apex's ``ASP`` by its names, on this package's recipe of that name: prune a trained model once, then train on with its masks.

::

    from nmkernels.integrations.asp import ASP       # in place of apex.contrib.sparsity

    handle = ASP.prune_trained_model(model, optimizer)
    ...                                              # the training loop is unchanged
    handle.finish()

Other than in apex: output heads and layers that are tiny stay dense, unless ``allowed_layer_names`` names them; nothing is printed, and
``print(handle.report)`` tells what was pruned; the model's state dict has no masks, they are in the optimizer's; ``compute_sparse_masks``
chooses masks once, for masks that follow the weights take another recipe (``nm.recipes.SRSTE``, ``STEP``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .. import ops, recipes
from ..pattern import Pattern, RecipeError
from ..recipes import Handle, sparsify_
from ..recipes.sparsify import select

CALCULATOR = re.compile(r"m(\d+)n(\d+)_1d")


class ASP:
    """apex's ``ASP``: class methods about the one model that was given last, and its handle, which they return."""

    _handle: Handle | None = None
    _optimizer: torch.optim.Optimizer | None = None
    _pruned = False

    @classmethod
    def prune_trained_model(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> Handle:
        """Prune ``model`` to 2:4 by magnitude now, and have ``optimizer`` keep the zeros; returns the handle.

        Raises:
            RecipeError: as ``sparsify_`` and ``handle.attach`` do.
        """
        cls.init_model_for_pruning(model, whitelist=(nn.Linear, nn.Conv2d))
        cls.init_optimizer_for_pruning(optimizer)
        return cls.compute_sparse_masks()

    @classmethod
    def init_model_for_pruning(
        cls,
        model: nn.Module,
        mask_calculator: str | Callable[..., Tensor] = "m4n2_1d",
        verbosity: int = 0,
        whitelist: Sequence[type[nn.Module]] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
        allowed_layer_names: Sequence[str] | None = None,
        disallowed_layer_names: Sequence[str] = (),
        allow_recompute_mask: bool = False,
        custom_layer_dict: dict[type[nn.Module], list[str]] | None = None,
        allow_permutation: bool = True,
    ) -> Handle:
        """Choose the layers; they stay dense until ``compute_sparse_masks``.

        Args:
            mask_calculator: ``"m4n2_1d"`` is 2:4 by magnitude, ``"mMnN_1d"`` is N:M.
            whitelist: classes of layers.
            allowed_layer_names: only these, which must be possible.
            disallowed_layer_names: not these.
            allow_permutation: reorder channels before pruning so that the masks keep more, as ``nm.recipes.ASP(permute=True)``.
            verbosity: has no meaning.

        Raises:
            RecipeError: another mask calculator, ``allow_recompute_mask``, ``custom_layer_dict``, or as ``sparsify_``.
        """
        found = CALCULATOR.fullmatch(mask_calculator) if isinstance(mask_calculator, str) else None
        if found is None:
            raise RecipeError(
                f"ASP: mask_calculator={mask_calculator!r} is not one of 'm4n2_1d', 'm8n1_1d' and their like. Masks in two dimensions are "
                "nm.recipes.FST's; masks of your own: set the weights outside them to 0, and nm.recipes.adopt(model) holds the zeros."
            )
        if allow_recompute_mask:
            raise RecipeError(
                "ASP: allow_recompute_mask=True keeps a copy of what was pruned. Here a mask is chosen once; recipes whose masks follow "
                "the dense weights are nm.recipes.SRSTE and STEP."
            )
        if custom_layer_dict:
            kinds = ", ".join(kind.__name__ for kind in custom_layer_dict)
            raise RecipeError(f"ASP: custom_layer_dict names {kinds}; only nn.Linear, nn.Conv2d and Hugging Face's Conv1D are taken.")
        m, n = map(int, found.groups())
        recipe = recipes.ASP(Pattern(n, m), permute=allow_permutation)
        if allowed_layer_names is None:
            possible = {c.name for c in select(model, Pattern(n, m), None, recipe)[0] if isinstance(c.module, tuple(whitelist))}
        else:
            possible = set(allowed_layer_names)
        names = possible - set(disallowed_layer_names)
        handle = sparsify_(model, recipe, lambda module, name: name in names)
        cls._handle, cls._optimizer, cls._pruned = handle, None, False
        return handle

    @classmethod
    def init_optimizer_for_pruning(cls, optimizer: torch.optim.Optimizer) -> None:
        """Have ``compute_sparse_masks`` attach ``optimizer``, which then keeps the zeros."""
        cls._current("init_optimizer_for_pruning")
        cls._optimizer = optimizer

    @classmethod
    def compute_sparse_masks(cls) -> Handle:
        """Choose the masks from the present weights and set what is outside to 0; without an optimizer the recipe is then finished.

        Raises:
            RecipeError: a second time, or as ``handle.attach``.
        """
        handle = cls._current("compute_sparse_masks")
        if cls._pruned:
            raise RecipeError(
                "ASP.compute_sparse_masks: the masks are chosen once, and what was outside is 0 now. Masks that follow the weights in "
                "training are nm.recipes.SRSTE's and STEP's."
            )
        if cls._optimizer is None:
            handle.finish(allow_unused=True)
        else:
            handle.attach(cls._optimizer)
        cls._pruned = True
        return handle

    @classmethod
    def restore_pruned_weights(cls) -> None:
        """Refused: what was pruned is not kept.

        Raises:
            RecipeError: always.
        """
        raise RecipeError("ASP.restore_pruned_weights: what was pruned is not kept; load the dense checkpoint again.")

    @classmethod
    def is_sparsity_enabled(cls) -> bool:
        """Whether every chosen weight is N:M, by ``compute_sparse_masks`` or from a checkpoint that was loaded."""
        handle = cls._current("is_sparsity_enabled")
        return all(ops.is_nm(layer.grouped.detach(), layer.pattern) for layer in handle.layers.values())

    @classmethod
    def already_init_asp_model(cls) -> bool:
        """Whether a model was given."""
        return cls._handle is not None

    @classmethod
    def _current(cls, verb: str) -> Handle:
        if cls._handle is None:
            raise RecipeError(f"ASP.{verb}: there is no model yet; call ASP.init_model_for_pruning(model) first.")
        return cls._handle
