"""masked_adamw_ bit for bit against an independent loop in NumPy, and against torch.optim.AdamW."""

import itertools
import math
import sys

import numpy as np
import pytest
import torch

from nmkernels.pattern import DtypeError, PatternError, ShapeError
from nmkernels.reference import compress, mask, masked_adamw_, pack, prune, to_layout, transposable_mask
from python_tests.each import each
from python_tests.reference.conftest import DTYPES

NAMES = ("lr", "beta1", "beta2", "eps", "weight_decay", "decay", "v_step", "clamp", "reserved")
DEFAULT = dict(zip(NAMES, (1e-2, 0.9, 0.999, 1e-8, 0.0, 0.0, 0.0, 0.0, 0.0), strict=True))


def hyper(**changes):
    return torch.tensor([{**DEFAULT, **changes}[k] for k in NAMES], dtype=torch.float64)


class State:
    """One parameter with its moments, as lists that masked_adamw_ takes."""

    def __init__(self, p, amsgrad=False, outs=(), step=0):
        wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        self.p, self.m, self.v = p.clone(), torch.zeros_like(p, dtype=wide), torch.zeros_like(p, dtype=wide)
        self.top = [torch.zeros_like(self.v)] if amsgrad else []
        self.step, self.outs = torch.tensor(float(step)), [torch.full_like(p, math.nan, dtype=d) for d in outs]

    def tensors(self):
        return [self.p, self.m, self.v, *self.top, self.step, *self.outs]

    def apply(self, g, h, n=0, m=0, **flags):
        return masked_adamw_([self.p], [g], [self.m], [self.v], self.top, [self.step], self.outs, h, n, m, **flags)


def beta_power(beta, t):
    result = 1.0
    while t:
        result, beta, t = result * beta if t & 1 else result, beta * beta, t >> 1
    return result


def in_numpy(s, grad, h, n, m, frozen, eps_inside, maximize, scale, mask=mask):
    """The step in NumPy: every line is one rounding. Returns what the state must be, and the statistics."""
    lr, beta1, beta2, eps, wd, decay, v_step, clamp, _ = h.tolist()
    real, t = (np.float64 if s.p.dtype == torch.float64 else np.float32), int(s.step) + 1
    bc2 = 1 - beta_power(beta2, int(v_step) if frozen else t) if not frozen or v_step else 1.0
    b1, omb1, b2, omb2, ibc1, sbc2, bc2 = map(
        real, (beta1, 1 - beta1, beta2, 1 - beta2, 1 / (1 - beta_power(beta1, t)), math.sqrt(bc2), bc2)
    )
    p, g, avg, v = (x.to(s.m.dtype).numpy().copy() for x in (s.p, grad, s.m, s.v))
    keep = mask(s.p, n, m).numpy() if n else np.ones_like(p, dtype=bool)
    g = g / real(np.float32(scale)) if scale else g
    g = -g if maximize else g
    stats = np.zeros(9)
    stats[0], stats[5], stats[6] = 1, np.abs(p[~keep]).astype(np.float64).sum(), np.abs(g[~keep]).astype(np.float64).sum()
    if n and decay:
        decayed = real(decay) * p
        g = np.where(keep, g, g + decayed)
    avg = (b1 * avg) + (omb1 * g)
    if not frozen:
        new = (b2 * v) + (omb2 * (g * g))
        change = np.abs(new - v).astype(np.float64)
        stats[1:4] = change.sum(), np.log(np.maximum(change, 2.0**-149)).sum(), (new == v).sum()
        v = new
    top = np.maximum(s.top[0].numpy(), v) if s.top and not frozen else s.top[0].numpy() if s.top else v
    # torch's float64 root may be one unit off NumPy's; the float32 one must be exact.
    root = np.sqrt if real is np.float32 else lambda x: torch.from_numpy(x).sqrt().numpy()
    d = root((top / bc2) + real(eps)) if eps_inside else (root(top) / sbc2) + real(eps)
    u = (avg * ibc1) / d
    stats[8] = np.abs(u).max() if u.size else 0
    if clamp:
        u = np.minimum(np.maximum(u, real(-clamp)), real(clamp))
    stored = torch.from_numpy((p * real(1 - lr * wd)) - (real(lr) * u)).to(s.p.dtype)
    after = mask(stored, n, m) if n else torch.ones_like(stored, dtype=torch.bool)
    stats[4], stats[7] = (after.numpy() ^ keep).sum(), ((stored != 0) & after).sum()
    outs = [torch.where(after, stored, torch.zeros_like(stored)).to(o.dtype) for o in s.outs]
    return [stored, *map(torch.from_numpy, [avg, v, *([top] if s.top else [])]), torch.tensor(float(t)), *outs], stats


