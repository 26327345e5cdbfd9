"""Chains of linear layers, or of convolutions, whose hidden channels can be reordered without changing the model's output, as torch.fx
proves."""

from __future__ import annotations

import copy
import inspect
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..layouts import CONV1D, CONV2D, MATRICES
from .swap import is_conv1d
from .weight import NMWeight

MODULES = frozenset(
    {
        *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.LogSigmoid),
        *(nn.Softplus, nn.Softsign, nn.Softshrink, nn.Hardshrink, nn.Tanhshrink, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Threshold),
        *(nn.Identity, nn.Dropout, nn.AlphaDropout),
    }
)
"""Elementwise modules. Dropout is one in distribution: it draws its channels again at every call."""

FUNCTIONS = frozenset(
    {
        *(F.relu, F.relu6, F.gelu, F.silu, F.mish, F.elu, F.selu, F.celu, F.leaky_relu, F.tanh, F.sigmoid, F.logsigmoid, F.softplus),
        *(F.softsign, F.softshrink, F.hardshrink, F.tanhshrink, F.hardtanh, F.hardswish, F.hardsigmoid, F.threshold, F.dropout),
        *(torch.relu, torch.tanh, torch.sigmoid, torch.erf, torch.exp, torch.square, torch.sqrt, torch.pow, torch.abs, torch.neg),
        *(torch.add, torch.sub, torch.mul, torch.div, torch.clamp, torch.sin, torch.cos),
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg),
    }
)
METHODS = frozenset(
    {
        *("relu", "tanh", "sigmoid", "erf", "exp", "square", "sqrt", "pow", "abs", "neg", "add", "sub", "mul", "div", "clamp"),
        *("to", "float", "half", "bfloat16", "double", "type_as", "contiguous", "clone"),
    }
)
BATCH_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)
IMAGE_MODULES = frozenset(
    {
        *(*BATCH_NORMS, nn.MaxPool2d, nn.AvgPool2d, nn.LPPool2d, nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool2d, nn.Dropout2d),
        *(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, nn.ZeroPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d),
    }
)
"""Modules that treat each channel of an image separately, but not along its last dimension, where a linear layer's channels lie."""
IMAGE_FUNCTIONS = frozenset({F.max_pool2d, F.avg_pool2d, F.adaptive_max_pool2d, F.adaptive_avg_pool2d, F.interpolate, F.dropout2d})
HARMLESS = frozenset({"shape", "dtype", "device", "ndim"})
"""Attributes that do not depend on the order of channels."""

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""torch's own blocks, which fx cannot trace: linear2(dropout(activation(linear1(x))))."""


def is_plain_linear(module: nn.Module) -> bool:
    """True for layers whose GEMM is y = x Wᵀ + b and nothing else: ``nn.Linear`` itself, ``Conv1D`` itself, our sparse ones."""
    return type(module) is nn.Linear or is_conv1d(module) or (isinstance(module, NMWeight) and module.layout in MATRICES)


def is_plain_conv(module: nn.Module) -> bool:
    """True for ``nn.Conv2d`` itself and our sparse one, where each output sums over all channels."""
    sparse = isinstance(module, NMWeight) and module.layout == CONV2D
    return sparse or (type(module) is nn.Conv2d and module.groups == 1)


def is_depthwise(module: nn.Module) -> bool:
    """True for an ``nn.Conv2d`` that treats each channel separately."""
    return type(module) is nn.Conv2d and module.groups == module.in_channels == module.out_channels > 1


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks see the inputs, outputs or gradients of ``module``."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


@dataclass(frozen=True, eq=False)
class Trace:
    """One graph of one module, with the names of its submodules in the whole model."""

    nodes: list[fx.Node]
    where: str
    names: dict[str, str]
    modules: dict[str, nn.Module]

    def kind(self, node: fx.Node) -> str:
        """``"layer"`` (linear or a convolution), ``"elementwise"``, ``"image"`` (each channel of an image separately), ``"harmless"`` (no
        values are read), or ``"other"``."""
        target = node.target
        if node.op == "call_module":
            module = self.modules[str(target)]
            if is_plain_linear(module) or is_plain_conv(module):
                return "layer" if len(node.args) == 1 and not node.kwargs and isinstance(node.args[0], fx.Node) else "other"
            if has_hooks(module) or "forward" in module.__dict__:
                return "other"
            if type(module) in MODULES or (isinstance(module, nn.PReLU) and module.num_parameters == 1):
                return "elementwise"
            return "image" if type(module) in IMAGE_MODULES or is_depthwise(module) else "other"
        if node.op == "call_function" and target in IMAGE_FUNCTIONS:
            return "image"
        if (target is getattr and node.args[1] in HARMLESS) or (node.op == "call_method" and target in ("size", "dim")):
            return "harmless"
        known = {"call_method": METHODS, "call_function": FUNCTIONS}.get(node.op, ())
        return "elementwise" if target in known else "other"

    def describe(self, node: fx.Node) -> str:
        inside = self.where or "the model"
        if node.op == "call_module":
            module = self.modules[str(node.target)]
            return f"{self.names[str(node.target)]} ({type(module).__name__}{' with hooks' if has_hooks(module) else ''})"
        known = {"placeholder": f"the input of {inside}", "output": f"the output of {inside}", "get_attr": f"the tensor {node.target}"}
        return known.get(node.op) or f"{getattr(node.target, '__name__', node.target)} in {inside}"


