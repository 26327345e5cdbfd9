"""A small vision transformer on handwritten digits."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_gpt.model import MLP, GPTConfig

from .base import task
from .digits import BATCH, CLASSES, SIDE, Digits
from .gpt import ByteGPT

HIGH, WIDE = 4, 2
"""Pixels of a patch: two rows of four patches."""

PATCHES = SIDE * SIDE // (HIGH * WIDE)


class Attention(nn.Module):
    """Multi-head self-attention with a fused projection for q, k and v, over all tokens or where ``mask`` is true."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map ``x`` ``[batch, tokens, width]`` to the same shape."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(batch, tokens, width))
        return out


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(GPTConfig(width=width, heads=heads))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map ``x`` ``[batch, tokens, width]`` to the same shape."""
        x = x + self.attn(self.norm1(x), mask)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class ViT(nn.Module):
    """Vision transformer (Dosovitskiy et al., ICLR 2021) with learned positions and mean pooling; eight patches of 4 × 2 pixels.

    ``sparsify_`` takes the blocks' linear layers; the embedding of eight pixels is too small, and ``head`` is an output head. Positions
    start with a deviation of 0.5: from 0.02, for half of such a short run, the model sees a bag of patches (90 % instead of 96 to 98 %).
    """

    count, size, deviation, classes = PATCHES, HIGH * WIDE, 0.5, CLASSES
    """Number of patches, size of one, deviation of the positions, and number of classes."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(self.size, width)
        self.positions = nn.Parameter(self.deviation * torch.randn(1, self.count, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[batch, classes]``."""
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(self.patches(images)) + self.positions)).mean(1))
        return logits

    def patches(self, images: Tensor) -> Tensor:
        """``images`` ``[batch, 8, 8]`` as ``[batch, count, size]``."""
        return images.view(-1, SIDE // HIGH, HIGH, SIDE // WIDE, WIDE).transpose(2, 3).reshape(-1, self.count, self.size)


@task("vit")
class DigitsViT(Digits):
    """102 thousand parameters, 98 thousand of them in layers that can be made sparse; 600 steps are 32 epochs of 1200 images.

    A run takes 9 to 12 CPU-seconds.
    """

    settings = replace(ByteGPT.settings, steps=600, tuning_seeds=10, seeds=10, seconds=11)
    tokens = BATCH * PATCHES
    shares: ClassVar[dict[str, float]] = {"head": 1 / PATCHES}

    def model(self) -> nn.Module:
        return ViT()
