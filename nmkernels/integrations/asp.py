"""NVIDIA apex's ``ASP`` by its names, on this package's recipe of that name: prune a trained model once, then train on with its masks.

::

    from nmkernels.integrations.asp import ASP       # in place of apex.contrib.sparsity

    handle = ASP.prune_trained_model(model, optimizer)
    ...                                              # the training loop is unchanged
    handle.finish()

Other than in apex: a layer of any size that M divides is pruned; output heads and layers that are tiny stay dense, unless
``allowed_layer_names`` names them; what stays dense is said in a warning, and ``print(handle.report)`` has every layer, with what
reordering its channels has gained or why they were left alone; the model's state dict has no masks, they are in the optimizer's;
``compute_sparse_masks`` chooses masks once, for masks that follow the weights take another recipe (``nm.recipes.SRSTE``, ``STEP``).
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
from ..recipes.sparsify import candidates

KNOWN = (nn.Linear, _ConvNd, nn.MultiheadAttention)
"""The classes that apex prunes."""
CALCULATOR = re.compile(r"m(\d+)n(\d+)_1d")


class ASP:
    """apex's ``ASP``: class methods about the model that was passed last, and its handle, which they return."""

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
            whitelist: classes of layers; those without a sparse form (``nn.Conv1d``, ``nn.Conv3d``) stay dense, as frozen layers do.
            allowed_layer_names: of these classes only these layers, which must be possible.
            disallowed_layer_names: not these.
            allow_permutation: reorder channels before pruning so that the masks keep more, as ``nm.recipes.ASP(permute=True)``.
            verbosity: has no meaning.

        Raises:
            RecipeError: another mask calculator, ``allow_recompute_mask``, ``custom_layer_dict``, a class or a name that is no layer's, no
                layer can be pruned, or as ``sparsify_``.
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
        strange = [kind.__name__ for kind in whitelist if not issubclass(kind, KNOWN) and not is_conv1d_type(kind)]
        if strange:
            raise RecipeError(f"ASP: whitelist names {', '.join(strange)}; only nn.Linear, nn.Conv2d and Hugging Face's Conv1D are taken.")
        m, n = map(int, found.groups())
        recipe = recipes.ASP(Pattern(n, m), permute=allow_permutation)
        chosen, dense = _choose(model, recipe, tuple(whitelist), allowed_layer_names, disallowed_layer_names)
        handle = sparsify_(model, recipe, lambda module, name: name in chosen)
        handle.report.explain(dense)
        cls._handle, cls._optimizer, cls._pruned = handle, None, False
        return handle

    @classmethod
    def init_optimizer_for_pruning(cls, optimizer: torch.optim.Optimizer) -> None:
        """Have ``compute_sparse_masks`` attach ``optimizer``, which then keeps the zeros; after it, attach it at once.

        Raises:
            RecipeError: the masks were computed without an optimizer, or as ``handle.attach``.
        """
        handle = cls._current("init_optimizer_for_pruning")
        if handle.finished:
            raise RecipeError(
                "ASP.init_optimizer_for_pruning: compute_sparse_masks has pruned the model for good, as there was no optimizer, and this "
                "one would fill the zeros. Call init_optimizer_for_pruning first; or handle.remove(), nm.recipes.adopt(model) and attach."
            )
        if cls._pruned:
            handle.attach(optimizer)
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


def _choose(
    model: nn.Module,
    recipe: recipes.ASP,
    whitelist: tuple[type[nn.Module], ...],
    allowed: Collection[str] | None,
    disallowed: Collection[str],
) -> tuple[set[str], dict[str, str]]:
    """Names of the layers to prune, and for each other one the reason; warns of those that apex might have pruned."""
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
    known = {*chosen, *dense, *dict(model.named_modules())}
    for said, names in (("allowed_layer_names", allowed or ()), ("disallowed_layer_names", disallowed)):
        strange = [name for name in names if name not in known]
        if strange:
            raise RecipeError(f"ASP: {said} names {', '.join(map(repr, strange))}, which is no layer of the model.")
    impossible = [f"{name!r}: {dense.get(name, 'it is no layer with a weight')}" for name in allowed or () if name not in chosen]
    if impossible:
        raise RecipeError(f"ASP: allowed_layer_names names layers that cannot be pruned: {'; '.join(impossible)}.")
    if not chosen:
        said = "; ".join(f"{name}: {why}" for name, why in dense.items())
        raise RecipeError(f"ASP: no layer of the model can be pruned to {recipe.pattern}: {said or 'there is none'}.")
    if unexpected:
        more = f" and {len(unexpected) - 5} more" if len(unexpected) > 5 else ""
        warnings.warn(
            f"ASP: layers that stay dense: {', '.join(unexpected[:5])}{more}. print(handle.report) shows all of them; a tiny layer or an "
            "output head is pruned where allowed_layer_names names it.",
            stacklevel=3,
        )
    return chosen, dense
