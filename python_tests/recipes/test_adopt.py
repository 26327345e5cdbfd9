"""sparsify_ takes layers over that were built as SparseLinear and never had a handle."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import nmkernels as nm
from python_tests.recipes.loop import mlp
from python_tests.recipes.training import DATA32, F32, metrics_of, same, start, train

R = nm.recipes


def build(sparse: bool, pattern: str = "2:4") -> nn.Sequential:
    """The small model, the first layer built as a ``SparseLinear``."""
    model = mlp(F32)
    if sparse:
        first = nm.SparseLinear(16, 32, pattern=pattern)
        first.load_state_dict(model[0].state_dict())
        model[0] = first
    return model


@pytest.mark.parametrize(
    "recipe",
    [R.SRSTE("2:4", decay=1e-2), R.STEP("2:4", t_min=2, t_max=4), R.SSTE("2:4", mvue=None), R.ASP("2:4", start=4), R.get("dense")],
    ids=lambda recipe: recipe.name,
)
def test_it_trains_as_if_it_had_been_dense(recipe: R.Recipe) -> None:
    results = []
    for sparse in (False, True):
        model, handle, optimizer = start(recipe, F32, model=build(sparse))
        metrics: list[str] = []
        train(model, optimizer, DATA32[:8], lambda t, handle=handle, metrics=metrics: metrics.append(str(metrics_of(handle))))
        results.append((handle.finish().state_dict(), metrics))
    (want, figures), (got, seen) = results
    assert same(got, want) and seen == figures


def test_report_and_remove() -> None:
    model = build(True)
    handle = nm.sparsify_(model, "srste:2:4")
    assert list(handle.layers) == ["0", "2"] and all(entry.sparse for entry in handle.report.entries if entry.name in handle.layers)
    handle.remove()
    assert [type(layer) for layer in model] == [nn.Linear, nn.GELU] * 2 + [nn.Linear]


def test_small_ones_and_heads_too() -> None:
    model = nn.ModuleDict({"lm_head": nm.SparseLinear(8, 4), "classifier": nn.Linear(32, 32)})
    assert list(nm.sparsify_(model, "srste:2:4").layers) == ["lm_head"]


def test_the_filter_may_leave_them_out() -> None:
    model = build(True)
    handle = nm.sparsify_(model, "srste:2:4", lambda module, name: name == "2")
    assert list(handle.layers) == ["2"] and not model[0].governed and model[0].transform is not None


def test_not_those_of_another_pattern() -> None:
    model = build(True, "1:4")
    handle = nm.sparsify_(model, "srste:2:4")
    assert list(handle.layers) == ["2"] and "it is 1:4 already" in str(handle.report)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("finished", [False, True])
def test_not_those_that_have_a_handle(copied: bool, finished: bool) -> None:
    model = build(True)
    handle = nm.sparsify_(model, "srste:2:4")
    model(torch.randn(2, 16))
    if finished:
        handle.finish()
    model = copy.deepcopy(model) if copied else model
    with pytest.raises(nm.RecipeError, match="has sparse layers already"):
        nm.sparsify_(model, "srste:2:4")


def test_a_failure_leaves_the_model_as_it_was() -> None:
    model = build(True)
    with torch.no_grad():
        model[2].weight.zero_()  # S-STE has no scale for it
    with pytest.raises(nm.RecipeError):
        nm.sparsify_(model, "sste:2:4")
    assert [type(layer) for layer in model] == [nm.SparseLinear, nn.GELU, nn.Linear, nn.GELU, nn.Linear]
    assert not model[0].governed and not dict(model.named_buffers()) and model[0].transform is model[0].final
    assert type(model[0].final).__name__ == "HardMask"
    with torch.no_grad():
        model[2].weight.normal_()
    assert len(nm.sparsify_(model, "sste:2:4").layers) == 2