CASES = [
    dict(zip(("frozen", "eps_inside", "maximize", "amsgrad", "scaled"), bits, strict=True))
    for bits in itertools.product((False, True), repeat=5)
]


@pytest.mark.quick(48)
@each("flags", CASES, ids=lambda f: "+".join(k for k, v in f.items() if v) or "plain")
@each("n, m", [(0, 0), (2, 4), (1, 8)])
@each("dtype", DTYPES)
def test_bits_equal_a_loop_in_numpy(flags, n, m, dtype, same_bits):
    flags = dict(flags)
    amsgrad, scaled = flags.pop("amsgrad"), flags.pop("scaled")
    torch.manual_seed(n)
    s = State(torch.randn(12, 16).to(dtype), amsgrad, outs=[torch.bfloat16], step=7)
    s.v.copy_(torch.rand(12, 16) * 1e-3), s.v[0].zero_()
    for step, clamp in enumerate((0.0, 0.0, 0.7)):
        g = torch.randn(12, 16).to(torch.bfloat16 if step == 1 else dtype)
        g[0, :8] = 0
        h = hyper(weight_decay=0.1, decay=0.02 * (step != 1), v_step=7.0 * (step == 2), clamp=clamp, eps=1e-6)
        want, numbers = in_numpy(s, g, h, n, m, flags["frozen"], flags["eps_inside"], flags["maximize"], 1.7 if scaled else 0)
        stats = s.apply(g, h, n, m, geometric=True, grad_scale=torch.tensor([1.7]) if scaled else None, **flags)
        assert all(same_bits(a, b) for a, b in zip(s.tensors(), want, strict=True))
        assert stats.dtype == torch.float64 and stats.tolist() == pytest.approx(numbers.tolist(), rel=1e-12, abs=1e-300)


@each("dtype", DTYPES)
def test_bits_on_edge_weights_and_gradients(edge, dtype, same_bits):
    s, flags = State(edge(40, 16, dtype), True, outs=[torch.float32, dtype][:1]), (False, False, False, 0)
    for seed in range(3):
        g = edge(40, 16, dtype, seed=seed + 5)
        h = hyper(decay=0.1, clamp=2.0)
        with np.errstate(all="ignore"):
            want, numbers = in_numpy(s, g, h, 2, 4, *flags)
        stats = s.apply(g, h, 2, 4)
        assert all(same_bits(a, b) for a, b in zip(s.tensors(), want, strict=True))
        numbers[2:4] = 0
        assert stats.tolist() == pytest.approx(numbers.tolist(), rel=1e-12, nan_ok=True) and stats[8].isnan()


