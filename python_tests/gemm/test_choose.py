"""Where the choice comes from, and that nothing is timed for it unless that is asked for."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

import nmkernels as nm
from bench.fit_rates import on
from nmkernels import timing
from nmkernels.capability import compiled_core
from nmkernels.gemm import choose as module
from nmkernels.gemm import estimate
from nmkernels.gemm.choose import choose, forget, rule, using
from nmkernels.gemm.methods import DENSE, UNESTIMATED, Method, methods
from nmkernels.gemm.problem import Problem, key
from nmkernels.timing import TABLE

pytestmark = pytest.mark.skipif(not compiled_core().ok, reason=compiled_core().reason)

CPU = torch.device("cpu")
FPROP = Problem("fprop", 20, 16, 32, 2, 4, torch.float32, CPU)
DGRAD = FPROP._replace(role="dgrad")
BASELINE = {True: "dense", False: "sparse"}


@pytest.fixture(autouse=True)
def free(cache, monkeypatch):
    """Nothing in the environment decides, and nothing is timed."""
    for name in ("NMKERNELS_CHOICE", "NMKERNELS_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(timing.timer.Timer, "turns", lambda *args, **kwargs: pytest.fail("timed"))
    forget()


@pytest.fixture
def costs(monkeypatch):
    """What the estimate says, by method or form; 1 s for what is not in it."""
    told = {}
    monkeypatch.setattr(estimate, "seconds", lambda method, p: told.get((p.role, method), told.get(method, 1.0)))
    monkeypatch.setattr(estimate, "making", lambda form, p: told.get(f"make {form}", 0.0))
    monkeypatch.setattr(estimate, "margin", lambda method, p: 1.0 if method == BASELINE["dense" in p.forms] else told.get("margin", 1.06))
    return told


def names(*problems):
    return [m.name for m in choose(*problems)]


def store(choice, *problems):
    TABLE.store({key(*problems): {"choice": choice}})


def test_integers(costs, monkeypatch):
    p = FPROP._replace(values="int4", group=8, forms=("rows",), dtype=torch.bfloat16)
    costs.update({"sparse": 0.9, "expand": 2.0, "expand float32": 1.0, "dense": 0.5})
    packed, both = ("rows",), ("dense", "rows")
    for sparse, forms, want in [(0.9, packed, "op"), (1.1, packed, "expand float32"), (0.4, both, "op"), (0.9, both, "dense")]:
        costs["sparse"] = sparse
        assert [m.name for m in rule(p._replace(forms=forms))] == [want], (sparse, forms)
    costs["sparse"] = 0.1
    assert [m.name for m in rule(p._replace(forms=both, cached=True))] == ["op"], "compared with a copy in the cache too"
    assert [m.name for m in module.for_graphs(p)] == ["op"], "for any number of tokens"
    on_gpu = p._replace(device=torch.device("cuda"))
    monkeypatch.setattr(module, "_tuned", lambda problems: None)
    for most, few, many in ((0, "expand", "expand"), (16, "op", "expand"), (17, "op", "op")):
        monkeypatch.setattr(module, "_has_kernel", lambda p, most=most: p.tokens <= most)
        assert [m.name for m in (*rule(on_gpu._replace(tokens=16)), *module.for_graphs(on_gpu))] == [few, many], most


def test_the_least_estimate_wins_by_its_margin(costs):
    for sparse, want in ((0.5, "op"), (0.94, "op"), (0.95, "dense"), (2.0, "dense")):
        costs["sparse"] = sparse
        forget()
        assert names(FPROP) == [want], sparse
    costs.update({"sparse": 0.8, "margin": 1.25 + 1e-9})
    forget()
    assert names(FPROP) == ["dense"]
    packed = FPROP._replace(forms=("rows",), dtype=torch.bfloat16)
    for times, want in (({}, "op"), ({"expand": 0.5}, "expand"), ({"expand": 0.5, "expand float32": 0.4}, "expand float32")):
        costs.update({"sparse": 1.0, "margin": 1.06, "expand": 1.0, "expand float32": 1.0, **times})
        forget()
        assert names(packed) == [want]


def test_the_making_of_a_changing_weight_counts(costs):
    costs.update({"sparse": 0.9, "make packed": 0.5, "make dense": 0.1})
    assert names(FPROP) == ["op"] and names(FPROP._replace(changing=True)) == ["dense"]
    costs["make dense"] = 0.6
    forget()
    assert names(FPROP._replace(changing=True)) == ["op"]


def test_gemms_that_read_one_weight_are_chosen_together(costs):
    pair = FPROP._replace(changing=True), DGRAD._replace(changing=True)
    costs.update({("fprop", "sparse"): 0.5, ("dgrad", "sparse"): 0.9, "make packed": 0.2, "make dense": 0.2})
    assert names(*pair) == ["op", "op"], "a dense dgrad would need the dense layout too"
    costs.update({("dgrad", "sparse"): 1.5})
    forget()
    assert names(*pair) == ["op", "dense"]
    costs.update({"make packed": 0.7})
    forget()
    assert names(*pair) == ["dense", "dense"]


CORES = ("dense", "rows", "rows:wgmma.sp")
WGRAD = Problem("wgrad", 4096, 4096, 4096, 2, 4, torch.bfloat16, torch.device("cuda", 0), CORES, "exact")


@pytest.fixture
def named(monkeypatch):
    """``named(text)``: the GPU's name from now on."""

    def call(text):
        estimate.forget()
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: text)

    monkeypatch.setattr(module, "_tuned", lambda problems: None)
    yield call
    estimate.forget()


