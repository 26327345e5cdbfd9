"""Translation from English to German: a small Transformer on the messages of thirteen Debian packages."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_gpt.model import MLP, GPTConfig

from .. import data
from ..catalogs import BEGIN, END, LONGEST, PAD, VOCABULARY, Tokens, translations
from .base import Settings, Task, generator, library, task, to_model
from .vit import Attention, Block

BATCH = 32
"""Pairs of a step."""

POOL = 50
"""Batches that are drawn together and sorted by length."""

SMOOTHING = 0.1
"""Label smoothing, in training only (Szegedy et al. 2016; Vaswani et al. 2017, section 5.4)."""

JUDGED, WORDS = 500, 5
"""Number of test texts translated for BLEU, and the fewest words of one: half of all sources are shorter, and BLEU counts 4-grams."""

SOURCE_TOKENS, TARGET_TOKENS = 12.0, 13.6
"""Tokens of an average training pair, ends included, for the count of FLOPs."""


class CrossAttention(nn.Module):
    """Multi-head attention from ``x`` to ``memory``: ``softmax(q kᵀ / sqrt(head_dim)) v`` with q from ``x``, k and v from ``memory``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Map ``x`` ``[batch, t, width]`` to the same shape; ``memory`` is ``[batch, s, width]``, ``mask`` true where it is read."""
        batch, tokens, width = x.shape
        q = self.q(x).view(batch, tokens, self.heads, -1).transpose(1, 2)
        k, v = self.kv(memory).view(batch, memory.shape[1], 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(batch, tokens, width))
        return out


class DecoderBlock(nn.Module):
    """Pre-norm decoder block: self-attention, cross-attention, feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.cross = nn.LayerNorm(width), CrossAttention(width, heads)
        self.norm3, self.mlp = nn.LayerNorm(width), MLP(GPTConfig(width=width, heads=heads))

    def forward(self, x: Tensor, causal: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Map ``x`` ``[batch, t, width]`` to the same shape; ``causal`` and ``mask`` are true where ``x`` and ``memory`` are read."""
        x = x + self.attn(self.norm1(x), causal)
        x = x + self.cross(self.norm2(x), memory, mask)
        out: Tensor = x + self.mlp(self.norm3(x))
        return out


class Transformer(nn.Module):
    """The encoder and decoder of Vaswani et al. 2017, pre-norm, with one embedding for both languages, tied to the output head.

    ``sparsify_`` takes the linear layers of attention and feed-forward; the tied head stays dense.
    """

    def __init__(self, vocabulary: int = VOCABULARY, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderBlock(width, heads) for _ in range(layers))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", sinusoids(LONGEST, width), persistent=False)
        self.positions: Tensor

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Next-token logits ``[batch, t, vocabulary]`` for ``target`` ``[batch, t]``, given ``source`` ``[batch, s]``."""
        logits: Tensor = self.head(self.decode(target, *self.encode(source)))
        return logits

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder's output ``[batch, s, width]``, and the mask ``[batch, 1, 1, s]`` that is false at padding."""
        mask = (source != PAD)[:, None, None]
        x = self.embed(source)
        for block in self.encoder:
            x = block(x, mask)
        return self.encoder_norm(x), mask

    def decode(self, target: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """The decoder's output ``[batch, t, width]``, with causal attention over ``target``."""
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).tril()
        x = self.embed(target)
        for block in self.decoder:
            x = block(x, causal, memory, mask)
        out: Tensor = self.decoder_norm(x)
        return out

    def embed(self, ids: Tensor) -> Tensor:
        """Scaled embeddings with their positions, ``[batch, tokens, width]``."""
        x: Tensor = self.embedding(ids)
        return x * math.sqrt(x.shape[-1]) + self.positions[: ids.shape[1]]

    @torch.no_grad()
    def translate(self, source: Tensor, longest: int = LONGEST) -> Tensor:
        """Greedy translations ``[batch, ≤ longest]``, from ``BEGIN`` to ``END``, then ``PAD``."""
        memory, mask = self.encode(source)
        ids = torch.full((len(source), 1), BEGIN, device=source.device)
        ended = torch.zeros(len(source), dtype=torch.bool, device=source.device)
        while ids.shape[1] < longest and not ended.all():
            # without a cache of keys and values, which would save little at this size
            following = self.head(self.decode(ids, memory, mask)[:, -1]).argmax(-1).masked_fill(ended, PAD)
            ids, ended = torch.cat([ids, following[:, None]], 1), ended | (following == END)
        return ids


def sinusoids(count: int, width: int) -> Tensor:
    """Positions ``[count, width]``: sines and cosines of wavelengths from 2π to 10000·2π (Vaswani et al. 2017, section 3.5)."""
    angles = torch.arange(count)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10000) / width))
    return torch.stack([angles.sin(), angles.cos()], -1).view(count, width)


