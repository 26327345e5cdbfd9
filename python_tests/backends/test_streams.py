"""What is made once is read on any stream and by graphs: on streams and tensors that say what is done to them."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nmkernels as nm
from nmkernels.backends import streams
from nmkernels.backends.streams import Made, MadeOf

DEVICE = torch.device("cuda", 1)


class Gpu:
    """A GPU of which only its streams are there; ``log`` has what is put on them."""

    def __init__(self) -> None:
        self.stream, self.capturing, self.log = 7, False, []

    def current_stream(self, device: torch.device) -> Any:
        assert device == DEVICE
        now = self.stream
        return SimpleNamespace(
            name=now, record_event=lambda: f"event of {now}", wait_event=lambda event: self.log.append(f"{now} waits for {event}")
        )

    def tensor(self, name: str) -> Any:
        return SimpleNamespace(record_stream=lambda stream: self.log.append(f"{name} is read on {stream.name}"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "current_stream", gpu.current_stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: (index == DEVICE.index) * gpu.stream, raising=False)
    return gpu


def test_another_stream_waits_once_and_holds_the_memory(gpu: Gpu) -> None:
    made = Made("value", [gpu.tensor("a"), gpu.tensor("b")], DEVICE)
    assert made.get() == "value" and not gpu.log, "the stream that made it need not wait"
    gpu.stream = 8
    assert [made.get(), made.get()] == ["value"] * 2
    assert gpu.log == ["8 waits for event of 7", "a is read on 8", "b is read on 8"]
    gpu.stream = 9
    made.get()
    gpu.stream = 7
    made.get()
    assert gpu.log[3:] == ["9 waits for event of 7", "a is read on 9", "b is read on 9"]


def test_a_capture_does_not_wait_for_work_outside_of_it(gpu: Gpu) -> None:
    """Which CUDA refuses; nor does the capturing stream count as one that has waited."""
    made = Made("value", [gpu.tensor("a")], DEVICE)
    assert not made.captured
    gpu.stream, gpu.capturing = 8, True
    assert made.get() == "value" and made.captured and not gpu.log
    gpu.capturing = False
    made.get()
    assert gpu.log == ["8 waits for event of 7", "a is read on 8"]


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``capture(True)``: from now on a graph is captured, on the CPU."""
    return lambda on: monkeypatch.setattr(streams, "capturing", lambda device: on)


class Counted:
    """Makes something of a weight, and counts."""

    def __init__(self) -> None:
        self.values, self.indices = torch.ones(2, 4), torch.zeros(2, 2, dtype=torch.uint8)
        self.made_of: MadeOf[int] = MadeOf()
        self.count = 0

    def make(self) -> tuple[int, list[torch.Tensor]]:
        self.count += 1
        return self.count, []

    def get(self, key: str = "") -> int:
        return self.made_of.get(self.values, self.indices, key, self.make)


def test_made_once_and_again_after_every_change() -> None:
    one = Counted()
    assert [one.get(), one.get(), one.get("other"), one.get("other")] == [1, 1, 2, 2]
    one.values.mul_(2)
    assert [one.get("other"), one.get("other")] == [3, 3]
    one.indices.add_(1)
    assert [one.get("other"), one.get("other")] == [4, 4]
    one.values.data = torch.ones(2, 4)
    assert [one.get("other"), one.get("other")] == [5, 5]


def test_what_a_capture_makes_is_not_kept(capture: Any) -> None:
    one = Counted()
    capture(True)
    assert [one.get(), one.get()] == [1, 2] and one.made_of.last is None
    capture(False)
    assert [one.get(), one.get()] == [3, 3]
    one.values.mul_(2)
    capture(True)
    assert one.get() == 4
    capture(False)
    assert [one.get(), one.get()] == [5, 5]
    capture(True)
    assert [one.get(), one.get()] == [6, 7], "a replay may write what was written before"
    capture(False)
    assert one.get() == 5


def test_what_a_graph_reads_stays_as_long_as_the_weight(capture: Any) -> None:
    """Whatever comes of the object that remembers it: a layer makes its ``weight`` again after ``train()``."""
    stack = nm.ops.compress(torch.randn(2, 4, 8), "2:4")

    def weight(stack: nm.Compressed) -> nm.Compressed:
        return nm.Compressed(stack.values.flatten(0, 1), stack.indices.flatten(0, 1), "2:4", (8, 8))  # views, as experts have

    def memory(of: nm.Compressed, name: str) -> Any:
        return weakref.ref(of.layout(name, BUILD[name]).untyped_storage())

    seen, unseen = weight(stack), weight(stack)
    read = [memory(seen, name) for name in BUILD]
    other = memory(unseen, "dense")
    capture(True)
    for name, build in BUILD.items():
        seen.layout(name, build)
    capture(False)
    del seen, unseen
    assert [part() is not None for part in read] == [True, True] and other() is None
    own = weakref.ref(stack.values.untyped_storage())
    del stack
    gc.collect()
    assert own() is None and read[0]() is None, "the graph's weight is gone, and so may be what was made of it"


BUILD = {"dense": nm.Compressed.dense, "the same memory": lambda c: c.values.view(-1)}


def test_a_layer_is_right_after_its_first_call_was_captured(capture: Any) -> None:
    """Its dense weight exists in replays only, so no plan keeps it either."""
    layer = nm.nn.CompressedLinear(nm.ops.compress(torch.randn(4, 8), "2:4"), None, keep_dense=True)
    x = torch.randn(3, 8)
    capture(True)
    layer(x)
    held = layer.weight.layout("dense", nm.Compressed.dense)
    held.zero_()  # as the memory of a graph that has not run
    capture(False)
    torch.testing.assert_close(layer(x), x @ layer.weight.dense().t())
