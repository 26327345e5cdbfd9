"""Tiny mixture-of-experts models: of transformers, built from configs, and one without transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

VOCAB, HIDDEN, INNER, EXPERTS, CHOSEN = 64, 32, 48, 4, 2
KINDS = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")
TRANSPOSED = "gpt_oss"


def tiny(kind="mixtral", implementation="eager", layers=1, seed=0):
    """A causal language model with one stack of experts a layer, ready to train."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    common = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
    own = {
        "mixtral": {"intermediate_size": INNER, "num_local_experts": EXPERTS},
        "qwen2_moe": {"moe_intermediate_size": INNER, "shared_expert_intermediate_size": INNER, "num_experts": EXPERTS},
        "qwen3_moe": {"moe_intermediate_size": INNER, "num_experts": EXPERTS, "head_dim": 16},
        "gpt_oss": {
            "intermediate_size": INNER,
            "num_local_experts": EXPERTS,
            "head_dim": 16,
            "initializer_range": 0.2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    }[kind]
    config = transformers.AutoConfig.for_model(kind, num_experts_per_tok=CHOSEN, **common, **own)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation(implementation)
    return model.train()


def experts_of(model):
    """The experts module of the first layer, and its name."""
    return next((name, module) for name, module in model.named_modules() if name.endswith(".experts"))


def tokens(count=1, batch=2, length=8, seed=1):
    """Batches of tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (batch, length), generator=generator) for _ in range(count)]


def loss_of(model, ids):
    return model(ids, labels=ids).loss


def only_experts(module, name):
    """A filter: the stacks of experts and no other layer."""
    return "experts." in name and "shared" not in name


# ---- the same without transformers


class Experts(nn.Module):
    """What ``use_experts_implementation`` makes of an experts class, for tests that want no transformers; ``eager`` is its only way."""

    def __init__(self, count=3, hidden=16, inner=24, transposed=False, bias=False, gate=True):
        super().__init__()
        self.config, self.has_gate, self.has_bias, self.is_transposed = SimpleNamespace(top_k=2), gate, bias, transposed
        self.first = "gate_up_proj" if gate else "up_proj"
        for name, rows, cols in ((self.first, 2 * inner if gate else inner, hidden), ("down_proj", hidden, inner)):
            weight = torch.randn(count, rows, cols) / cols**0.5
            self.register_parameter(name, nn.Parameter(weight.transpose(1, 2).contiguous() if transposed else weight))
            if bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(count, rows)))

    def _apply_gate(self, y):
        gate, up = y.chunk(2, dim=-1)
        return F.silu(gate) * up

    act_fn = staticmethod(F.silu)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for e in range(len(self.down_proj)):
            place, choice = torch.where(top_k_index == e)
            y = self._times(self.first, e, hidden_states[place])
            y = self._times("down_proj", e, self._apply_gate(y) if self.has_gate else self.act_fn(y))
            result = result.index_add(0, place, y * top_k_weights[place, choice, None])
        return result

    def _times(self, name, e, x):
        weight = getattr(self, name)[e]
        return F.linear(x, weight.t() if self.is_transposed else weight, getattr(self, f"{name}_bias")[e] if self.has_bias else None)


class Apart(nn.Module):
    """The same experts as so many linear layers."""

    def __init__(self, experts):
        super().__init__()
        self.first, self.last = nn.ModuleList(), nn.ModuleList()
        for layers, name in ((self.first, experts.first), (self.last, "down_proj")):
            for e in range(len(experts.down_proj)):
                weight = experts.get_parameter(name)[e].detach()
                weight = weight.t() if experts.is_transposed else weight
                linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
                linear.weight.data.copy_(weight)
                layers.append(linear)

    def forward(self, x, numbers, weights):
        result = torch.zeros_like(x)
        for e, (first, last) in enumerate(zip(self.first, self.last, strict=True)):
            place, choice = torch.where(numbers == e)
            gate, up = first(x[place]).chunk(2, dim=-1)
            result = result.index_add(0, place, last(F.silu(gate) * up) * weights[place, choice, None])
        return result


class Mixture(nn.Module):
    """Tokens that go to experts by their position, and a head that is too small to be worth masking."""

    def __init__(self, experts, dtype=torch.float64, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.experts, self.head = experts, nn.Linear(16, 8)
        self.to(dtype)

    def forward(self, x, experts=3):
        i = torch.arange(len(x))
        numbers = torch.stack([i % experts, (i + 1) % experts], 1)
        weights = torch.tensor([0.7, 0.3], dtype=x.dtype).expand(len(x), 2)
        return self.head(self.experts(x, numbers, weights))


def mixture(apart=False, dtype=torch.float64, seed=0, **options):
    """A small model with stacked experts, or with the same experts as linear layers."""
    torch.manual_seed(seed)
    experts = Experts(**options)
    return Mixture(Apart(experts) if apart else experts, dtype, seed)
