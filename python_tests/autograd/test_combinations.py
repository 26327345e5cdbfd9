"""The transforms that choose among combinations: what training does not show. Their equations: recipes/loop_learned.py, step by step."""

import itertools
import math

import pytest
import torch

import nmkernels as nm
from nmkernels.autograd import combination_count
from nmkernels.pattern import Pattern, PatternError
from nmkernels.recipes.contrib.lbc import CandidateMask
from nmkernels.recipes.methods.maskllm import GumbelMask, gumbel


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
        kept = nm.ops.mask(w, pattern).double().reshape(8, 4)
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
