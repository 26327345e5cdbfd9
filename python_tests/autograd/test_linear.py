"""The linear Function: what each GEMM reads, what it saves, and what it refuses. Its gradients on a layer: nn/test_linear.py."""

import sys
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from nmkernels import NMError, dispatch, ops, reference
from nmkernels.autograd import GemmPlan, linear, linear_compressed
from nmkernels.gemm.choose import using
from nmkernels.gemm.methods import UNESTIMATED
from nmkernels.gemm.route import operands, wgrad_problem
from nmkernels.testing import assert_equal_bits, assert_no_worse
from python_tests import naive

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def tensors(dtype=torch.float64, batch=(5, 3), out=8, cols=16):
    x = torch.randn(*batch, cols, dtype=dtype, requires_grad=True)
    w = torch.nn.Parameter(torch.randn(out, cols, dtype=dtype))
    b = torch.nn.Parameter(torch.randn(out, dtype=dtype))
    return x, w, b, naive.masked(w, 2, 4)


def test_only_needed_gradients_and_saved_tensors():
    for wanted in product((True, False), repeat=3):
        x, w, b, used = tensors()
        for tensor, want in zip((x, w, b), wanted, strict=True):
            tensor.requires_grad_(want)
        names, seen = {x.data_ptr(): "x", w.data_ptr(): "w", b.data_ptr(): "b", used.data_ptr(): "used"}, set()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, n=names, s=seen: s.add(n.get(t.data_ptr(), "other")), lambda t: t):
            linear(x, w, used, b)
        assert seen == {name for name, want in zip(("used", "x"), wanted, strict=False) if want}
        if any(wanted):
            linear(x, w, used, b).square().sum().backward()
        assert [t.grad is not None for t in (x, w, b)] == list(wanted)


def forms(w, dtype, layout="canonical"):
    """W̃ by a transposable mask: dense, packed, and its transpose packed."""
    mask = ops.transposable_mask(w.detach(), "2:4")
    packed = ops.pack(w.detach(), "2:4", mask, dtype=dtype, columns=True, layout=layout)
    return (w.detach() * mask).to(dtype), packed.rows, packed.columns


@pytest.mark.parametrize("wgrad", ["dense", "mvue", "none"])
def test_each_gemm_reads_its_own_form(wgrad):
    for fprop, dgrad in [("rows", "dense"), ("rows", "rows"), ("rows", "columns"), ("dense", "columns")]:
        x, w, b, _ = tensors(out=16, cols=32)
        dense, rows, columns = forms(w, w.dtype)
        known = {"dense": dense, "rows": rows, "columns": columns}
        # the estimate has a pattern of its own
        plan, seed = GemmPlan(wgrad=wgrad, n=1, m=2), torch.tensor([3, 5])
        used = operands(known[fprop], None if dgrad == fprop else known[dgrad], dgrad == "columns")
        assert used.pattern == rows.pattern
        y = linear(x, w, used, b, plan, seed)
        g = torch.randn_like(y)
        y.backward(g)
        torch.testing.assert_close(y, x @ dense.t() + b, **CLOSE)
        torch.testing.assert_close(x.grad, g @ dense, **CLOSE)
        flat = g.reshape(-1, 16)
        torch.testing.assert_close(b.grad, flat.sum(0), **CLOSE)
        flat = ops.mvue(flat, "1:2", dim=0, seed=torch.tensor([3, 5])) if wgrad == "mvue" else flat
        assert (w.grad is None) == (wgrad == "none") and seed.tolist() == [3, 5 + (wgrad == "mvue")], "the next pass draws again"
        if wgrad != "none":
            torch.testing.assert_close(w.grad, flat.t() @ x.detach().reshape(-1, 32), **CLOSE)


def test_tensor_core_order_of_both_orientations():
    x, w, b, _ = tensors(torch.float32, out=64, cols=128)
    dense, rows, columns = forms(w, torch.bfloat16, "mma.sp")
    h = x.detach().bfloat16().requires_grad_()
    y = linear(h, w, operands(rows, columns, True), b)
    g = torch.randn_like(y)
    y.backward(g)
    exact = h.double(), dense.double(), g.double()
    assert_no_worse(y, F.linear(h, dense, b.bfloat16()), exact[0] @ exact[1].t() + b.bfloat16().double())
    assert_no_worse(h.grad, g @ dense, exact[2] @ exact[1])


def test_of_packed_forms_only_that_of_backward_is_saved():
    x, w, _, _ = tensors(out=16, cols=32)
    _, rows, columns = forms(w, w.dtype)
    w.requires_grad_(False)
    for back in (None, columns):
        seen = set()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: seen.add(t.data_ptr()), lambda t: t):
            linear(x, w, operands(rows, back, back is not None))
        saved = rows if back is None else back
        assert seen == {saved.values.data_ptr(), saved.indices.data_ptr()}


