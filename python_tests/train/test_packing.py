"""The option ``packed``: which plans it makes, what it refuses, and that it changes how GEMMs are computed and nothing else."""

import sys
from dataclasses import replace

import pytest
import torch

import nmkernels as nm
from nmkernels.autograd import GemmPlan
from nmkernels.capability import compiled_core
from nmkernels.gemm.choose import forget
from nmkernels.gemm.methods import DENSE, Method, methods
from nmkernels.pattern import RecipeError
from nmkernels.recipes import FST, SRSTE, SSTE, STE, STEP
from nmkernels.recipes.schedule import packing
from python_tests.nn.test_effective import Calls
from python_tests.recipes.loop import distance, snapshot
from python_tests.recipes.roster import ROSTER
from python_tests.recipes.training import DATA, DATA32, F32, F64, run, start, step

KEYS = ["ste", "srste", "step", "step_sste", "sste", "sste_approx", "sste_dense_wgrad", "fst", "fst_nm", "sdgf_late", "layerwise"]


def made(key, packed):
    """A recipe of the roster, its GEMMs packed or not; where it has an inner one, that one's."""
    recipe = ROSTER[key].recipe
    inner = getattr(recipe, "inner", None)
    return replace(recipe, packed=packed) if inner is None else replace(recipe, inner=replace(inner, packed=packed))


# the function hides its module
linear_module, route_module = (sys.modules[f"nmkernels.{name}"] for name in ("autograd.linear", "gemm.route"))
EACH = pytest.mark.parametrize("key", KEYS)


@pytest.mark.quick(3)
@EACH
def test_twenty_steps_are_those_of_the_dense_layout(key):
    for dtype, data, close in ((F64, DATA, 1e-10), (F32, DATA32, 1e-4)):
        want, *others = (snapshot(run(made(key, packed=value), dtype, data)[0]) for value in (False, True, "auto"))
        assert all(distance(got, want) < close for got in others)


@EACH
def test_packed_gemms_are_what_runs(key):
    model, handle, _ = run(made(key, packed=True), F32, DATA32[:9])
    layer = model[2]
    assert layer.plan.packs and handle.run.stage.transform is not None
    model(torch.randn(4, 16))
    (packed,) = layer.effective.copies
    assert packed.rows.pattern == layer.mask_pattern and packed.columns is None, "on a CPU the rows serve both GEMMs"
    assert torch.equal(packed.rows.dense(), layer.effective_weight())


@pytest.fixture
def chosen(request, monkeypatch):
    """What ``NMKERNELS_CHOICE`` says, in whose GEMMs "auto" comes out."""
    monkeypatch.setenv("NMKERNELS_CHOICE", request.param)
    forget()
    yield request.param
    forget()


@pytest.mark.parametrize("chosen", ["dense", "packed"], indirect=True)
@pytest.mark.parametrize("name", ["srste", "sste", "sste_approx", "fst", "fst_nm"])
def test_auto_does_what_was_chosen(name, chosen):
    want = run(made(name, packed=False), F32, DATA32[:6])[0]
    with Calls() as calls:
        model = run(made(name, packed="auto"), F32, DATA32[:6])[0]
    assert distance(snapshot(model), snapshot(want)) < 1e-5
    estimated = {"dense": "mvue", "packed": "mvue_compress"}[chosen]
    names = {name.removesuffix("_out").replace("compress", "pack") for name in calls.names}
    assert {"linear", "linear_dgrad", "pack"} & names == (set() if chosen == "dense" else {"linear", "linear_dgrad", "pack"})
    draws = name in ("sste", "sste_approx", "fst")
    assert calls.names.count(estimated) == (12 if draws else 0)
    assert calls.names.count("linear_wgrad") == (12 if draws and chosen == "packed" else 0)


@pytest.mark.parametrize("chosen", ["dense", "packed"], indirect=True)
def test_auto_compiles_without_a_break(chosen):
    torch.compiler.reset()
    model, _, optimizer = start(made("sste", packed="auto"), F32)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    forward = torch.compile(model, fullgraph=True, backend=backend)
    for batch in DATA32[:4]:
        step(forward, optimizer, batch)
    assert len(graphs) == 1 and all((op in graphs[0]) == (chosen == "packed") for op in ("nm_linear.", "nm_linear_dgrad", "nm_pack"))
    assert distance(snapshot(model), snapshot(run(made("sste", packed=False), F32, DATA32[:4])[0])) < 1e-5
    torch.compiler.reset()


