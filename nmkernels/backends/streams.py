"""What is made once on a GPU and read by later calls: ordered between streams, and right where CUDA graphs are captured.

* A call on another stream than the one that made it waits for it, once, and its memory is not given away before that stream is done.
* What a capture makes holds values in replays of that graph only: it is never kept.
* What a graph reads stays: each replay reads the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph records what is launched now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int:
    """The handle of the device's current stream; 0 on the CPU."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


class Made(Generic[T]):
    """A value that was made on the current stream, for later calls on any.

    Args:
        tensors: its memory, all on ``device``.
    """

    def __init__(self, value: T, tensors: Sequence[Tensor], device: torch.device) -> None:
        self.value, self.tensors, self.device = value, tensors, device
        self.captured = False
        """Whether a graph reads it."""
        self._streams = {stream_of(device)}
        self._event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def get(self) -> T:
        """The value, for work on the current stream; a graph that is captured may read it ever after."""
        if capturing(self.device):
            # no waiting for another stream: whatever begins a capture has waited for all earlier work
            self.captured = True
            return self.value
        stream = stream_of(self.device)
        if stream not in self._streams:
            if self._event is not None:
                current = torch.cuda.current_stream(self.device)
                current.wait_event(self._event)
                for tensor in self.tensors:
                    tensor.record_stream(current)
            self._streams.add(stream)
        return self.value


_read_by_graphs = WeakIdKeyDictionary()
"""The memory of values that graphs read, by the storage of the weight that they were made of: it stays as long as the weight does."""


class MadeOf(Generic[T]):
    """The last value made of a packed weight, until the weight is written or has other memory.

    While a graph is captured it is used only if the weight was never written in place. Otherwise making it is recorded into the graph,
    so that a replay sees what an optimizer's step, replayed before it, has written.
    """

    def __init__(self) -> None:
        self.last: Made[T] | None = None
        self._state: Hashable = None

    def get(self, values: Tensor, indices: Tensor, key: Hashable, make: Callable[[], tuple[T, Sequence[Tensor]]]) -> T:
        """The value for ``key``, remembered or made: ``make()`` returns it and its tensors. The weight must count its writes."""
        written = values._version, indices._version
        state = written, values.data_ptr(), indices.data_ptr(), key  # as it is before anything is made
        last, captured = self.last, capturing(values.device)
        if last is not None and self._state == state and not (captured and any(written)):
            if captured:
                storage = values.untyped_storage()
                parts = [x.untyped_storage() for x in last.tensors]
                _read_by_graphs.setdefault(storage, {}).update({id(part): part for part in parts if part is not storage})
            return last.get()
        value, tensors = make()
        if not captured:
            # the weight's memory is held, so that no other tensor can lie at its address
            self.last, self._state = Made(value, [*tensors, values.detach(), indices.detach()], values.device), state
        return value
