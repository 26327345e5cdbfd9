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
from torch import Tensor, nn

import nmkernels as nm
from nmkernels.pattern import CheckpointError
from nmkernels.testing import equal_bits

COUNTS = {"header bytes": 900, "data bytes": 300, "frame": 300, "header tree": 1000, "metadata tree": 1300, "odd tensors": 300}
"""How many mutations of each kind; 4,100 in all."""


DTYPES = ["BOOL", "U8", "I8", "F8_E4M3", "F8_E8M0", "F4", "F6_E2M3", "I16", "BF16", "F16", "F32", "F64", "C64", "U64", "F128", "f32"]
EMPTY = [[0], [0, 2**62], [2**63, 0], [2**64, 0], [2**32, 2**32, 0], [0] * 70, [0] * 5000]
SHAPES = [*EMPTY, [], [1] * 200, [12], [24], [6, 24], [2**61], [-1]]


class Raw(str):
    """JSON text as it stands."""


class Key(str):
    """A key that equals only itself, so that an object can hold one name twice."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


DEEP = [Raw(f"{start * n}1{end * n}") for n in (100, 900, 50_000) for start, end in (("[", "]"), ('{"a":', "}"))]
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 24, 255, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 0.5, 24.0, 2.5),
    *(Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"), Raw("9" * 5000), Raw('"\\ud800"'), Raw("-0"), Raw("01"), Raw("")),
    *("", "9" * 5000, "\u0662:\u0664", "\u00e9\u202e\n", "a" * 50_000, "\0"),
    *("x", "2:4", "1:2", "2:3", "0:0", "2:999", "F32", "U8", "F8_E4M3", "BOOL", "float32", "__class__", "linear", "conv1d"),
    *("0.weight.values", "1", "head", "torch", "int32", "values", "24"),
    *([], {}, [1], [[]], {"a": 1}, [0, 0], [24, 12], ["24", "12"], [12.0, 24.0], [0, 2**62], [2**32, 2**32], [True, 4], [-12, -24]),
    *DEEP,
]


class Net(nn.Module):
    """Every kind of entry that a file has: compressed layers, an adapter, an order of columns, a layer and a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 24)
        self.norm = nn.LayerNorm(24)
        self.a = nn.Linear(24, 12)
        self.b = nn.Linear(12, 24, bias=False)
        self.again = self.a
        self.c = nn.Linear(24, 4)
        self.head = nn.Linear(24, 6, bias=False)
        self.head.weight = self.embed.weight


def saved(path: Path) -> bytes:
    generator = torch.Generator().manual_seed(0)
    net = Net()
    for p in net.parameters():
        nn.init.normal_(p, generator=generator)
    adapter = torch.randn(24, 2, generator=generator), torch.randn(2, 12, generator=generator)
    net.a = net.again = nm.CompressedLinear(nm.ops.compress(net.a.weight.detach(), "2:3"), net.a.bias, adapter=adapter)
    net.b = nm.CompressedLinear(nm.ops.compress(net.b.weight.detach(), "2:4"))
    columns = torch.randperm(24, generator=generator)
    net.c = nm.CompressedLinear(nm.ops.compress(net.c.weight.detach(), "1:8"), net.c.bias, columns=columns)
    nm.save_compressed(net, path)
    return path.read_bytes()


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
    """One structural change: a value is replaced, removed, doubled, moved or wrapped, a name changed."""
    at = list(places(tree))
    container, key = rng.choice(at)
    other, its = rng.choice(at)
    kind = rng.choice(["replace", "replace", "replace", "remove", "swap", "copy", "rename", "twice", "wrap", "nudge"])
    if kind == "remove":
        del container[key]
    elif kind == "swap":
        container[key], other[its] = deepcopy(other[its]), deepcopy(container[key])
    elif kind == "copy":
        container[key] = deepcopy(other[its])
    elif kind in ("rename", "twice") and isinstance(container, dict):
        other_name = key if kind == "twice" else str(rng.choice(["", "a", "a.weight", "\ud800", "norm", "__metadata__"]))
        name = str(its) if rng.random() < 0.5 else other_name
        value = container[key] if rng.random() < 0.5 else rng.choice(ODD)
        if kind == "rename":
            del container[key]
        container[Key(name)] = deepcopy(value)
    elif kind == "wrap":
        container[key] = rng.choice([[container[key]], {"a": container[key]}, text(container[key])])
    elif kind == "nudge" and type(container[key]) is int:
        container[key] += rng.choice([-8, -4, -1, 1, 4, 8, 2**32, -(2**40)])
    else:
        container[key] = rng.choice(ODD)


