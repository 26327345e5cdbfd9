"""Writing safetensors files tensor by tensor, for models that do not fit into memory."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import writing
from ..pattern import CheckpointError
from .tensors import INDEX, SINGLE

TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The format's names of dtypes."""
SHARD = 5_000_000_000
"""Bytes of one file, unless a single tensor is larger."""
EMPTY = hashlib.sha256().digest()


class ShardWriter:
    """Writes the files of ``save_pretrained`` into a folder: one file, or several and an index. The sizes of all tensors are known at the
    start; their values come later, in any order.

    Args:
        tensors: name -> a tensor of that shape and dtype, usually on the meta device, in the order in which they are spread over files.
        metadata: of every file.

    Raises:
        CheckpointError: a file cannot be written, or a dtype has no name in the format.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = ShardWriter(folder, {"w": torch.empty(2, 3, device="meta")}, {"format": "pt"})
        ...     writer.write("w", torch.ones(2, 3))
        ...     writer.close()
        ...     os.listdir(folder)
        ['model.safetensors']
    """

    def __init__(
        self, folder: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str], shard: int = SHARD
    ) -> None:
        self.folder = Path(folder)
        self.total = sum(t.nbytes for t in tensors.values())
        self._tensors = dict(tensors)
        self._place: dict[str, tuple[Path, int]] = {}
        self._open: dict[Path, int] = {}
        self._digests: dict[str, bytes] = {}
        shards: list[list[str]] = [[]]  # in order, each of at most so many bytes
        size = 0
        for name, t in tensors.items():
            if shards[-1] and size + t.nbytes > shard:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += t.nbytes
        names = [SINGLE] if len(shards) == 1 else [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        with writing(self.folder):
            for name, members in zip(names, shards, strict=True):
                self._begin(self.folder / name, members, metadata)
            if len(shards) > 1:
                files = {member: path.name for member, (path, _) in sorted(self._place.items())}
                index = {"metadata": {"total_size": self.total}, "weight_map": files}
                (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _begin(self, path: Path, members: Iterable[str], metadata: Mapping[str, str]) -> None:
        # as safetensors sorts them, which aligns every tensor to its dtype
        order = sorted(members, key=lambda name: (-self._tensors[name].itemsize, name))
        header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
        offset = 0
        for name in order:
            t = self._tensors[name]
            if t.dtype not in TYPES:
                raise CheckpointError(f"{path}: tensor {name!r} is {t.dtype}, which cannot be written.")
            header[name] = {"dtype": TYPES[t.dtype], "shape": list(t.shape), "data_offsets": [offset, offset + t.nbytes]}
            self._place[name] = path, offset
            offset += t.nbytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text = text.ljust(math.ceil(len(text) / 8) * 8)
        start = 8 + len(text)
        self._place |= {name: (path, start + self._place[name][1]) for name in order}
        with writing(path):
            self._open[path] = file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            _write_at(file, struct.pack("<Q", len(text)) + text, 0)
            os.ftruncate(file, start + offset)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the values of one tensor."""
        about = self._tensors.pop(name)
        if (tensor.shape, tensor.dtype) != (about.shape, about.dtype):
            raise CheckpointError(f"tensor {name!r} is {tensor.dtype}{tuple(tensor.shape)}, not {about.dtype}{tuple(about.shape)}.")
        path, offset = self._place[name]
        with writing(path):
            values = _bytes(tensor)
            _write_at(self._open[path], values, offset)
        self._digests[name] = hashlib.sha256(values).digest()

    def close(self) -> None:
        """Flush all files to disk, and read them back; CheckpointError if a tensor was never written, or a file does not hold what was."""
        missing = next((name for name, t in self._tensors.items() if t.numel()), None)
        if missing is not None:
            raise CheckpointError(f"tensor {missing!r} was not written.")
        for path, file in self._open.items():
            with writing(path):
                os.fsync(file)
        files = list(self._open)
        self.abandon()
        from safetensors import SafetensorError, safe_open

        for path in files:
            names = {name for name, (place, _) in self._place.items() if place == path}
            try:
                with safe_open(path, "pt") as stored:
                    present = set(stored.keys())
                    digests = {name: hashlib.sha256(_bytes(stored.get_tensor(name))).digest() for name in names & present}
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read back ({error}); write it again.") from error
            wrong = names ^ present | {name for name, digest in digests.items() if digest != self._digests.get(name, EMPTY)}
            if wrong:
                raise CheckpointError(f"{path} was changed while it was written: {min(wrong)!r} is not what was written. Write it again.")

    def abandon(self) -> None:
        """Close the files as they are."""
        while self._open:
            os.close(self._open.popitem()[1])


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count
