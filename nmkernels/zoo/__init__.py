"""A small byte-level language model and real text to train it on, with nothing to download."""

from __future__ import annotations

from .data import Corpus, DataError, load_corpus, make_corpus, stdlib_texts
from .gpt import GPT, GPTConfig, KVCache
from .sample import generate

__all__ = ["GPT", "Corpus", "DataError", "GPTConfig", "KVCache", "generate", "load_corpus", "make_corpus", "stdlib_texts"]
