"""CompressedLinear does its GEMM by the way that is chosen, and by the right one."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor

import nmkernels as nm
from nmkernels import dispatch
from nmkernels.autograd import gemms
from nmkernels.capability import compiled_core
from nmkernels.nn import compressed
from nmkernels.tuning import TABLE, Task

pytestmark = [pytest.mark.skipif(not compiled_core().ok, reason=compiled_core().reason), pytest.mark.usefixtures("cache")]


def _layer(keep_dense: bool, dtype: torch.dtype = torch.float32) -> nm.CompressedLinear:
    weight, bias = nm.ops.compress(torch.randn(16, 64).to(dtype), "2:4"), torch.randn(16).to(dtype)
    return nm.CompressedLinear(weight, bias, keep_dense=keep_dense)


def _chosen(layer: nm.CompressedLinear, name: str, tokens: int = 20) -> None:
    TABLE.store({gemms.key(*layer.gemms(tokens)): {"choice": name, "us": {}}})
    gemms.forget()


def _expected(layer: nm.CompressedLinear, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, layer.dense(), layer.bias)


@pytest.mark.parametrize("name", ["dense", "cpu rows", "mine rows"])
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
    called: list[str] = []
    monkeypatch.setattr(compressed, "call", lambda name, *args, **kwargs: called.append(name) or gemms.call(name, *args, **kwargs))
    with torch.no_grad():
        torch.testing.assert_close(layer(x), _expected(layer, x))
    assert called == ["expand"] and "dense" not in layer.weight._layouts


def test_a_small_layer_on_a_cpu_keeps_a_dense_copy_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [layer.gemms(1)[0].forms for layer in (_layer(False), _layer(True))] == [("dense", "rows")] * 2
    monkeypatch.setattr(compressed, "SMALL_BYTES", 16 * 64 * 4 - 1)
    assert [layer.gemms(1)[0].forms for layer in (_layer(False), _layer(True))] == [("rows",), ("dense", "rows")]
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


def test_a_second_call_asks_nobody(planned: tuple[nm.CompressedLinear, Tensor]) -> None:
    layer, x = planned
    assert torch.equal(layer(x), _expected(layer, x)) and torch.equal(layer(x.view(4, 5, 64)).view(20, 16), layer(x))
    y = layer(x.requires_grad_())
    y.sum().backward()
    torch.testing.assert_close(x.grad, layer.dense().sum(0).expand_as(x))
    for wrong, error in ((x.double(), nm.DtypeError), (x.view(40, 32), nm.ShapeError), (x[:19], pytest.fail.Exception)):
        with pytest.raises(error):
            layer(wrong)


def test_a_second_call_of_the_kernel_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = _layer(False), torch.randn(20, 64)
    _chosen(layer, "cpu rows")
    with torch.no_grad():
        y = layer(x)
        with monkeypatch.context() as m:
            for name in ("choose", "linear_compressed"):
                m.setattr(compressed, name, lambda *args, **kwargs: pytest.fail("asked"))
            assert torch.equal(layer(x), y) and torch.equal(layer(x.view(4, 5, 64)).view(20, 16), y)
            for other in (x[:19], x.view(40, 32), x.requires_grad_()):
                with torch.set_grad_enabled(other is x), pytest.raises(pytest.fail.Exception):
                    layer(other)
            with pytest.raises(nm.DtypeError):
                layer(x.double())
        with torch.profiler.profile() as profiler:
            layer(x)
        assert "nmkernels::nm_linear" in {event.key for event in profiler.key_averages()}
    layer(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.values.mul_(2),
        lambda layer: layer.to(torch.float64).float(),
        lambda layer: layer.train(),
        lambda layer: layer.load_state_dict(layer.state_dict()),
        lambda layer: setattr(layer, "values", layer.values * 3),
        lambda layer: setattr(layer.values, "data", layer.values * 3),
        lambda layer: nm.nn.set_adapter(layer, torch.ones(64, 1), torch.ones(1, 16), 16, 64),
        lambda layer: layer.values.requires_grad_(),
        lambda layer: gemms.forget(),
    ],
)
def test_a_layer_that_has_changed_asks_again(change: Any, planned: tuple[nm.CompressedLinear, Tensor]) -> None:
    layer, x = planned
    change(layer)
    with pytest.raises(pytest.fail.Exception, match="asked"):
        layer(x)


def test_a_layout_of_tensor_cores_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where this form is at hand."""
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


def test_compiled_it_asks_nobody_and_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "choose", lambda *args, **kwargs: pytest.fail("asked"))
    layer = _layer(True)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (2, 20, 300):
            x = torch.randn(tokens, 64)
            torch.testing.assert_close(compiled(x), _expected(layer, x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_small_layer_multiplies_packed_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once that is known, nothing is between it and the kernel; writes and other inputs are seen all the same."""
    layer, x = _layer(False), torch.randn(1, 64)
    _chosen(layer, "cpu rows", 1)
    with torch.no_grad():
        first, expected = layer(x), _expected(layer, x)
        with monkeypatch.context() as inside:
            inside.setattr(compressed, "choose", lambda *args, **kwargs: pytest.fail("asked"))
            assert torch.equal(layer(x), first)
            torch.testing.assert_close(first, expected)
            layer.bias.add_(1)
            torch.testing.assert_close(layer(x), expected + 1)
        layer.values.zero_()
        assert torch.equal(layer(x), layer.bias[None])
        with pytest.raises(nm.DtypeError):
            layer(x.double())


def test_what_is_timed_is_the_kernel_that_a_frozen_layer_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = _layer(False).gemms(1)[0]
    looked, during = [], {}
    found = gemms.function
    monkeypatch.setattr(gemms, "function", lambda *args: looked.append(args) or found(*args))

    def timer(task: Task) -> float:
        before = len(looked)
        task()
        during[task.name] = len(looked) - before
        return 1.0

    gemms.measure(gemm, timer=timer)
    assert during == {"dense": 0, "cpu rows": 0} and looked
