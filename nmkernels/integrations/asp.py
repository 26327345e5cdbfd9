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
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .. import ops, recipes
from ..nn import is_conv1d_type
from ..pattern import Pattern, RecipeError
from ..recipes import Handle, sparsify_
from ..train.layer_names import check_names
from ..train.sparsify import candidates

KNOWN = (nn.Linear, _ConvNd, nn.MultiheadAttention)
"""The classes that apex prunes."""
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
            whitelist: classes of layers; those without a sparse form (``nn.Conv1d``, ``nn.Conv3d``) stay dense, as frozen layers do.
            allowed_layer_names: prune only these layers; each must be prunable.
            disallowed_layer_names: do not prune these layers.
            allow_permutation: reorder channels before pruning so that the masks keep more, as ``nm.recipes.ASP(permute=True)``.
            verbosity: ignored.

        Raises:
            RecipeError: another mask calculator, ``allow_recompute_mask``, ``custom_layer_dict``, an unsupported class, an unknown name, no
                layer can be pruned, or as ``sparsify_``.
        """
        match = CALCULATOR.fullmatch(mask_calculator) if isinstance(mask_calculator, str) else None
        if match is None:
            raise RecipeError(
                f"ASP: mask_calculator={mask_calculator!r} is not of the form 'm4n2_1d'. For masks in two dimensions use "
                "nm.recipes.FST; for your own masks set the weights outside them to 0, and nm.recipes.adopt(model) keeps the zeros."
            )
        if allow_recompute_mask:
            raise RecipeError(
                "ASP: allow_recompute_mask=True is not supported, since pruned weights are not kept. Use a recipe whose masks follow the "
                "dense weights: nm.recipes.SRSTE or STEP."
            )
        if custom_layer_dict:
            kinds = ", ".join(kind.__name__ for kind in custom_layer_dict)
            raise RecipeError(f"ASP: custom_layer_dict names {kinds}; only nn.Linear, nn.Conv2d and Hugging Face's Conv1D are supported.")
        unknown = [kind.__name__ for kind in whitelist if not issubclass(kind, KNOWN) and not is_conv1d_type(kind)]
        if unknown:
            raise RecipeError(f"ASP: whitelist names {', '.join(unknown)}; it supports nn.Linear, nn.Conv2d and Hugging Face's Conv1D.")
        m, n = map(int, match.groups())
        recipe = recipes.ASP(Pattern(n, m), permute=allow_permutation)
        chosen, dense = _choose(model, recipe, tuple(whitelist), allowed_layer_names, disallowed_layer_names)
        handle = sparsify_(model, recipe, lambda module, name: name in chosen)
        handle.report.explain(dense)
        cls._handle, cls._optimizer, cls._pruned = handle, None, False
        return handle

    @classmethod
    def init_optimizer_for_pruning(cls, optimizer: torch.optim.Optimizer) -> None:
        """Register ``optimizer``, which keeps the zeros after ``compute_sparse_masks``; if that was called, attach it at once.

        Raises:
            RecipeError: the masks were computed without an optimizer, or as ``handle.attach``.
        """
        handle = cls._current("init_optimizer_for_pruning")
        if handle.finished:
            raise RecipeError(
                "ASP.init_optimizer_for_pruning: compute_sparse_masks was called without an optimizer and finished the recipe, so this one "
                "would fill the zeros. Call init_optimizer_for_pruning first; or handle.remove(), nm.recipes.adopt(model) and attach."
            )
        if cls._pruned:
            handle.attach(optimizer)
        cls._optimizer = optimizer

    @classmethod
    def compute_sparse_masks(cls) -> Handle:
        """Choose the masks from the current weights and set all other entries to 0; without an optimizer this finishes the recipe.

        Raises:
            RecipeError: on the second call, or as ``handle.attach``.
        """
        handle = cls._current("compute_sparse_masks")
        if cls._pruned:
            raise RecipeError(
                "ASP.compute_sparse_masks: masks are chosen once, and all other weights are 0 now. For masks that follow the weights in "
                "training use nm.recipes.SRSTE or STEP."
            )
        if cls._optimizer is None:
            handle.finish(allow_unused=True)
        else:
            handle.attach(cls._optimizer)
        cls._pruned = True
        return handle

    @classmethod
    def restore_pruned_weights(cls) -> None:
        """Not supported: pruned weights are not kept.

        Raises:
            RecipeError: always.
        """
        raise RecipeError("ASP.restore_pruned_weights: pruned weights are not kept; load the dense checkpoint again.")

    @classmethod
    def is_sparsity_enabled(cls) -> bool:
        """Whether every chosen weight is N:M, from ``compute_sparse_masks`` or from a loaded checkpoint."""
        handle = cls._current("is_sparsity_enabled")
        return all(ops.is_nm(layer.grouped.detach(), layer.pattern) for layer in handle.layers.values())

    @classmethod
    def already_init_asp_model(cls) -> bool:
        """Whether a model was passed."""
        return cls._handle is not None

    @classmethod
    def _current(cls, verb: str) -> Handle:
        if cls._handle is None:
            raise RecipeError(f"ASP.{verb}: there is no model yet; call ASP.init_model_for_pruning(model) first.")
        return cls._handle


def _choose(
    model: nn.Module,
    recipe: recipes.ASP,
    whitelist: tuple[type[nn.Module], ...],
    allowed: Collection[str] | None,
    disallowed: Collection[str],
) -> tuple[set[str], dict[str, str]]:
    """(names of the layers to prune, other layer -> reason); warns about layers that apex might have pruned."""
    allowed = [allowed] if isinstance(allowed, str) else allowed
    disallowed = [disallowed] if isinstance(disallowed, str) else disallowed
    chosen: set[str] = set()
    dense: dict[str, str] = {}
    unexpected: list[str] = []
    for c in candidates(model, Pattern(recipe.pattern), recipe):
        weight = c.module._parameters.get(c.key)
        if not isinstance(c.module, whitelist):
            dense[c.name] = "its class is not in whitelist"
        elif c.name in disallowed:
            dense[c.name] = "it is in disallowed_layer_names"
        elif allowed is not None and c.name not in allowed:
            dense[c.name] = "it is not in allowed_layer_names"
        else:
            frozen = "its weight is frozen" if weight is not None and not weight.requires_grad else ""
            why = c.impossible or frozen or (c.keep_dense if allowed is None else "")
            if why:
                dense[c.name] = why
                unexpected.append(f"{c.name} ({why})")
            else:
                chosen.add(c.name)
    known = [*dict(model.named_modules()), *chosen, *dense]
    check_names("ASP: allowed_layer_names", allowed or (), known)
    check_names("ASP: disallowed_layer_names", disallowed, known)
    impossible = [f"{name!r}: {dense.get(name, 'it has no weight')}" for name in allowed or () if name not in chosen]
    if impossible:
        raise RecipeError(f"ASP: allowed_layer_names names layers that cannot be pruned: {'; '.join(impossible)}.")
    if not chosen:
        reasons = "; ".join(f"{name}: {why}" for name, why in dense.items())
        raise RecipeError(f"ASP: no layer of the model can be pruned to {recipe.pattern}: {reasons or 'it has none'}.")
    if unexpected:
        more = f" and {len(unexpected) - 5} more" if len(unexpected) > 5 else ""
        warnings.warn(
            f"ASP: layers that stay dense: {', '.join(unexpected[:5])}{more}. print(handle.report) shows all of them; a tiny layer or an "
            "output head is pruned if allowed_layer_names names it.",
            stacklevel=3,
        )
    return chosen, dense
