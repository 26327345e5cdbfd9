"""Compressed: immutable, a pytree, copied and saved without its layouts, usable under torch.compile."""

from __future__ import annotations

import copy
import dataclasses
import io

import pytest
import torch
from torch.utils import _pytree as pytree

from nmkernels import Compressed, Pattern, ops, testing


@pytest.fixture
def c() -> Compressed:
    return ops.compress(torch.randn(6, 16), "2:4")


def test_attributes(c: Compressed) -> None:
    assert c.pattern == Pattern("2:4") and c.shape == torch.Size([6, 16]) and isinstance(c.shape, torch.Size)
    assert c.dtype == torch.float32 and c.device == torch.device("cpu")
    assert c.nbytes == 6 * 8 * 4 + 6 * 2
    assert repr(c) == 'Compressed((6, 16), "2:4", torch.float32, 204 bytes)'
    assert 'device="meta"' in repr(c.to("meta"))


def test_frozen_and_equal_by_identity(c: Compressed) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.values = torch.zeros(1)  # type: ignore[misc]
    again = Compressed(c.values, c.indices, "2:4", (6, 16))  # type: ignore[arg-type]
    assert c == c and c != again and len({c, again}) == 2
    assert again.pattern == Pattern("2:4") and isinstance(again.shape, torch.Size)


def test_to(c: Compressed) -> None:
    assert c.to("cpu") is c and c.to(torch.float32) is c
    half = c.to(torch.bfloat16)
    assert half.dtype == torch.bfloat16 and half.indices is c.indices
    testing.assert_equal_bits(half.dense(), c.dense().bfloat16())
    meta = c.to(device="meta", dtype=torch.float16, non_blocking=True)
    assert [(x.device.type, x.dtype) for x in (meta.values, meta.indices)] == [("meta", torch.float16), ("meta", torch.uint8)]


def test_integers_and_their_steps_move_but_are_not_cast(c: Compressed) -> None:
    rounded = ops.quantize_values(c, "int8")
    assert rounded.to(torch.float64) is rounded
    meta = rounded.to(device="meta", dtype=torch.float64)
    assert meta.step is not None and rounded.step is not None
    assert [(x.device.type, x.dtype) for x in (meta.values, meta.step)] == [("meta", torch.int8), ("meta", rounded.step.dtype)]


def test_pytree(c: Compressed) -> None:
    c.layout("x", lambda _: 1)
    leaves, spec = pytree.tree_flatten(c)
    assert leaves[0] is c.values and leaves[1] is c.indices and len(leaves) == 2
    again = pytree.tree_unflatten(leaves, spec)
    assert type(again) is Compressed and again.shape == c.shape and again.pattern == c.pattern and not again._layouts
    doubled = pytree.tree_map(lambda x: x * 2 if x.is_floating_point() else x, {"a": [c]})["a"][0]
    testing.assert_equal_bits(doubled.dense(), 2 * c.dense())
    assert [str(pytree.keystr(k)) for k, _ in pytree.tree_flatten_with_path(c)[0]] == [".values", ".indices"]
    assert pytree.tree_map(lambda _: None, c).values is None  # leaves need not be tensors
    text = pytree.treespec_dumps(spec)
    assert "nmkernels.Compressed" in text and pytree.treespec_loads(text) == spec


@pytest.mark.parametrize("way", ["torch.save", "deepcopy", "copy"])
def test_copies_are_equal_and_without_layouts(c: Compressed, way: str) -> None:
    c.layout("secret", lambda _: "unique marker")
    if way == "torch.save":
        buffer = io.BytesIO()
        torch.save(c, buffer)
        assert b"unique marker" not in buffer.getvalue()
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
    else:
        again = getattr(copy, way)(c)
    assert (again.values is c.values) == (way == "copy")
    assert again.shape == c.shape and isinstance(again.shape, torch.Size) and again.pattern == c.pattern and again._layouts == {}
    testing.assert_equal_bits(again, c)


def test_layouts_are_built_once_and_follow_writes(c: Compressed) -> None:
    built: list[torch.Tensor] = []

    def build(of: Compressed) -> torch.Tensor:
        built.append(of.values.sum())
        return built[-1]

    assert c.layout("sum", build) is c.layout("sum", build) and len(built) == 1
    ops.compress(torch.ones(6, 16), "2:4", out=c)
    assert c.layout("sum", build).item() == 6 * 8 and len(built) == 2
    c.values.mul_(2)
    assert c.layout("sum", build).item() == 6 * 16
    c.values.data = torch.ones_like(c.values)
    assert c.layout("sum", build).item() == 6 * 8
    address = c.values.data_ptr()
    c.values.data = torch.zeros(6, 8)
    # another tensor at that address would look like the old one
    assert c._layouts["sum"].last.tensors[-2].data_ptr() == address != c.values.data_ptr()


def test_no_layout_is_kept_where_nothing_tells_of_writes(c: Compressed) -> None:
    def build(of: Compressed) -> torch.Tensor:
        return of.values.sum()

    with torch.inference_mode():
        inside = ops.compress(torch.ones(6, 16), "2:4")
        assert inside.layout("sum", build).item() == 6 * 8 and not inside._layouts
        inside.values.mul_(2)
        assert inside.layout("sum", build).item() == 6 * 16
        assert not c.layout("sum", build).is_inference() and c._layouts  # a later call may need gradients
    c.values.requires_grad_()
    assert c.layout("sum", build).requires_grad  # and no constant that was kept
    torch.func.vmap(lambda x: x * ops.Compressed(c.values.detach(), c.indices, "2:4", (6, 16)).layout("sum", build))(torch.ones(2))
    again = ops.Compressed(c.values.detach(), c.indices, "2:4", (6, 16))
    torch.func.grad(lambda x: (x * again.layout("sum", build)).sum())(torch.ones(2))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        again.layout("sum", build)
    assert not again._layouts


@pytest.mark.filterwarnings("error")
def test_compile_takes_and_returns_it(c: Compressed) -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: torch.Tensor, c: Compressed, w: torch.Tensor) -> tuple[torch.Tensor, Compressed]:
        return ops.linear(x, c) + c.shape[0] * c.pattern.n, ops.compress(w, c.pattern)

    x, w = torch.randn(3, 16), torch.randn(6, 16)
    y, made = step(x, c, w)
    testing.assert_equal_bits(y, ops.linear(x, c) + 12)
    testing.assert_equal_bits(made, ops.compress(w, "2:4"))
    assert type(made) is Compressed and made.shape == (6, 16) and made.layout("n", lambda _: 5) == 5


def test_out_reuses_the_buffers(c: Compressed) -> None:
    w = torch.randn(6, 16)
    pointers = c.values.data_ptr(), c.indices.data_ptr()
    assert ops.compress(w, "2:4", out=c) is c
    assert pointers == (c.values.data_ptr(), c.indices.data_ptr())
    testing.assert_equal_bits(c.dense(), ops.prune(w, "2:4"))
    dense = torch.empty(6, 16)
    assert ops.decompress(c, out=dense) is dense
    testing.assert_equal_bits(dense, c.dense())
