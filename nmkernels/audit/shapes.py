"""Names and shapes of the linear layers of well-known models, for audits without the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ..pattern import NMError
from .flops import skeleton

Shapes = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class ModelShapes:
    """The linear layers of a model.

    Args:
        block: name of the module list of the blocks.
        blocks: number of blocks.
        layers: linear layers ``(out, in)`` of one block.
        outside: linear layers outside the blocks.
        rows: how often a token passes through a layer, if not once; see ``nm.flops``.
        embeddings: tables ``(tokens, width)`` that are not shared with an output layer.
    """

    block: str
    blocks: int
    layers: Shapes
    outside: Shapes = field(default_factory=dict)
    rows: Mapping[str, float] = field(default_factory=dict)
    embeddings: Shapes = field(default_factory=dict)

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Name → shape of every linear layer of the model."""
        inside = {f"{self.block}.{i}.{name}": shape for i in range(self.blocks) for name, shape in self.layers.items()}
        return {**inside, **self.outside}

    def module(self) -> nn.Module:
        """A model with these linear layers and embeddings on the meta device."""
        root = skeleton("ModelShapes", self.shapes())
        with torch.device("meta"):
            for name, (tokens, width) in self.embeddings.items():
                parent, _, last = name.rpartition(".")
                root.get_submodule(parent).add_module(last, nn.Embedding(tokens, width))
        return root


MODELS = {
    # Radford et al. 2019, 124M
    "gpt2": ModelShapes(
        "h", 12,
        {"attn.c_attn": (2304, 768), "attn.c_proj": (768, 768), "mlp.c_fc": (3072, 768), "mlp.c_proj": (768, 3072)},
        {"lm_head": (50257, 768)},
    ),
    # Grattafiori et al. 2024: 8 heads of keys and values of 128
    "llama-3-8b": ModelShapes(
        "layers", 32,
        {"self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096), "self_attn.v_proj": (1024, 4096),
         "self_attn.o_proj": (4096, 4096), "mlp.gate_proj": (14336, 4096), "mlp.up_proj": (14336, 4096), "mlp.down_proj": (4096, 14336)},
        {"lm_head": (128256, 4096)}, embeddings={"embed_tokens": (128256, 4096)},
    ),
    "llama-3-70b": ModelShapes(
        "layers", 80,
        {"self_attn.q_proj": (8192, 8192), "self_attn.k_proj": (1024, 8192), "self_attn.v_proj": (1024, 8192),
         "self_attn.o_proj": (8192, 8192), "mlp.gate_proj": (28672, 8192), "mlp.up_proj": (28672, 8192), "mlp.down_proj": (8192, 28672)},
        {"lm_head": (128256, 8192)}, embeddings={"embed_tokens": (128256, 8192)},
    ),
    # Dosovitskiy et al. 2021, ViT-L/16 at 224: 197 tokens an image
    "vit-l": ModelShapes(
        "blocks", 24,
        {"attn.qkv": (3072, 1024), "attn.proj": (1024, 1024), "mlp.fc1": (4096, 1024), "mlp.fc2": (1024, 4096)},
        {"head": (1000, 1024)}, {"head": 1 / 197},
    ),
    # Devlin et al. 2019
    "bert-large": ModelShapes(
        "encoder.layer", 24,
        {**{f"attention.{name}": (1024, 1024) for name in ("self.query", "self.key", "self.value", "output.dense")},
         "intermediate.dense": (4096, 1024), "output.dense": (1024, 4096)},
    ),
}  # fmt: skip


def byte_gpt(width: int, blocks: int) -> ModelShapes:
    """The linear layers of a GPT over bytes such as that of examples/train_gpt."""
    layers = {"attn.qkv": (3 * width, width), "attn.proj": (width, width), "mlp.fc": (4 * width, width), "mlp.proj": (width, 4 * width)}
    return ModelShapes("blocks", blocks, layers, {"lm_head": (256, width)}, embeddings={"tokens": (256, width)})


def model_shapes(name: str) -> ModelShapes:
    """The linear layers of a well-known model.

    Raises:
        NMError: the name is unknown.

    Example:
        >>> model_shapes("gpt2").shapes()["h.11.mlp.c_fc"]
        (3072, 768)
    """
    shapes = MODELS.get(name.lower().replace("_", "-").replace("llama3", "llama-3"))
    if shapes is None:
        raise NMError(f"no model is called {name!r}; choose one of {', '.join(MODELS)}.")
    return shapes
