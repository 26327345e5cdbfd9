"""Translation by an encoder and a decoder: from Python expressions to the instructions that Python compiles them to."""

from __future__ import annotations

import ast
import dis
import hashlib
from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmkernels.models import stdlib_texts

from .base import Settings, Task, task

SOURCE, TARGET = 40, 16
"""Longest expression, in bytes, and longest translation, in instructions with its end."""

PAIRS, TEST = 40_000, 2_000
BATCH = 32
PAD, BEGIN, END, FIRST = 0, 1, 2, 3
FRAMING = frozenset({"RESUME", "RETURN_VALUE", "PRECALL", "CACHE"})
"""Instructions that every translation has, or that follow from the next one."""


class EncoderDecoder(nn.Module):
    """A transformer as in Vaswani et al. 2017, of PyTorch's own layers, pre-norm, two layers each side.

    ``sparsify_`` takes the feed-forward layers; ``nn.MultiheadAttention`` reads its weights itself, so they stay dense, as does ``head``.
    """

    def __init__(self, instructions: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.bytes, self.instructions = nn.Embedding(256, width, padding_idx=PAD), nn.Embedding(instructions, width, padding_idx=PAD)
        self.source_positions = nn.Parameter(0.02 * torch.randn(SOURCE, width))
        self.target_positions = nn.Parameter(0.02 * torch.randn(TARGET, width))
        keywords = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        encoder = nn.TransformerEncoderLayer(width, heads, 4 * width, **keywords)  # type: ignore[arg-type]
        decoder = nn.TransformerDecoderLayer(width, heads, 4 * width, **keywords)  # type: ignore[arg-type]
        self.encoder = nn.TransformerEncoder(encoder, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, layers, nn.LayerNorm(width))
        self.head = nn.Linear(width, instructions)
        for parameter in (*self.encoder.parameters(), *self.decoder.parameters()):
            if parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)  # the layers of a stack begin as copies of one another

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits ``[batch, t, instructions]`` of what follows each of ``target`` ``[batch, t]``, given ``source`` ``[batch, s]``."""
        empty = source == PAD
        memory = self.encoder(self.bytes(source) + self.source_positions[: source.shape[1]], src_key_padding_mask=empty)
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        inputs = self.instructions(target) + self.target_positions[: target.shape[1]]
        logits: Tensor = self.head(self.decoder(inputs, memory, tgt_mask=causal, memory_key_padding_mask=empty, tgt_is_causal=True))
        return logits


@task("opcodes")
class ToOpcodes(Task):
    """From expressions in the standard library's source to their instructions, 38 thousand different pairs; Python's version matters."""

    settings = Settings(steps=1000, lr=2e-3, lrs=(1e-3, 2e-3, 4e-3), scouted=(5e-4, 1e-3, 2e-3, 4e-3))
    tokens = BATCH * SOURCE
    shares: ClassVar[dict[str, float]] = {"decoder": TARGET / SOURCE, "head": TARGET / SOURCE}

    def __init__(self, pairs: int = PAIRS, test: int = TEST) -> None:
        found = sorted(expressions(pairs).items(), key=lambda pair: hashlib.blake2b(pair[0].encode(), digest_size=8).digest())
        self.names = sorted({name for _, names in found for name in names})
        number = {name: i + FIRST for i, name in enumerate(self.names)}
        source = _padded([list(text.encode()) for text, _ in found], SOURCE)
        target = _padded([[BEGIN, *(number[name] for name in names), END] for _, names in found], TARGET + 1)
        self.test, self.train = (source[:test], target[:test]), (source[test:], target[test:])
        self.digest = hashlib.blake2b(source.numpy().tobytes() + target.numpy().tobytes(), digest_size=8).hexdigest()

    def model(self) -> nn.Module:
        return EncoderDecoder(len(self.names) + FIRST)

    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        rng = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + step) & (2**63 - 1))
        which = torch.randint(len(self.train[0]), (BATCH,), generator=rng)
        return self.train[0][which], self.train[1][which]

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        source, target = batch
        return F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """``val_loss`` in nats per instruction, and ``accuracy``: percent of the test translations right from beginning to end.

        An expression of the test set stands nowhere in the training set. Each instruction is predicted from the right ones before it; all
        of them right is the same as a right greedy translation.
        """
        losses, right, count = 0.0, 0, 0
        for source, target in zip(self.test[0].split(256), self.test[1].split(256), strict=True):
            logits, wanted = model(source, target[:, :-1]), target[:, 1:]
            losses += F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=PAD, reduction="sum").item()
            count += int((wanted != PAD).sum())
            right += int(((logits.argmax(-1) == wanted) | (wanted == PAD)).all(1).sum())
        return {"val_loss": losses / count, "accuracy": 100 * right / len(self.test[0])}

    def data(self) -> str:
        return self.digest


def expressions(most: int) -> dict[str, tuple[str, ...]]:
    """Up to ``most`` different expressions of the standard library's source, with their instructions."""
    found: dict[str, tuple[str, ...]] = {}
    texts = stdlib_texts()
    for name in sorted(texts, key=lambda n: hashlib.blake2b(n.encode(), digest_size=8).digest()):
        for text in _expressions_of(texts[name]):
            if len(found) == most:
                return found
            if text not in found and (names := instructions(text)):
                found[text] = names
    return found


def _expressions_of(text: bytes) -> Iterator[str]:
    try:
        nodes = ast.walk(ast.parse(text))
    except (SyntaxError, ValueError):
        return
    for node in nodes:
        if isinstance(node, ast.expr) and not isinstance(node, (ast.Name, ast.Constant, ast.Await, ast.Yield, ast.YieldFrom)):
            written = ast.unparse(node)
            if len(written.encode()) <= SOURCE:
                yield written


def instructions(text: str) -> tuple[str, ...]:
    """The names of the instructions of an expression; empty where it cannot stand alone, or where they are too many.

    Example:
        >>> "LOAD_NAME" in instructions("a + b")
        True
    """
    try:
        names = tuple(i.opname for i in dis.get_instructions(compile(text, "", "eval")) if i.opname not in FRAMING)
    except (SyntaxError, ValueError):
        return ()
    return names if len(names) < TARGET else ()


def _padded(rows: list[list[int]], length: int) -> Tensor:
    return torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
