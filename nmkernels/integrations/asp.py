"""NVIDIA apex's ``ASP`` by its names, with this package's recipe ``ASP``: prune a trained model once, then train on with fixed masks.

::

    from nmkernels.integrations.asp import ASP       # in place of apex.contrib.sparsity

    handle = ASP.prune_trained_model(model, optimizer)
    ...                                              # the training loop is unchanged
    handle.finish()

Differences from apex: layers of any size that M divides are pruned; output heads and tiny layers stay dense, unless
``allowed_layer_names`` names them; a warning lists layers that stay dense, and ``print(handle.report)`` shows every layer, with the gain
from reordering its channels or why they were not reordered; masks are in the optimizer's state dict, not in the model's;
``compute_sparse_masks`` chooses masks once (for masks that follow the weights use ``nm.recipes.SRSTE`` or ``STEP``).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from .. import recipes
from ..nn.compress import names_of
from ..pattern import Pattern, RecipeError
from ..recipes import Handle, sparsify_
from ..train.layer_names import check_names
from ..train.sparsify import candidates

CALCULATOR = re.compile(r"m(\d+)n(\d+)_1d")


class ASP:
    """apex's ``ASP``: class methods for the model that was passed last; they return its handle."""

    _handle: Handle | None = None
    _optimizer: torch.optim.Optimizer | None = None
    _pruned = False

    @classmethod
    def prune_trained_model(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> Handle:
        """Prune ``model`` to 2:4 by magnitude now, and make ``optimizer`` keep the zeros; returns the handle.

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
        mask_calculator: str = "m4n2_1d",
        verbosity: int = 0,
        whitelist: Sequence[type[nn.Module]] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
        allowed_layer_names: Collection[str] | str | None = None,
        disallowed_layer_names: Collection[str] | str = (),
        allow_recompute_mask: bool = False,
        custom_layer_dict: Any = None,
        allow_permutation: bool = True,
    ) -> Handle:
        """Choose the layers; they stay dense until ``compute_sparse_masks``.

        Args:
            mask_calculator: ``"m4n2_1d"`` is 2:4 by magnitude, ``"mMnN_1d"`` is N:M.
            whitelist: classes of layers; those without a sparse form (``nn.Conv1d``, ``nn.Conv3d``) stay dense, as frozen layers do.
            allowed_layer_names: prune only these layers; each must be prunable.
            disallowed_layer_names: do not prune these layers.
            allow_permutation: reorder channels before pruning so that the masks keep more, as ``nm.recipes.ASP(permute=True)``.
            verbosity: ignored.

        Raises:
            RecipeError: another mask calculator, ``allow_recompute_mask``, ``custom_layer_dict``, an unknown name, no layer can be pruned,
                or as ``sparsify_``.
        """
        match = CALCULATOR.fullmatch(str(mask_calculator))
        if match is None or allow_recompute_mask or custom_layer_dict:
            raise RecipeError(
                "ASP: only mask calculators such as 'm4n2_1d' are supported, for linear layers and Conv2d, and masks are chosen once. For "
                "masks in two dimensions use nm.recipes.FST; for masks that follow the weights SRSTE or STEP; for your own masks set the "
                "weights outside them to 0, and nm.recipes.adopt(model) keeps the zeros."
            )
        m, n = map(int, match.groups())
        recipe = recipes.ASP(Pattern(n, m), permute=allow_permutation)
        allowed = [allowed_layer_names] if isinstance(allowed_layer_names, str) else allowed_layer_names
        disallowed = [disallowed_layer_names] if isinstance(disallowed_layer_names, str) else disallowed_layer_names or ()
        names, excluded, dense = set[str](), set[str](), dict[str, str]()
        for c in candidates(model, Pattern(recipe.pattern), recipe):
            weight = c.module._parameters.get(c.key)
            frozen = "its weight is frozen" if weight is not None and not weight.requires_grad else ""
            if not isinstance(c.module, tuple(whitelist)) or c.name in disallowed or (allowed is not None and c.name not in allowed):
                excluded.add(c.name)
            elif why := c.impossible or frozen or (c.keep_dense if allowed is None else ""):
                dense[c.name] = why
            else:
                names.add(c.name)
        known = [*dict(model.named_modules()), *names, *excluded, *dense]
        check_names("ASP: allowed_layer_names", allowed or (), known)
        check_names("ASP: disallowed_layer_names", disallowed, known)
        impossible = [name for name in allowed or (dense if not names else ()) if name not in names]
        if impossible or not names:
            reasons = "; ".join(f"{name!r}: {dense.get(name, 'not in whitelist, or disallowed')}" for name in impossible)
            raise RecipeError(f"ASP: layers that cannot be pruned to {recipe.pattern}: {reasons or 'all of the model'}.")
        if dense:
            warnings.warn(
                f"ASP: layers that stay dense: {names_of([f'{name} ({why})' for name, why in dense.items()])}. print(handle.report) shows "
                "all of them; a tiny layer or an output head is pruned if allowed_layer_names names it.",
                stacklevel=2,
            )
        cls._handle = sparsify_(model, recipe, lambda module, name: name in names)
        cls._optimizer, cls._pruned = None, False
        cls._handle.report.explain(dense)
        return cls._handle

    @classmethod
    def init_optimizer_for_pruning(cls, optimizer: torch.optim.Optimizer) -> None:
        """Register ``optimizer``, which keeps the zeros after ``compute_sparse_masks``.

        Raises:
            RecipeError: no model was passed, or its masks were computed already.
        """
        cls._pending("init_optimizer_for_pruning")
        cls._optimizer = optimizer

    @classmethod
    def compute_sparse_masks(cls) -> Handle:
        """Choose the masks from the current weights and set all other entries to 0; without an optimizer this finishes the recipe.

        Raises:
            RecipeError: no model was passed, its masks were computed already, or as ``handle.attach``.
        """
        handle = cls._pending("compute_sparse_masks")
        if cls._optimizer is None:
            handle.finish(allow_unused=True)
        else:
            handle.attach(cls._optimizer)
        cls._pruned = True
        return handle

    @classmethod
    def _pending(cls, verb: str) -> Handle:
        """The handle of a model whose masks were not computed yet."""
        if cls._handle is None:
            raise RecipeError(f"ASP.{verb}: there is no model yet; call ASP.init_model_for_pruning(model) first.")
        if cls._pruned:
            raise RecipeError(
                f"ASP.{verb}: masks are chosen once, all other weights are 0 now, and another optimizer would fill the zeros. Call "
                "init_optimizer_for_pruning before compute_sparse_masks; for masks that follow the weights use nm.recipes.SRSTE or STEP."
            )
        return cls._handle
