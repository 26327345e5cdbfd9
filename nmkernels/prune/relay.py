"""Block by block through the model's own forward pass.

The model calls its blocks itself. Blocks that are finished answer from a store, the present one runs, and then the pass stops. So nothing
of a block's arguments is copied or guessed: masks, positions, caches and cross-attention come from the model at every pass.

What blocks tell each other in another way than by their outputs is not in the store: keys and values that later layers share, an attribute
that the model reads afterwards. So the relay first replays the dense model on two batches and compares what every layer gets. Where that
differs, nothing answers from a store, and each pass runs the whole model.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from ..export.tensors import first_line
from ..pattern import CheckpointError, NMError, RecipeError
from ..train.sparsify import LayerCandidate
from .data import call, copied, described, moved, padding, size_of
from .hessians import windows_of

log = logging.getLogger("nmkernels.prune")
log.addHandler(logging.NullHandler())

Forward = Callable[[nn.Module, Any], Any]
"""``forward(model, batch)``: runs the model on one batch of the user's data."""
TRIAL = 2
"""Batches on which the relay is compared with the model: a second one shows whether a block reuses what the first one left behind."""


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
    layers: list[LayerCandidate] = field(default_factory=list)
    block: Block | None = None
    until: Block | None = None


def block_lists(model: nn.Module, layers: Sequence[LayerCandidate], names: Sequence[str] | None = None) -> dict[str, list[nn.Module]]:
    """The lists of blocks of ``model``: every outermost ``ModuleList`` or ``Sequential`` of two or more modules of at most two classes that
    have layers to prune inside; or the modules ``names``, whose children are the blocks.
    """
    modules = dict(model.named_modules())
    if names is not None:
        for name in names:
            if name not in modules or not list(modules[name].children()):
                raise RecipeError(f"prune_: blocks={list(names)}: the model has no module {name!r} with children, whose blocks these are.")
        return {name: list(modules[name].children()) for name in names}
    layer_ids = {id(c.module) for c in layers}
    lists: dict[str, list[nn.Module]] = {}
    inside: set[int] = set()
    for name, module in modules.items():
        if id(module) in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = list(module)
        alike = len({type(child) for child in children}) <= (2 if isinstance(module, nn.ModuleList) else 1)
        if len(children) < 2 or not alike or any(id(child) in layer_ids or isinstance(child, nn.ModuleList) for child in children):
            continue
        if any(id(part) in layer_ids for child in children for part in child.modules()):
            lists[name] = children
            inside |= {id(part) for part in module.modules()}
    return lists


