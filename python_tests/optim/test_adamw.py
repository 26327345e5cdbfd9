"""MaskedAdamW without a recipe is AdamW; its flags, dtypes, groups and scalers. Closures: recipes/test_conformance.py."""

import pytest
import torch

from nmkernels.ops import STATS
from nmkernels.optim import MaskedAdamW, UpdateRule
from nmkernels.optim.adamw import merge_stats
from nmkernels.optim.rules import PLAIN, Target
from nmkernels.pattern import DtypeError, Pattern
from nmkernels.reference.adamw import AdamWArgs
from python_tests.copy_model import COPY_METHODS, copy_model
from python_tests.for_each import for_each

SHAPES = [(8, 16), (16,), (3, 4, 5), ()]


def params(dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=g, dtype=torch.float64).to(dtype)) for s in SHAPES]


def set_grads(ps, t, scale=1.0):
    g = torch.Generator().manual_seed(100 + t)
    for p in ps:
        p.grad = (torch.randn(p.shape, generator=g, dtype=torch.float64) * scale).to(p.dtype)


def run(make, steps=20, dtype=torch.float32):
    ps = params(dtype)
    optimizer = make(ps)
    for t in range(steps):
        set_grads(ps, t)
        optimizer.step()
    return ps, optimizer


def assert_same(mine, theirs, dtype=torch.float32):
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    for p, q in zip(mine, theirs, strict=True):
        assert (p - q).abs().max() <= tolerance * q.abs().max()


KEYWORDS = {
    "defaults": {},
    "all": {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3},
    "amsgrad": {"lr": 0.05, "betas": (0.5, 0.6), "amsgrad": True},
    "maximize": {"lr": 0.05, "maximize": True},
    "tensor_lr": {"lr": torch.tensor(0.05)},
    "no_decay": {"lr": 0.05, "weight_decay": 0.0},
    "foreach": {"lr": 0.05, "foreach": True},
    "fused": {"lr": 0.05, "fused": True},
    "not_foreach": {"lr": 0.05, "foreach": False},
}


@for_each("dtype", [torch.float32, torch.float64])
@for_each("case", KEYWORDS)
def test_equals_torch_adamw(case, dtype):
    keywords = KEYWORDS[case]
    mine, ours = run(lambda ps: MaskedAdamW(ps, **keywords), dtype=dtype)
    theirs, plain = run(lambda ps: torch.optim.AdamW(ps, **keywords), dtype=dtype)
    assert_same(mine, theirs, torch.float32 if case == "tensor_lr" else dtype)  # torch multiplies with an fp32 lr
    for p, q in zip(mine, theirs, strict=True):
        a, b = ours.state[p], plain.state[q]
        assert a.keys() == b.keys() and a["step"] == b["step"] == 20 and all(a[k].dtype == b[k].dtype for k in a)
        assert_same([a["exp_avg"], a["exp_avg_sq"]], [b["exp_avg"], b["exp_avg_sq"]], dtype)


def test_positional_arguments_and_defaults_are_adamws():
    ps = params()
    for arguments in ((), (0.1, (0.5, 0.6), 1e-3, 0.2, True)):
        assert MaskedAdamW(ps, *arguments).defaults == torch.optim.AdamW(ps, *arguments).defaults


def test_a_tensor_lr_is_read_at_every_step():
    lr, ps = torch.tensor(0.0), params()
    optimizer, before = MaskedAdamW(ps, lr=lr), ps[0].detach().clone()
    for value in (0.0, 0.1):
        lr.fill_(value)
        set_grads(ps, 0)
        optimizer.step()
        assert torch.equal(ps[0], before) == (value == 0.0)


def test_groups_and_parameters_without_gradients():
    def go(cls):
        ps = params()
        groups = [{"params": ps[:1], "lr": 0.1}, {"params": ps[1:3], "weight_decay": 0.5}, {"params": ps[3:], "maximize": True}]
        optimizer = cls(groups, lr=0.01)
        for t in range(8):
            set_grads(ps, t)
            ps[1].grad = None if t < 3 else ps[1].grad
            ps[2].grad = None
            optimizer.step()
        return ps, optimizer

    mine, ours = go(MaskedAdamW)
    theirs, _ = go(torch.optim.AdamW)
    assert_same(mine, theirs, torch.float32)
    assert torch.equal(mine[2], params()[2]) and mine[2] not in ours.state
    assert [int(ours.state[p]["step"]) for p in (mine[0], mine[1], mine[3])] == [8, 5, 8]


