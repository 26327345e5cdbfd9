"""Block by block through the model's own forward pass.

The model calls its blocks itself. Blocks that are finished answer from a store, the present one runs, and then the pass stops. So nothing
of a block's arguments is copied or guessed: masks, positions, caches and cross-attention come from the model at every pass.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...pattern import RecipeError
from ..sparsify import Candidate

log = logging.getLogger("nmkernels.prune")
log.addHandler(logging.NullHandler())

Forward = Callable[[nn.Module, Any], Any]
"""``forward(model, batch)``: runs the model on one batch of the user's data."""


class _Stop(Exception):
    """Ends a forward pass whose rest is not needed."""


@dataclass(eq=False)
class Block:
    """One block of a list; once ``finished`` it answers from the store."""

    name: str
    module: nn.Module
    list_name: str
    finished: bool = False


@dataclass(eq=False)
class Unit:
    """What is pruned together: the layers of ``block``, or layers outside all blocks that have one input.

    ``until``: the first block that is called after all of these layers have run; None if a pass must run to its end.
    """

    name: str
    layers: list[Candidate] = field(default_factory=list)
    block: Block | None = None
    until: Block | None = None


def block_lists(model: nn.Module, layers: Sequence[Candidate], names: Sequence[str] | None = None) -> dict[str, list[nn.Module]]:
    """The lists of blocks of ``model``: every outermost ``ModuleList`` or ``Sequential`` of two or more modules of at most two classes that
    have layers to prune inside; or the modules ``names``, whose children are the blocks.
    """
    modules = {name: module for name, module in model.named_modules()}
    if names is not None:
        for name in names:
            if name not in modules or not list(modules[name].children()):
                raise RecipeError(f"prune_: blocks={list(names)}: the model has no module {name!r} with children, whose blocks these are.")
        return {name: list(modules[name].children()) for name in names}
    own = {id(c.module) for c in layers}
    found: dict[str, list[nn.Module]] = {}
    inside: set[int] = set()
    for name, module in modules.items():
        if id(module) in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = list(module)
        alike = len({type(child) for child in children}) <= (2 if isinstance(module, nn.ModuleList) else 1)
        if len(children) < 2 or not alike or any(id(child) in own or isinstance(child, nn.ModuleList) for child in children):
            continue
        if any(id(part) in own for child in children for part in child.modules()):
            found[name] = children
            inside |= {id(part) for part in module.modules()}
    return found