class _Tracer(fx.Tracer):
    """Goes into every module but torch's own, linear layers, those that could not be traced, and those with hooks, which it cannot see."""

    def __init__(self, opaque: set[int]) -> None:
        super().__init__()
        self.opaque, self.entered = opaque, set[int]()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if id(m) in self.opaque or has_hooks(m) or isinstance(m, (nn.Linear, nn.Conv2d, NMWeight)) or is_conv1d(m):
            return True
        return bool(super().is_leaf_module(m, module_qualified_name))

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if not self.is_leaf_module(m, self.path_of_module(m)):
            self.entered.add(id(m))
        return super().call_module(m, forward, args, kwargs)


def trace(model: nn.Module) -> tuple[list[Trace], str]:
    """Graphs of the largest modules of ``model`` that can be traced, in every mode, or why there are none.

    It traces a copy of the modules (not of their tensors), so that nothing that a forward pass stores is stored in the model.
    """
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    try:
        skeleton = copy.deepcopy(model, dict(tensors))
    except Exception as error:
        return [], f"copying its modules failed: {type(error).__name__}"
    names = {id(m): name for name, m in skeleton.named_modules()}
    places = Counter(id(child) for m in skeleton.modules() for child in m._modules.values())
    opaque: set[int] = set()
    traces_of: dict[int, list[Trace]] = {}
    for module in reversed(list(skeleton.modules())):  # children first
        if is_plain_linear(module) or isinstance(module, (nn.Conv2d, *CONTAINERS)):
            continue
        if type(module) in BLOCKS and "forward" not in module.__dict__:
            traces_of[id(module)] = [_block(module, names)]
            opaque.add(id(module))
            continue
        try:
            graphs = list(_graphs(module, opaque))
        except Exception:  # a forward pass may raise anything when its inputs are placeholders
            opaque.add(id(module))
            continue
        if any(_keeps_proxy(value) for m in module.modules() for value in vars(m).values()):
            opaque.add(id(module))  # readers of what a forward pass stores are not in the graph
            continue
        inner = dict(module.named_modules())
        paths = {path: names[id(m)] for path, m in inner.items()}
        traces_of[id(module)] = [Trace(nodes, names[id(module)], paths, inner) for nodes, _ in graphs]
        # a module that was traced as part of this one needs no graph of its own, unless others call it too
        for child in set.intersection(*(entered for _, entered in graphs)):
            if places[child] == 1:
                traces_of.pop(child, None)
    return [t for traces in traces_of.values() for t in traces], ""


def _keeps_proxy(value: object, depth: int = 3) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    inside = isinstance(value, (list, tuple, set)) and depth > 0 and any(_keeps_proxy(v, depth - 1) for v in value)
    return isinstance(value, fx.Proxy) or inside


def _graphs(module: nn.Module, opaque: set[int]) -> Iterator[tuple[list[fx.Node], set[int]]]:
    """The nodes of every path through ``module``, and the modules that it traced into."""
    parameters = inspect.signature(module.forward).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    was = {m: m.training for m in module.modules()}
    try:
        for training in (True, False):
            module.train(training)
            for concrete in ({}, defaults) if defaults else ({},):
                tracer = _Tracer(opaque)
                yield list(tracer.trace(module, concrete_args=dict(concrete) or None).nodes), tracer.entered
    finally:
        for m, mode in was.items():
            m.training = mode


