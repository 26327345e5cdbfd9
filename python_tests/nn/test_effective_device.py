"""Weights packed in the order of tensor cores, in the emulator and on GPUs: which layers have them, who writes them, training with them."""

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.autograd import GemmPlan, HardMask
from nmkernels.backends.cuda import compress
from nmkernels.backends.cuda.core import emulator_built
from nmkernels.gemm import forms
from nmkernels.gemm.choose import forget
from nmkernels.gemm.forms import layout_on
from nmkernels.gemm.route import route
from nmkernels.optim import MaskedAdamW
from nmkernels.pattern import Pattern
from nmkernels.recipes.methods.fst import TransposableMask
from nmkernels.recipes.methods.sste import SoftThreshold
from python_tests.nn.test_effective import Calls

BF16 = torch.bfloat16
PACKED, AUTO = GemmPlan("packed", "device", n=2, m=4), GemmPlan("auto", "auto", n=2, m=4)
P = Pattern("2:4")

EMULATED = pytest.mark.skipif(not emulator_built(), reason="nmkernels._emulated is not built: NMKERNELS_EMULATOR=1 at the build")


@pytest.fixture(params=[pytest.param("cpu", marks=EMULATED), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """A GPU, or the CPU with everything in the emulator; "auto" takes packed GEMMs."""
    if request.param == "cpu":
        monkeypatch.setenv("NMKERNELS_BACKEND", "cuda-emulated")
    monkeypatch.setenv("NMKERNELS_CHOICE", "packed")
    forget()
    # a training step never waits for the device to say that a mask of our own is N:M
    monkeypatch.setattr(compress, "check_flag", lambda op, flag, *_: pytest.fail("the host waits") if flag is not None else None)
    yield request.param
    forget()


@pytest.fixture
def hopper(monkeypatch):
    """Nothing keeps wgmma.sp from running, it is told; the emulator multiplies its order by mma.sp."""
    monkeypatch.setattr(forms, "preferred_layout", lambda op, device: "wgmma.sp")


def what(plan, transform=None, rows=64, cols=64, dtype=BF16, tokens=5, device="cpu"):
    return route(plan, transform or HardMask(P), torch.empty(rows, cols, device=device), dtype, torch.empty(tokens, cols, device=device))


def test_which_weights_lie_in_that_order(device):
    held, others = TransposableMask(P), [HardMask(Pattern(p)) for p in ("1:4", "2:8")]
    order = layout_on(torch.device(device, 0), 64)
    for given in ({}, {"rows": 16}, {"dtype": torch.float16}, *({"transform": t} for t in others), {"transform": held}):
        dgrad = "columns" if given.get("transform") is held else "dense"
        assert what(PACKED, **given, device=device)[:3] == ("packed", dgrad, "mma.sp" if "rows" in given else order), given
    other = {"transform": HardMask(Pattern("1:2"))}
    for given in ({"rows": 24}, {"cols": 96}, {"dtype": torch.float32}, other, {"transform": held, "rows": 16}):
        assert what(PACKED, **given, device=device)[:3] == ("packed", "packed", "canonical"), given


def test_nowhere_else(monkeypatch):
    assert what(PACKED).layout == "canonical"
    monkeypatch.setenv("NMKERNELS_BACKEND", "reference")
    assert what(PACKED).layout == "canonical"


@EMULATED
@pytest.mark.usefixtures("hopper")
def test_where_wgmma_runs_they_lie_in_its_order(monkeypatch):
    monkeypatch.setenv("NMKERNELS_BACKEND", "cuda-emulated")
    held = TransposableMask(P)
    assert what(PACKED, held)[:3] == ("packed", "columns", "wgmma.sp") and what(PACKED, rows=128).layout == "wgmma.sp"
    assert what(GemmPlan("packed", "dense", n=2, m=4), rows=80).layout == "mma.sp", "its tiles are of 64 rows"
    assert what(PACKED, rows=24).layout == what(PACKED, dtype=torch.float32).layout == "canonical"
    monkeypatch.setenv("NMKERNELS_BACKEND", "reference")
    assert what(PACKED).layout == "canonical"


@EMULATED
def test_rules_by_name_and_by_choice(monkeypatch):
    monkeypatch.setenv("NMKERNELS_BACKEND", "cuda-emulated")
    held = TransposableMask(P)
    assert what(GemmPlan("packed", "packed", n=2, m=4)).dgrad == "dense", "no kernel turns that order"
    assert what(GemmPlan("packed", "dense", n=2, m=4), held, rows=16).layout == "mma.sp", "only rows are packed"
    assert what(GemmPlan("packed", "columns", n=2, m=4), held, rows=16) == ("packed", "columns", "canonical", ("", ""))
    assert what(AUTO, held) == ("packed", "columns", "mma.sp", ("", ""))
    assert what(AUTO) == ("packed", "dense", "mma.sp", ("", ""))
    with torch.no_grad():
        assert what(AUTO) == ("packed", "packed", "mma.sp", ("", ""))
    monkeypatch.delenv("NMKERNELS_BACKEND")
    monkeypatch.setenv("NMKERNELS_CHOICE", "dense")
    forget()
    assert what(AUTO, held) == ("dense", "dense", "canonical", ("", ""))
    forget()


@pytest.mark.parametrize("order", ["mma.sp", "wgmma.sp"])
@pytest.mark.parametrize("pattern", ["2:4", "1:4", "2:8"])
def test_the_order_holds_what_the_dense_layout_does(pattern, order):
    w, p = torch.randn(64, 128), Pattern(pattern)
    mask = nm.ops.transposable_mask(w, pattern)
    for transform, extras in [(HardMask(p), ()), (SoftThreshold(p), (torch.tensor(1.3),)), (TransposableMask(p), (mask,))]:
        packed = transform.packed(w, *extras, dtype=BF16, columns=transform.traits.transposable, layout=order)
        want = transform(w, *extras).to(BF16)
        assert packed.layout == order and packed.rows.pattern == P
        assert torch.equal(packed.rows.dense(), want)
        assert packed.columns is None or torch.equal(packed.columns.dense(), want.t())


def begun(recipe, device, **config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(device)
    return model, nm.sparsify_(model, recipe).attach(MaskedAdamW(model.parameters(), lr=1e-2, **config))


def loss_of(model, x):
    with torch.autocast(x.device.type, BF16, cache_enabled=False):
        return (model(x) - x.roll(1, 1)).float().square().mean()


def trained(recipe, device):
    """The model, its losses, and how often it packed and multiplied at each step."""
    model, optimizer = begun(recipe, device)
    losses, seen = [], []
    for t in range(4):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(t)).to(device)
        optimizer.zero_grad()
        with Calls() as calls:
            for _ in range(2):
                loss = loss_of(model, x)
                loss.backward()
        seen.append((calls.packs, calls.names.count("linear"), calls.names.count("linear_dgrad")))
        optimizer.step()
        losses.append(loss.item())
    return model, losses, seen


RECIPES = pytest.mark.parametrize("recipe", ["srste:2:4", "srste:1:4", "sste:2:4", "fst:2:4"])


@pytest.mark.quick(1, per="packed")
@RECIPES
@pytest.mark.parametrize("packed", ["True", "auto"])
def test_training_steps(device, recipe, packed):
    check_training(device, recipe, packed, layout_on(torch.device(device, 0), 64))


@EMULATED
@pytest.mark.quick(0)
@RECIPES
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.usefixtures("hopper")
def test_training_steps_in_the_order_of_wgmma(device, recipe):
    check_training(device, recipe, "auto", "wgmma.sp")


def check_training(device, recipe, packed, order):
    options = "end=None, every=2, seed=1, " if recipe.startswith("fst") else "seed=1, " if recipe.startswith("sste") else ""
    model, got, seen = trained(f"{recipe}({options}packed={packed})", device)
    for layer, of_x in ((model[0], False), (model[2], True)):  # whether its input needs a gradient
        kept = [form for form in layer.effective.copies if isinstance(form, nm.ops.Packed)]
        assert len(kept) == 1 and kept[0].layout == order and kept[0].rows.values.dtype == BF16
        assert (kept[0].columns is not None) == (of_x and recipe.startswith("fst"))
    # both layers are packed once per step; the first one has no dgrad
    assert seen == [(2, 4 + 2 * recipe.startswith("fst"), 0)] * 4
    _, want, _ = trained(f"{recipe}({options[:-2]})" if options else recipe, device)
    assert got == pytest.approx(want, rel=2e-2)


@EMULATED
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sste:2:4(packed=auto, seed=1)", "fst:2:4(end=None, seed=1, packed=auto)"])
@pytest.mark.usefixtures("hopper")
def test_a_step_compiles_to_one_graph_in_the_order_of_wgmma(device, recipe):
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    x, got = torch.randn(64, 64), []
    for compiled in (False, True):
        model, optimizer = begun(recipe, device)
        loss = torch.compile(loss_of, fullgraph=True, backend=backend) if compiled else loss_of
        for _ in range(2):
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()
        got.append([p.detach() for p in model.parameters()])
    assert len(graphs) == 1 and "wgmma.sp" in graphs[0] and "nm_linear." in graphs[0] and "nm_linear_dgrad" not in graphs[0]
    for a, b in zip(*got, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "recipe",
    ["srste:2:4(packed=True)", "sste:2:4(packed=True, seed=1)", "sste:2:4(packed=auto, seed=1)", "fst:2:4(end=None, seed=1, packed=auto)"],
)
def test_a_captured_step_trains_as_an_eager_one(recipe, monkeypatch):
    monkeypatch.setenv("NMKERNELS_CHOICE", "measured")  # by the eager steps before, and never while a graph is captured
    forget()
    x, replays = torch.randn(64, 64).cuda(), 5

    def step(model, optimizer):
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, x).backward()
        optimizer.step()

    eager, captured = begun(recipe, "cuda", capturable=True), begun(recipe, "cuda", capturable=True)
    for _ in range(3 + replays):
        step(*eager)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(*captured)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*captured)
    for _ in range(replays):
        graph.replay()
    for a, b in zip(eager[0].parameters(), captured[0].parameters(), strict=True):
        torch.testing.assert_close(b, a, atol=1e-4, rtol=1e-3)
