"""torchtitan: a converter that makes linear layers of its model config sparse, MaskedAdamW in its optimizers, and the recipe.

torchtitan builds models from configs on the meta device, and shards them before it creates their optimizers. Therefore the layers become
sparse in the config, and the recipe is attached by the hook that runs after the optimizers were built. A config file::

    from nmkernels.integrations.torchtitan import NMConverter, NMOptimizersContainer, drive

    def llama3_8b_sparse() -> Trainer.Config:
        config = llama3_8b()
        recipe = nm.recipes.STEP("2:4", total_steps=config.training.steps)
        config.model_spec = model_registry("8B", converters=[NMConverter.Config(recipe=recipe)])
        config.model_spec.post_optimizer_build_fn = drive(recipe)
        config.optimizer = NMOptimizersContainer.Config(
            param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="MaskedAdamW", optimizer_kwargs={"lr": 3e-4})]
        )
        return config

``trainer.optimizers.handles`` are the recipe's handles, one per model part: ``handle.metrics()``, ``handle.finish()``.
Written for torchtitan 0.3.0. To shard a model with torch 2.13, a dense one too, set ``parallelism.spmd_backend="partial_dtensor"``: the
default, ``"spmd_types"``, requires a later torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.utils import init_optim_state
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.module import Module

from ..audit.flops import skeleton
from ..nn.linear import SparseLinear
from ..optim.adamw import MaskedAdamW
from ..pattern import Pattern, RecipeError
from ..recipes import Handle, Recipe, Report, sparsify_
from ..recipes.registry import resolve
from ..train.optimizers import STATE_KEY
from ..train.sparsify import FilterFn, select


class NMLinear(SparseLinear, Module):
    """torchtitan's ``Linear`` with an N:M weight, y = x W̃ᵀ + b, built from its ``Config``.

    State dict and initialisation are those of the dense layer, and ``handle.remove()`` restores torchtitan's ``Linear``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """torchtitan's config and the ``pattern``, a string."""

        pattern: str = "2:4"

    def __init__(self, config: Config) -> None:
        SparseLinear.__init__(self, config.in_features, config.out_features, bias=config.bias, pattern=config.pattern)
        self.__dict__["dense_type"] = Linear


class NMConverter(ModelConfigConverter):
    """Replaces the linear layers of a model config that ``sparsify_`` would make sparse by ``NMLinear``.

    Output heads, tiny layers and subclasses of torchtitan's ``Linear`` (Float8, LoRA) stay dense.

    Attributes: ``report``, every linear layer and why it is sparse or not; None before ``convert``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """
        Args:
            recipe: as for ``sparsify_``, an instance or its name; pass the same one to ``drive``.
            filter_fn: ``filter_fn(module, name) -> bool`` as for ``sparsify_``; the module is an ``nn.Linear`` of the layer's shape on the
                meta device.
        """

        recipe: Any = "sste:2:4"
        filter_fn: FilterFn | None = None

    def __init__(self, config: Config, **_: Any) -> None:
        self.config = config
        self.report: Report | None = None

    def convert(self, model_config: Any) -> Any:
        """Make layers of the config sparse, in place, and return it.

        Raises:
            RecipeError: no layer can be made sparse, or the recipe chooses patterns by the weights, which do not exist yet.
        """
        recipe = resolve(self.config.recipe)
        if recipe.setup.patterns is not None:
            raise RecipeError(
                f"NMConverter: {type(recipe).__name__} chooses patterns by the weights, which do not exist yet; use a fixed pattern."
            )
        places = {name: (config, parent, key) for name, config, parent, key in model_config.traverse(Linear.Config)}
        plain = {name: config for name, (config, parent, _) in places.items() if config._owner is Linear and parent is not None}
        shapes = {name: (config.out_features, config.in_features) for name, config in plain.items()}
        chosen, self.report = select(skeleton("NMConverter", shapes), Pattern(recipe.pattern), self.config.filter_fn, recipe)
        if not chosen:
            raise RecipeError(f"NMConverter: no layer of the model can be made {recipe.pattern} sparse:\n{self.report}")
        for c in chosen:
            config, parent, key = places[c.name]
            settings = {f.name: getattr(config, f.name) for f in fields(config) if f.init}
            sparse = NMLinear.Config(**settings, pattern=str(recipe.pattern))
            if isinstance(parent, list):
                parent[key] = sparse
            else:
                setattr(parent, key, sparse)
        return model_config


class NMOptimizersContainer(OptimizersContainer):
    """torchtitan's optimizers; a parameter group can name ``"MaskedAdamW"``.

    It also loads the checkpoint of a dense run: the recipe then starts at its first step with the loaded moments.

    Attributes: ``handles``, the recipe's handles, set by ``drive``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """torchtitan's config, unchanged."""

    handles: list[Handle]

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Any]:
        return MaskedAdamW if name == "MaskedAdamW" else OptimizersContainer._resolve_optimizer_factory(name)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict()`` of this class, or of a dense run."""
        if not any(key.endswith(f".{STATE_KEY}") for key in state_dict):
            for optimizer in self.optimizers:
                init_optim_state(optimizer)  # first, because it makes a step, which adds the key again
                # torchtitan requires every key of the group in the checkpoint
                optimizer.param_groups[0].pop(STATE_KEY, None)
        super().load_state_dict(state_dict)


def drive(recipe: Recipe | str, filter_fn: FilterFn | None = None) -> Callable[..., None]:
    """A hook for ``ModelSpec.post_optimizer_build_fn`` that attaches ``recipe`` to the model's sparse layers and its optimizers.

    Args:
        recipe: with the same pattern as the converter's.
        filter_fn: as for ``sparsify_``, to leave out some of the layers.

    The hook raises ``RecipeError`` as ``sparsify_`` and ``handle.attach`` do (a recipe that adds parameters has to come before the
    optimizers, and is not supported), and for tensor parallelism with torchtitan's ``spmd_types``.
    """
    resolved = resolve(recipe)

    def attach(optimizers: OptimizersContainer, model_parts: list[nn.Module], parallel_dims: Any) -> None:
        if parallel_dims is not None and parallel_dims.tp_enabled and parallel_dims.spmd_backend == "spmd_types":
            raise RecipeError(
                "drive: under tensor parallelism with spmd_types a weight is a plain tensor without a record of its other parts, so scales "
                'and switch steps would differ between ranks; set parallelism.spmd_backend="partial_dtensor".'
            )
        handles = []
        for part in model_parts:
            if not any(isinstance(module, SparseLinear) for module in part.modules()):
                continue  # a stage of a pipeline may have none
            mine = {id(p) for p in part.parameters()}
            steps = [o for o in optimizers if any(id(p) in mine for group in o.param_groups for p in group["params"])]
            handle = sparsify_(part, resolved, filter_fn)
            handle.attach(*steps)
            handles.append(handle)
        if not handles:
            raise RecipeError(
                "drive: no part of the model has a sparse layer; pass model_registry the converter NMConverter.Config(recipe=...)."
            )
        optimizers.handles = handles

    return attach
