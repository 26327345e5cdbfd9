"""Every method is the same GEMM, and which forms and methods there are."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import nmkernels as nm
from nmkernels import dispatch
from nmkernels.backends import shared
from nmkernels.capability import compiled_core
from nmkernels.gemm import forms, methods
from nmkernels.gemm.methods import DENSE, Method, random_operands, run
from nmkernels.gemm.plan import GemmPlan
from nmkernels.gemm.problem import Problem, key
from nmkernels.gemm.route import wgrad_problem
from nmkernels.testing import assert_no_worse

pytestmark = pytest.mark.skipif(not compiled_core().ok, reason=compiled_core().reason)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FPROP = Problem("fprop", 20, 16, 32, 2, 4, torch.float32, CPU)
CORES = ("dense", "rows:mma.sp", "columns:mma.sp")


def test_every_part_of_the_key_matters():
    changes = [
        {"role": "dgrad"}, {"tokens": 33}, {"tokens": 16}, {"rows": 17}, {"cols": 36}, {"n": 1}, {"m": 8}, {"dtype": torch.bfloat16},
        {"forms": ("rows",)}, {"forms": ("dense", "rows", "columns")}, {"changing": True}, {"role": "wgrad", "rule": "exact"},
        {"role": "wgrad", "rule": "approx"},
    ]  # fmt: skip
    keys = [key(FPROP), key(FPROP, FPROP._replace(role="dgrad")), *(key(FPROP._replace(**change)) for change in changes)]
    assert len(set(keys)) == len(keys)
    assert key(FPROP._replace(tokens=17)) == key(FPROP._replace(tokens=32)) == key(FPROP)


@pytest.mark.parametrize(
    ("role", "n", "m", "forms"),
    [
        *(("fprop", n, m, forms) for n, m in ((2, 4), (1, 4), (2, 8), (1, 16)) for forms in (("dense", "rows"), CORES, ("rows",))),
        *(("dgrad", 2, 4, forms) for forms in (("dense", "rows", "columns"), CORES, ("rows",), ("columns",))),
    ],
)
def test_every_method_is_the_same_gemm(role, n, m, forms):
    p = Problem(role, 20, 64, 128, n, m, torch.bfloat16, CPU, forms)
    other, operand, _ = random_operands(p)
    w = operand["dense"]
    bias = torch.randn(64).bfloat16() if role == "fprop" else None
    assert nm.ops.is_nm(w, f"{n}:{m}")
    exact, theirs = (other.to(d) @ (w.t() if role == "fprop" else w).to(d) for d in (torch.float64, torch.bfloat16))
    if bias is not None:
        exact, theirs = exact + bias.double(), theirs + bias
    some = [m for m in methods.methods(p) if m.backend in ("", "cpu")]
    assert {m.name for m in some} >= ({"dense", "op"} if "dense" in forms else {"op", "expand", "expand float32"})
    for method in some:
        y = run(method, p, other, operand, bias=bias)
        assert y.dtype == torch.bfloat16
        assert_no_worse(y, theirs, exact)


def test_expanding_is_differentiable_and_keeps_nothing():
    p = FPROP._replace(forms=("rows",))
    other, operand, _ = random_operands(p)
    expand = next(m for m in methods.methods(p) if m.name == "expand")
    x = other.clone().requires_grad_()
    first = run(expand, p, x, operand)
    run(expand, p, torch.randn_like(other), {**operand, "rows": (operand["rows"][0] * 3, operand["rows"][1])})
    first.sum().backward()
    torch.testing.assert_close(x.grad, operand["dense"].sum(0).expand_as(x))


def test_which_forms_there_are():
    for n, m in ((2, 4), (1, 4), (2, 8), (1, 16)):
        assert forms.forms(64, 128, n, m, torch.bfloat16, GPU) == ("dense", "rows", "rows:mma.sp"), "sparser ones are 2:4 too"
        assert forms.forms(64, 128, n, m, torch.bfloat16, CPU, columns=True) == ("dense", "columns")
    assert forms.forms(64, 128, 2, 4, torch.float32, GPU, dense=False) == ("rows",) == forms.forms(64, 96, 3, 4, torch.half, GPU, False)


@pytest.fixture
def hopper(monkeypatch):
    """A GPU that is not there, on which backends prefer the order of wgmma.sp."""
    forms.forms.cache_clear()
    prefers = Mock(side_effect=lambda op, device: "wgmma.sp" if device.type == "cuda" else "mma.sp")
    monkeypatch.setattr(forms, "preferred_layout", prefers)
    monkeypatch.setattr(forms, "_has_kernel", lambda *_: True)
    yield prefers
    forms.forms.cache_clear()


@pytest.mark.usefixtures("hopper")
def test_on_hopper_forms_are_in_the_order_of_wgmma():
    for rows, cols, columns, cores in (
        (64, 128, False, "rows:wgmma.sp"),
        (80, 128, False, "rows:mma.sp"),  # its tiles are of 64 rows
        (128, 192, True, "columns:wgmma.sp"),
        (64, 80, True, "columns:mma.sp"),
    ):
        assert forms.forms(rows, cols, 2, 4, torch.bfloat16, GPU, columns=columns)[2] == cores
    assert forms.layout_on(GPU, 64, 128) == "wgmma.sp" and forms.layout_on(GPU, 64, 80) == forms.layout_on(CPU, 64) == "mma.sp"


def test_tracing_keeps_the_preferred_order(hopper):
    """What asks the driver cannot be traced."""
    torch.compiler.reset()
    plan = GemmPlan(wgrad="mvue", n=2, m=4)

    @torch.compile(backend="eager", fullgraph=True)
    def step(g):
        found = wgrad_problem(plan, g.shape[0], g.shape[1], 128, g.dtype, GPU).forms
        return g + (10 * len(found) + (found[2] == "rows:wgmma.sp") if len(found) > 2 else 0)

    assert step(torch.zeros(64, 64, dtype=torch.bfloat16))[0, 0] == 31 and hopper.call_args.args == ("nm_linear", GPU)
    torch.compiler.reset()


@pytest.mark.parametrize("tokens", [20, 21, 64])
@pytest.mark.parametrize("rule", ["exact", "approx", "magnitude"])
def test_every_method_of_wgrad_multiplies_the_same_estimate(rule, tokens):
    cores = tokens == 64
    available = ("dense", "rows:mma.sp") if cores else ("dense", "rows")
    p = Problem("wgrad", tokens, 32, 48, 2, 4, torch.bfloat16 if cores else torch.float32, CPU, available, rule)
    x, g, seed = random_operands(p)
    dense, packed = methods.dense_estimate(p, g, seed), methods.pack_estimate(p, g, seed)
    assert dense.shape == (32, tokens)
    assert torch.equal(dense, torch.ops.nmkernels.nm_decompress(*packed, 2, 4, tokens))
    if rule != "magnitude":
        assert torch.equal(dense, nm.ops.mvue(g, "2:4", dim=0, seed=seed, method=rule).t())
    else:
        assert torch.equal(dense[:, :20], nm.ops.prune(g[:20].t().contiguous(), "2:4"))
    if cores:
        assert methods.pack_estimate(p, g, seed, "rows:mma.sp")[1].dtype == torch.int32
    for method in methods.methods(p):
        if method.backend in ("", *(["cpu"] if not cores else [])):
            got = run(method, p, x, g, seed=seed)
            torch.testing.assert_close(got, dense @ x, **({"atol": 0.1, "rtol": 0.02} if cores else {}))


@pytest.mark.parametrize("name", ["dense", "op", "cpu rows"])
def test_a_weight_gradient_in_float32(name, monkeypatch):
    """By the kernels it is the sums, which are not rounded; a backend that has no such results rounds first, as torch does on a CPU."""
    p = Problem("wgrad", 64, 32, 48, 2, 4, torch.bfloat16, CPU, ("dense", "rows"), "exact")
    x, g, seed = random_operands(p)
    exact = methods.dense_estimate(p, g, seed).double() @ x.double()
    method = next(m for m in methods.methods(p) if m.name == name)
    dw, rounded = (run(method, p, x, g, seed=seed, dtype=dtype) for dtype in (torch.float32, None))
    assert dw.dtype == torch.float32 and rounded.dtype == torch.bfloat16 and torch.equal(dw.bfloat16(), rounded)
    assert torch.equal(dw, rounded.float()) == (name == "dense")
    if name != "dense":
        assert_no_worse(dw, exact.float(), exact)
        monkeypatch.setattr(methods, "ROUNDING", ("", "cpu"))
        assert torch.equal(run(method, p, x, g, seed=seed, dtype=torch.float32), rounded.float())
    assert torch.equal(run(methods.UNESTIMATED, p, x, g), g.t() @ x)
    assert torch.equal(run(methods.UNESTIMATED, p, x, g, dtype=torch.float32), (g.t() @ x).float())


def test_torch_is_asked_for_float32_where_it_has_that(monkeypatch):
    """On a GPU, without converting a result; in a graph only by a compiler that is known to take it. Elsewhere the result is converted."""

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.extend([str(func)] if func.namespace == "aten" else [])
            return func(*args, **kwargs or {})

    for device, compiling, known, want in (
        ("cuda", False, False, ["aten.mm.dtype"]),
        ("cuda", True, True, ["aten.mm.dtype"]),
        ("cuda", True, False, ["aten.mm.default", "aten._to_copy.default"]),
        ("cpu", False, True, ["aten.mm.default", "aten._to_copy.default"]),
    ):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        monkeypatch.setattr(shared, "COMPILED", known)
        names = []
        with FakeTensorMode():
            a, b = (torch.empty(8, 8, dtype=torch.bfloat16, device=device) for _ in range(2))
            with Calls():
                assert shared.product(a, b, torch.float32).dtype == torch.float32
        assert names == want, (device, compiling, known)


def test_a_backend_that_declines_is_replaced(monkeypatch):
    other, operand, _ = random_operands(FPROP)
    entry = dispatch.Impl("nm_linear", "mine", lambda *args, out=None: pytest.fail("declined"), lambda *args: (False, "mine"), 1)
    monkeypatch.setitem(dispatch._impls, "nm_linear", [*dispatch._impls["nm_linear"], entry])
    for backend in ("mine", "nobody"):
        y = run(Method(f"{backend} rows", "rows", backend), FPROP, other, operand)
        torch.testing.assert_close(y, other @ operand["dense"].t())


def test_a_named_backend_runs_before_those_of_higher_priority(monkeypatch):
    other, operand, _ = random_operands(FPROP)
    entry = dispatch.Impl("nm_linear", "mine", lambda x, *args, out=None: nm.reference.linear(x, *args) + 1, dispatch.always, -1)
    monkeypatch.setitem(dispatch._impls, "nm_linear", [*dispatch._impls["nm_linear"], entry])
    named, plain = (run(Method("m", "rows", backend), FPROP, other, operand) for backend in ("mine", ""))
    torch.testing.assert_close(named, plain + 1)
    torch.testing.assert_close(run(Method("m", "rows", "mine"), FPROP, other, operand), named)
    wrong = {"rows": (operand["rows"][0][:, :-1], operand["rows"][1])}
    with pytest.raises(nm.ShapeError):  # the route is there, and a call that does not fit is refused all the same
        run(Method("m", "rows", "mine"), FPROP, other, wrong)
    with pytest.raises(nm.DtypeError):
        run(Method("m", "rows", "mine"), FPROP, other.double(), operand)


def test_who_takes_part():
    names = [m.name for m in methods.methods(FPROP)]
    assert names[:2] == ["dense", "op"] and {"cpu rows", "triton rows", "cuda rows"} <= set(names)
    assert not any(name.startswith(("reference", "cuda-emulated", "expand")) for name in names)
    assert [m.name for m in methods.methods(FPROP._replace(forms=("rows",)))][:2] == ["op", "expand"]
    columns = [m.name for m in methods.methods(FPROP._replace(role="dgrad", forms=("dense", "columns")))]
    assert "cpu columns" in columns and not any(name.endswith("rows") for name in columns)
    assert methods.methods(FPROP._replace(forms=("dense",))) == (DENSE,)


def test_the_op_reads_the_layout_of_tensor_cores_beyond_a_few_tokens():
    forms = "rows", "rows:wgmma.sp"
    wgrad = {"role": "wgrad", "rule": "exact", "tokens": 1}
    for change, form in (
        ({"tokens": 2}, "rows:wgmma.sp"),
        ({"tokens": 1}, "rows"),
        ({"tokens": 17, "forms": ("rows", "rows:mma.sp")}, "rows:mma.sp"),
        ({"tokens": 16, "forms": ("rows", "rows:mma.sp")}, "rows"),
        (wgrad, "rows:wgmma.sp"),  # the estimate is written in that order
        ({"tokens": 17, "m": 8}, "rows"),  # 2:8 would be stored again, as 2:4
        ({"tokens": 17, "forms": ("rows",)}, "rows"),
    ):
        assert methods.methods(FPROP._replace(**{"forms": forms, **change}))[0] == Method("op", form), change