class Relay:
    """Runs ``batches`` through ``model`` one block at a time.

    Args:
        layers: those to prune.
        forward: runs the model on one batch.
        blocks: see ``block_lists``.
        device: where blocks run; None: where they are.
        resident: a context in which the weights of a module are on that device, entered again inside too; default ``on_device``.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[LayerCandidate],
        batches: Sequence[Any],
        forward: Forward,
        blocks: Sequence[str] | None = None,
        device: torch.device | None = None,
        resident: Callable[[nn.Module], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.model, self.layers, self.batches, self.forward = model, layers, batches, forward
        self.device, self.resident = device, resident or partial(on_device, device=device)
        lists = block_lists(model, layers, blocks)
        self.blocks = [Block(f"{name}.{i}", block, name) for name, members in lists.items() for i, block in enumerate(members)]
        self.units: list[Unit] = []  # in the order in which the model runs them
        self.idle: list[LayerCandidate] = []  # the layers outside blocks that the first batches did not reach
        self.rereads = False  # whether the model reads outputs of blocks that are not the last of their list, so that all are stored
        self.whole = ""  # why no block can answer from a store, so that each pass runs the whole model
        self.behaviour: dict[str, float] = {}  # of each layer a number that its inputs in the first batches give
        self.sources = {c.name: c.name for c in layers}  # of each layer the first one that has its input
        self.block_of: dict[nn.Module, Block] = {}  # the block that a module is in, among those that are pruned as such
        self._events: list[Block | LayerCandidate] = []
        self._batch = 0
        self._target: Block | None = None
        self._until: Block | None = None
        self._outputs: list[Any] = []
        # of the last finished block of each list, from which the model reads on, and the blocks before it answer with the same; or of each
        self._answers: dict[str, list[Any]] = {}

    # ---- passes

    def work(self, unit: Unit) -> float:
        """About the floating-point operations of one token in a pass for ``unit``, by the weights."""
        parts = [self.model] if self.whole else [unit.block.module] if unit.block else dict.fromkeys(c.module for c in unit.layers)
        return 2.0 * sum(p.numel() for part in parts for p in part.parameters())

    @contextmanager
    def running(self) -> Iterator[None]:
        """The relay answers for the model's blocks; the model is in eval mode, without gradients. Everything is restored at the end."""
        modes, cached = {module: module.training for module in self.model.modules()}, torch.is_autocast_cache_enabled()
        before = {block.module: block.module.__dict__.get("forward") for block in self.blocks}
        try:
            self.model.eval()
            for block in self.blocks:
                block.module.__dict__["forward"] = partial(self._call, block, block.module.forward)
            # torch.compile would trace the relay and its hooks; without torch._dynamo, which takes a second to import, nothing is compiled
            as_written = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
            # inside the caller's autocast, weights are cast at every use: its cache would not see that they are pruned
            torch.set_autocast_cache_enabled(False)
            torch.clear_autocast_cache()
            with torch.inference_mode(False), torch.no_grad(), as_written:
                yield
        finally:
            torch.set_autocast_cache_enabled(cached)
            for module, forward in before.items():
                module.__dict__.pop("forward", None)
                if forward is not None:
                    module.__dict__["forward"] = forward
            for module, mode in modes.items():
                module.training = mode

    def _call(self, block: Block, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._events.append(block)
        if block.finished:
            return copied(self._answers[block.name if self.rereads else block.list_name][self._batch])
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

    def run(self, unit: Unit, did: Callable[[float], object] = lambda work: None) -> None:
        """One pass over all batches, as far as ``unit``; the outputs of its block replace those of the pass before.

        ``did`` is called after each batch with its work.
        """
        self._target, self._until, self._outputs = (None, None, []) if self.whole else (unit.block, unit.until, [])
        work = self.work(unit)
        for number, batch in enumerate(self.batches):
            self._batch, self._events = number, []
            with suppress(_Stop):
                self.forward(self.model, copied(batch))
            did(work * size_of(batch))
        if unit.block is not None and not self.whole and len(self._outputs) != len(self.batches):
            raise RecipeError(
                f"prune_: block {unit.block.name!r} ran in {len(self._outputs)} of {len(self.batches)} batches only; pass blocks=[] to "
                "prune without blocks."
            )

    def finish(self, unit: Unit) -> None:
        """From now on the block of ``unit`` answers with the outputs of its last pass, if blocks can."""
        block, outputs, self._outputs = unit.block, self._outputs, []
        if block is not None and not self.whole:
            self._answers[block.name if self.rereads else block.list_name], block.finished = outputs, True

    def tokens(self, x: Tensor) -> tuple[int, Tensor | None]:
        """(the number of the batch that the present pass runs, from 1; which rows of a layer's input ``x`` are tokens)."""
        return self._batch + 1, padding(self.model, self.batches[self._batch], x)

    def output(self, number: int) -> Any:
        """The model's output for batch ``number``, from 0."""
        self._target = self._until = None
        self._batch, self._events = number, []
        return self.forward(self.model, copied(self.batches[number]))

    # ---- the order

    def trace(self) -> None:
        """Run the first batches to find the order of blocks and layers and which layers have one input, and prove that blocks can answer.

        Modules that run more than once in a pass do not count as blocks. Where the model reads outputs of earlier blocks again (in a
        multi-modal model those of the last but one block of its vision tower, for instance), those of all blocks are stored.
        """
        batches, self.batches = self.batches, self.batches[:TRIAL]
        try:
            inputs, outputs = self._original()
            self.behaviour = {name: sum(float(t.norm()) for t, _ in sketches) for name, sketches in inputs.items()}
            if not any(unit.block for unit in self.units):
                return
            different = self._difference(inputs, outputs)
            if different:
                self.rereads = True
                different = self._difference(inputs, outputs)
            self.whole = different
            if self.rereads and not self.whole:
                log.info("the model reads outputs of earlier blocks again, so those of all blocks are kept in memory")
        finally:
            self.batches = batches

    def _original(self) -> tuple[dict[str, Sketches], Sketches]:
        """What every layer gets and what the model returns, in whole passes; finds the units."""
        first: list[Block | LayerCandidate] = []
        calls: Counter[int] = Counter()
        outputs: Sketches = []
        with self._noting(self.layers) as (inputs, numbers), finite_weights(self.model, self.layers):
            for number, batch in enumerate(self.batches):
                try:
                    output = self.output(number)
                except Exception as error:
                    if isinstance(error, (NMError, torch.OutOfMemoryError)) or self.forward is not call:
                        raise
                    raise RecipeError(
                        f"prune_: the model cannot run batch {number + 1} of data, {described(batch)}: {first_line(error, typed=True)}. A "
                        "batch is what the model takes: a mapping of keyword arguments, a tuple of arguments, or a tensor; "
                        "forward=lambda model, batch: ... calls it in another way."
                    ) from error
                outputs += sketch(output)
                first = first or self._events
                calls |= Counter(map(id, self._events))
        repeated = {block.list_name for block in self.blocks if calls[id(block)] > 1}
        known = [block for block in self.blocks if block.list_name not in repeated and block in first]
        same: dict[tuple[object, ...], str] = {}
        reached = [c for c in self.layers if c.name in numbers]
        self.sources |= {c.name: same.setdefault((windows_of(c), *numbers[c.name]), c.name) for c in reached}
        self._order(first, known)
        return inputs, outputs

    def _difference(self, inputs: dict[str, Sketches], outputs: Sketches) -> str:
        """Replay the batches as pruning will, with dense weights: the first thing that is not as in whole passes, or ""."""
        try:
            for unit in self.units:
                with self.resident(unit.block.module) if unit.block else nullcontext(), self._noting(unit.layers) as (present, _):
                    self.run(unit)
                self.finish(unit)
                for c in unit.layers:
                    if not alike(present.get(c.name, []), inputs.get(c.name, [])):
                        return f"layer {c.name!r} gets other inputs when blocks before it answer from a store"
            again = [each for number in range(len(self.batches)) for each in sketch(self.output(number))]
            return "" if alike(again, outputs) else "the model has other outputs when its blocks answer from a store"
        except (CheckpointError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            return f"when blocks answer from a store, {first_line(error, typed=True)}"
        finally:
            self._answers, self._outputs = {}, []
            for block in self.blocks:
                block.finished = False

    @contextmanager
    def _noting(self, layers: Sequence[LayerCandidate]) -> Iterator[tuple[dict[str, Sketches], dict[str, list[int]]]]:
        """Note what ``layers`` get in the passes inside, by name: the sketches of all tensors, call by call; and of each call the number of
        the call that first got the same tensor.
        """
        inputs: dict[str, Sketches] = {}
        numbers: dict[str, list[int]] = {}
        seen, calls = WeakTensorKeyDictionary(), count()

        def note(c: LayerCandidate, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._events.append(c)
            inputs.setdefault(c.name, []).extend(sketch((args, kwargs)))
            x, number = next(iter((*args, *kwargs.values())), None), next(calls)
            if isinstance(x, Tensor):
                version, first = seen.get(x, (None, 0))
                if version == x._version:
                    number = first
                else:
                    seen[x] = x._version, number
            numbers.setdefault(c.name, []).append(number)

        hooks = [c.module.register_forward_pre_hook(partial(note, c), with_kwargs=True) for c in layers]
        try:
            yield inputs, numbers
        finally:
            for hook in hooks:
                hook.remove()

    def _order(self, events: list[Block | LayerCandidate], blocks: list[Block]) -> None:
        first = {id(event): number for number, event in reversed(list(enumerate(events)))}
        last = {id(event): number for number, event in enumerate(events)}
        self.block_of = {part: block for block in blocks for part in block.module.modules()}
        units = {id(block): Unit(block.name, block=block) for block in blocks}
        begin = {id(unit): first[id(unit.block)] for unit in units.values()}
        outside: dict[str, Unit] = {}
        for c in self.layers:
            if (block := self.block_of.get(c.module)) is not None:
                units[id(block)].layers.append(c)  # an expert that only later batches reach among them
            elif id(c) not in first:
                self.idle.append(c)
            else:
                unit = outside.setdefault(self.sources[c.name], Unit(self.sources[c.name]))
                unit.layers.append(c)
                begin[id(unit)] = min(begin.get(id(unit), len(events)), first[id(c)])
        for unit in outside.values():
            end = max(last[id(c)] for c in unit.layers)
            later = [block for block in blocks if first[id(block)] > end]
            unit.until = min(later, key=lambda block: first[id(block)], default=None)
        self.units = sorted((*units.values(), *outside.values()), key=lambda unit: begin[id(unit)])


@contextmanager
def on_device(module: nn.Module, device: torch.device | None) -> Iterator[None]:
    """Move ``module`` to ``device`` and back to where it was; one that is there, or whose weights are on several devices, stays."""
    homes = {t.device for t in (*module.parameters(), *module.buffers())}
    if device is None or len(homes) != 1 or homes == {device}:
        yield
        return
    module.to(device)
    try:
        yield
    finally:
        module.to(homes.pop())


# ---- the trial: what layers get in a pass, in short, so that two passes can be compared without keeping their tensors

VECTORS = 4
"""Fixed random vectors whose products with a tensor's rows stand for it; a difference is orthogonal to all of them by chance only."""
NARROW, WIDE = 2e-2, 1e-3
"""The relative difference of two passes that is rounding, with 16-bit numbers and with others."""
LARGEST = 1e15
"""Logits are masked by the least number of their dtype, whose products would be infinite."""
Sketches = list[tuple[Tensor, float]]
"""(products, the relative difference that is rounding) of each tensor."""


def sketch(values: Any) -> Sketches:
    """The sketches of all tensors in ``values``: of t ``(..., d)`` the products t V, V ``(d, VECTORS)``, in fp32; NaN and inf are 0."""
    return [(_products(t.detach()), NARROW if t.dtype.itemsize == 2 else WIDE) for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]


def _products(t: Tensor) -> Tensor:
    if not t.numel():
        return torch.zeros(0, VECTORS)
    t = torch.view_as_real(t) if t.is_complex() else t
    rows = t.reshape(-1, t.shape[-1] if t.dim() else 1).to(torch.float32).nan_to_num(0.0, 0.0, 0.0)
    rows = rows.clamp(-LARGEST, LARGEST)
    vectors = torch.randn(rows.shape[1], VECTORS, generator=torch.Generator().manual_seed(0))
    with torch.autocast(t.device.type, enabled=False):
        return (rows @ vectors.to(t.device)).cpu()


def alike(one: Sketches, other: Sketches) -> bool:
    """Whether the tensors are the same up to rounding."""
    return len(one) == len(other) and all(
        a.shape == b.shape and float((a - b).norm()) <= most * float(b.norm()) for (a, most), (b, _) in zip(one, other, strict=True)
    )


@contextmanager
def finite_weights(model: nn.Module, layers: Sequence[LayerCandidate]) -> Iterator[None]:
    """Raise RecipeError if a module that runs inside has a weight with NaN, or one of ``layers`` with inf."""
    pruned = {(c.module, c.key) for c in layers}
    seen = set[nn.Module]()

    def check(name: str, module: nn.Module, args: Any) -> None:
        if module in seen:
            return
        seen.add(module)
        for key, weight in module._parameters.items():
            if weight is None or not weight.is_floating_point() or weight.is_meta:
                continue
            wrong = ~weight.isfinite() if (module, key) in pruned else weight.isnan()
            if many := int(wrong.sum()):
                raise RecipeError(
                    f"prune_: the weight {f'{name}.{key}' if name else key!r} has {many} elements that are "
                    f"{'NaN or infinite' if (module, key) in pruned else 'NaN'}; load or train the model again. A weight of float16 may "
                    "have overflowed."
                )

    hooks = [m.register_forward_pre_hook(partial(check, name)) for name, m in model.named_modules() if m._parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
