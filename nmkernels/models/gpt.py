"""A small decoder-only transformer over bytes, and generation with a key-value cache.

Every GEMM is an ``nn.Linear``, so ``sparsify_`` finds all of them; the output head ``lm_head`` is not tied and stays dense.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..arguments import whole_number
from ..nn.activation import SquaredReLUMLP
from ..pattern import NMError, Pattern, ShapeError


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

    Raises:
        ShapeError: a size is not a whole number of at least 1, or ``width`` is not a multiple of ``heads``.
        NMError: the activation is unknown.
        PatternError: its N:M is invalid.
    """

    vocab: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 128
    activation: str = "gelu"

    def __post_init__(self) -> None:
        self.feed_forward()
        for name, value in asdict(self).items():
            if name != "activation":
                object.__setattr__(self, name, whole_number(ShapeError, f"GPTConfig: {name}", value))
        if self.width % self.heads:
            raise ShapeError(f"GPTConfig: width {self.width} is not a multiple of heads={self.heads}; change one of the two.")

    def feed_forward(self) -> tuple[str, Pattern | None]:
        """The activation's name and its N:M pattern, if any."""
        name, colon, pattern = self.activation.partition(":")
        if name not in ("gelu", "relu2") or (name == "gelu" and colon):
            raise NMError(f"GPTConfig: activation={self.activation!r} is unknown; choose gelu, relu2, or relu2:N:M.")
        return name, Pattern(pattern) if colon else None


class KVCache:
    """Cached keys and values, ``[layers, batch, heads, context, head_dim]`` each, for step-by-step decoding.

    Example:
        >>> KVCache(GPTConfig(width=32, layers=1, heads=2, context=16)).keys.shape
        torch.Size([1, 1, 2, 16, 16])
    """

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
        name, pattern = config.feed_forward()
        self.mlp = MLP(config) if name == "gelu" else SquaredReLUMLP(config.width, 4 * config.width, pattern=pattern)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), cache)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Decoder-only language model with learned positions and an untied head.

    Weights start as in GPT-2 (Radford et al. 2019, section 2.3): normal with deviation 0.02, and
    ``0.02 / sqrt(2 layers)`` for the two projections of each block that write to the residual stream.

    Example:
        >>> import torch
        >>> from nmkernels.models import GPT, GPTConfig
        >>> model = GPT(GPTConfig(width=32, layers=1, heads=2, context=16))
        >>> model(torch.zeros(3, 16, dtype=torch.long)).shape
        torch.Size([3, 16, 256])
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
        """Logits ``[batch, tokens, vocab]`` of the token after each of ``ids`` ``[batch, tokens]`` (int64).

        Raises:
            ShapeError: the sequence, with what the cache holds, is longer than ``config.context``.
        """
        past = cache.length if cache is not None else 0
        end = past + ids.shape[1]
        if end > self.config.context:
            raise ShapeError(f"GPT: {end} tokens exceed the context of {self.config.context}; shorten the input or use a longer context.")
        x = self.tokens(ids) + self.positions.weight[past:end]
        for block in self.blocks:
            x = block(x, cache)
        if cache is not None:
            cache.length = end
        return self.lm_head(self.norm(x))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy of ``y`` ``[batch, tokens]`` given ``x``, in nats per token."""
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())


@torch.no_grad()
def generate(model: GPT, prompt: bytes, count: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
    """Continue ``prompt`` by ``count`` bytes, one forward pass of one token each.

    With ``temperature`` 0 it takes the most likely byte, otherwise it samples from ``softmax(logits / temperature)`` with a generator
    seeded by ``seed``. When the context is full, generation restarts from its second half, because learned positions cannot slide.

    Raises:
        ShapeError: the prompt is empty, or ``temperature`` is negative.

    Example:
        >>> from nmkernels.models import GPT, GPTConfig, generate
        >>> model = GPT(GPTConfig(width=32, layers=1, heads=2, context=16))
        >>> len(generate(model, b"def ", 20))
        20
    """
    if not prompt:
        raise ShapeError("generate: the prompt is empty; give at least one byte to continue.")
    if temperature < 0:
        raise ShapeError(f"generate: temperature is {temperature}; 0 takes the likeliest byte, above 0 samples.")
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