@pytest.mark.parametrize(("name", "low", "high"), [("A100", 800, 1000), ("H100", 1600, 1800), ("H200", 1200, 1300)])
def test_an_estimate_is_left_out_where_it_costs_more_than_it_saves(name, low, high, named):
    """Both grow with the outputs and the tokens, so that the inputs decide, by memory and arithmetic of the GPU."""
    named(f"NVIDIA {name}")
    kept = [cols for cols in range(64, 8192, 64) if rule(WGRAD._replace(cols=cols)) != (UNESTIMATED,)]
    assert low <= kept[0] <= high and kept == list(range(kept[0], 8192, 64))
    few, many = WGRAD._replace(cols=low), WGRAD._replace(cols=high)
    assert rule(many) == (Method("op", "rows:wgmma.sp"),), "what is drawn is written as the kernel reads it"
    assert rule(WGRAD._replace(tokens=64)) == (UNESTIMATED,), "two launches and little to multiply"
    assert [m for m in methods(few) if m == UNESTIMATED] and choose(few) == (UNESTIMATED,) == module.for_graphs(few)
    assert rule(few._replace(rule="magnitude")) != (UNESTIMATED,), "that is for comparison"
    assert module._for_graphs(("wgrad", *few._replace(cols=512)[2:])) == "without estimate|dense|"


def test_an_estimate_that_is_multiplied_in_dense_layout_saves_nothing(named):
    for gpu, change in (("NVIDIA L4", {}), ("NVIDIA H100", {"dtype": torch.float32, "forms": CORES[:2]})):
        named(gpu)
        assert rule(WGRAD._replace(**change)) == (UNESTIMATED,)
    on_cpu = WGRAD._replace(device=CPU, forms=CORES[:2])
    assert UNESTIMATED not in [*methods(on_cpu), *rule(on_cpu._replace(cols=64))], "CPUs always estimate"


def test_where_nothing_is_known_it_is_the_baseline(costs, monkeypatch):
    costs["sparse"] = 0.1
    for change, want in [
        ({"dtype": torch.float64}, "dense"),
        ({"device": torch.device("meta")}, "dense"),
        ({"forms": ("rows",), "dtype": torch.float64}, "op"),
        ({"forms": ("dense",)}, "dense"),
        ({}, "op"),
    ]:
        assert names(FPROP._replace(**change)) == [want], change
    monkeypatch.setattr(module, "compiled_core", lambda: type("Probe", (), {"ok": False}))
    assert rule(FPROP) == (DENSE,)


def test_what_was_tuned_is_followed(costs):
    assert names(FPROP) == ["dense"]
    store("op", FPROP)
    assert names(FPROP) == ["op"] == names(FPROP._replace(tokens=32)) and names(FPROP._replace(tokens=33)) == ["dense"]
    store("dense, cpu rows", FPROP, DGRAD)
    assert choose(FPROP, DGRAD) == (DENSE, Method("cpu rows", "rows", "cpu"))
    forget()
    assert names(FPROP) == ["op"], "and found again on disk"


def test_a_line_that_names_no_method_is_ignored(costs):
    for choice in ("magic rows", "reference rows", "op, op", 3, None, "cpu columns", {"id": 1}):
        store(choice, FPROP)
        assert names(FPROP) == ["dense"], choice


def test_it_is_a_lookup_that_does_not_grow_without_end(costs, monkeypatch):
    found = choose(FPROP)
    with monkeypatch.context() as m:
        m.setattr(module, "_find", lambda *args: pytest.fail("asked again"))
        assert choose(FPROP) == found
    op = methods(FPROP)[1]
    with using((FPROP, op)):
        assert choose(FPROP) == (op,)
    assert choose(FPROP) == found
    monkeypatch.setattr(module, "REMEMBERED", 4)
    for tokens in range(1, 20):
        choose(FPROP._replace(tokens=tokens))
    assert len(module._chosen) <= 4


