"""The transforms that choose among combinations: equations on small numbers, gradients against autograd, compilation."""

import itertools
import math

import pytest
import torch

import nmkernels as nm
from nmkernels.autograd import combination_count
from nmkernels.pattern import Pattern, PatternError
from nmkernels.recipes.methods.lbc import BestCandidate, CandidateMask
from nmkernels.recipes.methods.maskllm import GumbelMask, LikeliestMask, gumbel

PATTERNS = pytest.mark.parametrize("pattern", ["2:4", "1:4", "3:4", "2:8", "1:16", "4:4"])


def rows(pattern):
    n, m = pattern.n, pattern.m
    return torch.tensor([[float(i in c) for i in range(m)] for c in itertools.combinations(range(m), n)], dtype=torch.float64)


def number(x):
    return torch.tensor(x, dtype=torch.float64)


def problem(pattern, tau=0.7, kappa=100.0, penalty=0.3, **options):
    torch.manual_seed(0)
    p = Pattern(pattern)
    w = torch.randn(3, 2 * p.m, dtype=torch.float64)
    transform = GumbelMask(p, **options)
    logits = transform.start(w)["nm_logits"]
    draw = transform.renew(w, [None] * 5, torch.Generator().manual_seed(1))["nm_draw"]
    return p, w, transform, (logits, draw, number(tau), number(kappa), number(penalty))


def test_the_number_of_combinations_is_bounded():
    assert [combination_count(Pattern(p)) for p in ("2:4", "4:8", "2:16", "1:256", "7:7")] == [6, 70, 120, 256, 1]
    with pytest.raises(PatternError, match="12870 combinations"):
        combination_count(Pattern("8:16"))


@PATTERNS
def test_the_table_is_in_lexicographic_order(pattern):
    p = Pattern(pattern)
    table = CandidateMask(p).table(torch.ones((), dtype=torch.float64))
    assert torch.equal(table, rows(p)) and len(table) == math.comb(p.m, p.n)


# ---- MaskLLM


def test_the_mixture_on_small_numbers():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    draw = torch.tensor([1, 2])
    w = torch.tensor([[1.0, -2.0, 4.0]])
    transform = GumbelMask(Pattern("2:3"))
    noise = gumbel(draw, logits)
    y = ((2 * logits + noise) / 0.5).softmax(1)[0]
    want = torch.tensor([y[0] + y[1], -2 * (y[0] + y[2]), 4 * (y[1] + y[2])])
    extras = logits, draw, torch.tensor(0.5), torch.tensor(2.0), torch.tensor(0.0)
    torch.testing.assert_close(transform(w, *extras)[0], want)
    out = torch.empty_like(w)
    assert transform(w, *extras, out=out) is out and torch.equal(out, transform(w, *extras))


@PATTERNS
@pytest.mark.parametrize("hard", [False, True])
def test_gradients_are_those_of_autograd(pattern, hard):
    p, w, transform, extras = problem(pattern, hard=hard)
    logits, (g, table) = extras[0].clone().requires_grad_(), (torch.randn_like(w), rows(p))
    y = ((extras[3] * logits + gumbel(extras[1], logits)) / extras[2]).softmax(1)
    if hard:
        y = torch.nn.functional.one_hot(y.argmax(1), y.shape[1]) + y - y.detach()
    used = w * (y @ table).reshape(w.shape)
    torch.testing.assert_close(transform(w, *extras), used.detach())
    for got, value in (
        (transform.gradient(g, w, *extras)[1], (g * used).sum()),
        (transform.penalty(w, *extras), -0.3 * used.square().sum()),
    ):
        (want,) = torch.autograd.grad(value, logits, retain_graph=True)
        torch.testing.assert_close(got["nm_logits"], want, atol=1e-10, rtol=1e-8)
    assert transform.gradient(g, w, *extras)[0] is None


def test_the_noise_is_gumbel_and_a_function_of_its_words():
    draw, like = torch.tensor([5, -7]), torch.zeros(40_000, 6, dtype=torch.float64)
    noise = gumbel(draw, like)
    assert torch.equal(noise, gumbel(draw.clone(), like)) and not torch.equal(noise, gumbel(draw + 1, like))
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01) and noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
    # the maximum of κπ + G falls on k with probability softmax(κπ)_k
    p = torch.tensor([0.4, 0.3, 0.1, 0.1, 0.06, 0.04], dtype=torch.float64)
    share = torch.bincount((p.log() + noise).argmax(1), minlength=6) / len(noise)
    assert (share - p).abs().max() < 4 * (0.25 / len(noise)) ** 0.5
    assert gumbel(draw, like.float()).isfinite().all()


def test_no_word_gives_an_infinite_number(monkeypatch):
    for word in (0, 2**24 - 1):
        monkeypatch.setattr(f"{gumbel.__module__}.uniforms24", lambda draw, count, word=word: torch.full((count,), word))
        assert gumbel(torch.tensor([0, 0]), torch.zeros(4)).isfinite().all()


@PATTERNS
def test_the_prior_prefers_the_mask_by_magnitude(pattern):
    p, w, transform, extras = problem(pattern, prior=100.0)
    assert torch.equal(LikeliestMask(p).kept(w, extras[0]), nm.ops.mask(w, p))
    assert torch.equal(LikeliestMask(p)(w, extras[0]), nm.ops.prune(w, p))
    assert torch.equal(transform.kept(w, *extras), nm.ops.mask(w, p))