@each("amsgrad", [False, True])
@each("maximize", [False, True])
@each("weight_decay", [0.0, 0.3])
@each("real, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_without_masks_it_is_torch_adamw(amsgrad, maximize, weight_decay, real, tolerance):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(31, 17, dtype=real))
    s = State(p.detach(), amsgrad)
    theirs = torch.optim.AdamW([p], lr=1e-2, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize, foreach=False)
    for _ in range(60):
        p.grad = torch.randn(31, 17, dtype=real) * 0.1
        theirs.step()
        s.apply(p.grad, hyper(weight_decay=weight_decay), maximize=maximize)
    state = theirs.state[p]
    for ours, other in ((s.p, p.detach()), (s.m, state["exp_avg"]), (s.v, state["exp_avg_sq"])):
        assert (ours - other).abs().max() <= tolerance * other.abs().max()
    assert s.step == state["step"] == 60


@each("dtype", DTYPES)
def test_masks_do_not_change_the_update_and_outs_follow_the_new_weight(dtype, same_bits):
    torch.manual_seed(1)
    p, g = torch.randn(8, 16).to(dtype), torch.randn(8, 16).to(dtype)
    dense, masked = State(p, outs=[torch.float32]), State(p, outs=[torch.bfloat16])
    dense.apply(g, hyper(lr=0.5))
    stats = masked.apply(g, hyper(lr=0.5), 2, 4)
    assert same_bits(dense.p, masked.p) and same_bits(dense.outs[0], dense.p.float())
    assert same_bits(masked.outs[0], prune(masked.p, 2, 4).to(torch.bfloat16))
    assert stats[4] == (mask(p, 2, 4) ^ mask(masked.p, 2, 4)).sum() > 0
    assert stats[7] == 64


def test_strided_tensors_are_updated_in_place_and_statistics_add_up(same_bits):
    torch.manual_seed(2)
    plain = [State(torch.randn(8, 12), True, [torch.bfloat16]), State(torch.randn(4, 8), True, [torch.bfloat16], step=3)]
    # (in, out) layouts: the same numbers in buffers of transposed strides, handed over as views
    views = [[x.t().contiguous().t() if x.dim() else x.clone() for x in s.tensors()] for s in plain]
    grads, h = [torch.randn_like(s.p) for s in plain], hyper(decay=0.1)
    each = torch.stack([s.apply(g, h, 2, 4, geometric=True) for s, g in zip(plain, grads, strict=True)])
    p, m, v, top, step, out = (list(x) for x in zip(*views, strict=True))
    assert not p[0].is_contiguous()
    stats = masked_adamw_(p, [g.t().contiguous().t() for g in grads], m, v, top, step, out, h, 2, 4, geometric=True)
    for s, view in zip(plain, views, strict=True):
        assert all(same_bits(a, b) for a, b in zip(view, s.tensors(), strict=True))
    assert stats[1:8].tolist() == pytest.approx(each.sum(0)[1:8].tolist(), rel=1e-12)
    assert stats[0] == 1 and stats[8] == each[:, 8].max() and each[0, 8] != each[1, 8]


def test_a_skipped_step_changes_nothing(same_bits):
    s = State(torch.randn(4, 8), True, outs=[torch.float32], step=5)
    before = [x.clone() for x in s.tensors()]
    stats = s.apply(torch.full((4, 8), math.inf), hyper(), 2, 4, found_inf=torch.ones(1), grad_scale=torch.ones(1))
    assert stats.tolist() == [0.0] * 9 and all(same_bits(a, b) for a, b in zip(s.tensors(), before, strict=True))
    assert s.apply(torch.ones(4, 8), hyper(), 2, 4, found_inf=torch.zeros(1))[0] == 1 and s.step == 6


def test_decay_pulls_pruned_weights_only():
    p = torch.tensor([4.0, 0.5, -0.25, 3.0])
    s = State(p)
    stats = s.apply(torch.zeros(4), hyper(decay=0.1), 2, 4)
    assert torch.equal(s.m != 0, torch.tensor([False, True, True, False])) and (s.p.abs() <= p.abs()).all()
    assert stats[5] == 0.75 and stats[6] == 0


def test_non_zeros_are_counted_under_the_new_mask():
    s = State(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    stats = s.apply(torch.tensor([0.0, 0.0, 1.0, 0.0]), hyper(), 2, 4)
    assert stats[7] == 2 and stats[4] == 2 and stats[8] == pytest.approx(1)


def test_the_root_is_correctly_rounded():
    v = torch.rand(100_000) * 2.0 ** torch.randint(-100, 100, (100_000,))
    got = sys.modules["nmkernels.reference.adamw"]._sqrt(v)
    assert torch.equal(got, torch.from_numpy(np.sqrt(v.numpy())))


def test_empty():
    assert masked_adamw_([], [], [], [], [], [], [], hyper(), 2, 4).tolist() == [1.0] + [0.0] * 8
    assert State(torch.empty(0, 8), outs=[torch.float32]).apply(torch.empty(0, 8), hyper(), 2, 4).tolist() == [1.0] + [0.0] * 8


def test_errors_come_before_any_change():
    def fails(error, match, pattern=(2, 4), h=None, **lists):
        s = State(torch.ones(2, 8))
        every = {"grads": [s.p], "avgs": [s.m], "sqs": [s.v], "top": [], "steps": [s.step], "outs": [], **lists}
        with pytest.raises(error, match=match):
            masked_adamw_([s.p], *every.values(), hyper() if h is None else h, *pattern)
        assert s.step == 0 and (s.p == 1).all() and (s.m == 0).all()

    good = torch.ones(2, 8)
    fails(ShapeError, "1 params but 0 grads", grads=[])
    fails(ShapeError, "1 params but 2 max_exp_avg_sqs", top=[good, good])
    fails(ShapeError, "outs has shape", outs=[torch.ones(8, 2)])
    fails(ShapeError, "masked_adamw_: the last dimension is 8.*M=3", pattern=(1, 3))
    fails(PatternError, "5:4", pattern=(5, 4))
    fails(DtypeError, "exp_avgs is torch.bfloat16", avgs=[good.bfloat16()])
    fails(DtypeError, "int32", grads=[good.int()])
    fails(ShapeError, "hyper", h=torch.ones(8))


def buffers(shape, n, m, dtype, ways=(True, True), layout="canonical"):
    """Four of a param, filled with what nothing writes."""
    like = torch.zeros(shape)
    made = pack(like, n, m, "transposable", dtype=dtype, rows=ways[0], columns=ways[1], layout=layout)
    return [x.fill_(77) for x in made]


@pytest.mark.quick(8)
@each("flags", CASES[::5], ids=lambda f: "+".join(k for k, v in f.items() if v) or "plain")
@each("n, m", [(2, 4), (1, 2)])
@each("to", [torch.bfloat16, torch.float16, torch.float32])
@each("dtype", DTYPES)
def test_transposable_steps_and_what_they_pack(flags, n, m, to, dtype, same_bits):
    flags = dict(flags)
    amsgrad, scaled = flags.pop("amsgrad"), flags.pop("scaled")
    torch.manual_seed(n)
    s, packs = State(torch.randn(12, 16).to(dtype), amsgrad, outs=[torch.bfloat16], step=7), buffers((12, 16), n, m, to)
    s.v.copy_(torch.rand(12, 16) * 1e-3)
    for _ in range(2):
        g, h = torch.randn(12, 16).to(dtype), hyper(weight_decay=0.1, decay=0.02, v_step=7.0, lr=0.3)
        want, numbers = in_numpy(s, g, h, n, m, flags["frozen"], flags["eps_inside"], flags["maximize"], 1.7 * scaled, transposable_mask)
        scale = torch.tensor([1.7]) if scaled else None
        stats = s.apply(g, h, n, m, geometric=True, grad_scale=scale, transposable=True, packs=packs, **flags)
        assert all(same_bits(a, b) for a, b in zip(s.tensors(), want, strict=True))
        assert stats.tolist() == pytest.approx(numbers.tolist(), rel=1e-12, abs=1e-300)
        keep = transposable_mask(s.p, n, m)
        expected = (*compress(s.p.to(to), n, m, keep), *compress(s.p.to(to).T, n, m, keep.T))
        assert all(same_bits(a, b) for a, b in zip(packs, expected, strict=True))


@each("to", [torch.bfloat16, torch.float64])
@each("dtype", DTYPES)
def test_packs_of_rows_have_the_new_mask_and_one_rounding(to, edge, dtype, same_bits):
    s, packs = State(edge(16, 16, dtype), outs=[to]), buffers((16, 16), 2, 4, to, (True, False))
    s.apply(edge(16, 16, dtype, seed=4), hyper(lr=0.5), 2, 4, packs=packs)
    assert all(same_bits(a, b) for a, b in zip(packs, compress(s.p.to(to), 2, 4, mask(s.p, 2, 4)), strict=False))
    assert packs[2].numel() == packs[3].numel() == 0


@each("layout", ["mma.sp", "wgmma.sp"])
def test_packs_in_a_layout_of_the_device(layout):
    s, packs = State(torch.randn(64, 128)), buffers((64, 128), 2, 4, torch.float16, layout=layout)
    s.apply(torch.randn(64, 128), hyper(lr=0.5), 2, 4, transposable=True, packs=packs, layout=layout)
    keep = transposable_mask(s.p, 2, 4)
    for i, (x, k) in enumerate(((s.p, keep), (s.p.T, keep.T))):
        values, indices = compress(x.half(), 2, 4, k)
        assert torch.equal(packs[2 * i], values) and torch.equal(packs[2 * i + 1], to_layout(indices, x.shape[1], layout))


def test_each_param_has_packs_of_its_own_or_none_and_a_skipped_step_writes_none(same_bits):
    states = [State(torch.randn(8, 12)), State(torch.randn(4)), State(torch.randn(8, 4))]
    strided = torch.zeros(6, 8).bfloat16().T  # columns of (8, 12), values in transposed memory
    none = [torch.empty(0)] * 4
    packs = [
        *buffers((8, 12), 2, 4, torch.float16, (True, False)),
        *none,
        *none[:2],
        *buffers((8, 4), 2, 4, torch.float32, (False, True))[2:],
    ]
    packs[0] = strided
    before = [x.clone() for x in packs]

    def step(found, *chosen, **flags):
        some = [states[i] for i in chosen]
        grads, (p, m, v, k) = [torch.ones_like(s.p) for s in some], zip(*((s.p, s.m, s.v, s.step) for s in some), strict=True)
        mine = [x for i in chosen for x in packs[4 * i : 4 * i + 4]]
        return masked_adamw_(p, grads, m, v, [], k, [], hyper(), 2, 4, found_inf=torch.tensor([found]), packs=mine, **flags)

    assert step(1.0, 0, 1)[0] == 0 and step(1.0, 2, transposable=True)[0] == 0
    assert all(same_bits(a, b) for a, b in zip(packs, before, strict=True))
    assert step(0.0, 0, 1)[0] == 1 and step(0.0, 2, transposable=True)[0] == 1
    values, indices = compress(states[0].p.bfloat16(), 2, 4, mask(states[0].p, 2, 4))
    assert same_bits(packs[0].contiguous(), values) and torch.equal(packs[1], indices)
    values, indices = compress(states[2].p.T, 2, 4, transposable_mask(states[2].p, 2, 4).T)
    assert same_bits(packs[10], values) and torch.equal(packs[11], indices)
