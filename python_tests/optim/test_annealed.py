"""AnnealedAdamW: AdamW unless a rule is late, and then the update that its docstring gives."""

import copy

import pytest
import torch

from nmkernels import NMError, Pattern
from nmkernels.optim import AnnealedAdamW, MaskedAdamW, Target, UpdateRule
from nmkernels.testing import equal_bits
from python_tests.each import each

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


def annealed(params, late="total", **extra):
    """The first two parameters have the penalty, the third is plain."""
    opt = AnnealedAdamW(params, **{**HYPER, **extra})
    opt.targets = {p: Target(Pattern("2:4"), penalty=lambda p=p: pull(p)) for p in params[:2]}
    opt.rule = UpdateRule(late=late)
    return opt


def run(opt, params, grads):
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        opt.step()
    return [p.detach() for p in params]


def by_hand(params, grads, late="total", amsgrad=False):
    (b1, b2), lr, eps, wd = HYPER["betas"], HYPER["lr"], HYPER["eps"], HYPER["weight_decay"]
    out = []
    for i, w in enumerate(p.detach().double() for p in params):
        m = v = peak = torch.zeros_like(w)
        for t, step in enumerate(grads, start=1):
            r = pull(w) if i < 2 else torch.zeros_like(w)
            m = b1 * m + (1 - b1) * step[i].double()
            u = m / (1 - b1**t) + r
            s = u if late == "total" and i < 2 else step[i].double() + r
            v = b2 * v + (1 - b2) * s**2
            peak = torch.maximum(peak, v) if amsgrad else v
            w = w * (1 - lr * wd) - lr * u / ((peak / (1 - b2**t)).sqrt() + eps)
        out.append(w)
    return out


@each("amsgrad", [False, True])
@each("late", ["total", "gradient"])
def test_late_update(late, amsgrad):
    grads, params = gradients(7), weights()
    want = by_hand(params, grads, late, amsgrad)
    for got, expected in zip(run(annealed(params, late, amsgrad=amsgrad), params, grads), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_without_a_late_rule_it_is_masked_adamw():
    grads, ours, theirs = gradients(5, F32), weights(F32), weights(F32)
    run(AnnealedAdamW(ours, **HYPER), ours, grads)
    run(MaskedAdamW(theirs, **HYPER), theirs, grads)
    assert all(equal_bits(a.detach(), b.detach()) for a, b in zip(ours, theirs, strict=True))
    early = annealed(weights(F32), "")
    params = [p for group in early.param_groups for p in group["params"]]
    assert all(equal_bits(a, b.detach()) for a, b in zip(run(early, params, grads), theirs, strict=True)), (
        "the penalty is the hooks' matter"
    )


def test_gradient_without_a_penalty_is_adamw():
    grads, ours, theirs = gradients(5), weights(), weights()
    opt = annealed(ours, "gradient")
    opt.targets = {p: Target(Pattern("2:4")) for p in ours}
    for a, b in zip(run(opt, ours, grads), run(torch.optim.AdamW(theirs, **HYPER), theirs, grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_maximize_negates_the_gradient_but_not_the_penalty():
    grads, params = gradients(4), weights()
    want = by_hand(params, [[-g for g in step] for step in grads])
    for got, expected in zip(run(annealed(params, maximize=True), params, grads), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_a_closure_and_a_transposed_parameter():
    grads, params = gradients(1), weights()
    want = by_hand(params, grads)
    stored = [torch.nn.Parameter(p.detach().t().contiguous()) for p in params]
    opt = AnnealedAdamW(stored, **HYPER)
    opt.targets = {p: Target(Pattern("2:4"), transposed=True, penalty=lambda p=p: pull(p.t())) for p in stored[:2]}
    opt.rule = UpdateRule(late="total")

    def closure():
        for p, g in zip(stored, grads[0], strict=True):
            p.grad = g.t().clone()
        return torch.tensor(3.0)

    assert opt.step(closure) == 3.0
    for got, expected in zip(stored, want, strict=True):
        torch.testing.assert_close(got.detach().t(), expected, rtol=1e-12, atol=1e-13)


@each("dtype", [torch.bfloat16, torch.float16])
def test_moments_of_16_bit_parameters_are_fp32(dtype):
    grads, params = gradients(3, dtype), weights(dtype)
    opt = annealed(params)
    got = run(opt, params, grads)
    assert all(opt.state[p][name].dtype == F32 for p in params for name in ("exp_avg", "exp_avg_sq"))
    for a, b in zip(got, by_hand(weights(dtype), grads), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0.0, atol=0.05)


def test_scaled_gradients_and_a_skipped_step():
    grads, params = gradients(4, F32), weights(F32)
    want = run(annealed(params), params, grads)
    scaled = weights(F32)
    opt = annealed(scaled)
    opt.grad_scale = torch.tensor(8.0)
    for bad, step in zip((0.0, 0.0, 1.0, 0.0, 0.0), (*grads[:2], grads[2], *grads[2:]), strict=True):
        opt.found_inf = torch.tensor(bad)
        before = copy.deepcopy([[p.detach() for p in scaled], opt.state_dict()["state"]])
        for p, g in zip(scaled, step, strict=True):
            p.grad = g * (torch.inf if bad else 8.0)
        opt.step()
        if bad:
            after = [[p.detach() for p in scaled], opt.state_dict()["state"]]
            assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
            assert all(torch.equal(before[1][i][k], after[1][i][k]) for i in before[1] for k in before[1][i])
            assert opt.stats[0] == 0 == opt.stats[-1]
    for a, b in zip(scaled, want, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-6, atol=1e-6)


def test_tensors_as_hyper_parameters():
    grads, params = gradients(3), weights()
    want = by_hand(params, grads)
    opt = annealed(params)
    opt.param_groups[0]["lr"] = torch.tensor(HYPER["lr"], dtype=F64)
    for got, expected in zip(run(opt, params, grads), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-8)


def test_state_is_adamws():
    grads, params = gradients(6), weights()
    opt = annealed(params)
    run(opt, params, grads[:3])
    saved, middle = copy.deepcopy(opt.state_dict()), [torch.nn.Parameter(p.detach().clone()) for p in params]
    torch.optim.AdamW(weights(), **HYPER).load_state_dict(saved)
    again = annealed(middle)
    again.load_state_dict(saved)
    for a, b in zip(run(opt, params, grads[3:]), run(again, middle, grads[3:]), strict=True):
        assert torch.equal(a, b)


def test_largest_update_is_told():
    params = weights()
    opt = annealed(params)
    run(opt, params, gradients(1))
    # after one step u / √v̂ is ±1, up to ε
    assert opt.stats[-1] == pytest.approx(1.0, abs=1e-4) and opt.stats_numel == 64


def test_unknown_rule():
    with pytest.raises(NMError, match="'total', 'gradient'"):
        UpdateRule(late="early")
