"""The weight transforms: what they use, and the gradient that they pass on. Training with each: recipes/test_conformance.py."""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch.autograd import forward_ad

from nmkernels import NMError, Pattern, PatternError, ShapeError, ops
from nmkernels.autograd import HardMask, WeightTransform, combination_count, linear, masked, transformed
from nmkernels.autograd.transforms import pruned_along_out, reading
from nmkernels.layouts import as_matrix, as_stored, ordered
from nmkernels.recipes.contrib.complementary import StrideMask
from nmkernels.recipes.contrib.lbc import CandidateMask
from nmkernels.recipes.contrib.maxq import PartlyDense, SoftQuery
from nmkernels.recipes.methods.fst import TransposableMask
from nmkernels.recipes.methods.maskllm import GumbelMask, gumbel
from nmkernels.recipes.methods.mdgf import DecayedMask
from nmkernels.recipes.methods.slope import DoublePruned
from nmkernels.recipes.methods.sste import SoftThreshold
from nmkernels.testing import assert_equal_bits, equal_bits
from python_tests import naive

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def test_pruned_nan_and_inf_leave_plus_zero():
    w = torch.tensor([[float("nan"), float("inf"), -1.0, -2.0], [float("-inf"), -3.0, 3.0, float("inf")]])
    kept = HardMask(Pattern("1:4"))(w)
    assert equal_bits(kept, torch.tensor([[float("nan"), 0.0, 0.0, 0.0], [float("-inf"), 0.0, 0.0, 0.0]]))


def test_pruned_along_out():
    for pattern, rows in itertools.product(["1:2", "2:4", "1:4", "2:8", "3:5", "4:4"], [40, 37, 1, 3]):
        p, w = Pattern(pattern), torch.randn(rows, 80)
        # a short last group keeps n of its rows
        want = torch.cat([naive.masked(block.t().contiguous(), min(p.n, len(block)), len(block)).t() for block in w.split(p.m)])
        assert torch.equal(pruned_along_out(w, p.n, p.m), want)


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "1:8"])
def test_tensor_cores_read_sparser_patterns_as_2_4(pattern):
    w, transform = torch.randn(64, 128), HardMask(Pattern(pattern))
    rows = transform.packed(w, dtype=torch.bfloat16, layout="wgmma.sp").rows
    assert rows.pattern == P and torch.equal(rows.dense(), transform(w).bfloat16())


def test_double_pruning_loses_no_place_to_a_pruned_weight():
    held = DoublePruned(P).renew(torch.zeros(8, 8), [None, None], torch.Generator())
    assert int((held["nm_columns"] & held["nm_rows"]).sum()) == int(held["nm_columns"].sum()) > 0, "what is zero now may still grow"


# ---- the others

P = Pattern("2:4")
EVERY = {
    "plain": (WeightTransform(P), ()),
    "hard": (HardMask(P), ()),
    "hard_chain": (HardMask(P, chain=True), ()),
    "soft": (SoftThreshold(P), (torch.tensor(1.5),)),
    "decayed": (DecayedMask(P), (torch.tensor(0.25, dtype=torch.float64),)),
    "query": (SoftQuery(P), ()),
    "query_whole": (SoftQuery(P, 0.5, whole=True), ()),
    "partly_dense": (PartlyDense(P, 0.1), (torch.tensor(0.3, dtype=torch.float64),)),
    "decayed_straight": (DecayedMask(P, chain=False), (torch.tensor(0.25, dtype=torch.float64),)),
}
GUMBEL = GumbelMask(P), (torch.ones(48, 6), torch.tensor([1, 2]), *torch.tensor([0.5, 2.0, 0.0]))


@pytest.mark.parametrize("name", [*EVERY, "gumbel"])
def test_out_and_views_give_the_same_bits_contiguous(name):
    transform, extras = EVERY.get(name, GUMBEL)
    for dtype in DTYPES:
        w = torch.randn(16, 12).to(dtype).t()
        got, out = transform(w, *extras), torch.full((12, 16), float("nan"), dtype=dtype)
        assert transform(w, *extras, out=out) is out and got.is_contiguous() and got.dtype == dtype
        assert equal_bits(got, out) and equal_bits(got, transform(w.contiguous(), *extras)), dtype
    assert transform == replace(transform) and hash(transform) == hash(replace(transform))