@pytest.mark.parametrize(("pattern", "count", "half"), [("2:4", 6, 1.0), ("1:4", 4, 0.5)])
def test_the_prior_equation(pattern, count, half):
    w = torch.randn(4, 8, dtype=torch.float64)
    torch.manual_seed(3)
    raw = torch.randn(8, count).double() * 0.01
    torch.manual_seed(3)
    got = GumbelMask(Pattern(pattern), prior=3.0).start(w)["nm_logits"]
    kept = nm.ops.mask(w, pattern).double().reshape(8, 4)
    torch.testing.assert_close(got, raw + raw.std(correction=0) * (kept @ rows(Pattern(pattern)).T - half) * 3.0, rtol=1e-6, atol=1e-9)
    assert GumbelMask(Pattern("2:4")).start(w.bfloat16())["nm_logits"].dtype == torch.float32


def test_sharpness_goes_from_one_in_c_to_one():
    _, w, transform, extras = problem("2:4", tau=1e6)
    assert transform.watch(w, *extras)["sharpness"].item() == pytest.approx(1 / 6, rel=1e-3)
    _, w, transform, extras = problem("2:4", tau=1e-3)
    assert transform.watch(w, *extras)["sharpness"].item() > 0.99


# ---- LBC


def candidates(pattern="2:4", **options):
    p = Pattern(pattern)
    w = torch.randn(3, 2 * p.m, dtype=torch.float64)
    transform = CandidateMask(p, **options)
    scores = transform.start(w)["nm_scores"]
    return w, transform, scores, transform.renew(w, (scores, None, None), torch.Generator())["nm_alive"]


def test_removal_on_small_numbers():
    transform, w = CandidateMask(Pattern("2:4")), torch.ones(1, 4)
    scores = torch.tensor([[0.3, -0.9, 0.1, 0.3, 0.0, 0.2]])
    alive = torch.ones(1, 6, dtype=torch.bool)
    want = {5: [0, 2, 3, 4, 5], 3: [0, 3, 5], 2: [0, 3], 1: [0]}
    for remaining, members in want.items():
        alive = transform.renew(w, (scores, alive, torch.tensor(float(remaining))), torch.Generator())["nm_alive"]
        assert alive[0].nonzero().flatten().tolist() == members
        best = BestCandidate(Pattern("2:4"))
        assert torch.equal(best.kept(w, scores, alive, None), torch.tensor([[True, True, False, False]]))
    # what is gone stays away, however well it scores later
    scores[0, 4] = 9.0
    for remaining in (1.0, 6.0):
        again = transform.renew(w, (scores, alive, torch.tensor(remaining)), torch.Generator())["nm_alive"]
        assert again[0].nonzero().flatten().tolist() == [0]


def test_the_union_is_what_remaining_combinations_have():
    transform, w = CandidateMask(Pattern("2:4")), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    alive = torch.tensor([[False, True, False, False, False, True]])  # {0, 2} and {2, 3}
    assert torch.equal(transform(w, torch.ones(1, 6), alive, None), torch.tensor([[1.0, 0.0, 3.0, 4.0]]))


@PATTERNS
@pytest.mark.parametrize("chain", [False, True])
def test_scores_get_the_gradient_of_the_soft_mask(pattern, chain):
    w, transform, scores, alive = candidates(pattern, chain=chain)
    alive = alive & (torch.rand(alive.shape, generator=torch.Generator().manual_seed(0)) > 0.4)
    g, leaf = torch.randn_like(w), scores.clone().requires_grad_()
    soft = ((leaf * alive) @ rows(Pattern(pattern))).reshape(w.shape)
    (want,) = torch.autograd.grad((g * w * soft).sum(), leaf)
    dw, learned = transform.gradient(g, w, scores, alive, None)
    torch.testing.assert_close(learned["nm_scores"], want)
    kept = transform.kept(w, scores, alive, None)
    assert torch.equal(dw, g * kept if chain else g)


# ---- surroundings


def test_all_compile_without_a_break():
    p, w, gumbel_mask, extras = problem("2:4")
    _, candidate, scores, alive = candidates()
    cases = [
        (gumbel_mask, extras),
        (LikeliestMask(p), extras[:1]),
        (candidate, (scores[:6], alive[:6], number(6.0))),
        (CandidateMask(p, forward="top_n"), (scores[:6], alive[:6], number(6.0))),
        (BestCandidate(p), (scores[:6], alive[:6], number(6.0))),
    ]
    for transform, more in cases:
        torch.compiler.reset()
        compiled = torch.compile(transform.__call__, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(w, *more), transform(w, *more))
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_are_kept(dtype):
    _, w, transform, extras = problem("2:4")
    w, logits = w.to(dtype), extras[0].float()
    assert transform(w, logits, *extras[1:]).dtype == dtype
    assert transform.gradient(w, w, logits, *extras[1:])[1]["nm_logits"].dtype == torch.float32
    assert CandidateMask(Pattern("2:4")).start(w)["nm_scores"].dtype == torch.float32
