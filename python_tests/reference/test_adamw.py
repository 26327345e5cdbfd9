"""masked_adamw_ bit for bit against an independent loop in NumPy, and against torch.optim.AdamW."""

import itertools
import math
import sys

import numpy as np
import pytest
import torch

from nmkernels.ops import mask_bits
from nmkernels.pattern import DtypeError, ShapeError
from nmkernels.reference import mask, masked_adamw_
from nmkernels.reference.adamw import mask_of
from nmkernels.testing import assert_equal_bits
from python_tests.for_each import for_each
from python_tests.reference.conftest import DTYPES, edge

NAMES = ("lr", "beta1", "beta2", "eps", "weight_decay", "decay", "v_step", "clamp", "reserved")
DEFAULT = dict(zip(NAMES, (1e-2, 0.9, 0.999, 1e-8, 0.0, 0.0, 0.0, 0.0, 0.0), strict=True))


def hyper(**changes):
    return torch.tensor([{**DEFAULT, **changes}[k] for k in NAMES], dtype=torch.float64)


class State:
    """One parameter with its moments, as lists that masked_adamw_ takes."""

    def __init__(self, p, amsgrad=False, step=0):
        wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        self.p, self.m, self.v = p.clone(), torch.zeros_like(p, dtype=wide), torch.zeros_like(p, dtype=wide)
        self.top = [torch.zeros_like(self.v)] if amsgrad else []
        self.step = torch.tensor(float(step))

    def tensors(self):
        return [self.p, self.m, self.v, *self.top, self.step]

    def apply(self, g, h, n=0, m=0, **flags):
        return masked_adamw_([self.p], [g], [self.m], [self.v], self.top, [self.step], h, n, m, **flags)


def beta_power(beta, t):
    result = 1.0
    while t:
        result, beta, t = result * beta if t & 1 else result, beta * beta, t >> 1
    return result


def in_numpy(s, grad, h, n, m, frozen, eps_inside, maximize, scale, held=None, fixed=False):
    """The step in NumPy: every line is one rounding. Returns what the state must be, and the statistics."""
    lr, beta1, beta2, eps, wd, decay, v_step, clamp, _ = h.tolist()
    real, t = (np.float64 if s.p.dtype == torch.float64 else np.float32), int(s.step) + 1
    bc2 = 1 - beta_power(beta2, int(v_step) if frozen else t) if not frozen or v_step else 1.0
    b1, omb1, b2, omb2, ibc1, sbc2, bc2 = map(
        real, (beta1, 1 - beta1, beta2, 1 - beta2, 1 / (1 - beta_power(beta1, t)), math.sqrt(bc2), bc2)
    )
    p, g, avg, v = (x.to(s.m.dtype).numpy().copy() for x in (s.p, grad, s.m, s.v))
    keep = mask(s.p, n, m).numpy() if n else np.ones_like(p, dtype=bool) if held is None else held.numpy()
    g = g / real(np.float32(scale)) if scale else g
    g = -g if maximize else g
    if fixed:
        g[~keep] = 0
    stats = np.zeros(9)
    stats[0], stats[5], stats[6] = 1, np.abs(p[~keep]).astype(np.float64).sum(), np.abs(g[~keep]).astype(np.float64).sum()
    if decay and not fixed:
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
    new = (p * real(1 - lr * wd)) - (real(lr) * u)
    if fixed:
        new[~keep] = 0
    stored = torch.from_numpy(new).to(s.p.dtype)
    after = mask(stored, n, m) if n else torch.from_numpy(keep)
    stats[4], stats[7] = (after.numpy() ^ keep).sum(), ((stored != 0) & after).sum()
    return [stored, *map(torch.from_numpy, [avg, v, *([top] if s.top else [])]), torch.tensor(float(t))], stats


CASES = [
    dict(zip(("frozen", "eps_inside", "maximize", "amsgrad", "scaled"), bits, strict=True))
    for bits in itertools.product((False, True), repeat=5)
]


