"""A small decoder-only transformer over bytes in plain PyTorch, and generation with a key-value cache.

Every GEMM is an ``nn.Linear``, so ``nm.sparsify_`` finds all of them; the output head ``lm_head`` is not tied and stays dense.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmkernels.nn import SquaredReLUMLP


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a ``GPT``.

    Args:
        vocab: number of token ids; 256 for bytes.
        width: features of the residual stream, a multiple of ``heads``.
        layers: transformer blocks.
        heads: attention heads per block.
        context: longest sequence, in tokens.
        activation: of the feed-forward blocks: ``"gelu"``, ``"relu2"`` (squared ReLU), or ``"relu2:N:M"`` with at most N of every M
            activations non-zero (see ``nm.nn.SquaredReLU``).
    """

    vocab: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 128
    activation: str = "gelu"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads={self.heads}.")
        if not re.fullmatch(r"gelu|relu2(:\d+:\d+)?", self.activation):
            raise ValueError(f"activation={self.activation!r} is unknown; choose gelu, relu2, or relu2:N:M.")


class KVCache:
    """Cached keys and values, ``[layers, batch, heads, context, head_dim]`` each, for step-by-step decoding."""

    def __init__(self, config: GPTConfig, batch: int = 1, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        shape = (config.layers, batch, config.heads, config.context, config.width // config.heads)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.length = 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``k`` and ``v`` ``[batch, heads, new, head_dim]`` of one layer; return all keys and values so far."""
        end = self.length + k.shape[2]
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class Attention(nn.Module):
    """Causal multi-head self-attention, ``softmax(q kᵀ / sqrt(head_dim)) v``, with one fused projection for q, k and v."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.layer = config.heads, layer
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        past, mask = 0, None
        if cache is not None:
            past = cache.length
            k, v = cache.extend(self.layer, k, v)
        if past and tokens > 1:  # is_causal aligns to the first key, so it is wrong with a past
            mask = torch.ones(tokens, past + tokens, dtype=torch.bool, device=x.device).tril(past)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and tokens > 1)
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, width))


class MLP(nn.Module):
    """``proj(gelu(fc(x)))`` with a hidden layer four times as wide."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.width, 4 * config.width)
        self.proj = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x)))


class Block(nn.Module):
    """Pre-norm transformer block: ``x + attn(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attn = Attention(config, layer)
        self.norm2 = nn.LayerNorm(config.width)
        pattern = config.activation.partition(":")[2] or None
        self.mlp = MLP(config) if config.activation == "gelu" else SquaredReLUMLP(config.width, 4 * config.width, pattern=pattern)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), cache)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Decoder-only language model with learned positions and an untied head.

    Weights start as in GPT-2 (Radford et al. 2019, section 2.3): normal with deviation 0.02, and
    ``0.02 / sqrt(2 layers)`` for the two projections of each block that write to the residual stream.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocab, bias=False)

        residual = 0.02 / math.sqrt(2 * config.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=residual if name.endswith("proj.weight") else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits ``[batch, tokens, vocab]`` of the token after each of ``ids`` ``[batch, tokens]`` (int64)."""
        past = cache.length if cache is not None else 0
        end = past + ids.shape[1]
        if end > self.config.context:
            raise ValueError(f"{end} tokens exceed the context of {self.config.context}.")
        x = self.tokens(ids) + self.positions.weight[past:end]
        for block in self.blocks:
            x = block(x, cache)
        if cache is not None:
            cache.length = end
        return self.lm_head(self.norm(x))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy of ``y`` ``[batch, tokens]`` given ``x``, in nats per token."""
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def generate(model: GPT, prompt: bytes, count: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
    """Continue ``prompt`` by ``count`` bytes, one forward pass of one token each.

    With ``temperature`` 0 it takes the most likely byte, otherwise it samples from ``softmax(logits / temperature)`` with a generator
    seeded by ``seed``. When the context is full, generation restarts from its second half, because learned positions cannot slide.
    """
    weight = model.lm_head.weight
    context = model.config.context
    rng = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    new = ids[-context:]
    cache = KVCache(model.config, device=weight.device, dtype=weight.dtype)
    for _ in range(count):
        if cache.length + len(new) > context:
            cache.length = 0
            new = ids[-max(context // 2, 1) :]
        logits = model(torch.tensor([new], device=weight.device), cache)[0, -1]
        if temperature == 0:
            new = [int(logits.argmax())]
        else:
            probabilities = torch.softmax(logits.float() / temperature, -1)
            new = [int(torch.multinomial(probabilities.cpu(), 1, generator=rng))]
        ids += new
    return bytes(ids[len(prompt) :])
