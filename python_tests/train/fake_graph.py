"""CUDA graphs on the CPU: a capture records the ops that torch dispatches and undoes them, a replay runs them in the same memory."""

import contextlib
from types import SimpleNamespace

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nmkernels.optim import adamw
from python_tests.train.test_step_bytes import on_a_gpu

SYNCHRONISES = ("_local_scalar_dense", "aten.nonzero", "masked_select", "unique", "is_nonzero", "equal.default", "repeat_interleave.Tensor")
"""The host waits for their results, or their results have sizes that only the device knows."""

RECORDING = []
"""The graphs that are being captured: one or none."""


def tensors(tree):
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def memory(x):
    return x.untyped_storage()._cdata


def written(func, args, kwargs):
    """The tensors that an op writes."""
    by_name = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    return tensors([by_name[a.name] for a in func._schema.arguments if a.name in by_name and a.alias_info and a.alias_info.is_write])


class FakeGraph(TorchDispatchMode):
    """Stands for ``torch.cuda.CUDAGraph``, and records while it is entered.

    Numbers from the host are constants of the graph, as arguments of kernels are. Whatever has been computed on the host and would be
    copied to the device is refused, and so is all that waits for the device.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.own, self.before = [], set(), {}
        self.host = False  # while a list of numbers becomes a tensor on the CPU, which kernels get as arguments

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, str(func)
        by_mask = name.startswith("aten.index.") and any(x.dtype == torch.bool for x in tensors(args[1]))
        if by_mask or any(word in name for word in SYNCHRONISES):
            raise RuntimeError(f"{name} waits for the device, which a capture does not permit")
        if (not self.host and "lift_fresh" in name) or kwargs.get("generator") is not None:
            raise RuntimeError(f"{name} copies numbers from the host")
        for x in written(func, args, kwargs):
            if memory(x) not in self.own | self.before.keys():
                self.before[memory(x)] = x.untyped_storage(), x.untyped_storage().clone()
        known = {memory(x) for x in tensors((args, kwargs))}
        result = func(*args, **kwargs)
        new = [memory(x) not in known for x in tensors(result)]
        self.own |= {memory(x) for x, is_new in zip(tensors(result), new, strict=True) if is_new}
        if any(new) or written(func, args, kwargs):  # not a view
            self.calls.append((func, args, kwargs, result, new))
        return result

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, result, new in self.calls:
            for x, y, is_new in zip(tensors(result), tensors(func(*args, **kwargs)), new, strict=True):
                if is_new:
                    x.copy_(y)

    def undo(self):
        """A capture runs nothing: what it has written is as it was."""
        for storage, content in self.before.values():
            storage.copy_(content)


def from_host(function):
    """``function``, whose result is on the host: kernels get its numbers as arguments."""

    def called(*args):
        for graph in RECORDING:
            graph.host = True
        result = function(*args)
        for graph in RECORDING:
            graph.host = False
        return result

    return called


@contextlib.contextmanager
def captured(graph, stream=None):
    RECORDING.append(graph)
    try:
        with graph:
            yield
    finally:
        RECORDING.pop()
        graph.undo()


def fake_graphs(monkeypatch):
    """Have the CPU take the path of a GPU, and torch.cuda's graphs be fake ones."""
    on_a_gpu(monkeypatch)
    stream, recording = SimpleNamespace(wait_stream=lambda other: None), lambda *_: bool(RECORDING)
    for name, fake in {"CUDAGraph": FakeGraph, "graph": captured, "Stream": lambda device: stream}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr("nmkernels.train.capture._can_capture", lambda device: True)
    for where in ("nn.effective._capturing", "backends.streams.capturing", "train.step.capturing"):
        monkeypatch.setattr(f"nmkernels.{where}", recording)
    monkeypatch.setattr("nmkernels.optim.annealed.float", lambda count: count.double(), raising=False)  # as of a count on the device
    monkeypatch.setattr("nmkernels.optim.adamw._hyper", from_host(adamw._hyper))
