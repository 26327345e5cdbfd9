"""The linear Function: its three GEMMs, what it saves, and what it refuses."""

import sys
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from nmkernels import NMError, ops
from nmkernels.autograd import GemmPlan, linear, linear_compressed, operands
from nmkernels.testing import assert_no_worse
from python_tests import plain

MVUE = GemmPlan(wgrad="mvue", n=2, m=4)


def tensors(dtype=torch.float64, batch=(5, 3), out=8, cols=16):
    x = torch.randn(*batch, cols, dtype=dtype, requires_grad=True)
    w = torch.nn.Parameter(torch.randn(out, cols, dtype=dtype))
    b = torch.nn.Parameter(torch.randn(out, dtype=dtype))
    return x, w, b, plain.masked(w, 2, 4)


def saved_by(call, names):
    """What ``call`` saves for its backward pass, by the names of addresses."""
    seen = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.add(names.get(t.data_ptr(), "other")), lambda t: t):
        call()
    return seen


def test_ste_backward_is_algebra():
    # gradcheck fails on a straight-through estimator by design; its backward is these three lines
    x, w, b, used = tensors()
    y = linear(x, w, used, b)
    g = torch.randn_like(y)
    y.backward(g)
    g2, x2 = g.reshape(-1, 8), x.detach().reshape(-1, 16)
    torch.testing.assert_close(y, x @ used.t() + b, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, g @ used, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(w.grad, g2.t() @ x2, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(b.grad, g2.sum(0), rtol=1e-12, atol=1e-12)
    assert w.grad[used == 0].abs().min() > 0, "the gradient of pruned weights is passed on"


def test_batches_of_any_shape():
    for batch in [(), (1,), (0,), (2, 0), (4,), (2, 3, 4)]:
        x, w, b, used = tensors(torch.float32, batch)
        y = linear(x, w, used, b)
        y.sum().backward()
        assert y.shape == (*batch, 8) and x.grad.shape == x.shape
        torch.testing.assert_close(b.grad, torch.full((8,), float(x.numel() // 16)))
        torch.testing.assert_close(w.grad, x.detach().reshape(-1, 16).sum(0).expand(8, 16))


def test_strided_and_expanded_operands():
    w = torch.nn.Parameter(torch.randn(16, 8, dtype=torch.float64).t())
    used = plain.masked(w.contiguous(), 2, 4)
    for x in (torch.randn(16, 6, dtype=torch.float64).t(), torch.randn(1, 16, dtype=torch.float64).expand(6, 16)):
        w.grad = None
        linear(x, w, used).sum().backward()  # the gradient that arrives is an expanded one
        torch.testing.assert_close(w.grad, x.sum(0).expand(8, 16))


def test_only_wanted_gradients_are_computed():
    for wanted in [w for w in product((True, False), repeat=3) if any(w)]:
        x, w, b, used = tensors()
        for tensor, want in zip((x, w, b), wanted, strict=True):
            tensor.requires_grad_(want)
        linear(x, w, used, b).square().sum().backward()
        assert [t.grad is not None for t in (x, w, b)] == list(wanted)


def test_only_needed_tensors_are_saved():
    for need_x, need_w, saved in [(True, True, {"x", "used"}), (True, False, {"used"}), (False, True, {"x"}), (False, False, set())]:
        x, w, b, used = tensors()
        x.requires_grad_(need_x)
        w.requires_grad_(need_w)
        names = {x.data_ptr(): "x", w.data_ptr(): "w", b.data_ptr(): "b", used.data_ptr(): "used"}
        assert saved_by(lambda args=(x, w, used, b): linear(*args), names) == saved


def test_wgrad_none_leaves_the_weight_alone():
    x, w, b, used = tensors()
    linear(x, w, used, b, GemmPlan(wgrad="none")).sum().backward()
    assert w.grad is None and x.grad is not None and b.grad is not None


def test_gradient_has_the_dtype_of_its_tensor():
    x, w, b, used = tensors(torch.float32)
    y = linear(x.bfloat16(), w, used.bfloat16(), b)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and w.grad.dtype == b.grad.dtype == x.grad.dtype == torch.float32


def forms(w, dtype, canonical=True):
    """W̃ by a transposable mask: dense, packed, and its transpose packed."""
    mask = ops.transposable_mask(w.detach(), "2:4")
    layout = "canonical" if canonical else "mma.sp"
    packed = ops.pack(w.detach(), "2:4", mask, dtype=dtype, columns=True, layout=layout)
    return (w.detach() * mask).to(dtype), packed.rows, packed.columns


def test_each_product_reads_its_own_form():
    for wgrad in ["dense", "mvue", "none"]:
        for fprop, dgrad in [("rows", "dense"), ("rows", "rows"), ("rows", "columns"), ("dense", "columns")]:
            x, w, b, _ = tensors(out=16, cols=32)
            dense, rows, columns = forms(w, w.dtype)
            known = {"dense": dense, "rows": rows, "columns": columns}
            # the estimate has a pattern of its own
            plan = GemmPlan(wgrad=wgrad, n=1, m=2)
            used = operands(known[fprop], None if dgrad == fprop else known[dgrad], dgrad == "columns")
            assert used.pattern == rows.pattern
            y = linear(x, w, used, b, plan, torch.tensor([3, 5]))
            g = torch.randn_like(y)
            y.backward(g)
            torch.testing.assert_close(y, x @ dense.t() + b, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(x.grad, g @ dense, rtol=1e-12, atol=1e-12)
            flat = g.reshape(-1, 16)
            flat = ops.mvue(flat, "1:2", dim=0, seed=torch.tensor([3, 5])) if wgrad == "mvue" else flat
            assert (w.grad is None) == (wgrad == "none")
            if wgrad != "none":
                torch.testing.assert_close(w.grad, flat.t() @ x.detach().reshape(-1, 32), rtol=1e-12, atol=1e-12)


def test_tensor_core_order_of_both_orientations():
    x, w, b, _ = tensors(torch.float32, out=64, cols=128)
    dense, rows, columns = forms(w, torch.bfloat16, canonical=False)
    h = x.detach().bfloat16().requires_grad_()
    y = linear(h, w, operands(rows, columns, True), b)
    g = torch.randn_like(y)
    y.backward(g)
    exact = h.double(), dense.double(), g.double()
    assert_no_worse(y, F.linear(h, dense, b.bfloat16()), exact[0] @ exact[1].t() + b.bfloat16().double())
    assert_no_worse(h.grad, g @ dense, exact[2] @ exact[1])


def test_of_packed_forms_only_that_of_backward_is_saved():
    for used, saved in [(("rows", None), {"values", "indices"}), (("rows", "columns"), {"back", "back_indices"})]:
        x, w, _, _ = tensors(out=16, cols=32)
        _, rows, columns = forms(w, w.dtype)
        w.requires_grad_(False)
        parts = {"values": rows.values, "indices": rows.indices, "back": columns.values, "back_indices": columns.indices}
        names = {t.data_ptr(): name for name, t in parts.items()}
        read = operands(rows, columns if used[1] else None, used[1] is not None)
        assert saved_by(lambda args=(x, w, read): linear(*args), names) == saved


def mvue_gradient(seed, dtype=torch.float64, tokens=10):
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, 8, generator=gen, dtype=dtype)
    g = torch.randn(tokens, 4, generator=gen, dtype=dtype)
    w = torch.nn.Parameter(torch.zeros(4, 8, dtype=dtype))
    # its offset is advanced by the backward pass
    linear(x, w, w.detach(), plan=MVUE, seed=None if seed is None else seed.clone()).backward(g)
    return w.grad, g.t() @ x


def test_mvue_gradient_is_that_of_the_estimate_and_replays():
    seed = torch.tensor([7, 1])
    got, _ = mvue_gradient(seed)
    gen = torch.Generator().manual_seed(3)
    x, g = torch.randn(10, 8, generator=gen, dtype=torch.float64), torch.randn(10, 4, generator=gen, dtype=torch.float64)
    estimate = ops.mvue(g, "2:4", dim=0, seed=seed)
    assert int((estimate == 0).sum()) > 0
    torch.testing.assert_close(got, estimate.t() @ x, rtol=1e-12, atol=1e-12)
    assert torch.equal(got, mvue_gradient(seed)[0])
    assert not torch.equal(got, mvue_gradient(torch.tensor([7, 2]))[0])


def test_mvue_gradient_is_unbiased():
    runs = torch.stack([mvue_gradient(torch.tensor([11, i]))[0] for i in range(400)])
    exact = mvue_gradient(torch.tensor([0, 0]))[1]
    sigma = runs.std(0) / len(runs) ** 0.5
    assert ((runs.mean(0) - exact).abs() <= 5 * sigma + 1e-12).all()
    assert runs.std(0).max() > 0.1, "an estimate that never varies tests nothing"


def test_mvue_without_seed_draws_from_torch():
    torch.manual_seed(5)
    first = mvue_gradient(None)[0]
    second = mvue_gradient(None)[0]
    torch.manual_seed(5)
    assert torch.equal(first, mvue_gradient(None)[0]) and not torch.equal(first, second)


def test_gradient_of_the_largest_is_biased():
    for tokens in [8, 10]:
        gen = torch.Generator().manual_seed(3)
        x = torch.randn(tokens, 8, generator=gen, dtype=torch.float64)
        g = torch.randn(tokens, 4, generator=gen, dtype=torch.float64)
        w = torch.nn.Parameter(torch.zeros(4, 8, dtype=torch.float64))
        linear(x, w, w.detach(), plan=GemmPlan(wgrad="magnitude", n=2, m=4)).backward(g)
        kept = torch.zeros_like(g)
        for j in range(4):
            for i in range(0, tokens, 4):
                best = i + g[i : i + 4, j].abs().argsort(descending=True)[:2]
                kept[best, j] = g[best, j]
        torch.testing.assert_close(w.grad, kept.t() @ x, rtol=1e-12, atol=1e-12)


def test_compressed_gradcheck():
    x, w, b, _ = tensors(batch=(2, 3))
    c = ops.compress(w.detach(), "2:4")
    assert torch.autograd.gradcheck(lambda x, b: linear_compressed(x, c, b), (x, b))
    assert torch.autograd.gradcheck(lambda x: linear_compressed(x, c), (x,))


def test_compressed_is_as_good_as_dense():
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
        x, w, b, used = tensors(dtype, (9,), 24, 64)
        g = torch.randn(9, 24).to(dtype)
        y = linear_compressed(x, ops.compress(w.detach(), "2:4"), b)
        (dx,) = torch.autograd.grad(y, x, g)
        assert_no_worse(y, F.linear(x, used, b), F.linear(x.double(), used.double(), b.double()))
        assert_no_worse(dx, g @ used, g.double() @ used.double())


def test_second_derivative_raises():
    x, w, b, used = tensors()
    c = ops.compress(w.detach(), "2:4")
    for y in (linear(x, w, used, b), linear_compressed(x, c, b)):
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(NMError, match="no second derivative.*once_differentiable"):
            dx.sum().backward()


def test_mismatched_dtypes_raise():
    x, w, _, used = tensors(torch.float32)
    with pytest.raises(RuntimeError, match="dtype"):
        linear(x.double(), w, used)
    with pytest.raises(TypeError, match="float64"):
        linear_compressed(x.double(), ops.compress(w.detach(), "2:4"))


def test_a_named_backend_computes_as_the_op_does(monkeypatch):
    """Without autocast, which would multiply in another dtype than the one agreed, and without recording."""
    x, w, _, used = tensors(torch.float32)
    c, seen = ops.compress(w.detach(), "2:4"), []

    def kernel(x, *args):
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return torch.nn.functional.linear(x, used)

    monkeypatch.setattr(
        sys.modules["nmkernels.autograd.linear"], "function", lambda op, backend, args: kernel if backend == "mine" else None
    )
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, w, operands(c, by=("mine", "")))
    torch.testing.assert_close(y, F.linear(x, used))
    assert seen == [(False, False)] and y.requires_grad
