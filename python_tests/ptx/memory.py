"""Global memory of the emulated kernels: the tensors of the test at their own addresses, and nothing else."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


class Memory:
    """The storages of some CPU tensors; what is read and written is checked against them."""

    def __init__(self, tensors: list[Tensor]) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}
        self.starts = sorted(storages)
        self.bytes = [torch.empty(0, dtype=torch.uint8).set_(storages[s]).numpy() for s in self.starts]  # type: ignore[call-overload]

    def _locate(self, address: np.ndarray, bits: int, count: int, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The array that holds the addresses, as items of so many bits, and the index of each item."""
        size = bits // 8
        wrong = address % np.uint64(size * count) != 0
        assert not wrong.any(), f"{text}: address {address[wrong][0]:#x} is no multiple of {size * count}"
        region = int(np.searchsorted(np.array(self.starts, np.uint64), address[0], side="right")) - 1
        assert region >= 0, f"{text}: address {address[0]:#x} is below every tensor"
        start, data = self.starts[region], self.bytes[region]
        offset = address - np.uint64(start)
        outside = offset + np.uint64(size * count) > data.size
        assert not outside.any(), f"{text}: offset {int(offset[outside][0])} of a tensor of {data.size} bytes"
        items = data[: data.size // size * size].view(UNSIGNED[bits])
        return items, (offset // np.uint64(size)).astype(np.int64)

    def load(self, address: np.ndarray, bits: int, count: int, text: str) -> list[np.ndarray]:
        """``count`` consecutive items of ``bits`` at each address."""
        items, index = self._locate(address, bits, count, text)
        return [items[index + i] for i in range(count)]

    def store(self, address: np.ndarray, bits: int, values: list[np.ndarray], text: str) -> None:
        """The inverse of ``load``; different values for one address in one instruction are an error."""
        items, index = self._locate(address, bits, len(values), text)
        for i, value in enumerate(values):
            items[index + i] = value
            assert (items[index + i] == value).all(), f"{text}: two threads write different values to one address"
