"""MaskedAdamW writes packed weights in the pass of its update: which call takes which parameters, and what the buffers hold then."""

import pytest
import torch

from nmkernels import ops
from nmkernels.optim import MaskedAdamW, Target, UpdateRule, adamw
from nmkernels.pattern import Pattern
from python_tests import plain

BF16 = torch.bfloat16


@pytest.fixture
def calls(monkeypatch):
    """What each call of the kernel was given: patterns, numbers of parameters, sinks and packs, layout of the packs."""
    seen = []

    def record(params, *args, outs=None, packs=None, **rest):
        seen.append((str(args[5]), len(params), len(outs or ()), len(packs or ()), packs[0].layout if packs else ""))
        return ops.masked_adamw_(params, *args, outs=outs, packs=packs, **rest)

    monkeypatch.setattr(adamw, "masked_adamw_", record)
    return seen


def parameter(rows=16, cols=64, transposed=False):
    return torch.nn.Parameter(torch.randn(cols, rows) if transposed else torch.randn(rows, cols))


def target_of(p, pattern="2:4", transposed=False, sink=False, filled=None, **packed):
    w = p.t() if transposed else p
    buffer = torch.full_like(w, torch.nan).contiguous() if sink else None
    packs = ops.empty_packed(w, pattern, **packed) if packed else None
    done = [] if filled is None else filled
    return Target(Pattern(pattern), transposed, lambda: buffer, lambda: packs, lambda: done.append(p))


def stepped(groups, targets, rule=None, **config):
    optimizer = MaskedAdamW([{"params": group} for group in groups], lr=0.05, **config)
    optimizer.targets, optimizer.rule = targets, rule or UpdateRule(masked=True, decay=0.1)
    for group in groups:
        for p in group:
            p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer


def check(p, target):
    n, m, w = target.pattern.n, target.pattern.m, target.view(p.detach())
    want = plain.masked(w, n, m)
    if (sink := target.sink()) is not None:
        assert torch.equal(sink, want)
    if (packs := target.packs()) is not None:
        assert torch.equal(packs.rows.dense(), want.to(packs.rows.values.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("layout", ["canonical", "mma.sp"])
def test_packs_hold_the_updated_weight_rounded_once(dtype, transposed, sink, layout):
    if layout != "canonical" and dtype.itemsize != 2:
        pytest.skip("the order of tensor cores is for 16 bits")
    p, filled = parameter(transposed=transposed), []
    target = target_of(p, transposed=transposed, sink=sink, filled=filled, dtype=dtype, layout=layout)
    stepped([[p]], {p: target})
    check(p, target)
    assert len(filled) == 1 and target.packs().rows.values.dtype == dtype


def test_one_call_for_each_group_pattern_layout_and_kind_of_buffers(calls):
    ps = [parameter() for _ in range(8)]
    options = [
        {"dtype": BF16},
        {"dtype": torch.float32},
        {"dtype": BF16, "layout": "mma.sp"},
        {"pattern": "1:4", "dtype": BF16},
        {"sink": True},
        {"sink": True, "dtype": BF16},
        {"dtype": BF16},
    ]
    targets = {p: target_of(p, **kind) for p, kind in zip(ps, options, strict=False)}
    optimizer = stepped([ps[:3], ps[3:]], targets)
    assert calls == [
        ("2:4", 2, 0, 2, "canonical"),
        ("2:4", 1, 0, 1, "mma.sp"),
        ("1:4", 1, 0, 1, "canonical"),
        ("2:4", 1, 1, 0, ""),
        ("2:4", 1, 1, 1, "canonical"),
        ("2:4", 1, 0, 1, "canonical"),
        ("None", 1, 0, 0, ""),
    ]
    for p, target in targets.items():
        check(p, target)
    assert optimizer.stats_numel == 7 * 16 * 64


def test_without_masks_nothing_is_asked_for_and_nothing_written(calls):
    p, filled = parameter(), []
    target = target_of(p, sink=True, filled=filled, dtype=BF16)
    target.packs().rows.values.fill_(7.0)
    stepped([[p]], {p: target}, UpdateRule())
    assert calls == [("None", 1, 0, 0, "")] and not filled and bool((target.packs().rows.values == 7.0).all())


def test_a_skipped_step_writes_no_packs():
    p = parameter()
    target = target_of(p, dtype=BF16)
    target.packs().rows.values.fill_(7.0)
    optimizer = MaskedAdamW([p], lr=0.05)
    optimizer.targets, optimizer.rule = {p: target}, UpdateRule(masked=True)
    before, p.grad = p.detach().clone(), torch.ones_like(p)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert torch.equal(p, before) and bool((target.packs().rows.values == 7.0).all())
    optimizer.found_inf.zero_()
    optimizer.step()
    check(p, target)
    assert not torch.equal(p, before)