@task("translation")
class EnglishToGerman(Task):
    """362 thousand parameters, 229 thousand of them in layers that can be made sparse; 1500 steps are one epoch of 44,084 pairs.

    The pairs are those of ``catalogs``; ``fetch translation`` downloads the packages (75 MB), and the first process that needs the pairs
    makes them in 12 seconds. A run costs a minute; ``val_loss`` and ``bleu`` are on other texts of the training packages.

    Raises:
        RuntimeError: the packages have not been fetched, or sacrebleu or tokenizers is not installed.
    """

    settings = Settings(steps=1500, lr=3e-3, weight_decay=0.0, margin=0.03, seconds=60)
    tokens = round(BATCH * SOURCE_TOKENS)
    shares: ClassVar[dict[str, float]] = {
        "decoder": TARGET_TOKENS / SOURCE_TOKENS,
        "head": TARGET_TOKENS / SOURCE_TOKENS,
        "decoder.0.cross.kv": 1.0,
        "decoder.1.cross.kv": 1.0,
    }

    def __init__(self) -> None:
        library(self.name, "tokenizers")
        self.corpus_bleu = library(self.name, "sacrebleu").corpus_bleu
        found = translations(data.files("translation"), data.folder())
        self.splits, self.texts, self.tokenizer, self.digest = found.tokens, found.texts, found.tokenizer, found.digest
        self.pool = lru_cache(maxsize=2)(self._pool)

    def model(self) -> nn.Module:
        return Transformer()

    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        return self.splits["train"].take(self.pool(seed, step // POOL)[step % POOL])

    def _pool(self, seed: int, number: int) -> Tensor:
        """The pairs of ``POOL`` batches ``[POOL, BATCH]``, of similar length within a batch, the batches in random order."""
        rng, train = generator(seed, number), self.splits["train"]
        which = torch.randint(len(train), (POOL * BATCH,), generator=rng)
        return which[train.order(which)].view(POOL, BATCH)[torch.randperm(POOL, generator=rng)]

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return cross_entropy(model, batch, label_smoothing=SMOOTHING)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, tuning: bool = False) -> dict[str, float]:
        """Losses in nats per token, without smoothing; for tuning only ``val_loss``, on the split ``val``."""
        if tuning:
            return {"val_loss": mean_loss(model, self.splits["val"])}
        return {"val_loss": mean_loss(model, self.splits["test"]), "bleu": self.bleu(model, "test")}

    def bleu(self, model: nn.Module, split: str) -> float:
        """Corpus BLEU, in percent, of greedy translations of the first ``JUDGED`` texts of ``WORDS`` words or more (Post, WMT 2018)."""
        judged = [i for i, pair in enumerate(self.texts[split]) if len(pair.source.split()) >= WORDS][:JUDGED]
        which, tokens, written = torch.tensor(judged), self.splits[split], list[str]()
        which = which[tokens.order(which)]
        for part in which.split(BATCH):
            ids = model.translate(*to_model(model, tokens.take(part)[0]))  # type: ignore[operator]
            written += self.tokenizer.decode_batch(ids.tolist())
        return float(self.corpus_bleu(written, [[self.texts[split][i].target for i in which.tolist()]]).score)


def cross_entropy(model: nn.Module, batch: tuple[Tensor, ...], **keywords: Any) -> Tensor:
    """The loss of each target token with teacher forcing, without padding."""
    source, target = batch
    return F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD, **keywords)


def mean_loss(model: nn.Module, tokens: Tokens) -> float:
    """Nats per token of all pairs."""
    parts = [tokens.take(part) for part in tokens.order(torch.arange(len(tokens))).split(BATCH)]
    counts = [int((target[:, 1:] != PAD).sum()) for _, target in parts]
    return sum(cross_entropy(model, to_model(model, *part), reduction="sum").item() for part in parts) / sum(counts)
