"""Chains of linear layers whose hidden channels may change places without changing what the model computes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn

from ._tracing import Trace, has_hooks, is_plain_linear, trace
from .conv1d import is_conv1d
from .linear import NMWeight


@dataclass(frozen=True)
class Chain:
    """Linear layers that write, and those that read, one set of channels and nothing else does.

    With any permutation P of the channels, ``rows`` of the producers' weights and biases and ``columns`` of the consumers' weights
    taken in the order P leave the model's function as it is.

    Args:
        producers: names of the layers whose outputs the channels are.
        consumers: names of the layers whose inputs they are; a layer of a residual stream may be both.
        channels: how many there are.
    """

    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    channels: int


@dataclass
class _Space:
    """One set of channels: what writes it, what reads it, and what else touches it."""

    producers: set[str] = field(default_factory=set)
    consumers: set[str] = field(default_factory=set)
    obstacles: list[str] = field(default_factory=list)


def find_chains(model: nn.Module) -> tuple[list[Chain], dict[str, str]]:
    """Every chain that can be proved, and for each linear layer in none of them as a consumer the reason.

    Proved is what ``torch.fx`` shows of the largest modules that it can trace, in training and in eval mode, with optional arguments
    given and not: channels written only by plain linear layers, passed only through elementwise operations, read only by plain linear
    layers. All else is an obstacle: norms, reshapes, attention, softmax, a sum with a tensor of another origin (a residual stream),
    being stored by the forward pass, leaving the traced module, hooks, tied or computed or frozen weights, a module registered twice.
    A module that cannot be traced is taken to call its children, and not to reach into them for grandchildren or weights.

    Example:
        >>> find_chains(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        ([Chain(producers=('0',), consumers=('2',), channels=8)], {'0': 'its input comes from the input of the model'})
    """
    linears = {name: m for name, m in model.named_modules() if is_plain_linear(m)}
    traces, why = trace(model)
    spaces = _Channels(traces).spaces()
    unfit = _Fitness(model)
    chains: list[Chain] = []
    reasons: dict[str, str] = {}
    for space in spaces:
        members = sorted(space.producers | space.consumers)
        obstacles = [*space.obstacles, *(f"{name} {said}" for name in members if (said := unfit(linears[name])))]
        widths = {shape(linears[name])[0] for name in space.producers} | {shape(linears[name])[1] for name in space.consumers}
        if len(widths) > 1:
            obstacles.append(f"its layers differ in width: {sorted(widths)}")
        if obstacles or not space.producers or not space.consumers:
            reasons.update(dict.fromkeys(space.consumers, obstacles[0] if obstacles else "nothing produces its input"))
        else:
            chains.append(Chain(tuple(sorted(space.producers)), tuple(sorted(space.consumers)), widths.pop()))
    found = {name for chain in chains for name in chain.consumers}
    hidden = {name: why or "the module around it cannot be traced" for name in linears if name not in found | reasons.keys()}
    return sorted(chains, key=lambda c: c.consumers), {name: {**hidden, **reasons}[name] for name in linears if name not in found}


def shape(linear: nn.Module) -> tuple[int, int]:
    """``(out, in)`` of a linear layer, however it stores its weight."""
    weight = linear.weight
    assert isinstance(weight, Tensor)
    rows, cols = weight.shape
    return (cols, rows) if stored_transposed(linear) else (rows, cols)


def stored_transposed(linear: nn.Module) -> bool:
    """True where the parameter is ``(in, out)``."""
    return linear.transposed if isinstance(linear, NMWeight) else is_conv1d(linear)


@torch.no_grad()
def channel_parameters(model: nn.Module, chain: Chain) -> Iterator[tuple[nn.Parameter, int]]:
    """Every parameter that carries the channels of ``chain``, with the dimension they lie along."""
    for name in chain.producers:
        linear = model.get_submodule(name)
        assert isinstance(linear.weight, nn.Parameter)
        yield linear.weight, int(stored_transposed(linear))
        if isinstance(linear.bias, nn.Parameter):
            yield linear.bias, 0
    for name in chain.consumers:
        linear = model.get_submodule(name)
        assert isinstance(linear.weight, nn.Parameter)
        yield linear.weight, int(not stored_transposed(linear))


@torch.no_grad()
def reorder_(tensor: Tensor, dim: int, order: Tensor) -> None:
    """Take ``tensor`` along ``dim`` in ``order``, in place."""
    tensor.copy_(tensor.index_select(dim, order.to(tensor.device)))


class _Fitness:
    """Why one layer's weight may not be reordered, whatever its surroundings; empty where it may."""

    def __init__(self, model: nn.Module) -> None:
        self.places = Counter(id(child) for m in model.modules() for child in m._modules.values())
        tensors = [t for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        self.storages = Counter(_storage(t) for t in tensors if not isinstance(t, nn.parameter.UninitializedParameter))

    def __call__(self, linear: nn.Module) -> str:
        for key in ("weight", "bias"):
            p = linear._parameters.get(key)
            if p is None and (key == "weight" or getattr(linear, key, None) is not None):
                return f"computes its {key} from other tensors"
            if p is None:
                continue
            if isinstance(p, nn.parameter.UninitializedParameter):
                return "is not initialised yet"
            if self.storages[_storage(p)] > 1:
                return f"shares its {key} with another module"
            if not p.requires_grad:
                return f"is frozen: its {key} wants no gradient"
            if key == "weight" and p.dim() != 2:
                return "has a weight that is not a matrix"
        if (set(linear._parameters) | set(linear._buffers)) - {"weight", "bias"}:
            return "keeps further tensors beside its weight and bias"
        if self.places[id(linear)] > 1:
            return "is registered under several names"
        if "forward" in linear.__dict__:
            return "has its forward replaced"
        return "has hooks" if has_hooks(linear) else ""


def _storage(tensor: Tensor) -> tuple[object, ...]:
    # tensors without data of their own (meta, fake, wrapped) have no address that tells them apart
    pointer = 0 if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter) else tensor.untyped_storage().data_ptr()
    return (tensor.device, pointer) if pointer else (id(tensor),)


class _Channels:
    """Union-find over every tensor of the traces: what an elementwise operation connects has the same channels."""

    def __init__(self, traces: list[Trace]) -> None:
        self.parent: dict[object, object] = {}
        self.obstacles: list[tuple[object, str]] = []
        self.linears: set[str] = set()
        for t in traces:
            for node in t.nodes:
                self._visit(t, node)

    def _visit(self, t: Trace, node: fx.Node) -> None:
        kind = t.kind(node)
        if kind == "harmless":
            return
        inputs = [i for i in node.all_input_nodes if t.kind(i) != "harmless"]
        if kind == "linear":
            name = t.name(node)
            self.linears.add(name)
            for i in inputs:
                self._join(("in", name), self._key(t, i))
        elif kind == "elementwise":
            for i in inputs:
                self._join(self._key(t, node), self._key(t, i))
        else:
            said = t.describe(node)
            self.obstacles.append((self._key(t, node), f"its input comes from {said}"))
            self.obstacles += [(self._key(t, i), f"its input also goes to {said}") for i in inputs]

    @staticmethod
    def _key(t: Trace, node: fx.Node) -> object:
        return ("out", t.name(node)) if t.kind(node) == "linear" else node

    def _find(self, key: object) -> object:
        while self.parent.setdefault(key, key) != key:
            key = self.parent[key]
        return key

    def _join(self, a: object, b: object) -> None:
        self.parent[self._find(a)] = self._find(b)

    def spaces(self) -> list[_Space]:
        """The sets of channels that a linear layer writes or reads."""
        spaces: dict[object, _Space] = defaultdict(_Space)
        for name in sorted(self.linears):
            spaces[self._find(("out", name))].producers.add(name)
            spaces[self._find(("in", name))].consumers.add(name)
        for key, said in self.obstacles:
            if (root := self._find(key)) in spaces:
                spaces[root].obstacles.append(said)
        return list(spaces.values())
