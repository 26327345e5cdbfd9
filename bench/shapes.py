"""Weights of real models, ``(out_features, in_features)``, so that a figure says something about a layer that people run."""

from __future__ import annotations

from collections.abc import Iterable

from nmkernels import NMError

from .registry import sizes

MODELS: dict[str, dict[str, str]] = {
    # Radford et al. 2019: 12 blocks of width 768, one projection for q, k and v
    "gpt2": {"qkv": "2304x768", "proj": "768x768", "fc": "3072x768", "down": "768x3072"},
    # Grattafiori et al. 2024: width 4096, 8 heads of keys and values of 128, hidden 14336
    "llama3-8b": {"q": "4096x4096", "kv": "1024x4096", "o": "4096x4096", "up": "14336x4096", "down": "4096x14336"},
    # Dosovitskiy et al. 2021: width 1024, hidden 4096, one projection for q, k and v
    "vit-l": {"qkv": "3072x1024", "proj": "1024x1024", "fc": "4096x1024", "down": "1024x4096"},
    # Devlin et al. 2019: width 1024, hidden 4096, separate projections
    "bert-large": {"qkv": "1024x1024", "fc": "4096x1024", "down": "1024x4096"},
    # what the speed targets are stated on: a square weight, and Llama-7B's up projection
    "design": {"square": "4096x4096", "up": "11008x4096"},
}


def parse(words: Iterable[str]) -> tuple[str, ...]:
    """Matrices of words such as ``4096x11008``, ``gpt2`` (all its layers) and ``gpt2:fc``; ``NMError`` for others."""
    found: list[str] = []
    for word in words:
        model, _, layer = word.lower().partition(":")
        if model not in MODELS:
            try:
                sizes(word)
            except NMError:
                raise NMError(f"no shape is called {word!r}; write ROWSxCOLS or one of {', '.join(MODELS)}, or MODEL:LAYER.") from None
            found.append(word)
        elif layer and layer not in MODELS[model]:
            raise NMError(f"{model} has no layer {layer!r}; it has {', '.join(MODELS[model])}.")
        else:
            found += [matrix for name, matrix in MODELS[model].items() if layer in ("", name)]
    return tuple(dict.fromkeys(found))


def names(matrix: str) -> list[str]:
    """The layers whose weight has this shape, such as ``llama3-8b q``; those of the targets' own shapes last."""
    return [f"{model} {layer}" for model, layers in MODELS.items() for layer, its in layers.items() if its == matrix]
