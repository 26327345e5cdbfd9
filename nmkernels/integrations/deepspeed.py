"""DeepSpeed's ZeRO-1 and ZeRO-2: ``attach`` has a recipe follow an engine's steps. Tried with deepspeed 0.19.8, on gloo.

The model keeps whole weights. DeepSpeed's optimizer steps a torch optimizer on this rank's part of flat float32 copies of them, after it
has averaged and clipped the gradients, and gathers the result. So the recipe's rule acts on the part, with the mask of the whole weight
that the model multiplies, and what follows a step happens once the weights are gathered.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..layouts import MATRICES, as_stored
from ..nn.weight import NMWeight
from ..pattern import RecipeError
from ..recipes import Handle
from ..recipes.contract import Hooks
from ..train import gradients
from ..train.run import Attachment

OTHERWISE = "Train with torch.distributed.fsdp.fully_shard, which needs as little memory, or with DistributedDataParallel."


class ZeroOptimizer(torch.optim.Optimizer):
    """DeepSpeed's optimizer as a recipe sees one: groups of the model's Parameters, and one step for all of them.

    Attributes:
        zero: DeepSpeed's; ``optim``: the torch optimizer that it steps, which keeps the moments and the recipe's state in checkpoints.
        found_inf: after a step that DeepSpeed has skipped, 1 as a tensor, else None; as a ``GradScaler`` sets it.
    """

    def __init__(self, engine: Any) -> None:
        self.zero, self.optim = engine.optimizer, engine.optimizer.optimizer
        settings = {key: value for key, value in self.optim.param_groups[0].items() if key != "params"}
        super().__init__([{**settings, "params": [p for p in engine.module.parameters() if p.requires_grad]}], {})
        self.found_inf: Tensor | None = None
        self._attachment: Attachment | None = None
        self._sums: Tensor | None = None
        self._step, self._remover = self.zero.step, self.optim.register_step_pre_hook(self._apply_rule)
        self.zero.step = self._step_whole

    def remove(self) -> None:
        """Leave DeepSpeed's optimizer as it was."""
        self.zero.__dict__.pop("step", None)
        self._remover.remove()

    # what is saved and loaded is the state of the inner optimizer

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optim.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optim.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optim.register_load_state_dict_post_hook(hook, prepend)

    # ---- a step

    def _step_whole(self, *args: Any, **kwargs: Any) -> None:
        """What DeepSpeed's engine calls: ``step``, between the recipe's hooks."""
        self.step()
        self.hold()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """DeepSpeed's step."""
        self.found_inf = torch.ones(())  # unless it steps the inner optimizer
        self._step()
        a = self._attachment
        if a is not None and a.pruned:
            assert self._sums is not None
            dist.all_reduce(self._sums, group=self.zero.dp_process_group)
            a.pruned = {name: (size, self._sums[i]) for i, (name, (size, _)) in enumerate(a.pruned.items())}

    @torch.no_grad()
    def prepare(self, a: Attachment) -> None:
        """Note the masks of the present weights; the gradients that the inner optimizer will read do not exist yet."""
        stage, self._attachment = a.run.stage, a
        a.masks, a.pruned = {}, {}
        a.took = [name for name, layer in a.layers.items() if layer.parameter.requires_grad]
        a.numel = sum(a.layers[name].parameter.numel() for name in a.took)
        for name in a.took if stage.rule.masked and not stage.held_mask else ():
            layer = a.layers[name]
            mask = a.masks[name] = layer.kept()
            size = gradients.magnitude(layer.master.detach().masked_fill(mask, 0.0))
            a.pruned[name] = size, size
        self._sums = torch.zeros(len(a.pruned), dtype=torch.float64, device=a.layers[a.took[0]].master.device) if a.pruned else None

    @torch.no_grad()
    def _apply_rule(self, optim: torch.optim.Optimizer, *_: Any) -> None:
        """Mask or decay the gradients of this rank's part; DeepSpeed steps its groups one after the other."""
        self.found_inf, a = None, self._attachment
        if a is None:
            return
        flat = {p.untyped_storage().data_ptr(): (p, group) for group in optim.param_groups for p in group["params"]}
        for name in a.took:
            layer, rule = a.layers[name], a.run.stage.rule
            piece = layer.parameter._hp_mapping  # type: ignore[attr-defined]
            if piece is None or piece.hp_fragment.untyped_storage().data_ptr() not in flat:
                continue
            p, group = flat[piece.hp_fragment.untyped_storage().data_ptr()]
            w, where = piece.hp_fragment, piece.hp_fragment_address
            assert p.grad is not None
            g, cut = p.grad.narrow(0, where.start, where.numel), partial(_part, layer, piece)
            add = partial(gradients.add, g, bool(group.get("maximize")), None)
            for value in layer.penalties().values():
                add(cut(value))
            if a.run.stage.held_mask:
                g.masked_fill_(~cut(a.run.held.masks[name]), 0.0)
            elif name in a.masks:
                mask = cut(a.masks[name])
                assert self._sums is not None
                self._sums[list(a.pruned).index(name)] += gradients.magnitude(g.masked_fill(mask, 0.0))
                if rule.decay:
                    add(w.detach().masked_fill(mask, 0.0), rule.decay)

    @torch.no_grad()
    def hold(self) -> None:
        """Have the copies of the weights zeros where held masks have them."""
        if self._attachment is None:
            return
        run = self._attachment.run
        for name, mask in run.held.masks.items():
            piece = getattr(run.layers[name].parameter, "_hp_mapping", None)
            if piece is not None:
                piece.hp_fragment.data.masked_fill_(~_part(run.layers[name], piece, mask), 0.0)