class Relay:
    """Runs ``batches`` through ``model`` one block at a time.

    Args:
        layers: those to prune.
        forward: runs the model on one batch.
        blocks: see ``block_lists``.
        device: where blocks run; None: where they are.
        resident: a context in which the weights of a module are on that device; it may be entered again inside.

    Attributes:
        units: in the order in which the model runs them, once ``trace`` was called.
        idle: the layers that the first batch did not reach.
        rereads: whether the model reads outputs of blocks that are not the last of their list, so that all are stored.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Candidate],
        batches: Sequence[Any],
        forward: Forward,
        blocks: Sequence[str] | None = None,
        device: torch.device | None = None,
        resident: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model, self.layers, self.batches, self.forward = model, layers, batches, forward
        self.device, self.resident = device, resident
        lists = block_lists(model, layers, blocks)
        self.blocks = [Block(f"{name}.{i}", block, name) for name, members in lists.items() for i, block in enumerate(members)]
        self.units: list[Unit] = []
        self.idle: list[Candidate] = []
        self._sources: dict[str, str] = {}
        # of each layer's calls in the first pass, the number of the call that first got the same tensor
        self._inputs: dict[str, list[int]] = {}
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self._events: list[Block | Candidate] = []
        self._batch = 0
        self._target: Block | None = None
        self._until: Block | None = None
        self._outputs: list[Any] = []
        # of the last finished block of each list, from which the model reads on; the blocks before it answer with the same
        self._last: dict[str, Block] = {}
        self._answers: dict[Block, list[Any]] = {}
        self.rereads = False

    # ---- passes

    @contextmanager
    def running(self) -> Iterator[None]:
        """The relay answers for the model's blocks; the model is in eval mode, without gradients. Everything is restored at the end."""
        modes = {module: module.training for module in self.model.modules()}
        before = {block.module: block.module.__dict__.get("forward") for block in self.blocks}
        try:
            self.model.eval()
            for block in self.blocks:
                block.module.__dict__["forward"] = partial(self._call, block, block.module.forward)
            with torch.inference_mode(False), torch.no_grad(), uncached_autocast(), uncompiled():
                yield
        finally:
            for module, own in before.items():
                module.__dict__.pop("forward", None)
                if own is not None:
                    module.__dict__["forward"] = own
            for module, mode in modes.items():
                module.training = mode

    def _call(self, block: Block, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._events.append(block)
        if block.finished:
            last = self._last[block.list_name]
            return copied(self._answers[block if self.rereads else last][self._batch])
        if block is self._until:
            raise _Stop
        home = next((t.device for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)), None)
        with self.resident(block.module):
            args, kwargs = moved((args, kwargs), self.device)
            output = moved(forward(*args, **kwargs), home)
        if block is self._target:
            self._outputs.append(output)
            raise _Stop
        return output

    def run(self, unit: Unit) -> None:
        """One pass over all batches, as far as ``unit``; the outputs of its block replace those of the pass before."""
        self._target, self._until, self._outputs = unit.block, unit.until, []
        for number, batch in enumerate(self.batches):
            self._batch, self._events = number, []
            with suppress(_Stop):
                self.forward(self.model, copied(batch))
        if unit.block is not None and len(self._outputs) != len(self.batches):
            raise RecipeError(
                f"prune_: block {unit.block.name!r} ran in {len(self._outputs)} of {len(self.batches)} batches only; pass blocks=[] to "
                "prune without blocks."
            )

    def finish(self, unit: Unit) -> None:
        """From now on the block of ``unit`` answers with the outputs of its last pass."""
        if unit.block is not None:
            self._finish(unit.block, self._outputs)

    def _finish(self, block: Block, outputs: list[Any]) -> None:
        last = self._last.get(block.list_name)
        if last is not None and not self.rereads:
            del self._answers[last]
        self._answers[block], self._last[block.list_name], block.finished = outputs, block, True
        self._outputs = []

    @property
    def batch(self) -> Any:
        """The batch that the present pass runs."""
        return self.batches[self._batch]

    @property
    def number(self) -> int:
        """The number of that batch, from 1."""
        return self._batch + 1

    def final(self, batches: int) -> Iterator[Any]:
        """The model's outputs for the first batches."""
        self._target = self._until = None
        for number, batch in enumerate(self.batches[:batches]):
            self._batch, self._events = number, []
            yield self.forward(self.model, copied(batch))

    # ---- the order

    def trace(self) -> None:
        """Run the first batch to find the order of blocks and layers, which layers have one input, and whether the relay is exact.

        Blocks that run more than once in a pass are no blocks. Where the model reads outputs of earlier blocks again (a multi-modal model
        the last but one of its vision tower, for instance), those of all blocks are stored.
        """
        hooks = [c.module.register_forward_pre_hook(self._note(c), with_kwargs=True) for c in self.layers]
        last: dict[str, tuple[Block, Any]] = {}  # by list

        def record(block: Block, module: nn.Module, args: Any, output: Any) -> None:
            last[block.list_name] = block, copied(output)

        hooks += [block.module.register_forward_hook(partial(record, block)) for block in self.blocks]
        try:
            whole = next(self.final(1))
        finally:
            for hook in hooks:
                hook.remove()
        events = self._events
        calls = Counter(id(event) for event in events)
        repeated = {block.list_name for block in self.blocks if calls[id(block)] > 1}
        known = [block for block in self.blocks if block.list_name not in repeated and calls[id(block)]]
        self._share_sources()
        self._order(events, known)
        for block in known:
            block.finished, (self._last[block.list_name], output) = True, last[block.list_name]
            self._answers[self._last[block.list_name]] = [output]
        self.rereads = not same(whole, next(self.final(1)))
        if self.rereads:
            log.info("the model reads outputs of earlier blocks again, so those of all blocks are kept in memory")
        self._last, self._answers = {}, {}
        for block in known:
            block.finished = False

    def _note(self, c: Candidate) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._events.append(c)
            x = next(iter((*args, *kwargs.values())), None)
            call = len(self._events)
            if isinstance(x, Tensor):
                ref, version, first = self._seen.get(id(x), (None, 0, 0))
                if ref is not None and ref() is x and version == x._version:
                    call = first
                else:
                    self._seen[id(x)] = weakref.ref(x), x._version, call
            self._inputs.setdefault(c.name, []).append(call)

        return note

    def _share_sources(self) -> None:
        """Layers have one source if all their calls got the same tensors."""
        first: dict[tuple[int, ...], str] = {}
        for name, calls in self._inputs.items():
            self._sources[name] = first.setdefault(tuple(calls), name)
        self._inputs, self._seen = {}, {}

    def _order(self, events: list[Block | Candidate], blocks: list[Block]) -> None:
        first = {id(event): number for number, event in reversed(list(enumerate(events)))}
        last = {id(event): number for number, event in enumerate(events)}
        of = {id(part): block for block in blocks for part in block.module.modules()}
        units = {id(block): Unit(block.name, block=block) for block in blocks}
        begin = {id(unit): first[id(unit.block)] for unit in units.values()}
        outside: dict[str, Unit] = {}
        for c in self.layers:
            if id(c) not in first:
                self.idle.append(c)
            elif (block := of.get(id(c.module))) is not None:
                units[id(block)].layers.append(c)
            else:
                unit = outside.setdefault(self.source(c), Unit(self.source(c)))
                unit.layers.append(c)
                begin[id(unit)] = min(begin.get(id(unit), len(events)), first[id(c)])
        for unit in outside.values():
            end = max(last[id(c)] for c in unit.layers)
            later = [block for block in blocks if first[id(block)] > end]
            unit.until = min(later, key=lambda block: first[id(block)], default=None)
        self.units = sorted((*units.values(), *outside.values()), key=lambda unit: begin[id(unit)])

    def block_of(self, module: nn.Module) -> Block | None:
        """The block, among those that are pruned as such, that ``module`` is in."""
        blocks = (unit.block for unit in self.units if unit.block is not None)
        return next((block for block in blocks if any(part is module for part in block.module.modules())), None)

    def source(self, c: Candidate) -> str:
        """The name of the first layer that has the input of ``c``."""
        return self._sources.get(c.name, c.name)


