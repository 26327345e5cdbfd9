"""A whole training step in a CUDA graph: what the graph repeats, and what the host still does after each replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..pattern import NMError, RecipeError, ShapeError
from . import step as steps
from .handle import Handle
from .run import Recorded


class CapturedStep:
    """A training step that is captured in a CUDA graph and replayed, while the recipe continues as in an eager run.

    The graph has forward pass, backward pass and update, with masks, decay and statistics. What a recipe decides between two steps (counts,
    phases, AutoSwitch, renewed masks and noise) is done on the host after each replay. Weights, moments, metrics and checkpoints are those
    of the eager run, bit for bit. The first ``warm_up`` calls run eagerly, and so do those after each change of what training does (a new
    phase, a loaded checkpoint, ``handle.renew_masks()``), after which the step is captured again. On a CPU every call is eager.

    Args:
        handle: of a model whose optimizers are attached, on one GPU, without sharded weights.
        step: one whole step: forward, backward, ``optimizer.step()``, ``optimizer.zero_grad()``; with autocast, clipping, accumulation and
            a ``GradScaler`` inside if they are used. It steps each optimizer at most once and reads nothing back from the device.
        warm_up: eager calls before each capture, at least 1.

    Calling it takes the arguments of ``step``, tensors always of the same sizes, and returns what ``step`` returns, tensors as detached
    copies. ``step`` may still be called itself between two calls, for a smaller last batch for instance.

    Raises:
        RecipeError: no optimizer is attached, one was built without ``capturable=True``, a number of a parameter group was changed after
            the capture (give a learning rate with a schedule as a tensor on the GPU), the weights are sharded, the recipe is finished, or
            ``step`` cannot be captured.
        ShapeError: sizes, dtypes or other arguments differ from those of the first call.

    Example:
        >>> from nmkernels import sparsify_
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> handle = sparsify_(model, "fst:2:4(total_steps=100)")
        >>> optimizer = handle.attach(handle.recipe.optimizer(model.parameters(), lr=torch.tensor(1e-3), capturable=True))
        >>> def step(x):
        ...     loss = model(x).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     return loss
        >>> captured = CapturedStep(handle, step)
        >>> losses = [captured(torch.ones(8, 64)) for _ in range(5)]
        >>> bool(losses[4] < losses[0]), handle.state["t"].item()
        (True, 5.0)
    """

    def __init__(self, handle: Handle, step: Callable[..., Any], warm_up: int = 3) -> None:
        if warm_up < 1:
            raise RecipeError(f"CapturedStep: warm_up={warm_up} must be at least 1: the first call loads kernels, which no capture can.")
        self.handle, self.step, self.warm_up = handle, step, warm_up
        self.device = next(iter(handle.layers.values())).parameter.device
        self._stream: Any = None
        self._form: Any = None
        self._inputs: list[Tensor] = []
        self._args: tuple[Any, ...] = ()
        self._forget()

    @property
    def captured(self) -> bool:
        """Whether the next call replays a graph, unless something has changed what training does."""
        return self._graph is not None

    def __call__(self, *args: Any) -> Any:
        if not _can_capture(self.device):
            return self.step(*args)
        run = self.handle.run
        if self.handle.finished or not run.attachments:
            reason = "the recipe is finished." if self.handle.finished else "call handle.attach(optimizer) first."
            raise RecipeError(f"CapturedStep: {reason}")
        self._load(args)
        if run.revision != self._revision:
            self._forget()
        for (layer, name), value in self._held.items():  # what was renewed since the capture goes to the memory that the graph reads
            if (new := getattr(layer, name)) is not value:
                value.copy_(new)
                layer.hold({name: value})
        if self._graph is not None and self._addresses() != self._known:
            self._forget()
        if self._graph is None:
            self._check()
            if self._eager < self.warm_up:
                self._eager += 1
                # on the stream of the capture, so that whatever autograd and libraries keep for a stream exists there
                current = torch.cuda.current_stream(self.device)
                self._stream = self._stream or torch.cuda.Stream(self.device)
                self._stream.wait_stream(current)
                with torch.cuda.stream(self._stream):
                    result = self.step(*self._args)
                current.wait_stream(self._stream)
                return _copied(result)
            self._capture()
        for a, *_ in self._steps:
            steps.before(a, closure=True)
        for name, value in self._numbers():
            if self._constants[name] != value:
                raise RecipeError(
                    f"CapturedStep: {name} is {value!r} now and was {self._constants[name]!r} at the capture, which has it as a constant. "
                    "Build the optimizer with a tensor on the GPU, lr=torch.tensor(1e-3, device='cuda') for instance: schedulers write "
                    "into it. After a single change, make a new CapturedStep."
                )
        self._graph.replay()
        with torch.no_grad():
            for a, stats, a.numel, found_inf in self._steps:
                # a copy, since the next replay overwrites them
                steps.finish_step(a, None if stats is None else stats.clone(), found_inf)
        return _copied(self._result)

    # ---- the graph

    def _forget(self) -> None:
        """Drop the graph, if there is one; the next calls are eager."""
        if getattr(self, "_graph", None) is not None:
            torch.cuda.synchronize(self.device)  # its last replay may still run
        self._graph: Any = None
        self._steps: list[Recorded] = []
        self._result: Any = None
        self._held: dict[tuple[Any, str], Tensor] = {}
        self._known: tuple[int, ...] = ()
        self._constants: dict[str, Any] = {}
        self._revision, self._eager = self.handle.run.revision, 0

    def _capture(self) -> None:
        run = self.handle.run
        graph, run.recording = torch.cuda.CUDAGraph(), []
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                result = self.step(*self._args)
            recording = run.recording
        except NMError:
            raise
        except RuntimeError as error:
            raise RecipeError(
                "CapturedStep: the step cannot be captured: something in it waits for the GPU, as .item(), .cpu(), printing or comparing a "
                "tensor do, and a GradScaler with an optimizer that leaves skipping to it (MaskedAdamW and fused=True do not). See the "
                f"error above this one: {error}"
            ) from error
        finally:
            run.recording = None
        if not recording or len({id(a) for a, *_ in recording}) < len(recording):
            count = "an optimizer more than once" if recording else "no attached optimizer"
            raise RecipeError(f"CapturedStep: the function steps {count}. It has to be one whole training step, with optimizer.step().")
        self._graph, self._steps = graph, recording
        self._result = pytree.tree_map_only(Tensor, Tensor.detach, result)  # without the nodes of autograd, which would stay otherwise
        self._held = {(run.layers[name], key): getattr(run.layers[name], key) for name, keys in run.held.names.items() for key in keys}
        self._known, self._constants = self._addresses(), dict(self._numbers())

    # ---- what the graph takes for granted

    def _check(self) -> None:
        """Raise ``RecipeError`` where a graph would be wrong."""
        if self.handle.run.sharded:
            raise RecipeError("CapturedStep: sharded weights are gathered by Python code between kernels; train them without a graph.")
        for optimizer in self.handle.run.optimizers:
            if any(group.get("capturable") is False for group in optimizer.param_groups):
                kind = type(optimizer).__name__
                raise RecipeError(f"CapturedStep: {kind} counts its steps on the host; build it with {kind}(..., capturable=True).")
        for name, value in self._settings():
            if isinstance(value, Tensor) and value.device != self.device:
                raise RecipeError(
                    f"CapturedStep: {name} is a tensor on {value.device}, which a graph cannot read; put it on {self.device}."
                )

    def _load(self, args: tuple[Any, ...]) -> None:
        """Copy the arguments into the memory that the graph reads."""
        leaves, tree = pytree.tree_flatten(args)
        form = tree, [(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves]
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if any(x.requires_grad for x in tensors):
            raise RecipeError("CapturedStep: an argument requires a gradient; compute it inside the step, which has to be the whole one.")
        if self._form is None:
            self._form, self._inputs = form, [torch.empty_like(x, device=self.device) for x in tensors]
            left = iter(self._inputs)
            self._args = pytree.tree_unflatten([next(left) if isinstance(x, Tensor) else x for x in leaves], tree)
        elif form != self._form:
            raise ShapeError(
                f"CapturedStep: a graph has fixed sizes: {_described(self._form)} at the first call, and {_described(form)} now. Leave out "
                "the smaller last batch (drop_last=True), or call the step itself, eagerly, for it."
            )
        for memory, x in zip(self._inputs, tensors, strict=True):
            memory.copy_(x, non_blocking=True)

    def _settings(self) -> Iterator[tuple[str, Any]]:
        """The hyperparameters of every parameter group, by name."""
        for optimizer in self.handle.run.optimizers:
            for i, group in enumerate(optimizer.param_groups):
                for key in optimizer.defaults:
                    value, name = group.get(key), f"{type(optimizer).__name__}.param_groups[{i}][{key!r}]"
                    if isinstance(value, (tuple, list)):
                        yield from ((f"{name}[{k}]", part) for k, part in enumerate(value))
                    else:
                        yield name, value

    def _numbers(self) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name, value in self._settings() if not isinstance(value, Tensor))

    def _addresses(self) -> tuple[int, ...]:
        """Of all tensors that last from step to step and may get other memory, as a loaded checkpoint and new masks come in new tensors;
        and of the attached optimizers."""
        run = self.handle.run
        tensors: list[Any] = [*(value for _, value in self._settings()), *run.held.masks.values()]
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                tensors += group["params"]
            for state in optimizer.state.values():
                tensors += state.values()
        for layer in run.layers.values():
            tensors += (*layer._buffers.values(), layer.seed)
        return *map(id, run.attachments), *(x.data_ptr() for x in tensors if isinstance(x, Tensor))


def _can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def _copied(result: Any) -> Any:
    """``result`` with its tensors copied, since the next replay overwrites them."""
    return pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), result)


def _described(form: Any) -> str:
    return ", ".join(f"{tuple(x[0])} {x[1]}".replace("torch.", "") if isinstance(x, tuple) else repr(x) for x in form[1])