def _part(layer: NMWeight, piece: Any, matrix: Tensor) -> Tensor:
    """What this rank updates of ``matrix`` ``(out, in)``, as DeepSpeed flattens the Parameter."""
    stored, where = as_stored(matrix, layer.layout, layer.parameter.shape), piece.lp_fragment_address
    return stored.reshape(-1).narrow(0, where.start, where.numel)


def attach(handle: Handle, engine: Any) -> None:
    """Have the recipe follow the steps of a DeepSpeed engine with ZeRO-1 or ZeRO-2.

    Call it after ``deepspeed.initialize``, and before ``engine.load_checkpoint``. The configuration needs
    ``"zero_allow_untested_optimizer": True`` for optimizers that DeepSpeed does not know, such as ``MaskedAdamW``. The engine's checkpoints
    include the recipe's state and held masks. ``handle.finish()`` ends it all as in one process.

    Weights, masks, schedule and metrics equal those of DistributedDataParallel; in bf16 masks are those of the 16-bit weights that the
    model multiplies, and decay and update act on the float32 copies.

    Raises:
        RecipeError: ZeRO-3 or no ZeRO, offloading, elastic checkpoints, layers that are not linear; or a recipe that updates weights by
            its own rule (STEP and AST, which need ``MaskedAdamW`` to step each weight) or prunes each weight as a whole.

    Example::

        handle = nm.sparsify_(model, "srste:2:4")
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=config)
        nm.integrations.deepspeed.attach(handle, engine)
    """
    _check(handle, engine)
    optimizer = ZeroOptimizer(engine)
    try:
        handle.attach(optimizer)
    except Exception:
        optimizer.remove()
        raise
    optimizer._attachment = next(a for a in handle.run.attachments if a.optimizer is optimizer)
    optimizer._attachment.removers.append(optimizer)
    optimizer.hold()


def _check(handle: Handle, engine: Any) -> None:
    """Raise ``RecipeError`` where the recipe cannot follow this engine."""
    recipe, setup, run = type(handle.recipe).__name__, handle.recipe.setup, handle.run
    stage = engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else None
    reason = ""
    if stage == 3:
        reason = f"ZeRO-3 shards weights by its own engine, and no rank could make a mask. {OTHERWISE}"
    elif stage not in (1, 2):
        reason = f"this is for an engine of deepspeed.initialize with ZeRO stage 1 or 2, and the stage is {stage}. {OTHERWISE}"
    elif getattr(engine.optimizer, "cpu_offload", False) or getattr(engine.optimizer, "zenflow", False):
        reason = "offload_optimizer updates weights elsewhere, which has not been tried. Leave it out."
    elif getattr(engine.optimizer, "elastic_checkpoint", False):
        reason = "elastic checkpoints would lose the recipe's state. Leave elastic_checkpoint out."
    elif not all(hasattr(layer.parameter, "_hp_mapping") for layer in run.layers.values() if layer.parameter.requires_grad):
        reason = "the engine's optimizer does not have all weights of the sparse layers. Build it from model.parameters() after sparsify_."
    elif setup.optimizer is not None:
        reason = f"{recipe} {setup.needs}, for which the optimizer must step each weight; DeepSpeed's steps flat copies. {OTHERWISE}"
    elif setup.needs_whole:
        reason = f"{recipe} {setup.needs_whole}, and this rank updates a part of them. Train with DistributedDataParallel."
    elif type(run.hooks).after_step is not Hooks.after_step:
        reason = f"{recipe} changes weights after each step, of which DeepSpeed keeps copies. Train with DistributedDataParallel."
    elif other := [name for name, layer in run.layers.items() if layer.layout not in MATRICES]:
        reason = f"layer {other[0]!r} is not a linear layer, and only those have been tried. Leave it out of sparsify_ with filter_fn."
    if reason:
        raise RecipeError(f"deepspeed.attach: {reason}")
