"""The linear layers of well-known models by name and shape, so that figures can be had of a model without having it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..pattern import NMError

Shapes = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class ModelShapes:
    """Linear layers ``(out, in)`` of one block and how many blocks, those outside, and how often a token passes through some."""

    source: str
    block: str
    blocks: int
    layers: Shapes
    outside: Shapes
    rows: Mapping[str, float]

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Every linear layer of the model, by its name there."""
        inside = {f"{self.block}.{i}.{name}": shape for i in range(self.blocks) for name, shape in self.layers.items()}
        return {**inside, **self.outside}


MODELS = {
    "gpt2": ModelShapes(
        "Radford et al. 2019, 124M: 12 blocks of width 768",
        "h",
        12,
        {"attn.c_attn": (2304, 768), "attn.c_proj": (768, 768), "mlp.c_fc": (3072, 768), "mlp.c_proj": (768, 3072)},
        {"lm_head": (50257, 768)},
        {},
    ),
    "llama-3-8b": ModelShapes(
        "Grattafiori et al. 2024: 32 blocks of width 4096, 8 heads of keys and values of 128, hidden 14336",
        "layers",
        32,
        {
            "self_attn.q_proj": (4096, 4096),
            "self_attn.k_proj": (1024, 4096),
            "self_attn.v_proj": (1024, 4096),
            "self_attn.o_proj": (4096, 4096),
            "mlp.gate_proj": (14336, 4096),
            "mlp.up_proj": (14336, 4096),
            "mlp.down_proj": (4096, 14336),
        },
        {"lm_head": (128256, 4096)},
        {},
    ),
    "vit-l": ModelShapes(
        "Dosovitskiy et al. 2021, ViT-L/16 at 224: 24 blocks of width 1024, hidden 4096, 197 tokens an image",
        "blocks",
        24,
        {"attn.qkv": (3072, 1024), "attn.proj": (1024, 1024), "mlp.fc1": (4096, 1024), "mlp.fc2": (1024, 4096)},
        {"head": (1000, 1024)},
        {"head": 1 / 197},
    ),
    "bert-large": ModelShapes(
        "Devlin et al. 2019: 24 blocks of width 1024, hidden 4096, separate projections",
        "encoder.layer",
        24,
        {
            "attention.self.query": (1024, 1024),
            "attention.self.key": (1024, 1024),
            "attention.self.value": (1024, 1024),
            "attention.output.dense": (1024, 1024),
            "intermediate.dense": (4096, 1024),
            "output.dense": (1024, 4096),
        },
        {},
        {},
    ),
}


def model_shapes(name: str) -> ModelShapes:
    """The linear layers of the model of that name.

    Raises:
        NMError: none is called that.

    Example:
        >>> model_shapes("gpt2").shapes()["h.11.mlp.c_fc"]
        (3072, 768)
    """
    found = MODELS.get(name.lower().replace("_", "-").replace("llama3", "llama-3"))
    if found is None:
        raise NMError(f"no model is called {name!r}; there are the shapes of {', '.join(MODELS)}.")
    return found
