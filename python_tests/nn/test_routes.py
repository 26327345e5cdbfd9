"""A call that has to be refused is refused on a layer that has run the good one, whose kernel is remembered by then."""

import copy
import pickle

import pytest
import torch

import nmkernels as nm
from nmkernels.capability import compiled_core
from nmkernels.gemm import choose

pytestmark = pytest.mark.skipif(not compiled_core().ok, reason=compiled_core().reason)

IN, OUT = 64, 32
GOOD = (4, IN)
BAD = {
    "another dtype": torch.randn(GOOD, dtype=torch.float64),
    "integers": torch.ones(GOOD, dtype=torch.int64),
    "too few columns": torch.randn(4, IN - 4),
    "as many elements in other columns": torch.randn(8, IN // 2),
    "a scalar": torch.randn(()),
    "another device": torch.empty(GOOD, device="meta"),
}


def trained(packed):
    model = torch.nn.Sequential(torch.nn.Linear(IN, OUT))
    recipe = nm.recipes.SRSTE("2:4", packed=packed)
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=1e-3))
    model(torch.randn(GOOD)).sum().backward()
    optimizer.step()
    return model[0]


LAYERS = {
    "packed": lambda: trained(True),
    "dense": lambda: trained(False),
    "compressed": lambda: nm.CompressedLinear(nm.ops.compress(torch.randn(OUT, IN), "2:4"), torch.randn(OUT)),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("setting", ["packed", "dense"])
def test_what_must_be_refused_is_refused_after_a_good_call(name, what, grad, setting, monkeypatch):
    monkeypatch.setenv("NMKERNELS_CHOICE", setting)
    nm.gemm.choose.forget()
    layer, good = LAYERS[name](), torch.randn(GOOD)
    with torch.set_grad_enabled(grad):
        before = [layer(good) for _ in range(3)]
        with pytest.raises((nm.NMError, RuntimeError)):
            layer(BAD[what])
        torch.testing.assert_close(layer(good), before[0])
    nm.gemm.choose.forget()


@pytest.mark.parametrize("name", LAYERS)
def test_a_bias_that_does_not_fit_is_refused(name, monkeypatch):
    monkeypatch.setenv("NMKERNELS_CHOICE", "packed")
    nm.gemm.choose.forget()
    layer, good = LAYERS[name](), torch.randn(GOOD)
    with torch.no_grad():
        layer(good)
        for wrong in (torch.randn(OUT + 4), torch.randn(OUT - 1), torch.randn(2, OUT)):
            layer.bias = torch.nn.Parameter(wrong)
            if name == "dense" and wrong.dim() == 2:
                continue  # F.linear adds what broadcasts
            with pytest.raises((nm.NMError, RuntimeError)):
                layer(good)
    nm.gemm.choose.forget()


def test_routes_are_few_and_belong_to_one_layer(monkeypatch):
    monkeypatch.setattr(choose, "MOST_ROUTES", 2)
    routes = choose.Routes()
    assert [routes.put(kind, -kind) for kind in range(3)] == [0, -1, -2] and dict(routes) == {2: -2}
    for again in (copy.copy(routes), copy.deepcopy(routes), pickle.loads(pickle.dumps(routes))):
        assert type(again) is choose.Routes and not again