def test_mvue_without_seed_draws_from_torch():
    x, w, _, used = tensors(batch=(10,))
    g = torch.randn(10, 8, dtype=torch.float64)

    def gradient():
        w.grad = None
        linear(x, w, used, plan=GemmPlan(wgrad="mvue", n=2, m=4)).backward(g)
        return w.grad

    torch.manual_seed(5)
    first, second = gradient(), gradient()
    torch.manual_seed(5)
    assert torch.equal(first, gradient()) and not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_a_float32_weight_is_rounded_once(dtype):
    """The sums of the GEMM of an estimate, as the reference defines them; of 16-bit weights they are rounded to that."""
    x, w = torch.randn(64, 16).to(dtype), torch.randn(24, 16)
    plan = GemmPlan(fprop="packed", dgrad="packed", wgrad="mvue", n=2, m=4)
    grads = []
    for weight in (w.requires_grad_(), w.detach().to(dtype).requires_grad_()):
        packed = ops.compress(w.detach().to(dtype), "2:4")
        y = linear(x, weight, operands(packed), plan=plan, seed=torch.tensor([3, 0]))
        g = torch.linspace(-1, 1, y.numel()).view_as(y).to(dtype)
        y.backward(g)
        assert weight.grad.dtype == weight.dtype
        grads.append(weight.grad)
    estimate = ops.mvue_compress(g, "2:4", dim=0, seed=3)
    want = reference.linear_wgrad(estimate.values, estimate.indices, 2, 4, 64, x, torch.float32)
    assert_no_worse(grads[0], want, estimate.dense().double() @ x.double())
    assert torch.equal(grads[0].to(dtype), grads[1]) and not torch.equal(grads[0], grads[1].float())


def test_without_the_estimate_nothing_is_drawn():
    """Where the choice leaves it out: the dense gradient, and neither the layer's stream of numbers nor torch's generator moves."""
    x, w = torch.randn(8, 16), torch.randn(24, 16, requires_grad=True)
    plan = GemmPlan(fprop="auto", dgrad="auto", wgrad="mvue", n=2, m=4)
    problem = wgrad_problem(plan, 8, 24, 16, x.dtype, x.device)
    for seed in (torch.tensor([3, 5]), None):
        w.grad, state = None, torch.get_rng_state()
        with using((problem, UNESTIMATED)):
            y = linear(x, w, ops.prune(w.detach(), "2:4"), plan=plan, seed=seed)
            g = torch.linspace(-1, 1, y.numel()).view_as(y)
            y.backward(g)
        assert_equal_bits(w.grad, g.t() @ x)
        assert torch.equal(state, torch.get_rng_state()) and (seed is None or seed.tolist() == [3, 5])


def test_refusals():
    x, w, b, used = tensors()
    c = ops.compress(w.detach(), "2:4")
    for y in (linear(x, w, used, b), linear_compressed(x, c, b)):
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(NMError, match="no second derivative.*once_differentiable"):
            dx.sum().backward()
    with pytest.raises(RuntimeError, match="dtype"):
        linear(x.float(), w, used)
    with pytest.raises(TypeError, match="float64"):
        linear_compressed(x.float(), c)


def test_a_named_backend_computes_as_the_op_does(monkeypatch):
    """Without autocast, which would multiply in another dtype than the one agreed, and without recording."""
    x, w, _, used = tensors(torch.float32)
    c, seen = ops.compress(w.detach(), "2:4"), []

    def kernel(x, *args, out=None):
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return F.linear(x, used)

    entry = dispatch.Impl("nm_linear", "mine", kernel, dispatch.always, -1)
    monkeypatch.setitem(dispatch._impls, "nm_linear", [*dispatch._impls["nm_linear"], entry])
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, w, operands(c, backends=("mine", "")))
    torch.testing.assert_close(y, F.linear(x, used))
    assert seen == [(False, False)] and y.requires_grad


def test_the_choice_knows_the_integers_and_their_group(monkeypatch):
    module, problems = sys.modules["nmkernels.autograd.linear"], []
    choose = module.choose
    monkeypatch.setattr(module, "choose", lambda problem: [problems.append(problem), choose(problem)][1])
    for group in (None, 32):
        c = ops.quantize_values(ops.compress(torch.randn(16, 64), "2:4"), "int4", group)
        linear_compressed(torch.randn(3, 64, requires_grad=True), c)
    assert [(p.values, p.group) for p in problems] == [("int4", 0), ("int4", 32)]