def packable(name, w):
    """A transform and what it reads in addition to the weight."""
    return {
        "hard": (HardMask(P), ()),
        "soft": (SoftThreshold(P), (torch.tensor(1.7, dtype=torch.float64 if w.dtype == torch.float64 else torch.float32),)),
        "held": (TransposableMask(P), (ops.transposable_mask(w.flip(0), "2:4"),)),
        "other": (StrideMask(P, spacing=1), ()),
    }[name]


@pytest.mark.parametrize("name", ["hard", "soft", "held", "other"])
def test_packed_is_the_dense_form_compressed(name):
    narrow = [torch.bfloat16, torch.float16]
    for dtype, view in itertools.product([torch.float32, torch.bfloat16, torch.float64], [False, True]):
        w = torch.randn(8, 16).to(dtype)
        w = w.t() if view else w
        transform, extras = packable(name, w)
        for cast in (dtype, *narrow):
            packed = transform.packed(w, *extras, dtype=cast, columns=transform.traits.transposable)
            want = transform(w, *extras).to(cast)
            if name == "soft":  # rounded once, where the dense form is first rounded to the master weight's dtype
                want = (ops.soft_threshold(w, "2:4").to(extras[0].dtype) * extras[0]).to(cast)
                assert dtype == torch.bfloat16 or torch.equal(want, transform(w, *extras).to(cast))
            assert torch.equal(packed.rows.dense(), want) and packed.rows.values.dtype == cast and packed.rows.pattern == P
            assert (packed.columns is not None) == transform.traits.transposable
            assert packed.columns is None or torch.equal(packed.columns.dense(), want.t())


@pytest.mark.parametrize("name", EVERY)
def test_the_dense_form_alone_is_what_the_transform_makes(name):
    """As a GPU makes it under autocast, of every transform: not all of them are N:M, and stacked experts have a scale for each row."""
    transform, extras = EVERY[name]
    w = torch.randn(8, 16)
    extras = tuple(x.float() if x.dtype == torch.float64 else x for x in extras)
    calls = [extras]
    if isinstance(transform, SoftThreshold):
        calls.append((torch.linspace(0.5, 2, 8)[:, None],))
    for some in calls:
        made = transform.packed(w, *some, dtype=torch.bfloat16, rows=False, dense=True)
        assert made.rows is None and torch.equal(made.dense, transform(w, *some).to(torch.bfloat16))


def test_what_is_not_nm_is_not_packed():
    w = torch.randn(16, 16)
    for name in ("hard", "soft", "other"):
        transform, extras = packable(name, w)
        with pytest.raises((PatternError, ShapeError)):
            transform.packed(w, *extras, dtype=w.dtype, columns=True)
    with pytest.raises(ShapeError, match="more than"):
        DecayedMask(P).packed(w, torch.tensor(0.5), dtype=torch.float32)


@pytest.mark.parametrize("name", EVERY)
def test_gradient_that_reaches_the_master_weight(name):
    transform, extras = EVERY[name]
    w = torch.nn.Parameter(torch.randn(8, 16, dtype=torch.float64))
    x, g = torch.randn(5, 16, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    used = transform(w.detach(), *extras)
    linear(x, w, used, transform=transform, extras=extras).backward(g)
    kept = naive.mask(w, 2, 4)
    factor = {"hard_chain": kept.double(), "decayed": torch.where(kept, 1.0, 0.25).double()}.get(name, torch.ones_like(w))
    torch.testing.assert_close(w.grad, g.T @ x * factor, rtol=1e-12, atol=1e-12)
    assert transform.traits.own_gradient == (name in ("hard_chain", "decayed"))


def test_a_weight_changed_before_backward():
    for name in ("decayed", "hard"):
        transform, extras = EVERY[name]
        w = torch.nn.Parameter(torch.randn(8, 16))
        y = linear(torch.randn(5, 16), w, transform(w.detach(), *extras), transform=transform, extras=extras)
        with torch.no_grad():
            w.neg_()
        if not transform.traits.own_gradient:
            y.sum().backward()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                y.sum().backward()


# ---- masked

SPECIAL = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-42, -3.5, 65504.0])