# ---- the kinds of mutations


def flip(data: bytes, rng: random.Random, start: int, end: int) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        changed[rng.randrange(start, end)] = rng.choice([rng.randrange(256), *b'"{}[],:0129-eN\\'])
    return bytes(changed)


def header_bytes(data: bytes, rng: random.Random) -> bytes:
    return flip(data, rng, 0, len(data) - len(split(data)[1]))


def data_bytes(data: bytes, rng: random.Random) -> bytes:
    return flip(data, rng, len(data) - len(split(data)[1]), len(data))


def frame(data: bytes, rng: random.Random) -> bytes:
    kind = rng.choice(["cut", "longer", "length", "shift", "hole"])
    if kind == "cut":
        return data[: rng.randrange(len(data))]
    if kind == "longer":
        return data + bytes(rng.randrange(1, 100))
    if kind == "length":
        length = rng.choice([0, 1, 2, 7, 8, len(data), 10**8, 10**8 + 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, rng.randrange(2 * len(data))])
        return struct.pack("<Q", length) + data[8:]
    at = rng.randrange(8, len(data))
    return data[:at] + (b" " if kind == "shift" else b"") + data[at + (kind == "hole") :]


def header_tree(data: bytes, rng: random.Random) -> bytes:
    header, body = split(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        disturb(header, rng)
    return joined(header, body)


def metadata_tree(data: bytes, rng: random.Random) -> bytes:
    header, body = split(data)
    about = header["__metadata__"]
    which = rng.choice(["layers", "layers", "aliases"])
    table = json.loads(about[which])
    if rng.random() < 0.05:
        table = rng.choice(ODD)
    elif which == "aliases" and rng.random() < 0.3:
        name, target = (rng.choice([*header, "none", ""]) for _ in range(2))
        table[name] = rng.choice([target, name])
    else:
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            disturb(table, rng)
    about[which] = text(table)
    if rng.random() < 0.1:
        about["version"] = rng.choice(["0", "1", "3", "4", "", "x", "\u0663", "9" * 5000, "-1", "3.0"])
    about = {key: value.encode("utf-8", "replace").decode() for key, value in about.items()}
    return joined({**header, "__metadata__": about}, body)


def odd_tensors(data: bytes, rng: random.Random) -> bytes:
    """One entry more, or another in the place of one, of any dtype and shape, with no bytes or with those of a neighbour."""
    header, body = split(data)
    names = [name for name in header if name != "__metadata__"]
    near = header[rng.choice(names)]["data_offsets"]
    at = rng.choice([[near[0]] * 2, [near[1]] * 2, near, [0, 0], [len(body)] * 2, near[::-1], [near[0], near[1] + 1]])
    name = rng.choice(
        [*names, "x", "", "a.nm_left", "norm.weight.values", "c.weight", "head.weight", "again.weight.columns", "\u00e9" * 9999]
    )
    header[name] = {"dtype": rng.choice(DTYPES), "shape": rng.choice(SHAPES), "data_offsets": at}
    return joined(header, body)


MUTATIONS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "header bytes": header_bytes,
    "data bytes": data_bytes,
    "frame": frame,
    "header tree": header_tree,
    "metadata tree": metadata_tree,
    "odd tensors": odd_tensors,
}


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", COUNTS)
def test_a_mutated_file_loads_what_it_says_or_is_refused(tmp_path: Path, kind: str) -> None:
    all_checked(tmp_path / "m", kind, COUNTS[kind])


@pytest.mark.parametrize("kind", COUNTS)
def test_some_mutated_files(tmp_path: Path, kind: str) -> None:
    all_checked(tmp_path / "m", kind, 20)


def all_checked(path: Path, kind: str, count: int) -> None:
    data = saved(path)
    assert check(path, data), "the untouched file loads"
    loaded = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(count):
            mutated = MUTATIONS[kind](data, random.Random(f"{kind} {seed}"))
            try:
                loaded += check(path, mutated)
            except BaseException as error:
                raise AssertionError(f"mutation {seed} of {kind}: {type(error).__name__}: {str(error)[:300]}") from error
    assert loaded < count or kind == "data bytes", "nothing was refused: the mutations change nothing"
