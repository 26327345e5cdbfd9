"""Weight shapes of real models, ``(out_features, in_features)``."""

from __future__ import annotations

from collections.abc import Iterable

from nmkernels import NMError
from nmkernels.audit import shapes

from .registry import sizes

NAMES = {
    "gpt2": ("gpt2", {"qkv": "attn.c_attn", "proj": "attn.c_proj", "fc": "mlp.c_fc", "down": "mlp.c_proj"}),
    "llama3-8b": (
        "llama-3-8b",
        {"q": "self_attn.q_proj", "kv": "self_attn.k_proj", "o": "self_attn.o_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"},
    ),
    "vit-l": ("vit-l", {"qkv": "attn.qkv", "proj": "attn.proj", "fc": "mlp.fc1", "down": "mlp.fc2"}),
    "bert-large": ("bert-large", {"qkv": "attention.self.query", "fc": "intermediate.dense", "down": "output.dense"}),
}
"""Short names of the layers of ``nmkernels/audit/shapes.py``, which has their shapes and sources."""

MODELS: dict[str, dict[str, str]] = {
    **{
        ours: {short: "{}x{}".format(*shapes.MODELS[theirs].layers[name]) for short, name in layers.items()}
        for ours, (theirs, layers) in NAMES.items()
    },
    # the shapes of the speed targets: a square weight, and Llama-7B's up projection
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
                raise NMError(f"unknown shape {word!r}; write ROWSxCOLS, one of {', '.join(MODELS)}, or MODEL:LAYER.") from None
            found.append(word)
        elif layer and layer not in MODELS[model]:
            raise NMError(f"{model} has no layer {layer!r}; it has {', '.join(MODELS[model])}.")
        else:
            found += [matrix for name, matrix in MODELS[model].items() if layer in ("", name)]
    return tuple(dict.fromkeys(found))


def names(matrix: str) -> list[str]:
    """The layers whose weight has this shape, such as ``llama3-8b q``; the shapes of the targets last."""
    return [f"{model} {layer}" for model, layers in MODELS.items() for layer, its in layers.items() if its == matrix]
