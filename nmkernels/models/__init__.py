"""A small byte-level language model, text to train it on without downloads, and the layer shapes of well-known models."""

from .data import Corpus, DataError, load_corpus, make_corpus, stdlib_texts
from .gpt import GPT, GPTConfig, KVCache, generate
from .shapes import MODELS, ModelShapes, model_shapes

__all__ = [
    "GPT",
    "MODELS",
    "Corpus",
    "DataError",
    "GPTConfig",
    "KVCache",
    "ModelShapes",
    "generate",
    "load_corpus",
    "make_corpus",
    "model_shapes",
    "stdlib_texts",
]
