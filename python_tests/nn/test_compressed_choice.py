"""CompressedLinear does its GEMM by the method that is chosen, and right."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor

import nmkernels as nm
from nmkernels import dispatch
from nmkernels.capability import compiled_core
from nmkernels.gemm.choose import forget
from nmkernels.gemm.problem import key
from nmkernels.nn import compressed
from nmkernels.timing import TABLE
from python_tests.nn.test_effective import Calls

pytestmark = [pytest.mark.skipif(not compiled_core().ok, reason=compiled_core().reason), pytest.mark.usefixtures("cache")]


def _layer(keep_dense: bool, dtype: torch.dtype = torch.float32) -> nm.CompressedLinear:
    weight, bias = nm.ops.compress(torch.randn(16, 64).to(dtype), "2:4"), torch.randn(16).to(dtype)
    return nm.CompressedLinear(weight, bias, keep_dense=keep_dense)


def _chosen(layer: nm.CompressedLinear, name: str, tokens: int = 20) -> None:
    TABLE.store({key(*layer.problems(tokens)[0]): {"choice": name, "us": {}}})
    forget()


def _expected(layer: nm.CompressedLinear, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, layer.dense(), layer.bias)


@pytest.mark.parametrize("name", ["dense", "op", "mine rows"])
@pytest.mark.parametrize(("dtype", "leading"), [(torch.float32, (4, 5)), (torch.bfloat16, (20,))])
def test_it_runs_what_is_chosen(name: str, dtype: torch.dtype, leading: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []

    def fn(x: Tensor, *args: Any, out: Tensor | None = None) -> Tensor:
        ran.append(torch.is_grad_enabled())
        return nm.reference.linear(x, *args)

    _add(monkeypatch, fn)
    layer, x = _layer(True, dtype), torch.randn(*leading, 64).to(dtype)
    _chosen(layer, name)
    with torch.no_grad():
        y = layer(x)
        torch.testing.assert_close(y, _expected(layer, x))
    assert ran == ([False] if name == "mine rows" else []) and ("dense" in layer.weight._layouts) == (name == "dense")
    # with gradients too, where the dispatcher chooses between backends
    y = layer(x.requires_grad_())
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, layer.dense().sum(0).expand_as(x))
    assert layer.bias is not None and layer.bias.grad is not None


def _add(monkeypatch: pytest.MonkeyPatch, fn: Any) -> None:
    entry = dispatch.Impl("nm_linear", "mine", fn, dispatch.always, 0)
    monkeypatch.setitem(dispatch._impls, "nm_linear", [*dispatch._impls["nm_linear"], entry])


def test_without_a_dense_layout_it_may_expand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "SMALL_BYTES", 0)
    layer, x = _layer(False), torch.randn(20, 64)
    _chosen(layer, "expand")
    for grad in (False, True):
        with Calls() as calls, torch.set_grad_enabled(grad):
            y = layer(x.requires_grad_(grad))
        torch.testing.assert_close(y, _expected(layer, x))
        assert [name.removesuffix("_out") for name in calls.names] == ["decompress"] and "dense" not in layer.weight._layouts
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, layer.dense().sum(0).expand_as(x))


def test_a_small_layer_on_a_cpu_keeps_a_dense_copy_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [layer.problems(1)[0][0].forms for layer in (_layer(False), _layer(True))] == [("dense", "rows")] * 2
    monkeypatch.setattr(compressed, "SMALL_BYTES", 16 * 64 * 4 - 1)
    assert [layer.problems(1)[0][0].forms for layer in (_layer(False), _layer(True))] == [("rows",), ("dense", "rows")]
    monkeypatch.setattr(compressed, "SMALL_BYTES", 16 * 64 * 4)
    layer, x = _layer(False), torch.randn(3, 64)
    _chosen(layer, "dense", 3)
    for _ in range(3):
        assert torch.equal(layer(x), _expected(layer, x))
    assert list(layer.state_dict()) == ["bias", "values", "indices"]
    small, large = io.BytesIO(), io.BytesIO()
    torch.save(layer, small)
    torch.save(_layer(False), large)
    assert abs(small.tell() - large.tell()) < 16 * 64 * 4, "the copy is not saved"


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> tuple[nm.CompressedLinear, Tensor]:
    """A layer that has multiplied its dense copy, and whose next call of the kind asks nobody."""
    layer, x = _layer(False), torch.randn(20, 64)
    _chosen(layer, "dense")
    layer(x)
    monkeypatch.setattr(compressed, "choose", lambda *args, **kwargs: pytest.fail("asked"))
    return layer, x


def test_a_second_call_is_remembered(planned: tuple[nm.CompressedLinear, Tensor]) -> None:
    layer, x = planned
    assert torch.equal(layer(x), _expected(layer, x)) and torch.equal(layer(x.view(4, 5, 64)).view(20, 16), layer(x))
    y = layer(x.requires_grad_())
    y.sum().backward()
    torch.testing.assert_close(x.grad, layer.dense().sum(0).expand_as(x))
    for wrong, error in ((x.double(), nm.DtypeError), (x.view(40, 32), nm.ShapeError), (x[:19], pytest.fail.Exception)):
        with pytest.raises(error):
            layer(wrong)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.values.mul_(2),
        lambda layer: layer.to(torch.float64).float(),
        lambda layer: layer.train(),
        lambda layer: layer.load_state_dict(layer.state_dict()),
        lambda layer: setattr(layer, "values", layer.values * 3),
        lambda layer: setattr(layer.values, "data", layer.values * 3),
        lambda layer: nm.nn.adapter.set_adapter(layer, torch.ones(64, 1), torch.ones(1, 16), 16, 64),
        lambda layer: layer.values.requires_grad_(),
        lambda layer: forget(),
    ],
)
def test_a_layer_that_has_changed_asks_again(change: Any, planned: tuple[nm.CompressedLinear, Tensor]) -> None:
    layer, x = planned
    change(layer)
    with pytest.raises(pytest.fail.Exception, match="asked"):
        layer(x)


def test_a_layout_of_tensor_cores_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where this form is available."""
    asked: list[torch.dtype] = []

    def fn(x: Tensor, values: Tensor, indices: Tensor, *args: Any, out: Tensor | None = None) -> Tensor:
        asked.append(indices.dtype)
        return nm.reference.linear(x, values, indices, *args)

    _add(monkeypatch, fn)
    monkeypatch.setattr(compressed, "forms", lambda *args: ("dense", "rows", "rows:mma.sp"))
    layer, x = _layer(True, torch.bfloat16), torch.randn(20, 64).to(torch.bfloat16)
    _chosen(layer, "mine rows:mma.sp")
    with torch.no_grad():
        torch.testing.assert_close(layer(x), _expected(layer, x))
        made = layer.weight._layouts["rows:mma.sp"].last.value
        layer(x)
    assert asked == [torch.int32] * 2 and layer.weight._layouts["rows:mma.sp"].last.value is made


def test_a_graph_calls_the_op_and_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "choose", lambda *problems: pytest.fail("chosen"))
    layer = _layer(True)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (2, 20, 300):
            x = torch.randn(tokens, 64)
            torch.testing.assert_close(compiled(x), _expected(layer, x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
