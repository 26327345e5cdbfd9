"""The GPT of train_gpt: causal, the same with and without the cache."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import nmkernels as nm
from examples.train_gpt.model import GPT, GPTConfig, KVCache, generate

SMALL = GPTConfig(width=32, layers=2, heads=4, context=16)


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(SMALL).double()


def test_every_matrix_is_a_linear_layer_and_the_head_is_untied(model):
    assert sum(p.numel() for p in GPT(GPTConfig()).parameters()) <= 1_000_000
    linears = [name for name, m in model.named_modules() if type(m) is nn.Linear]
    assert len(linears) == 4 * SMALL.layers + 1
    assert "lm_head" in linears
    assert model.lm_head.weight is not model.tokens.weight


def test_logits_depend_on_the_past_only(model):
    ids = torch.randint(256, (2, 16))
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    a, b = model(ids), model(changed)
    assert torch.equal(a[:, :9], b[:, :9])
    assert not torch.allclose(a[:, 9:], b[:, 9:])
    assert not torch.allclose(a[:, 15], b[:, 15])


@pytest.mark.parametrize("parts", [[1] * 16, [5, 1, 1, 9]])
def test_the_cache_changes_nothing(model, parts):
    ids = torch.randint(256, (2, 16))
    cache = KVCache(SMALL, batch=2, dtype=torch.float64)
    pieces = [model(part, cache) for part in ids.split(parts, 1)]
    assert torch.allclose(torch.cat(pieces, 1), model(ids), atol=1e-12)


def test_too_long_an_input_raises(model):
    with pytest.raises(ValueError, match="17 tokens exceed the context of 16"):
        model(torch.zeros(1, 17, dtype=torch.long))
    cache = KVCache(SMALL, dtype=torch.float64)
    model(torch.zeros(1, 12, dtype=torch.long), cache)
    with pytest.raises(ValueError, match="17 tokens"):
        model(torch.zeros(1, 5, dtype=torch.long), cache)


def test_loss_is_the_mean_negative_log_likelihood(model):
    x, y = torch.randint(256, (2, 8)), torch.randint(256, (2, 8))
    logp = model(x).log_softmax(-1).gather(-1, y[..., None])
    assert torch.isclose(model.loss(x, y), -logp.mean())
    assert abs(model.loss(x, y).item() - math.log(256)) < 0.1  # a fresh model knows nothing


def test_init_deviations():
    torch.manual_seed(0)
    big = GPT(GPTConfig(width=128, layers=2))
    assert big.blocks[0].attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert big.blocks[1].mlp.proj.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert not big.blocks[0].mlp.fc.bias.any()
    assert bool((big.norm.weight == 1).all())


def test_what_is_refused():
    for wrong in ({"width": 30}, {"activation": "silu"}, {"activation": "gelu:2:4"}, {"activation": "relu2:"}):
        with pytest.raises(ValueError, match="not a multiple of heads" if "width" in wrong else "choose gelu, relu2"):
            GPTConfig(**wrong)
    with pytest.raises(nm.PatternError):
        GPT(replace(SMALL, activation="relu2:4:2"))


def test_greedy_generation_follows_the_logits(model):
    ids = list(b"abc")
    for _ in range(10):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert generate(model, b"abc", 10, temperature=0) == bytes(ids[3:])


def test_generation_outlives_the_context(model):
    prompt = b"a prompt longer than the context of sixteen"
    out = generate(model, prompt, 50, seed=3)
    assert len(out) == 50 and out == generate(model, prompt, 50, seed=3) != generate(model, prompt, 50, seed=4)


def test_generation_runs_one_token_at_a_time(model):
    widths = []
    model.register_forward_pre_hook(lambda _m, args: widths.append(args[0].shape[1]))
    generate(model, b"abcd", 8)
    assert widths == [4] + [1] * 7


@pytest.mark.parametrize("activation", ["relu2", "relu2:2:4"])
def test_squared_relu(activation):
    torch.manual_seed(0)
    model = GPT(replace(SMALL, activation=activation))
    torch.manual_seed(0)
    baseline = GPT(SMALL)
    assert all(torch.equal(v, baseline.state_dict()[k]) for k, v in model.state_dict().items()), "the same weights under the same names"
    ids = torch.randint(0, 256, (2, 16))
    assert not torch.equal(model(ids), baseline(ids))
    hidden = model.blocks[0].mlp.act(torch.randn(100, 128)).reshape(-1, 4).ne(0).sum(1)
    assert hidden.max() == (2 if ":" in activation else 4)