def test_the_environment_decides(costs, monkeypatch):
    costs["sparse"] = 0.5
    for setting, want, packed in [("dense", "dense", "op"), ("packed", "op", "op"), ("", "op", "op"), ("table", "op", "op")]:
        monkeypatch.setenv("NMKERNELS_CHOICE", setting)
        forget()
        assert names(FPROP, DGRAD) == [want, want] and names(FPROP._replace(forms=("rows",))) == [packed]
        assert names(FPROP._replace(forms=("dense",))) == ["dense"]
    costs["sparse"] = 2.0
    monkeypatch.setenv("NMKERNELS_BACKEND", "reference")
    forget()
    assert names(FPROP) == ["op"]
    monkeypatch.setenv("NMKERNELS_CHOICE", "fastest")
    forget()
    with pytest.raises(nm.NMError, match="NMKERNELS_CHOICE='fastest' is unknown; set one of dense, packed, measured"):
        choose(FPROP)


def test_deterministic_algorithms_take_the_baseline(costs):
    costs["sparse"] = 0.5
    assert names(FPROP) == ["op"]
    torch.use_deterministic_algorithms(True)
    try:
        assert names(FPROP, DGRAD) == ["dense", "dense"] and names(FPROP._replace(forms=("rows",))) == ["op"]
    finally:
        torch.use_deterministic_algorithms(False)
    assert names(FPROP) == ["op"]


def test_it_measures_where_that_is_asked_for(costs, monkeypatch):
    measured = []

    def measure(*problems):
        measured.append(problems)
        store("op", *problems)

    monkeypatch.setattr(module, "measure_and_record", measure)
    assert names(FPROP) == ["dense"] and not measured
    monkeypatch.setenv("NMKERNELS_CHOICE", "measured")
    forget()
    assert names(FPROP) == ["op"] == names(FPROP) and measured == [(FPROP,)]
    with torch.profiler.profile():
        assert names(DGRAD) == ["dense"] and len(measured) == 1, "not while somebody watches"
    monkeypatch.setattr(module, "measure_and_record", Mock(side_effect=[torch.OutOfMemoryError, IndexError]))
    assert names(FPROP._replace(cols=64)) == ["dense"], "no memory to measure in is no error"
    with pytest.raises(IndexError):
        choose(FPROP._replace(cols=96))


# ---- in graphs


def test_a_graph_has_one_answer_for_all_tokens(costs):
    store("dense", FPROP._replace(tokens=64))
    store("op", FPROP._replace(tokens=4096))
    seen, weight = [], torch.nn.Parameter(torch.zeros(16, 32))

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def f(x):
        taken = choose(Problem("fprop", x.shape[0], weight.shape[0], weight.shape[1], 2, 4, torch.float32, CPU))[0]
        return x + 1 if taken.name == "op" else x

    torch._dynamo.utils.counters.clear()
    for tokens in (64, 20, 4000, 100):
        seen.append(float(f(torch.zeros(tokens, 32)).mean()))
    assert seen == [1.0] * 4  # as measured with the most tokens
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_an_unmeasured_graph_follows_the_rule_for_many_tokens(costs, monkeypatch):
    monkeypatch.setattr(estimate, "seconds", lambda method, p: 0.5 if method == "sparse" and p.tokens < 1000 else 1.0)
    assert names(FPROP) == ["op"]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert names(FPROP) == ["dense"]
    monkeypatch.setenv("NMKERNELS_CHOICE", "packed")
    assert names(FPROP) == ["op"]


def test_a_cached_weight_without_rows_needs_a_larger_margin():
    """Rows of weights in memory are not enough: the cache makes dense faster by more than the op."""
    for tokens, margin in ((1, 1.8), (4, 1.8), (16, 1.5)):
        p = FPROP._replace(tokens=tokens, rows=256, cols=256, cached=True)
        with on("amx intel 6"):
            assert estimate.margin("sparse", p) == margin and estimate.margin("dense", p) == 1
            assert estimate.margin("sparse", p._replace(forms=("rows",))) == estimate.margin("expand", p._replace(forms=("rows",))) == 1
            assert estimate.seconds("sparse", p) == estimate.seconds("sparse", p._replace(cached=False))
        with on("avx512_bf16 amd 25"):
            assert estimate.margin("sparse", p) == 1.06
            assert estimate.margin("sparse", p._replace(tokens=16, n=1, m=64)) == 1.25, "sparser than any row"
            assert estimate.seconds("dense", p) < estimate.seconds("dense", p._replace(cached=False)), "rows of cached weights"
    assert key(FPROP) != key(FPROP._replace(cached=True))