@for_each("n, m", [(0, 0), (2, 4), (1, 8)])
@for_each("i", range(len(CASES)))
def test_bits_equal_a_loop_in_numpy(n, m, i):
    flags, dtype = dict(CASES[i]), DTYPES[(i + i // 4 + n) % 4]
    amsgrad, scaled = flags.pop("amsgrad"), flags.pop("scaled")
    s = State(torch.randn(12, 16).to(dtype), amsgrad, step=7)
    s.v.copy_(torch.rand(12, 16) * 1e-3), s.v[0].zero_()
    for step, clamp in enumerate((0.0, 0.0, 0.7)):
        g = torch.randn(12, 16).to(torch.bfloat16 if step == 1 else dtype)
        g[0, :8] = 0
        h = hyper(weight_decay=0.1, decay=0.02 * (step != 1), v_step=7.0 * (step == 2), clamp=clamp, eps=1e-6)
        want, numbers = in_numpy(s, g, h, n, m, flags["frozen"], flags["eps_inside"], flags["maximize"], 1.7 if scaled else 0)
        stats = s.apply(g, h, n, m, geometric=True, grad_scale=torch.tensor([1.7]) if scaled else None, **flags)
        assert_equal_bits(s.tensors(), want)
        assert stats.dtype == torch.float64 and stats.tolist() == pytest.approx(numbers.tolist(), rel=1e-12, abs=1e-300)


@for_each("dtype", DTYPES)
def test_bits_on_edge_weights_and_gradients(dtype):
    s, flags = State(edge(40, 16, dtype), True), (False, False, False, 0)
    for seed in range(3):
        g = edge(40, 16, dtype, seed=seed + 5)
        h = hyper(decay=0.1, clamp=2.0)
        with np.errstate(all="ignore"):
            want, numbers = in_numpy(s, g, h, 2, 4, *flags)
        stats = s.apply(g, h, 2, 4)
        assert_equal_bits(s.tensors(), want)
        numbers[2:4] = 0
        assert stats.tolist() == pytest.approx(numbers.tolist(), rel=1e-12, nan_ok=True) and stats[8].isnan()


@for_each("fixed", [False, True])
@for_each("i", range(0, len(CASES), 3))
def test_held_masks_equal_a_loop_in_numpy(i, fixed):
    flags, dtype = dict(CASES[i]), DTYPES[(i // 3) % 4]
    amsgrad, scaled = flags.pop("amsgrad"), flags.pop("scaled")
    s, held = State(torch.randn(12, 13).to(dtype), amsgrad, step=7), torch.rand(12, 13) < 0.4
    s.v.copy_(torch.rand(12, 13) * 1e-3)
    for clamp in (0.0, 0.7):
        g = torch.randn(12, 13).to(dtype)
        if fixed:
            g[~held] = torch.tensor([math.nan, math.inf, -1.0, 2.0]).to(dtype)[torch.randint(4, g[~held].shape)]
        h = hyper(weight_decay=0.1, decay=0.02, v_step=7.0, clamp=clamp, eps=1e-6)
        want, numbers = in_numpy(s, g, h, 0, 0, *list(flags.values()), 1.7 if scaled else 0, held, fixed)
        scale = torch.tensor([1.7]) if scaled else None
        stats = s.apply(g, h, geometric=True, grad_scale=scale, masks=[mask_bits(held)], fixed=fixed, **flags)
        assert_equal_bits(s.tensors(), want)
        assert stats.tolist() == pytest.approx(numbers.tolist(), rel=1e-12, abs=1e-300)
        assert stats[4] == 0 and (stats[5] > 0) == (not fixed or clamp == 0.0) and (stats[6] == 0) == fixed
    if fixed:
        assert not s.p[~held].any() and not s.p[~held].signbit().any()


def test_mask_bits():
    for shape in ((1,), (8,), (3, 13), (2, 3, 16), (0, 9), (4, 0), (2, 257)):
        keep = torch.rand(shape) < 0.5
        bits = mask_bits(keep)
        assert bits.dtype == torch.uint8 and bits.shape == (*shape[:-1], -(-shape[-1] // 8)) and bits.is_contiguous()
        assert mask_bits(keep.mT).is_contiguous() if keep.dim() == 2 else True
        assert torch.equal(mask_of(bits, shape[-1]), keep)
        for index in np.ndindex(shape):
            assert bool(int(bits[(*index[:-1], index[-1] // 8)]) >> index[-1] % 8 & 1) == keep[index]
        if shape[-1] % 8 and bits.numel():
            assert not (bits[..., -1] >> shape[-1] % 8).any()
    with pytest.raises(DtypeError, match=r"mask_bits.*float32.*bool"):
        mask_bits(torch.ones(4))
    with pytest.raises(ShapeError, match="0-dimensional"):
        mask_bits(torch.tensor(True))


def test_strided_tensors_and_statistics():
    plain = [State(torch.randn(8, 12), True), State(torch.randn(4, 8), True, step=3)]
    # (in, out) layouts: the same numbers in buffers of transposed strides, handed over as views
    views = [[x.t().contiguous().t() if x.dim() else x.clone() for x in s.tensors()] for s in plain]
    grads, h = [torch.randn_like(s.p) for s in plain], hyper(decay=0.1)
    alone = torch.stack([s.apply(g, h, 2, 4, geometric=True) for s, g in zip(plain, grads, strict=True)])
    p, m, v, top, step = (list(x) for x in zip(*views, strict=True))
    assert not p[0].is_contiguous()
    stats = masked_adamw_(p, [g.t().contiguous().t() for g in grads], m, v, top, step, h, 2, 4, geometric=True)
    assert_equal_bits(views, [s.tensors() for s in plain])
    assert stats[1:8].tolist() == pytest.approx(alone.sum(0)[1:8].tolist(), rel=1e-12)
    assert stats[0] == 1 and stats[8] == alone[:, 8].max() and alone[0, 8] != alone[1, 8]


def test_the_root_is_correctly_rounded():
    v = torch.rand(100_000) * 2.0 ** torch.randint(-100, 100, (100_000,))
    got = sys.modules["nmkernels.reference.adamw"]._sqrt(v)
    assert torch.equal(got, torch.from_numpy(np.sqrt(v.numpy())))


def test_empty():
    assert masked_adamw_([], [], [], [], [], [], hyper(), 2, 4).tolist() == [1.0] + [0.0] * 8
    assert State(torch.empty(0, 8)).apply(torch.empty(0, 8), hyper(), 2, 4).tolist() == [1.0] + [0.0] * 8


def test_a_skipped_step_changes_nothing():
    s = State(torch.randn(4, 8), True, step=5)
    before = [x.clone() for x in s.tensors()]
    stats = s.apply(torch.full((4, 8), math.inf), hyper(), 2, 4, found_inf=torch.ones(1), grad_scale=torch.ones(1))
    assert stats.tolist() == [0.0] * 9
    assert_equal_bits(s.tensors(), before)
    assert s.apply(torch.ones(4, 8), hyper(), 2, 4, found_inf=torch.zeros(1))[0] == 1 and s.step == 6
