"""What a recipe tells the optimizer: every field of the rule changes the update as its equation says."""

import dataclasses

import pytest
import torch

from nmkernels.layouts import as_matrix, ordered
from nmkernels.ops import STATS, mask_bits
from nmkernels.optim import MaskedAdamW, UpdateRule, adamw
from nmkernels.optim.annealed import AnnealedRule
from nmkernels.optim.rules import PLAIN, Target
from nmkernels.pattern import NMError, Pattern, ShapeError
from nmkernels.reference.adamw import AdamWArgs
from python_tests import naive
from python_tests.for_each import for_each

LR, B1, B2, EPS, WD = 0.05, 0.9, 0.95, 1e-3, 0.1


def one_step(rule, w, g, m, v, t, held=None):
    """The update of one tensor in float64, from the equations."""
    kept = naive.mask(w, 2, 4) if held is None else held
    g = g.masked_fill(~kept, 0) if rule.fixed else g + rule.decay * w * ~kept if rule.masked else g
    m = B1 * m + (1 - B1) * g
    v_new = v if rule.frozen else B2 * v + (1 - B2) * g * g
    correction = (1 - B2**rule.v_step if rule.v_step else 1.0) if rule.frozen else 1 - B2**t
    d = (v_new / correction + EPS).sqrt() if rule.eps_inside else (v_new / correction).sqrt() + EPS
    u = m / (1 - B1**t) / d
    u = u.clamp(-rule.clamp, rule.clamp) if rule.clamp else u
    w = w * (1 - LR * WD) - LR * u
    return w * kept if rule.fixed else w, m, v_new


RULES = {
    "plain": PLAIN,
    "masked": UpdateRule(masked=True),
    "decay": UpdateRule(masked=True, decay=0.5),
    "frozen_raw": UpdateRule(masked=True, frozen=True),
    "frozen_corrected": UpdateRule(masked=True, frozen=True, v_step=3),
    "eps_inside": UpdateRule(masked=True, eps_inside=True),
    "clamp": UpdateRule(masked=True, clamp=0.3),
    "frozen_clamped_decay": UpdateRule(masked=True, frozen=True, v_step=2, clamp=0.7, decay=0.2, eps_inside=True),
}


@for_each("transposed", [False, True])
@for_each("case", RULES)
def test_update(case, transposed):
    rule = RULES[case]
    gen = torch.Generator().manual_seed(0)
    w = torch.randn(8, 16, generator=gen, dtype=torch.float64)
    m = v = torch.zeros_like(w)
    p = torch.nn.Parameter(w.t().clone() if transposed else w.clone())
    optimizer = MaskedAdamW([p], lr=LR, betas=(B1, B2), eps=EPS, weight_decay=WD)
    optimizer.targets = {p: Target(Pattern("2:4"), "conv1d" if transposed else "linear")}
    for t in range(1, 7):
        now = rule if t > 3 else dataclasses.replace(rule, frozen=False)  # a second moment, before it is frozen
        optimizer.rule = now
        g = torch.randn(8, 16, generator=gen, dtype=torch.float64)
        p.grad = g.t().clone() if transposed else g.clone()
        before = naive.mask(w, 2, 4)
        w, m, v = one_step(now, w, g, m, v, t)
        optimizer.step()
        got = p.detach().t() if transposed else p.detach()
        assert torch.allclose(got, w, rtol=1e-12, atol=1e-14)
        stats = dict(zip(STATS, optimizer.stats.tolist(), strict=True))
        assert stats["flips"] == (int((naive.mask(w, 2, 4) ^ before).sum()) if rule.masked else 0)


HELD = {
    "not used": PLAIN,
    "decay": UpdateRule(masked=True, decay=0.5),
    "fixed": UpdateRule(fixed=True),
    "fixed_decay": UpdateRule(masked=True, fixed=True, decay=0.5),
}


@for_each("transposed", [False, True])
@for_each("case", HELD)
def test_update_with_a_held_mask(case, transposed):
    """The bits of a target instead of its pattern; a weight without bits, in the same group, keeps its own mask."""
    rule = HELD[case]
    gen = torch.Generator().manual_seed(0)
    w = torch.randn(8, 16, generator=gen, dtype=torch.float64)
    held = torch.rand(w.shape, generator=gen) < 0.6
    m = v = torch.zeros_like(w)
    p, other = torch.nn.Parameter(w.t().clone() if transposed else w.clone()), torch.nn.Parameter(w.float())
    optimizer = MaskedAdamW([p] if rule.fixed else [p, other], lr=LR, betas=(B1, B2), eps=EPS, weight_decay=WD)
    optimizer.targets = {p: Target(Pattern("2:4"), "conv1d" if transposed else "linear", bits=mask_bits(held))}
    if not rule.fixed:
        optimizer.targets[other] = Target(Pattern("2:4"))
    optimizer.rule = rule
    for t in range(1, 5):
        g = torch.randn(8, 16, generator=gen, dtype=torch.float64)
        p.grad, other.grad = g.t().clone() if transposed else g.clone(), g.float()
        before = naive.mask(other.detach(), 2, 4)
        w, m, v = one_step(rule, w, g, m, v, t, held)
        optimizer.step()
        got = p.detach().t() if transposed else p.detach()
        assert torch.allclose(got, w, rtol=1e-12, atol=1e-14)
        flips = int((naive.mask(other.detach(), 2, 4) ^ before).sum()) if rule.masked and not rule.fixed else 0
        assert optimizer.stats[STATS.index("flips")] == flips and optimizer.stats_numel == (1 if rule.fixed else 2) * 128
    outside = got[~held]
    assert rule.fixed == (not outside.any())