@pytest.mark.parametrize("way", ["plain", "transposed", "strided", "negated", "needs grad"])
def test_masked_keeps_bits_and_leaves_plus_zero(way):
    for dtype in DTYPES:
        x = SPECIAL.to(dtype).repeat(6, 2)
        mask = torch.rand(6, 16) < 0.5
        if way == "transposed":
            x, mask = x.t(), mask.t()
        elif way == "strided":
            x, mask = x[:, ::3], mask[:, ::3]
        elif way == "negated":
            x = torch._neg_view(x)
        elif way == "needs grad":
            x = x.clone().requires_grad_()
        expected = torch.where(mask, x.detach().resolve_neg(), torch.zeros((), dtype=dtype)).contiguous()
        found = masked(x, mask).detach()
        assert_equal_bits(found, expected)
        assert not found.signbit()[~mask].any() and found.is_contiguous()


def test_masked_writes_out_and_says_so():
    x, mask, out = torch.randn(4, 8), torch.rand(4, 8) < 0.5, torch.full((4, 8), torch.nan)
    version = out._version
    assert masked(x, mask, out) is out and out._version > version
    assert_equal_bits(out, masked(x, mask))


@pytest.mark.slow
def test_masked_empty_compiled_and_under_torch_func():
    assert masked(torch.ones(0, 4), torch.ones(0, 4, dtype=torch.bool)).shape == (0, 4)
    x, mask = torch.randn(4, 8), torch.rand(4, 8) < 0.5
    for other in (torch.compile(masked, fullgraph=True), torch.func.vmap(masked)):
        assert_equal_bits(other(x, mask), masked(x, mask))


# ---- transformed: W̃ in the graph of torch's own multiplication, its gradient by the transform's rule

SHAPES = {"linear": (4, 8), "conv2d": (4, 8, 3, 3), "experts": (2, 4, 8), "experts_t": (2, 8, 4)}


@dataclass(frozen=True)
class Scaled(WeightTransform):
    """W̃ = s W with a learned number s: ∂L/∂W = s g, ∂L/∂s = Σ g W."""

    reads = reading(nm_factor="learned")

    def __call__(self, weight, *extras, out=None):
        return weight * extras[0]

    def gradient(self, g, weight, *extras):
        assert g.dim() == weight.dim() == 2
        return g * extras[0], {"nm_factor": (g * weight).sum()}


def used_of(w, transform, layout, *extras, dtype=None):
    matrix = transform(as_matrix(ordered(w.detach(), layout), layout), *(e.detach() for e in extras))
    return as_stored(matrix.to(dtype or w.dtype), layout, w.shape)


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("chain", [False, True])
def test_the_gradient_follows_the_rule(layout, chain):
    torch.manual_seed(0)
    w = ordered(torch.randn(SHAPES[layout]), layout).requires_grad_()
    rule = HardMask(P, chain=chain)
    used = used_of(w, rule, layout, dtype=torch.bfloat16)
    y = transformed(w, used, rule, (), layout)
    assert torch.equal(y, used) and y.data_ptr() == used.data_ptr()
    g = torch.randn(w.shape)  # in an order of its own
    y.backward(g.bfloat16())
    want = g.bfloat16().float()
    want = want * (used != 0) if chain else want
    assert torch.equal(w.grad, want) and w.grad.dtype == w.dtype and w.grad.stride() == w.stride()