def _block(module: nn.Module, names: dict[int, str]) -> Trace:
    """The feed-forward part of one of torch's transformer blocks, as a graph."""
    graph = fx.Graph()
    activation: Any = module.activation
    modules = {**dict(module.named_modules()), "activation": activation}
    hidden = graph.call_module("linear1", (graph.placeholder("x"),))
    hidden = graph.call_module("activation", (hidden,)) if isinstance(activation, nn.Module) else graph.call_function(activation, (hidden,))
    graph.output(graph.call_module("linear2", (graph.call_module("dropout", (hidden,)),)))
    paths = {path: names.get(id(m), path) for path, m in modules.items()}
    return Trace(list(graph.nodes), names[id(module)], paths, modules)


@dataclass(frozen=True)
class Chain:
    """Names of the layers, linear ones or convolutions, that write a set of ``channels``, and of those that read it; nothing else does, and
    one layer may do both.

    For any permutation P of the channels, the model computes the same with the rows of the producers' weights and biases and the columns
    of the consumers' weights taken in the order P; and so the tensors of modules ``between`` convolutions that have an entry for each
    channel (batch norms, depthwise convolutions).
    """

    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    channels: int
    between: tuple[str, ...] = ()


def find_chains(model: nn.Module) -> tuple[list[Chain], dict[str, str]]:
    """Every chain that can be proved, and the reason for each linear layer and convolution that is no chain's consumer.

    The proof is by ``torch.fx``, on the largest modules that it can trace, in training and in eval mode, with and without optional
    arguments: only plain linear layers write the channels, only elementwise operations pass them on, only plain linear layers read them.
    The same goes for convolutions, where operations on single channels may lie between too, such as pooling and batch norms. Anything
    else is an obstacle. A module that cannot be traced is taken to call its children, and not to reach into them for grandchildren or
    weights.

    Example:
        >>> find_chains(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        ([Chain(producers=('0',), consumers=('2',), channels=8, between=())], {'0': 'its input comes from the input of the model'})
    """
    layers = {name: m for name, m in model.named_modules() if is_plain_linear(m) or is_plain_conv(m)}
    traces, why = trace(model)
    unfit = _fitness(model)
    chains: list[Chain] = []
    reasons: dict[str, str] = {}
    for producers, consumers, between, obstacles in _spaces(traces):
        involved = sorted({*producers, *consumers, *between})
        obstacles += [f"{name} {reason}" for name in involved if (reason := unfit(model.get_submodule(name)))]
        images = sorted({is_plain_conv(layers[name]) for name in (*producers, *consumers)})
        if len(images) > 1:
            obstacles.append("linear layers and convolutions have their channels along different dimensions")
        chain = Chain(tuple(producers), tuple(consumers), 0, tuple(between))
        widths = set() if obstacles else {p.shape[dim] for p, dim in channel_parameters(model, chain)}
        if len(widths) > 1:
            obstacles.append(f"its layers differ in width: {sorted(widths)}")
        if obstacles or not producers or not consumers:
            reasons.update(dict.fromkeys(consumers, obstacles[0] if obstacles else "nothing produces its input"))
        else:
            chains.append(replace(chain, channels=widths.pop()))
    in_chains = {name for chain in chains for name in chain.consumers}
    hidden = {name: why or "the module around it cannot be traced" for name in layers if name not in in_chains | reasons.keys()}
    return sorted(chains, key=lambda c: c.consumers), {name: {**hidden, **reasons}[name] for name in layers if name not in in_chains}


def channel_parameters(model: nn.Module, chain: Chain) -> Iterator[tuple[Tensor, int]]:
    """Every Parameter, and buffer of a batch norm, that has the channels of ``chain``, with the dimension along which they lie."""
    for names, writes in ((chain.producers, True), (chain.consumers, False)):
        for name in names:
            linear: Any = model.get_submodule(name)
            transposed = linear.layout == CONV1D if isinstance(linear, NMWeight) else is_conv1d(linear)
            yield linear.weight, int(transposed == writes)
            if writes and linear.bias is not None:
                yield linear.bias, 0
    for name in chain.between:
        module: Any = model.get_submodule(name)
        yield from ((t, 0) for key in TENSORS if (t := getattr(module, key, None)) is not None)


@torch.no_grad()
def reorder_(tensor: Tensor, dim: int, order: Tensor) -> None:
    """Take ``tensor`` along ``dim`` in ``order``, in place."""
    tensor.copy_(tensor.index_select(dim, order.to(tensor.device)))


TENSORS = ("weight", "bias", "running_mean", "running_var")
"""The tensors of a layer, or a batch norm, with an entry for each channel."""


