"""Thousands of mutated files: each loads what it says, or is refused with ``CheckpointError`` and the model is left as it was."""

from __future__ import annotations

import json
import random
import struct
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
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


class Raw(str):
    """JSON text as it stands."""


class Key(str):
    """A key that equals only itself, so that an object can hold one name twice."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 24, 255, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 0.5, 24.0, 2.5),
    *(Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"), Raw("9" * 5000), Raw('"\\ud800"'), Raw("-0"), Raw("01"), Raw("")),
    *("", "9" * 5000, "\u0662:\u0664", "\u00e9\u202e\n", "a" * 50_000, "\0"),
    *("x", "2:4", "1:2", "2:3", "0:0", "2:999", "F32", "U8", "F8_E4M3", "BOOL", "float32", "__class__", "linear", "conv1d"),
    *("0.weight.values", "1", "head", "torch", "int32", "values", "24"),
    *([], {}, [1], [[]], {"a": 1}, [0, 0], [24, 12], ["24", "12"], [12.0, 24.0], [0, 2**62], [2**32, 2**32], [True, 4], [-12, -24]),
    *(Raw(f"{start * n}1{end * n}") for n in (100, 50_000) for start, end in (("[", "]"), ('{"a":', "}"))),
]


Mutation = Callable[[bytes, random.Random], bytes]


# ---- a file as a tree, and the tree as a file


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def text(value: Any) -> str:
    """JSON that may say a name twice, or be none at all."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(str(key))}:{text(item)}" for key, item in value.items()) + "}"
    return "[" + ",".join(map(text, value)) + "]" if isinstance(value, list) else json.dumps(value)


def joined(header: Any, body: bytes) -> bytes:
    head = text(header).encode("utf-8", "surrogatepass")
    head = head.ljust(-(-len(head) // 8) * 8)
    return struct.pack("<Q", len(head)) + head + body


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of ``tree``."""
    for key in list(tree if isinstance(tree, dict) else range(len(tree))):
        yield tree, key
        if isinstance(tree[key], (dict, list)):
            yield from places(tree[key])


def disturb(tree: Any, rng: random.Random) -> None:
    """One structural change: a value is replaced, removed, doubled or moved, a name changed."""
    at = list(places(tree))
    (container, key), (other, its) = rng.choice(at), rng.choice(at)
    kind = rng.choice(["replace", "replace", "remove", "swap", "rename", "twice", "nudge"])
    if kind == "remove":
        del container[key]
    elif kind == "swap":
        container[key], other[its] = deepcopy(other[its]), deepcopy(container[key])
    elif kind in ("rename", "twice") and isinstance(container, dict):
        value = rng.choice([container[key], container[key], rng.choice(ODD)])
        name = key if kind == "twice" else rng.choice([its, "", "a.weight", "\ud800", "norm", "__metadata__"])
        if kind == "rename":
            del container[key]
        container[Key(name)] = deepcopy(value)
    elif kind == "nudge" and type(container[key]) is int:
        container[key] += rng.choice([-8, -4, -1, 1, 4, 8, 2**32, -(2**40)])
    else:
        container[key] = rng.choice([*ODD, [container[key]], text(container[key])])


# ---- the kinds of mutations


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Some bytes of the header, or of the tensors."""
    changed, border = bytearray(data), len(data) - len(split(data)[1])
    area = rng.choice([range(border), range(border), range(border, len(data))])
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        changed[rng.choice(area)] = rng.choice([rng.randrange(256), *b'"{}[],:0129-eN\\'])
    return bytes(changed)


def framed(data: bytes, rng: random.Random) -> bytes:
    """Cut off, longer, with another length of the header, or with a byte more or less inside."""
    at = rng.randrange(8, len(data))
    length = rng.choice([0, 1, 7, 8, len(data), 10**8, 10**8 + 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, rng.randrange(2 * len(data))])
    changes = [data[: rng.randrange(len(data))], data + bytes(at), struct.pack("<Q", length) + data[8:]]
    return rng.choice([*changes, data[:at] + b" " + data[at:], data[:at] + data[at + 1 :]])


def disturbed(data: bytes, rng: random.Random) -> bytes:
    """The header, or one of the tables in its metadata."""
    header, body = split(data)
    which = rng.choice(["header", "layers", "layers", "aliases"])
    about = header["__metadata__"]
    tree = header if which == "header" else json.loads(about[which])
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        disturb(tree, rng)
    if which == "header":
        return joined(tree, body)
    if rng.random() < 0.1:
        about["version"] = rng.choice(["0", "1", "3", "4", "", "x", "\u0663", "9" * 5000, "-1", "3.0"])
    table = rng.choice(ODD) if rng.random() < 0.05 else tree
    return joined({**header, "__metadata__": {**about, which: text(table).encode("utf-8", "replace").decode()}}, body)


def odd_tensors(data: bytes, rng: random.Random) -> bytes:
    """One entry more, or another in the place of one, of any dtype and shape, with no bytes or with those of a neighbour."""
    header, body = split(data)
    names = [name for name in header if name != "__metadata__"]
    start, end = header[rng.choice(names)]["data_offsets"]
    at = rng.choice([[start, start], [end, end], [start, end], [0, 0], [len(body)] * 2, [end, start], [start, end + 1]])
    name = rng.choice([*names, "x", "", "a.nm_left", "norm.weight.values", "c.weight", "again.weight.columns", "\u00e9" * 9999])
    header[name] = {"dtype": rng.choice(DTYPES), "shape": rng.choice(SHAPES), "data_offsets": at}
    return joined(header, body)


# ---- what must hold


def contents(data: bytes) -> dict[str, Tensor]:
    """The state dict that a file says it holds, read apart from the package."""
    tensors = safetensors.torch.load(data)
    aliases = json.loads(split(data)[0]["__metadata__"].get("aliases", "{}"))
    assert not set(aliases) & set(tensors), "an alias may not stand for a tensor that the file holds"
    tensors |= {alias: tensors[name] for alias, name in aliases.items()}
    return {
        key.replace(".weight.values", ".values").replace(".weight.indices", ".indices").replace(".weight.columns", ".columns"): t
        for key, t in tensors.items()
    }


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
    for layer in (net.a, net.b, net.c, net.again):
        assert type(layer) is nm.CompressedLinear and nm.ops.is_nm(layer.weight.dense(), layer.pattern)
        layer(torch.ones(2, layer.in_features))
    return True


@pytest.mark.parametrize("count", [30, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mutation", [flipped, framed, disturbed, odd_tensors])
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