def test_learned_parameters_get_gradients():
    w, s = torch.randn(4, 8, 3, 3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    y = transformed(w, used_of(w, Scaled(P), "conv2d", s), Scaled(P), [s], "conv2d")
    (y * torch.arange(288.0).view(w.shape)).sum().backward()
    assert torch.equal(w.grad, 2 * torch.arange(288.0).view(w.shape))
    assert torch.allclose(s.grad, (w.detach() * torch.arange(288.0).view(w.shape)).sum())
    frozen = w.detach()
    y = transformed(frozen, used_of(w, Scaled(P), "conv2d", s), Scaled(P), [s], "conv2d")
    y.sum().backward()  # the weight is not trained, the other parameter is


@pytest.mark.parametrize("chain", [False, True])
def test_second_derivatives_are_refused(chain):
    w, rule = torch.randn(4, 8, requires_grad=True), HardMask(P, chain=chain)
    y = transformed(w, used_of(w, rule, "linear"), rule)
    (g,) = torch.autograd.grad(y.square().sum(), w, create_graph=True)
    with pytest.raises(NMError, match="no second derivative"):
        g.sum().backward()


def test_torch_func_and_no_forward_mode():
    w, x = torch.randn(4, 8, 3, 3), torch.randn(5, 8, 6, 6)
    rule, used = HardMask(P), used_of(w, HardMask(P), "conv2d")

    def loss(w, x):
        return torch.conv2d(x[None], transformed(w, used_of(w, rule, "conv2d"), rule, (), "conv2d")).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x)
    for i in range(5):
        leaf = used.clone().requires_grad_()
        torch.conv2d(x[i][None], leaf).square().sum().backward()
        assert torch.allclose(each[i], leaf.grad, atol=1e-4)
    t = torch.randn_like(w)
    with forward_ad.dual_level(), pytest.raises(NMError, match="no derivative in forward mode"):
        transformed(forward_ad.make_dual(w, t), used, HardMask(P), (), "conv2d")


# ---- those that choose among combinations: what training does not show. Their equations: recipes/loop_learned.py, step by step


def test_the_number_of_combinations_is_bounded():
    assert [combination_count(Pattern(p)) for p in ("2:4", "4:8", "2:16", "1:256", "7:7")] == [6, 70, 120, 256, 1]
    with pytest.raises(PatternError, match="12870 combinations"):
        combination_count(Pattern("8:16"))


def test_the_noise_is_gumbel_and_a_function_of_its_words():
    draw, like = torch.tensor([5, -7]), torch.zeros(40_000, 6, dtype=torch.float64)
    noise = gumbel(draw, like)
    assert torch.equal(noise, gumbel(draw.clone(), like)) and not torch.equal(noise, gumbel(draw + 1, like))
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01) and noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
    # the maximum of κπ + G falls on k with probability softmax(κπ)_k
    p = torch.tensor([0.4, 0.3, 0.1, 0.1, 0.06, 0.04], dtype=torch.float64)
    share = torch.bincount((p.log() + noise).argmax(1), minlength=6) / len(noise)
    assert (share - p).abs().max() < 4 * (0.25 / len(noise)) ** 0.5


def test_no_word_gives_an_infinite_number(monkeypatch):
    for word in (0, 2**24 - 1):
        monkeypatch.setattr(f"{gumbel.__module__}.uniforms24", lambda draw, count, word=word: torch.full((count,), word))
        assert gumbel(torch.tensor([0, 0]), torch.zeros(4)).isfinite().all()


def test_the_prior_equation():
    for pattern, half in [("2:4", 1.0), ("1:4", 0.5)]:
        p, w = Pattern(pattern), torch.randn(4, 8, dtype=torch.float64)
        table = torch.tensor([[float(i in c) for i in range(4)] for c in itertools.combinations(range(4), p.n)], dtype=torch.float64)
        torch.manual_seed(3)
        raw = torch.randn(8, len(table)).double() * 0.01
        torch.manual_seed(3)
        got = GumbelMask(p, prior=3.0).start(w)["nm_logits"]
        kept = ops.mask(w, pattern).double().reshape(8, 4)
        torch.testing.assert_close(got, raw + raw.std(correction=0) * (kept @ table.T - half) * 3.0, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_learned_is_wide_and_the_weight_keeps_its_dtype(dtype):
    w, transform = torch.randn(3, 8).to(dtype), GumbelMask(Pattern("2:4"))
    logits = transform.start(w)["nm_logits"]
    draw = transform.renew(w, [None] * 5, torch.Generator().manual_seed(1))["nm_draw"]
    extras = logits, draw, *torch.tensor([0.7, 100.0, 0.3], dtype=torch.float64)
    assert transform(w, *extras).dtype == dtype and logits.dtype == torch.float32
    assert transform.gradient(w, w, *extras)[1]["nm_logits"].dtype == torch.float32
    assert CandidateMask(Pattern("2:4")).start(w)["nm_scores"].dtype == torch.float32