@pytest.mark.skipif(not compiled_core().ok, reason=compiled_core().reason)
@pytest.mark.parametrize(
    ("fprop", "dgrad", "wgrad"),
    [
        ("op rows", "op columns", "dense"),
        ("dense", "op columns", "op rows"),
        ("op rows", "dense", "op rows"),
        ("dense", "cpu rows", "dense"),
    ],
)
def test_each_gemm_is_done_by_the_method_chosen_for_it(fprop, dgrad, wgrad, monkeypatch):
    chosen = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}

    def choose(*problems):
        def named(p):
            return next(m for m in methods(p) if chosen[p.role] in (m.name, f"{m.name} {m.form}"))

        return tuple(Method("op", "columns") if chosen[p.role] == "op columns" else named(p) for p in problems)

    for module in (route_module, linear_module):
        monkeypatch.setattr(module, "choose", choose)
    with Calls() as calls:
        got, _, _ = run(made("fst", packed="auto"), F32, DATA32[:4])
    assert distance(snapshot(got), snapshot(run(made("fst", packed=False), F32, DATA32[:4])[0])) < 1e-5
    # two layers and four steps; the first layer's input needs no gradient
    assert calls.names.count("linear") == 8 * (fprop == "op rows") + 4 * (dgrad == "op columns")
    assert calls.names.count("linear_dgrad") == 4 * (dgrad == "cpu rows")
    assert calls.names.count("linear_wgrad") == 8 * (wgrad == "op rows")
    (packed,) = (form for form in got[2].effective.copies if isinstance(form, nm.ops.Packed))
    assert (packed.rows is not None) == (fprop == "op rows" or dgrad == "cpu rows")
    assert (packed.columns is not None) == (dgrad == "op columns")


@pytest.mark.parametrize("name", ["srste", "sste", "sste_approx", "fst"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_layer_is_tuned_for_what_it_chooses(name, grad, monkeypatch):
    asked = []
    for module in (route_module, linear_module):
        monkeypatch.setattr(module, "choose", lambda *problems: asked.append(problems) or (DENSE,) * len(problems))
    model, _, _ = start(made(name, packed="auto"), F32)
    layer, x = model[0], torch.randn(3, 4, 16, requires_grad=True)
    with torch.set_grad_enabled(grad):
        y = layer(x)
    if grad:
        y.sum().backward()
    known = layer.problems(12)
    assert asked == (known if grad else [known[0][:1]])
    assert [len(some) for some in known] == ([2] if name == "srste" else [2, 1])


def test_plans():
    mvue = GemmPlan(wgrad="mvue", n=2, m=4)
    assert packing(False, "1:4", mvue) is mvue
    assert packing(True, "1:4", mvue) == GemmPlan("packed", "device", "mvue", 2, 4)
    assert packing("auto", "1:8") == GemmPlan("auto", "auto", n=1, m=8)
    assert FST("2:4", 60, packed=True).stage({}).plan.wgrad == "mvue" and SSTE("1:4", packed="auto").stage({}).plan.fprop == "auto"
    assert all(recipe().stage({}).plan.fprop == "auto" for recipe in (STE, SRSTE, SSTE)), "by default"
    assert not SSTE(fp8="paper").stage({}).plan.packs, "emulated FP8 needs the dense layout"
    plan = FST("2:4", 60).stage({}).plan
    assert plan.dense_layout == FST("2:4", 60, packed=False).stage({}).plan == plan.dense_layout.dense_layout


@pytest.mark.parametrize("name", ["ste", "srste", "sste", "step", "fst", "sdgf_late"])
def test_other_values_are_refused(name):
    for value in ("always", None, 2):
        with pytest.raises(RecipeError, match=f"packed={value!r} is unknown; choose one of auto, True, False"):
            made(name, packed=value)
    with pytest.raises(RecipeError, match="fp8='paper', packed=True cannot be combined: .*the weight in dense layout"):
        SSTE(fp8="paper", packed=True)
    with pytest.raises(RecipeError, match="packed=True is a setting of phase 1, which inner= replaces; set it on the inner recipe"):
        STEP("2:4", 20, packed=True, inner="srste")
