"""torchtitan: sparse layers by a converter of its model config, MaskedAdamW in its optimizers, and a recipe that drives both.

torchtitan builds models from configs, on the meta device, and shards them before it makes their optimizers. So the linear layers are made
sparse in the config, and the recipe comes last, by the hook for what is to be done once the optimizers are there. A config file::

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

``trainer.optimizers.handles`` are the recipe's handles, one for each part of the model: ``handle.metrics()``, ``handle.finish()``.
Written for torchtitan 0.3.0. To shard a model with torch 2.13, a dense one too, set ``parallelism.spmd_backend="partial_dtensor"``: the
default, ``"spmd_types"``, wants a later torch.
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
from ..nn import SparseLinear
from ..optim import MaskedAdamW
from ..pattern import Pattern, RecipeError
from ..recipes import Handle, Recipe, Report, sparsify_
from ..recipes.attach import STATE_KEY
from ..recipes.registry import resolve
from ..recipes.sparsify import FilterFn, select


class NMLinear(SparseLinear, Module):
    """torchtitan's ``Linear`` with an N:M weight, y = x W̃ᵀ + b, built from its ``Config``.

    State dict and initialisation are the dense layer's, and ``handle.remove()`` gives torchtitan's ``Linear`` back.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """torchtitan's, and the ``pattern``, as text."""

        pattern: str = "2:4"

    def __init__(self, config: Config) -> None:
        SparseLinear.__init__(self, config.in_features, config.out_features, bias=config.bias, pattern=config.pattern)
        self.__dict__["dense_type"] = Linear


class NMConverter(ModelConfigConverter):
    """Puts ``NMLinear`` in the place of the linear layers of a model config that ``sparsify_`` would make sparse.

    Output heads and tiny layers stay dense, and so does whatever is not torchtitan's ``Linear`` itself, such as Float8 and LoRA layers.

    Attributes: ``report``, every linear layer and why it was taken or not; None before ``convert``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """
        Args:
            recipe: as for ``sparsify_``, an instance or its name; the one that ``drive`` is given.
            filter_fn: ``filter_fn(module, name) -> bool`` as for ``sparsify_``; the module is an ``nn.Linear`` of the layer's shape on the
                meta device.
        """

        recipe: Any = "sste:2:4"
        filter_fn: FilterFn | None = None

    def __init__(self, config: Config, **_: Any) -> None:
        self.config = config
        self.report: Report | None = None

    def convert(self, model_config: Any) -> Any:
        """The config with sparse layers, changed in place.

        Raises:
            RecipeError: no layer can be made sparse, or the recipe chooses patterns by the weights, which are not there yet.
        """
        recipe = resolve(self.config.recipe)
        if recipe.setup.patterns is not None:
            raise RecipeError(f"NMConverter: {type(recipe).__name__} chooses the layers' patterns by their weights; give one pattern.")
        places = {name: (config, parent, key) for name, config, parent, key in model_config.traverse(Linear.Config)}
        plain = {name: config for name, (config, parent, _) in places.items() if config._owner is Linear and parent is not None}
        shapes = {name: (config.out_features, config.in_features) for name, config in plain.items()}
        chosen, self.report = select(skeleton(shapes), Pattern(recipe.pattern), self.config.filter_fn, recipe)
        if not chosen:
            raise RecipeError(f"NMConverter: no layer of the model can be made {recipe.pattern} sparse:\n{self.report}")
        for c in chosen:
            config, parent, key = places[c.name]
            given = {f.name: getattr(config, f.name) for f in fields(config) if f.init}
            sparse = NMLinear.Config(**given, pattern=str(recipe.pattern))
            if isinstance(parent, list):
                parent[key] = sparse
            else:
                setattr(parent, key, sparse)
        return model_config


class NMOptimizersContainer(OptimizersContainer):
    """torchtitan's optimizers, among which a parameter group can name ``"MaskedAdamW"``.

    It also loads the checkpoint of a dense run: the recipe then starts from its beginning with the loaded moments.

    Attributes: ``handles``, those of the recipe, once ``drive`` has hooked it in.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """torchtitan's."""

    handles: list[Handle]

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Any]:
        return MaskedAdamW if name == "MaskedAdamW" else OptimizersContainer._resolve_optimizer_factory(name)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, or a dense run's."""
        if not any(key.endswith(f".{STATE_KEY}") for key in state_dict):
            for optimizer in self.optimizers:
                init_optim_state(optimizer)  # its step would bring the key back
                # torchtitan looks for every key that the group has
                optimizer.param_groups[0].pop(STATE_KEY, None)
        super().load_state_dict(state_dict)


def drive(recipe: Recipe | str, filter_fn: FilterFn | None = None) -> Callable[..., None]:
    """The hook for ``ModelSpec.post_optimizer_build_fn`` that gives the model's sparse layers and its optimizers to ``recipe``.

    Args:
        recipe: of the pattern that the converter gave the layers.
        filter_fn: as for ``sparsify_``, where some of them shall not take part.

    The hook raises ``RecipeError`` as ``sparsify_`` and ``handle.attach`` do (a recipe that learns more than the weights has to come before
    the optimizers, and cannot be driven so), and for tensor parallelism with torchtitan's ``spmd_types``.
    """
    resolved = resolve(recipe)

    def attach(optimizers: OptimizersContainer, model_parts: list[nn.Module], parallel_dims: Any) -> None:
        if parallel_dims is not None and parallel_dims.tp_enabled and parallel_dims.spmd_backend == "spmd_types":
            raise RecipeError(
                "drive: under tensor parallelism with spmd_types a weight is a plain tensor that does not tell of its other parts, so that "
                'scales and switches would differ from rank to rank; set parallelism.spmd_backend="partial_dtensor".'
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
                "drive: no part of the model has a sparse layer; give model_registry the converter NMConverter.Config(recipe=...)."
            )
        optimizers.handles = handles

    return attach
