"""Thousands of mutated files: each loads what it says, or is refused with ``CheckpointError`` and the model is left as it was."""

from __future__ import annotations

import json
import random
import re
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import nmkernels as nm
from nmkernels.pattern import CheckpointError
from nmkernels.testing import equal_bits
from python_tests.export.editing import Net, saved

DTYPES = ["BOOL", "U8", "I8", "F8_E4M3", "F8_E8M0", "F4", "F6_E2M3", "I16", "BF16", "F16", "F32", "F64", "C64", "U64", "F128", "f32"]
SHAPES = [[0], [0, 2**62], [2**63, 0], [2**64, 0], [2**32, 2**32, 0], [0] * 5000, [], [1] * 200, [12], [24], [6, 24], [2**61], [-1]]

WORDS = [
    "x", "2:4", "1:2", "2:3", "0:0", "2:999", "int8", "int4", "F32", "U8", "F8_E4M3", "BOOL", "float32", "linear", "conv1d", "a.values",
    "1", "head", "torch", "int32", "values", "24", "norm", "__metadata__", "3.0",
]  # fmt: skip
ODD = [
    "null", "true", "false", "0", "1", "-1", "2", "3", "24", "255", "0.5", "24.0", "2.5", "-0", "01", "1e999", "NaN", "Infinity",
    "-Infinity",
    *(str(sign * 2**bits + more) for bits in (31, 32, 63, 64, 100) for sign in (1, -1) for more in (0, -1)),
    *('""', '"\\ud800"', '"__class__"', '"\\u0662:\\u0664"', '"\\u0000"', f'"{"9" * 5000}"', f'"{"a" * 50_000}"', "9" * 5000, ""),
    *(f'"{word}"' for word in WORDS),
    *("[]", "{}", "[1]", "[[]]", '{"a": 1}', "[0, 0]", "[24, 12]", '["24", "12"]', "[12.0, 24.0]", "[0, 4611686018427387904]", "[true, 4]"),
    *(f"{start * n}1{end * n}" for n in (100, 50_000) for start, end in (("[", "]"), ('{"a":', "}"))),
]  # fmt: skip
"""JSON text, or none at all."""

STRING = r'"(?:[^"\\]|\\.)*"'
VALUE = rf"(?:{STRING}|-?\d+|\[[^\[\]]*\]|\{{[^{{}}]*\}})"
PIECES = [rf"(?<=: ){VALUE}", rf"(?<=: ){VALUE}", VALUE, STRING, rf"{STRING}: {VALUE}(?:, )?", ".*"]
"""What is exchanged in a header: values, names, whole members, and all there is."""

Mutation = Callable[[bytes, random.Random], bytes]


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header: str, body: bytes) -> bytes:
    head = header.encode()
    head = head.ljust(-(-len(head) // 8) * 8)
    return struct.pack("<Q", len(head)) + head + body


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Some bytes of the header, or of the tensors, are others, missing, or more; or all from one on are missing."""
    changed, border = bytearray(data), len(data) - len(split(data)[1])
    area = rng.choice([range(border), range(border), range(border, len(data))])
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        at = rng.choice(area)
        changed[at : at + rng.choice([0, 1, 1, 1, 1, 2])] = [rng.choice([rng.randrange(256), *b'"{}[],:0129-eN\\'])]
    return bytes(changed[: rng.choice([len(data), rng.choice(area)]) if rng.random() < 0.1 else None])


def disturbed(data: bytes, rng: random.Random) -> bytes:
    """The text of the header, or of one of the tables in its metadata: pieces are replaced, removed, doubled or moved."""
    header, body = split(data)
    about = header["__metadata__"]
    which = rng.choice(["header", "header", "layers", "layers", "aliases", "version"])
    text = json.dumps(header) if which == "header" else about[which]
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        pieces = [*re.finditer(rng.choice(PIECES), text)] or [*re.finditer(".*", text)]
        one, other = rng.choice(pieces), rng.choice(pieces)
        new = rng.choice([*rng.choices(ODD, k=4), other[0], f"[{one[0]}]", one[0] * 2, ""])
        text = text[: one.start()] + new + text[one.end() :]
    return joined(text if which == "header" else json.dumps({**header, "__metadata__": {**about, which: text}}), body)


def odd_tensors(data: bytes, rng: random.Random) -> bytes:
    """An additional or replaced entry, of any dtype and shape, with no bytes or with those of a neighbour."""
    header, body = split(data)
    names = [name for name in header if name != "__metadata__"]
    start, end = header[rng.choice(names)]["data_offsets"]
    at = rng.choice([[start, start], [end, end], [start, end], [0, 0], [len(body)] * 2, [end, start], [start, end + 1]])
    more = ["x", "", "a.nm_left", "norm.values", "c.weight", "c.weight.values", "again.columns", "a.step", "d.weight.step", "\u00e9" * 9999]
    name = rng.choice([*names, *more])
    header[name] = {"dtype": rng.choice(DTYPES), "shape": rng.choice(SHAPES), "data_offsets": at}
    return joined(json.dumps(header), body)


def contents(data: bytes) -> dict[str, Tensor]:
    """The state dict that a file says it holds, read apart from the package."""
    tensors = safetensors.torch.load(data)
    aliases = json.loads(split(data)[0]["__metadata__"].get("aliases", "{}"))
    assert not set(aliases) & set(tensors), "an alias may not stand for a tensor that the file holds"
    tensors |= {alias: tensors[name] for alias, name in aliases.items()}
    old = {key: re.sub(r"\.weight\.(values|indices|step|columns)$", r".\1", key) for key in tensors}
    return {old[key] if old[key] not in tensors else key: t for key, t in tensors.items()}


def check(path: Path, data: bytes) -> bool:
    """True if the file loaded, and everything it holds is in the model; False if it was refused, and nothing of it is."""
    path.write_bytes(data)
    net = Net()
    before = [(name, module) for name, module in net.named_modules(remove_duplicate=False)]
    tensors = {key: (value.data_ptr(), value.clone()) for key, value in net.state_dict().items()}
    try:
        nm.load_compressed(net, path)
    except CheckpointError as error:
        assert 0 < len(str(error).encode()) < 4000, "the message cannot be printed, or nobody reads it to its end"
        assert [(name, module) for name, module in net.named_modules(remove_duplicate=False)] == before
        state = net.state_dict()
        assert list(state) == list(tensors)
        assert all(state[key].data_ptr() == at and equal_bits(state[key], value) for key, (at, value) in tensors.items())
        return False
    state, want = net.state_dict(), contents(data)
    assert set(state) == set(want)
    assert all(equal_bits(value, want[key]) for key, value in state.items())
    for layer in (net.a, net.b, net.c, net.d, net.again):
        assert type(layer) is nm.CompressedLinear and nm.ops.is_nm(layer.weight.dense(), layer.pattern)
        layer(torch.ones(2, layer.in_features))
    return True


@pytest.mark.parametrize("count", [30, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mutation", [flipped, disturbed, odd_tensors])
def test_a_mutated_file_loads_what_it_says_or_is_refused(tmp_path: Path, mutation: Mutation, count: int) -> None:
    data = saved(tmp_path / "m")
    assert check(tmp_path / "m", data), "the untouched file loads"
    loaded = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(count):
            mutated = mutation(data, random.Random(seed))
            try:
                loaded += check(tmp_path / "m", mutated)
            except BaseException as error:
                raise AssertionError(f"mutation {seed}: {type(error).__name__}: {str(error)[:300]}") from error
    assert loaded < count, "nothing was refused: the mutations change nothing"
