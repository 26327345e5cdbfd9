"""Byte-by-byte generation with a cache of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pattern import ShapeError
from .gpt import GPT, KVCache


@torch.no_grad()
def generate(model: GPT, prompt: bytes, count: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
    """Continue ``prompt`` by ``count`` bytes, one forward pass of one token each.

    ``temperature`` 0 takes the likeliest byte, else bytes are drawn from ``softmax(logits / temperature)`` with a
    generator seeded by ``seed``. When the context is full, its second half is read again as a fresh start, because
    learned positions cannot slide.

    Raises:
        ShapeError: the prompt is empty (there is nothing to continue), or ``temperature`` is negative.

    Example:
        >>> from nmkernels.zoo import GPT, GPTConfig, generate
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
            cache = KVCache(model.config, device=weight.device, dtype=weight.dtype)
            new = ids[-max(context // 2, 1) :]
        logits = model(torch.tensor([new], device=weight.device), cache)[0, -1]
        new = [_pick(logits, temperature, rng)]
        ids += new
    return bytes(ids[len(prompt) :])


def _pick(logits: Tensor, temperature: float, rng: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.float() / temperature, -1)
    return int(torch.multinomial(probabilities.cpu(), 1, generator=rng))
