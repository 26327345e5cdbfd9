"""Measuring: only what is right is timed, a verdict has to repeat, and a model's layers follow what was found."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels import dispatch
from nmkernels.autograd import GemmPlan, HardMask
from nmkernels.backends.triton import interpreted
from nmkernels.capability import compiled_core
from nmkernels.gemm import choose as choosing
from nmkernels.gemm import tune as tuning
from nmkernels.gemm.candidates import measure
from nmkernels.gemm.choose import choose
from nmkernels.gemm.methods import random_operands, run
from nmkernels.gemm.problem import Problem, key
from nmkernels.nn import compressed
from nmkernels.recipes.methods.fst import TransposableMask
from python_tests.nn.test_effective import Calls

pytestmark = [
    pytest.mark.skipif(interpreted() or not compiled_core().ok, reason="the CPU's kernels are what is chosen here"),
    pytest.mark.usefixtures("cache"),
]

CPU = torch.device("cpu")
FPROP = Problem("fprop", 20, 16, 32, 2, 4, torch.float32, CPU)


def clock(**seconds):
    """What each method takes, ``dense=1.0`` or ``mine_rows=0.5``; 1 s for all others."""

    def timer(task):
        task()
        return seconds.get(task.name.replace(", ", "__").replace(" ", "_"), 1.0)

    return timer


@pytest.fixture
def mine(monkeypatch):
    """A backend of nm_linear that does what the first item of a list says: right, wrong, raises, declines."""
    how = ["right"]
    before = dispatch._impls["nm_linear"]

    def fn(x, *args, out=None):
        assert how[0] != "declines"
        if how[0] == "raises":
            raise RuntimeError("no shared memory\nand more")
        y = nm.reference.linear(x, *args)
        if how[0] == "wrong":
            y.view(-1)[-1] *= 1 + 1e-3
        return y if out is None else out.copy_(y)

    def register(**more):
        entry = dispatch.Impl("nm_linear", "mine", fn, lambda *args: (how[0] != "declines", "it is mine"), 1, **more)
        monkeypatch.setitem(dispatch._impls, "nm_linear", [*before, entry])
        return how

    return register


# ---- one GEMM


def test_the_fastest_is_best():
    found = measure(FPROP, timer=clock(op=0.25))
    assert (found.best, found.baseline, found.gain) == ("op", "dense", 4.0)
    assert found.seconds == {"dense": 1.0, "op": 0.25} and not found.refused
    assert found.declined["cpu rows"] == "it is the op's own choice" and {"triton rows", "cuda rows"} <= set(found.declined)
    for seconds, best in ((4.0, "dense"), (0.99, "dense"), (0.97, "op")):  # 1 % is noise
        assert measure(FPROP, timer=clock(op=seconds)).best == best


def test_a_verdict_has_to_repeat():
    for samples, best in (((0.5, 0.5), "op"), ((0.5, 1.1), "dense"), ((1.1, 0.2), "dense")):
        left = list(samples)
        assert measure(FPROP, timer=lambda task, left=left: left.pop(0) if task.name == "op" else 1.0).best == best


WHY = {"right": "", "wrong": "against float64", "raises": "RuntimeError: no shared memory", "declines": "it is mine"}


@pytest.mark.parametrize(("how", "said"), WHY.items())
def test_only_what_is_right_is_timed(how, said, mine):
    mine()[0] = how
    found = measure(FPROP, timer=clock(mine_rows=0.01))
    assert found.best == ("mine rows" if how == "right" else "dense")
    told = (found.declined if how == "declines" else found.refused).get("mine rows", "")
    assert said in told and "more" not in told and bool(found.refused) == (how in ("wrong", "raises"))


def test_without_a_dense_layout_the_op_is_the_baseline(mine):
    packed, how = FPROP._replace(forms=("rows",)), mine()
    found = measure(packed, timer=clock(mine_rows=0.5, expand=0.75))
    assert (found.baseline, found.best, found.gain) == ("op", "mine rows", 2.0)
    how[0] = "declines"
    assert measure(packed, timer=clock(expand=0.75)).best == "expand"
    assert measure(packed, timer=clock()).best == "op"


def test_forms_that_cannot_be_made_are_declined():
    odd = Problem("fprop", 20, 20, 32, 2, 4, torch.bfloat16, CPU, ("dense", "rows:mma.sp"))
    assert "16" in measure(odd, timer=clock()).declined["cuda rows:mma.sp"]


@pytest.mark.parametrize("role", ["fprop", "dgrad", "wgrad"])
def test_a_real_clock_touches_nothing_of_the_caller(role):
    before = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = measure(FPROP._replace(role=role, rule="exact" if role == "wgrad" else ""), budget=0.001)
    assert set(found.seconds) == {"dense", "op"} and all(t > 0 for t in found.seconds.values()) and not found.refused
    assert torch.equal(before, torch.get_rng_state()) and torch.is_grad_enabled()


def test_a_backend_may_search_before_it_is_timed(mine):
    searched = []
    how = mine(search=lambda op, *args, timer: searched.append(f"{op} {args[3]}:{args[4]}"))
    assert measure(FPROP, timer=clock(mine_rows=0.5)).best == "mine rows" and searched == ["nm_linear 2:4"]
    measure(FPROP, timer=clock(), prepare=False)
    how[0] = "declines"
    measure(FPROP, timer=clock())
    assert len(searched) == 1
    mine(search=lambda *args, timer: [][0])[0] = "right"
    assert "IndexError" in measure(FPROP, timer=clock(mine_rows=0.5)).refused["mine rows"]


KERNELS = {"cuda": 10, "cuda-mma.sp": 9, "cuda-stream-k": 8, "cusparselt": 3}
"""Backends that multiply an operand in the order of wgmma.sp on Hopper, with their priorities."""


@pytest.fixture
def kernels(monkeypatch):
    """Those backends on the CPU, by the reference; the op and backend of each call."""
    called = []

    def stand_in(op, backend, priority):
        right = next(i.fn for i in dispatch._impls[op] if i.backend == "reference")

        def fn(*args, out=None):
            called.append((op, backend))
            y = right(*args)
            return y if out is None else out.copy_(y)

        return dispatch.Impl(op, backend, fn, dispatch.always, priority)

    for op in ("nm_linear", "nm_linear_wgrad"):
        others = [i for i in dispatch._impls[op] if i.backend not in KERNELS]
        monkeypatch.setitem(dispatch._impls, op, [*(stand_in(op, *kernel) for kernel in KERNELS.items()), *others])
    return called


@pytest.mark.parametrize(
    ("role", "form", "op"),
    [("fprop", "rows", "nm_linear"), ("dgrad", "columns", "nm_linear"), ("wgrad", "rows", "nm_linear_wgrad")],
)
@pytest.mark.parametrize("fastest", [*KERNELS, "dense"])
def test_the_fastest_kernel_of_an_order_is_taken(role, form, op, fastest, kernels):
    rule = "exact" if role == "wgrad" else ""
    p = Problem(role, 64, 64, 128, 2, 4, torch.bfloat16, CPU, ("dense", f"{form}:wgmma.sp"), rule)
    names = {"dense": "dense", "cuda": "op"}
    best = names.get(fastest, f"{fastest} {form}:wgmma.sp")
    found = measure(p, timer=clock(**{best.replace(" ", "_"): 0.5}))
    assert found.best == best and set(found.seconds) == {"dense", "op", *(f"{b} {form}:wgmma.sp" for b in KERNELS if b != "cuda")}
    found.store(found.best)
    (method,) = choose(p)
    assert method.name == best
    other, operand, seed = random_operands(p)
    kernels.clear()
    run(method, p, other, operand, seed=seed)
    assert kernels == ([] if fastest == "dense" else [(op, fastest)])


@pytest.mark.parametrize(
    ("seconds", "eager", "compiled"),
    [
        ({"cusparselt": 0.5, "op": 2.0}, "cusparselt", "dense"),
        ({"cusparselt": 0.5, "op": 0.99}, "cusparselt", "dense"),  # 1 % is noise
        ({"cusparselt": 0.5, "op": 0.8}, "cusparselt", "op"),
        ({"cuda-mma.sp": 0.6, "op": 0.8}, "cuda-mma.sp", "op"),
        ({"op": 0.8}, "op", "op"),
        ({}, "dense", "dense"),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_a_graph_takes_the_dispatchers_kernel_or_dense(seconds, eager, compiled):
    """It calls the op: a kernel of lower priority that was the fastest says nothing of the one that runs there."""
    p = Problem("fprop", 64, 64, 128, 2, 4, torch.bfloat16, CPU, ("dense", "rows:wgmma.sp"), changing=True)
    named = {b: b if b in ("op", "dense") else f"{b} rows:wgmma.sp" for b in (*KERNELS, "op", "dense")}
    found = measure(p, timer=clock(**{named[b].replace(" ", "_"): took for b, took in seconds.items()}))
    found.store(found.best)
    assert [choose(p)[0].name, choosing.for_graphs(p)[0].name] == [named[eager], compiled]


# ---- a layer's forward and backward passes


def test_a_layer_is_timed_by_plan_with_the_making_of_its_weight():
    pair = FPROP._replace(changing=True), FPROP._replace(role="dgrad", changing=True)
    found = measure(*pair, timer=clock(op__op=0.5))
    assert found.seconds == {"dense, dense": 1.0, "dense, op": 1.0, "op, dense": 1.0, "op, op": 0.5}
    assert (found.baseline, found.best) == ("dense, dense", "op, op")
    found.store(found.best)
    assert [m.name for m in choose(*pair)] == ["op", "op"]
    assert measure(*pair, budget=0.01).best in found.seconds


def test_the_making_of_a_weight_counts_without_a_backward_pass_too():
    """In an evaluation only fprop is chosen, of a weight that changes between evaluations."""
    made = []

    def timer(task):
        with Calls() as calls:
            task()
        made.append({name.removesuffix("_out") for name in calls.names} - {"linear"})
        return 1.0

    p = FPROP._replace(changing=True)
    assert set(measure(p, timer=timer).seconds) == {"dense", "op"}
    assert made[-2:] == [{"prune"}, {"pack"}] and {"prune"} not in made[:-4]


@pytest.mark.usefixtures("kernels")
def test_a_graph_takes_the_fastest_plan_without_a_named_kernel():
    sizes = 64, 64, 128, 2, 4, torch.bfloat16, CPU
    pair = Problem("fprop", *sizes, ("dense", "rows:wgmma.sp"), changing=True), Problem("dgrad", *sizes, ("dense",), changing=True)
    named = "cusparselt_rows:wgmma.sp"
    found = measure(*pair, timer=clock(**{named: 0.5, f"{named}__dense": 0.5, "op__dense": 0.8}))
    found.store(found.best)
    assert [m.name for m in choose(*pair)] == ["cusparselt rows:wgmma.sp", "dense"]
    assert [m.name for m in choosing.for_graphs(*pair)] == ["op", "dense"]
    found = measure(*pair, timer=clock(**{named: 0.5, f"{named}__dense": 0.5, "op__dense": 2.0}))
    found.store(found.best)
    assert [m.name for m in choosing.for_graphs(*pair)] == ["dense", "dense"]


@pytest.mark.parametrize(("mask", "dgrad"), [("magnitude", ("dense", "rows")), ("transposable", ("dense", "rows", "columns"))])
def test_layers_in_training_choose_what_their_plan_leaves_open(mask, dgrad, monkeypatch):
    layer = nm.SparseLinear(8, 16)
    transform = HardMask(layer.pattern) if mask == "magnitude" else TransposableMask(layer.pattern)
    layer.nm_mask = nm.ops.transposable_mask(layer.weight.detach(), "2:4")
    layer.use(transform, GemmPlan("auto", "auto", "mvue", 2, 4))
    report = nm.tune(layer, tokens=20, timer=clock(op__op=0.25, op=0.25))
    assert [(e.gemm, e.tokens, e.shape, e.choice) for e in report.choices] == [
        ("fprop + dgrad", 20, (16, 8), "op, op"),
        ("wgrad", 20, (16, 8), "op"),
    ]
    (first, back), (wgrad,) = layer.problems(20)
    assert [p.forms for p in (first, back, wgrad)] == [("dense", "rows"), dgrad, ("dense", "rows")]
    assert [p.changing for p in (first, back, wgrad)] == [True, True, False]  # an estimate is made by its call in any case
    layer(torch.randn(20, 8, requires_grad=True)).sum().backward()
    assert {key(*some) for some in choosing._chosen} == {key(first, back), key(wgrad)}, "and it chooses nothing else"
    assert [[m.name for m in some] for some in choosing._chosen.values()] == [["op", "op"], ["op"]]
    layer.use(transform, GemmPlan("packed", "packed", "dense", 2, 4))
    fixed = [p for some in layer.problems(20) for p in some]
    assert [(p.role, p.forms) for p in fixed] == [("fprop", ("rows",)), ("dgrad", ("rows",))], "only the kernel is left open"
    layer.use(transform, GemmPlan())
    assert layer.problems(20) == []


# ---- a model


def _packed(cols=8, keep_dense=True, dtype=torch.float32):
    return nm.CompressedLinear(nm.ops.compress(torch.randn(4, cols, dtype=dtype), "2:4"), keep_dense=keep_dense)


def _model():
    trained = nm.SparseLinear(8, 4)
    trained.plan = trained.plan.dense_layout
    return nn.Sequential(_packed(), _packed(), _packed(16), trained, _packed(keep_dense=False))


def test_every_gemm_is_measured_once(cache, monkeypatch):
    monkeypatch.setattr(compressed, "SMALL_BYTES", 0)  # no dense copy unasked
    told = []
    report = nm.tune(_model(), tokens=20, timer=clock(op=0.25, expand=4.0), progress=lambda *what: told.append(what))
    assert [(e.layers, e.kind, e.gemm, e.shape, e.tokens, e.choice) for e in report.choices] == [
        (["0", "1"], "CompressedLinear", "fprop", (4, 8), 20, "op"),
        (["2"], "CompressedLinear", "fprop", (4, 16), 20, "op"),
        (["3"], "SparseLinear", "", (4, 8), 0, "its GEMMs are dense until nm.compress_"),
        (["4"], "CompressedLinear", "fprop", (4, 8), 20, "op"),
    ]
    assert all(e.best == 0.25 and e.default in (0.25, 1.0, 4.0) for e in report.choices if e.gemm)
    assert told == [(i, 3, f"fprop 4x{cols} 2:4, 20 tokens") for i, cols in enumerate((8, 16, 8))]
    assert report.path == str(cache / "tuning.json") and report.changed == [e for e in report.choices if e.gemm and e.default != 0.25]
    assert len(json.loads((cache / "tuning.json").read_text())["lines"]) == 3
    text = str(report).splitlines()
    assert text[0].split("  ")[0] == "layer" and "estimate ms" in text[0] and text[-1] == f"stored in {cache / 'tuning.json'}"
    assert " ".join(text[1].split()).startswith("CompressedLinear x2 fprop 2:4 float32 (4,8) 20 ") and len(text) == 6


def test_the_layer_does_what_was_measured():
    layer, x = _packed(dtype=torch.bfloat16), torch.randn(20, 8, dtype=torch.bfloat16)
    nm.tune(layer, tokens=20, timer=clock(op=0.5))
    assert choose(*layer.problems(20)[0])[0].name == "op"
    with torch.no_grad():
        layer(x)
        assert "dense" not in layer.weight._layouts
        torch.testing.assert_close(layer(x), x @ layer.dense().t())
    nm.tune(layer, tokens=20, timer=clock(op=2.0))
    with torch.no_grad():
        assert torch.equal(layer(x), nn.functional.linear(x, layer.dense())) and "dense" in layer.weight._layouts


def test_several_token_counts_and_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = nm.tune(_packed(), tokens=(1, 300), timer=clock())
    assert [(e.tokens, e.dtype) for e in report.choices] == [(1, "bfloat16"), (300, "bfloat16")]
    for tokens in (0, -1, (), (8, 0)):
        with pytest.raises(nm.NMError, match="at least 1"):
            nm.tune(nn.Linear(3, 3), tokens=tokens)


def test_what_is_refused_or_does_not_fit_is_reported(mine, monkeypatch):
    mine()[0] = "raises"
    report = nm.tune(_packed(), tokens=20, timer=clock())
    assert report.choices[0].choice == "dense" and "mine rows: RuntimeError: no shared memory" in report.choices[0].refused
    assert "refused, fprop 4x8: mine rows: RuntimeError: no shared memory" in str(report)

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("no\nmemory")

    monkeypatch.setattr(tuning, "measure", full)
    (entry,) = nm.tune(_packed(), tokens=20).choices
    assert entry.choice == "not measured: no" and entry.gain is None


def test_choices_that_cannot_be_written_hold_in_this_process(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NMKERNELS_CACHE", str(tmp_path / "file" / "below"))
    layer = _packed(dtype=torch.bfloat16)
    report = nm.tune(layer, tokens=20, timer=clock(op=0.5))
    assert report.path is None and "in this process only" in str(report)
    assert choose(*layer.problems(20)[0])[0].name == "op"


def test_a_forced_backend_leaves_nothing_to_choose(monkeypatch):
    monkeypatch.setenv("NMKERNELS_BACKEND", "cpu")
    report = nm.tune(_packed(), tokens=20, timer=lambda task: pytest.fail("timed"))
    assert report.path is None and str(report).endswith("nothing to choose: NMKERNELS_BACKEND=cpu")


def test_a_model_without_such_layers_is_fine(cache):
    report = nm.tune(nn.Linear(3, 3))
    assert not report.choices and str(report).endswith("nothing to store") and not cache.exists()
    assert not any(e.gemm for e in nm.tune(_packed().to("meta"), tokens=4).choices)