@for_each("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_have_fp32_moments(dtype):
    ps, optimizer = run(lambda ps: MaskedAdamW(ps, lr=0.05), dtype=dtype)
    exact = params(dtype)
    masters = [torch.nn.Parameter(p.detach().float()) for p in exact]
    theirs = torch.optim.AdamW(masters, lr=0.05)
    for t in range(20):
        set_grads(exact, t)
        for m, p in zip(masters, exact, strict=True):
            m.grad = p.grad.float()
        theirs.step()
        for m in masters:
            m.data.copy_(m.detach().to(dtype))  # the parameter is rounded after every step, the moments never
    for p, m in zip(ps, masters, strict=True):
        assert optimizer.state[p]["exp_avg"].dtype == optimizer.state[p]["exp_avg_sq"].dtype == torch.float32
        assert (p.float() - m).abs().max() <= 2 * torch.finfo(dtype).eps * m.abs().max()
        assert torch.allclose(optimizer.state[p]["exp_avg_sq"], theirs.state[m]["exp_avg_sq"], rtol=1e-6)


@for_each("unscale, clip", [(False, False), (True, False), (True, True)])
def test_a_scaler_changes_nothing_but_skips_what_is_not_finite(unscale, clip):
    def train(optimizer, ps, scaler):
        for t in range(8):
            scaler.scale(torch.ones(()))
            set_grads(ps, t, scaler.get_scale())
            if unscale:
                scaler.unscale_(optimizer)
            if clip:
                torch.nn.utils.clip_grad_norm_(ps, 0.1)
            scaler.step(optimizer)
            scaler.update()

    mine, theirs = params(), params()
    optimizer, scaler = MaskedAdamW(mine, lr=0.05), torch.amp.GradScaler("cpu", init_scale=512.0)
    optimizer.targets, optimizer.rule = {mine[0]: Target(Pattern("2:4"))}, UpdateRule(masked=True)
    train(optimizer, mine, scaler)
    train(torch.optim.AdamW(theirs, lr=0.05), theirs, torch.amp.GradScaler("cpu", init_scale=1.0))
    assert_same(mine, theirs, torch.float32)
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
    tensors = [*mine, *(v for s in optimizer.state.values() for v in s.values())]
    before = [t.detach().clone() for t in tensors]
    mine[0].grad[0, 0] = torch.inf
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True)) and not optimizer.stats.any()


def test_refusals():
    with pytest.raises(ValueError, match="differentiable"):
        MaskedAdamW(params(), differentiable=True)
    for bad in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1.0}, {"weight_decay": -1.0}):
        with pytest.raises(ValueError, match="Invalid"):
            MaskedAdamW(params(), **bad)
    with pytest.raises(TypeError):
        MaskedAdamW(params(), learning_rate=0.1)
    z = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    z.grad = torch.ones_like(z)
    with pytest.raises(DtypeError, match=r"complex64.*torch\.optim\.AdamW"):
        MaskedAdamW([z]).step()
    table = torch.nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(DtypeError, match="SparseAdam"):
        MaskedAdamW(table.parameters()).step()


@for_each("how", COPY_METHODS)
def test_copies_train_identically(how):
    ps, optimizer = run(lambda ps: MaskedAdamW(ps, lr=0.05), steps=3)
    optimizer.targets, optimizer.rule = {ps[0]: Target(Pattern("2:4"))}, UpdateRule(masked=True)
    baselines, baseline = copy_model((ps, optimizer), how)
    # hooks and masks belong to the handle of the original
    assert baseline.targets == {} and baseline.rule is PLAIN
    for t in range(3):
        set_grads(ps, t)
        set_grads(baselines, t)
        optimizer.step()
        baseline.step()
    assert all(torch.equal(a, b) for a, b in zip(ps, baselines, strict=True))


def test_merge_stats():
    a, b = torch.arange(9.0, dtype=torch.float64), torch.full((9,), 4.0, dtype=torch.float64)
    a[0], b[0] = 0.0, 1.0
    got = dict(zip(STATS, merge_stats(a, b).tolist(), strict=True))
    assert got["applied"] == 1 and got["max_update"] == 8.0 and got["flips"] == 8.0 and got["v_change"] == 5.0
    a[-1] = torch.nan
    assert merge_stats(a, b)[-1].isnan()


def test_stats_count_maskable_parameters_only():
    ps = params()
    optimizer = MaskedAdamW(ps, lr=0.05)
    set_grads(ps, 0)
    optimizer.step()
    assert optimizer.stats is None and optimizer.stats_numel == 0
    optimizer.targets, optimizer.rule = {ps[0]: Target(Pattern("2:4"))}, UpdateRule(masked=True)
    before = optimizer.state[ps[0]]["exp_avg_sq"].clone()
    set_grads(ps, 1)
    optimizer.step()
    stats = dict(zip(STATS, optimizer.stats.tolist(), strict=True))
    assert optimizer.stats_numel == 128 and stats["nonzeros"] == 64 and stats["applied"] == 1
    assert stats["v_change"] == pytest.approx((optimizer.state[ps[0]]["exp_avg_sq"] - before).abs().double().sum().item(), rel=1e-6)
    optimizer.forget()
    optimizer.step()
    assert optimizer.stats is None


@for_each("lr", [0.1, torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.1, device="meta")], ids=["a", "b", "c"])
def test_scalars_are_not_copied_from_the_host(lr, monkeypatch):
    """They stay on the host; only with a learning rate on another device are they made there."""
    given = []
    monkeypatch.setattr("nmkernels.optim.adamw.nm_masked_adamw_", lambda *args: given.append(AdamWArgs(*args).hyper))
    p = torch.nn.Parameter(torch.ones(4, device=getattr(lr, "device", "cpu")))
    p.grad = torch.ones_like(p)
    optimizer = MaskedAdamW([p], capturable=p.is_meta)
    optimizer.param_groups[0]["lr"] = lr
    optimizer.step()
    assert given[0].device == p.device == optimizer.state[p]["step"].device
    assert p.is_meta or given[0].tolist() == [0.1, 0.9, 0.999, 1e-8, 0.01, 0.0, 0.0, 0.0, 0.0]