def _fitness(model: nn.Module) -> Callable[[nn.Module], str]:
    """A function that says why a layer's weight may not be reordered, whatever the model around it; empty where it may."""
    places = Counter(id(child) for m in model.modules() for child in m._modules.values())
    tensors = [t for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    storages = Counter(_storage(t) for t in tensors if not isinstance(t, nn.parameter.UninitializedParameter))

    def unfit(layer: nn.Module) -> str:
        norm = isinstance(layer, BATCH_NORMS)
        dims = 1 if norm else 4 if is_plain_conv(layer) or is_depthwise(layer) else 2
        for key in ("weight", "bias"):
            p = layer._parameters.get(key)
            if p is None and ((key == "weight" and not norm) or getattr(layer, key, None) is not None):
                return f"computes its {key} from other tensors"
            if p is None:
                continue
            if isinstance(p, nn.parameter.UninitializedParameter):
                return "is not initialised yet"
            if storages[_storage(p)] > 1:
                return f"shares its {key} with another module"
            if not p.requires_grad:
                return f"is frozen: its {key} has requires_grad=False"
            if key == "weight" and p.dim() != dims:
                return f"has a weight that is not of {dims} dimensions"
        if (set(layer._parameters) | set(layer._buffers)) - {*TENSORS, "num_batches_tracked"}:
            return "keeps further tensors with its weight and bias"
        if places[id(layer)] > 1:
            return "is registered under several names"
        if "forward" in layer.__dict__:
            return "has its forward replaced"
        return "has hooks" if has_hooks(layer) else ""

    return unfit


def _storage(tensor: Tensor) -> tuple[object, ...]:
    # tensors without data of their own (meta, fake, wrapped) have no address that tells them apart
    pointer = 0 if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter) else tensor.untyped_storage().data_ptr()
    return (tensor.device, pointer) if pointer else (id(tensor),)


def _spaces(traces: list[Trace]) -> list[tuple[list[str], list[str], list[str], list[str]]]:
    """The sets of channels that layers touch: for each the sorted names of its writers, of its readers and of the modules between with
    tensors for each channel, and the obstacles. Tensors that an elementwise operation connects have the same channels."""
    parents: dict[object, object] = {}
    obstacles: list[tuple[bool, object, str]] = []
    """Each with whether it is one only where the channels are those of linear layers."""
    layers: dict[str, nn.Module] = {}
    between: set[str] = set()

    def root(key: object) -> object:
        while parents.setdefault(key, key) != key:
            key = parents[key]
        return key

    def channels(t: Trace, node: fx.Node) -> object:
        return ("out", t.names[str(node.target)]) if t.kind(node) == "layer" else node

    def join(a: object, b: object) -> None:
        parents[root(a)] = root(b)

    nodes = [(t, node) for t in traces for node in t.nodes if t.kind(node) != "harmless"]
    for t, node in nodes:
        kind, key = t.kind(node), channels(t, node)
        inputs = [channels(t, i) for i in node.all_input_nodes if t.kind(i) != "harmless"]
        if node.op == "get_attr" and any(t.kind(user) != "harmless" for user in node.users):
            owner, _, attribute = str(node.target).rpartition(".")
            reason = f"the {attribute} of {t.names.get(owner)} is read outside that layer too"
            obstacles += [(False, (end, t.names.get(owner)), reason) for end in ("in", "out", "between")]
        if kind == "layer":
            name = t.names[str(node.target)]
            layers[name] = t.modules[str(node.target)]
            key = "in", name
        if kind == "other":
            obstacles.append((False, key, f"its input comes from {t.describe(node)}"))
            obstacles += [(False, i, f"its input also goes to {t.describe(node)}") for i in inputs]
            continue
        for i in inputs:
            join(key, i)
        if kind == "image":
            obstacles.append((True, key, f"its input comes from {t.describe(node)}"))
            if node.op == "call_module" and {*t.modules[str(node.target)]._parameters, *t.modules[str(node.target)]._buffers}:
                name = t.names[str(node.target)]
                between.add(name)
                join(("between", name), key)
    spaces: dict[object, tuple[list[str], list[str], list[str], list[str]]] = defaultdict(lambda: ([], [], [], []))
    linear: set[object] = set()
    for name in sorted(layers):
        for end, names in (("out", 0), ("in", 1)):
            spaces[root((end, name))][names].append(name)
            if not is_plain_conv(layers[name]):
                linear.add(root((end, name)))
    for name in sorted(between):
        if (place := root(("between", name))) in spaces:
            spaces[place][2].append(name)
    for of_linear, key, reason in sorted(obstacles, key=lambda o: o[0]):
        if (place := root(key)) in spaces and (not of_linear or place in linear):
            spaces[place][3].append(reason)
    return list(spaces.values())