def same(one: Any, other: Any) -> bool:
    """Whether two outputs of a model agree up to rounding; False if nothing in them can be compared."""
    ones, others = ([t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)] for output in (one, other))
    return bool(ones) and all(torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True) for a, b in zip(ones, others, strict=True))


def copied(values: Any) -> Any:
    """``values`` with copies of all tensors in them: a model may write into what it gets."""
    return pytree.tree_map_only(Tensor, torch.clone, values)


def moved(values: Any, device: torch.device | None) -> Any:
    """``values`` with all tensors in them on ``device``; None: as they are."""
    return values if device is None else pytree.tree_map_only(Tensor, lambda t: t.to(device), values)


@contextmanager
def on_device(module: nn.Module, device: torch.device | None) -> Iterator[None]:
    """Move ``module`` to ``device`` and back to where it was; one whose weights are on several devices stays."""
    homes = {t.device for t in (*module.parameters(), *module.buffers())}
    if device is None or len(homes) != 1 or homes == {device}:
        yield
        return
    module.to(device)
    try:
        yield
    finally:
        module.to(homes.pop())


def uncompiled() -> AbstractContextManager[Any]:
    """Compiled modules run as they were written: torch.compile would trace the relay and its hooks, again for each of them."""
    # without torch._dynamo, which takes a second to import, nothing is compiled
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def uncached_autocast() -> Iterator[None]:
    """Inside the caller's autocast, weights are cast at every use: its cache would not see that they are pruned."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
