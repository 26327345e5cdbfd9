"""Decoders of the sizes of Llama 3 and GPT-2 for training and for step-by-step decoding with a cache of fixed size, in plain torch.

The GPT of examples/train_gpt grows its cache by slices, whose sizes a CUDA graph would freeze, and has no gated block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Sizes of a ``Decoder``; ``pairs``: heads of keys and values; ``gated``: a Llama (RMSNorm, rotary positions, SwiGLU, no biases)."""

    width: int
    hidden: int
    heads: int
    pairs: int
    layers: int
    vocab: int
    context: int
    gated: bool

    @property
    def dim(self) -> int:
        """Features of a head."""
        return self.width // self.heads


SIZES = {
    "Llama-3-8B x4": Sizes(4096, 14336, 32, 8, 4, 128256 // 8, 4096, True),
    "GPT-2-medium x4": Sizes(1024, 4096, 16, 16, 4, 50256 // 6, 1024, False),
    "GPT-2-medium": Sizes(1024, 4096, 16, 16, 24, 50257, 1024, False),
    "Llama 128x1": Sizes(128, 256, 4, 2, 1, 96, 32, True),
    "GPT-2 128x1": Sizes(128, 256, 4, 4, 1, 96, 32, False),
}
"""By name. With four of 32 or 24 layers the vocabulary is an eighth or a sixth too, so that the output head has its share of the whole
model. The last two are for tests."""

Last = tuple[Tensor, Tensor]
"""The position of a token ``[1]``, and which positions of the cache it attends to, ``[1, 1, 1, context]``."""
Cache = list[tuple[Tensor, Tensor]]
"""Keys and values ``[batch, pairs, context, dim]`` of each layer."""


class Attention(nn.Module):
    """Causal self-attention with one projection for q, k and v; heads share keys and values in groups."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, bias = sizes, not sizes.gated
        self.qkv = nn.Linear(sizes.width, (sizes.heads + 2 * sizes.pairs) * sizes.dim, bias=bias)
        self.proj = nn.Linear(sizes.width, sizes.width, bias=bias)

    def forward(self, x: Tensor, turn: Tensor | None, cache: tuple[Tensor, Tensor] | None, last: Last | None) -> Tensor:
        """``turn``: cosines and sines of the positions; with a cache x is one token, and attention is over the positions up to it."""
        s, (batch, tokens, width) = self.sizes, x.shape
        qk, v = self.qkv(x).view(batch, tokens, -1, s.dim).transpose(1, 2).split([s.heads + s.pairs, s.pairs], 1)
        q, k = (qk if turn is None else rotated(qk, turn)).split([s.heads, s.pairs], 1)
        if cache is None or last is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.heads != s.pairs)
        else:
            (keys, values), (at, mask) = cache, last
            keys.index_copy_(2, at, k)
            values.index_copy_(2, at, v)
            # the heads that share keys are queries of one head
            y = F.scaled_dot_product_attention(q.reshape(batch, s.pairs, -1, s.dim), keys, values, attn_mask=mask)
            y = y.reshape(batch, s.heads, 1, s.dim)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, tokens, width))
        return out


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """x ``[batch, heads, tokens, dim]`` with rotary positions, computed in float32."""
    cos, sin = turn
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


class FeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))``, or ``down(gelu(up(x)))`` with biases."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        bias = not sizes.gated
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False) if sizes.gated else None
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=bias)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x and the result ``[batch, tokens, width]``."""
        out: Tensor = self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + ffn(norm(x))``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        norm = nn.RMSNorm if sizes.gated else nn.LayerNorm
        self.norm1, self.attention = norm(sizes.width), Attention(sizes)
        self.norm2, self.ffn = norm(sizes.width), FeedForward(sizes)

    def forward(self, x: Tensor, turn: Tensor | None, cache: tuple[Tensor, Tensor] | None, last: Last | None) -> Tensor:
        """As ``Attention.forward``."""
        x = x + self.attention(self.norm1(x), turn, cache, last)
        out: Tensor = x + self.ffn(self.norm2(x))
        return out


class Decoder(nn.Module):
    """A language model with an output head of its own."""

    turns: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.tokens = nn.Embedding(sizes.vocab, sizes.width)
        self.places = None if sizes.gated else nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = (nn.RMSNorm if sizes.gated else nn.LayerNorm)(sizes.width)
        self.lm_head = nn.Linear(sizes.width, sizes.vocab, bias=False)
        rates = 500000.0 ** (-torch.arange(0, sizes.dim, 2, dtype=torch.float32) / sizes.dim)
        angles = torch.outer(torch.arange(sizes.context, dtype=torch.float32), rates)
        self.register_buffer("turns", torch.stack((angles.cos(), angles.sin())).repeat(1, 1, 2), persistent=False)

    def forward(self, ids: Tensor, cache: Cache | None = None, at: Tensor | None = None) -> Tensor:
        """Logits ``[batch, tokens, vocab]`` of ids ``[batch, tokens]``; with a cache ids are one token each, at position ``at`` ``[1]``."""
        places = torch.arange(ids.shape[1], device=ids.device) if at is None else at
        x = self.tokens(ids)
        turn = None
        if self.places is None:
            turn = self.turns[:, places].float()
        else:
            x = x + self.places(places)
        last = None
        if cache is not None and at is not None:
            last = at, (torch.arange(cache[0][0].shape[2], device=ids.device) <= at).view(1, 1, 1, -1)
        for i, block in enumerate(self.blocks):
            x = block(x, turn, None if cache is None else cache[i], last)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits

    def cache(self, batch: int, context: int) -> Cache:
        """An empty cache for so many sequences."""
        s, weight = self.sizes, self.lm_head.weight
        return [
            (weight.new_zeros(batch, s.pairs, context, s.dim), weight.new_zeros(batch, s.pairs, context, s.dim)) for _ in range(s.layers)
        ]


def prunable(model: nn.Module) -> Sequence[tuple[str, nn.Linear]]:
    """The linear layers without the output head."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"]