def test_fixed_weights_need_bits():
    p = torch.nn.Parameter(torch.randn(2, 4))
    optimizer = MaskedAdamW([p], lr=LR)
    optimizer.targets, optimizer.rule = {p: Target(Pattern("2:4"))}, UpdateRule(fixed=True)
    p.grad, before = torch.ones(2, 4), p.detach().clone()
    with pytest.raises(NMError, match="fixed=True.*masks"):
        optimizer.step()
    assert torch.equal(p, before)


STORED = {"conv2d": (4, 8, 3, 2), "experts": (3, 4, 8), "experts_t": (3, 8, 4)}


@for_each("layout", list(STORED))
def test_update_of_weights_that_are_no_matrices(layout):
    """Equal to the update of the matrix as a Parameter of its own, also where gradients and loaded moments are in another order."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(ordered(torch.randn(STORED[layout]), layout))
    same = torch.nn.Parameter(as_matrix(p.detach(), layout).clone())
    ours, plain_one = MaskedAdamW([p], lr=LR, amsgrad=True), MaskedAdamW([same], lr=LR, amsgrad=True)
    ours.targets, plain_one.targets = {p: Target(Pattern("2:4"), layout)}, {same: Target(Pattern("2:4"))}
    ours.rule = plain_one.rule = RULES["decay"]
    for step in range(3):
        p.grad = torch.randn(p.shape)  # in the order of its dimensions
        same.grad = as_matrix(ordered(p.grad, layout), layout).clone()
        ours.step()
        plain_one.step()
        assert torch.equal(as_matrix(p.detach(), layout), same) and torch.equal(ours.stats, plain_one.stats), step
        assert torch.equal(as_matrix(p.grad, layout), same.grad)
        for name, moment in ours.state[p].items():
            if moment.dim():
                assert torch.equal(as_matrix(moment, layout), plain_one.state[same][name])
                ours.state[p][name] = moment.clone(memory_format=torch.contiguous_format)  # as before the weight was put in order
    if layout != "experts":
        p.data = p.data.contiguous()
        before = p.detach().clone()
        with pytest.raises(ShapeError, match="another order in memory"):
            ours.step()
        assert torch.equal(p, before)


def test_one_call_for_each_group_and_pattern(monkeypatch):
    calls = []

    def record(*args):
        a = AdamWArgs(*args)
        calls.append((f"{a.n}:{a.m}" if a.n else "None", len(a.params)))
        return torch.ops.nmkernels.nm_masked_adamw_(*args)

    monkeypatch.setattr(adamw, "nm_masked_adamw_", record)
    ps = [torch.nn.Parameter(torch.randn(4, 8)) for _ in range(6)]
    bits = mask_bits(torch.ones(4, 8, dtype=torch.bool))
    optimizer = MaskedAdamW([{"params": ps[:4]}, {"params": ps[4:]}], lr=LR)
    optimizer.targets = {p: Target(Pattern(text)) for p, text in zip(ps, ["2:4", "1:4", "2:4", "2:4", "2:4"], strict=False)}
    optimizer.rule = UpdateRule(masked=True)
    for p in ps:
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert calls == [("2:4", 3), ("1:4", 1), ("2:4", 1), ("None", 1)] and optimizer.stats_numel == 5 * 32
    calls.clear()
    optimizer.targets[ps[0]].bits = optimizer.targets[ps[3]].bits = bits
    optimizer.step()
    assert calls == [("None", 2), ("1:4", 1), ("2:4", 1), ("2:4", 1), ("None", 1)], "those with bits are apart"
    calls.clear()
    optimizer.rule = PLAIN
    optimizer.step()
    assert [pattern for pattern, _ in calls] == ["None"] * 5 and optimizer.stats_numel == 5 * 32


def test_refusals():
    for field in ("decay", "clamp", "v_step"):
        with pytest.raises(NMError, match=f"{field}=-1"):
            UpdateRule(**{field: -1})
    with pytest.raises(NMError, match="'total' or 'gradient'"):
        AnnealedRule(second_moment="early")
    with pytest.raises(NMError, match="fixed=True"):
        AnnealedRule(fixed=True)
