"""AnnealedAdamW: AdamW unless its rule is annealed, and then the update that its docstring gives. In training: recipes/test_ast.py."""

import pytest
import torch

from nmkernels import Pattern
from nmkernels.optim import AnnealedAdamW, MaskedAdamW
from nmkernels.optim.annealed import AnnealedRule
from nmkernels.optim.rules import PLAIN, Target
from nmkernels.testing import equal_bits
from python_tests.for_each import for_each

F32, F64 = torch.float32, torch.float64
HYPER = {"lr": 0.03, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}


def weights(dtype=F64, count=3):
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(4, 8, generator=g, dtype=F64).to(dtype)) for _ in range(count)]


def gradients(steps, dtype=F64, count=3):
    g = torch.Generator().manual_seed(1)
    return [[torch.randn(4, 8, generator=g, dtype=F64).to(dtype) for _ in range(count)] for _ in range(steps)]


def pull(w):
    """Some penalty's gradient that changes with the weight."""
    return 0.3 * w.detach() * (w.detach().abs() < 0.7)


def annealed(params, second_moment="total", **extra):
    """The first two parameters have the penalty, the third is plain."""
    opt = AnnealedAdamW(params, **{**HYPER, **extra})
    opt.targets = {p: Target(Pattern("2:4"), penalty=lambda p=p: pull(p)) for p in params[:2]}
    opt.rule = AnnealedRule(second_moment=second_moment) if second_moment else PLAIN
    return opt


def run(opt, params, grads):
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        opt.step()
    return [p.detach() for p in params]


def by_hand(params, grads, second_moment="total", amsgrad=False, maximize=False):
    (b1, b2), lr, eps, wd = HYPER["betas"], HYPER["lr"], HYPER["eps"], HYPER["weight_decay"]
    out = []
    for i, w in enumerate(p.detach().double() for p in params):
        m = v = peak = torch.zeros_like(w)
        for t, step in enumerate(grads, start=1):
            r, g = pull(w) if i < 2 else torch.zeros_like(w), step[i].double() * (-1 if maximize else 1)
            m = b1 * m + (1 - b1) * g
            u = m / (1 - b1**t) + r
            s = u if second_moment == "total" and i < 2 else g + r
            v = b2 * v + (1 - b2) * s**2
            peak = torch.maximum(peak, v) if amsgrad else v
            w = w * (1 - lr * wd) - lr * u / ((peak / (1 - b2**t)).sqrt() + eps)
        out.append(w)
    return out


@for_each("extra", [{}, {"amsgrad": True}, {"maximize": True}])
@for_each("second_moment", ["total", "gradient"])
def test_annealed_update(second_moment, extra):
    grads, params = gradients(7), weights()
    want = by_hand(params, grads, second_moment, **extra)
    optimizer = annealed(params, second_moment, **extra)
    for got, expected in zip(run(optimizer, params, grads), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    assert optimizer.stats_numel == 64


def test_without_an_annealed_rule_it_is_masked_adamw():
    grads, ours, theirs = gradients(5, F32), weights(F32), weights(F32)
    run(AnnealedAdamW(ours, **HYPER), ours, grads)
    run(MaskedAdamW(theirs, **HYPER), theirs, grads)
    assert all(equal_bits(a.detach(), b.detach()) for a, b in zip(ours, theirs, strict=True))
    early = weights(F32)
    run(annealed(early, ""), early, grads)
    assert all(equal_bits(a.detach(), b.detach()) for a, b in zip(early, theirs, strict=True)), "the penalty is the hooks' matter"
    plain, params = weights(F64), weights(F64)
    opt = annealed(params, "gradient")
    opt.targets = {p: Target(Pattern("2:4")) for p in params}
    for a, b in zip(run(opt, params, gradients(5)), run(torch.optim.AdamW(plain, **HYPER), plain, gradients(5)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@for_each("dtype", [torch.bfloat16, torch.float16, F32])
@for_each("states", [F32, torch.bfloat16])
def test_moments_have_the_dtype_of_states(dtype, states):
    """The arithmetic is that of fp32; in bf16 the states, and nothing else, are rounded."""
    grads, params, wide = gradients(3, dtype), weights(dtype), weights(dtype)
    opt, other = annealed(params, amsgrad=True, states=str(states).removeprefix("torch.")), annealed(wide, amsgrad=True)
    run(opt, params, grads[:1])
    run(other, wide, grads[:1])
    assert all(opt.state[p][name].dtype == states for p in params for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"))
    assert all(map(equal_bits, [p.detach() for p in params[:2]], [p.detach() for p in wide[:2]]))
    assert all(torch.equal(opt.state[p]["exp_avg"], other.state[q]["exp_avg"].to(states)) for p, q in zip(params, wide, strict=True))
    for got, expected in zip(run(opt, params, grads[1:]), by_hand(weights(dtype), grads, amsgrad=True), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0.0, atol=0.05)


def test_tensor_lr_grad_scaler_and_clamped_update():
    grads, params = gradients(1), weights()
    want = by_hand(params, grads)
    opt = annealed(params)
    opt.param_groups[0]["lr"] = torch.tensor(HYPER["lr"], dtype=F64)
    opt.grad_scale, opt.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    scaled = [[8 * g for g in step] for step in grads]
    for got, expected in zip(run(opt, params, scaled), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-8)
    # after one step u / √v̂ is ±1, up to ε
    assert opt.stats[-1] == pytest.approx(1.0, abs=1e-4)
    opt.found_inf = torch.tensor(1.0)
    tensors = [*params, *(v for s in opt.state.values() for v in s.values())]
    before = [t.detach().clone() for t in tensors]
    run(opt, params, scaled)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True)) and not opt.stats.any()
