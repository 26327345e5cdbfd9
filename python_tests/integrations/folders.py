"""Tiny models on disk, with a tokenizer, and text to calibrate them on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

VOCABULARY = 128
WORDS = [f"w{i}" for i in range(VOCABULARY - 4)]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= {"vocab_size": VOCABULARY}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}


def config_of(name: str, layers: int = 3) -> tuple[str, dict[str, Any]]:
    """(the class of a model, its settings)."""
    llama = {**SIZES, **TOKENS, "num_hidden_layers": layers}
    bert = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    return {
        "llama": ("LlamaForCausalLM", llama),
        "llama-tied": ("LlamaForCausalLM", {**llama, "tie_word_embeddings": True}),
        "qwen3-moe": ("Qwen3MoeForCausalLM", {**llama, **MOE}),
        "gpt-oss": ("GptOssForCausalLM", {**llama, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
        "gpt2": ("GPT2LMHeadModel", {**TOKENS, "n_embd": 64, "n_layer": layers, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64}),
        "bert": ("BertForMaskedLM", {**bert, "num_hidden_layers": layers}),
        "albert": ("AlbertForMaskedLM", {**bert, "num_hidden_layers": layers, "embedding_size": 32}),
        "t5": ("T5ForConditionalGeneration", {
            "d_model": 64, "d_ff": 128, "num_layers": layers, "num_heads": 4, "d_kv": 16, "vocab_size": VOCABULARY,
            "decoder_start_token_id": 0,
        }),
        "vit": ("ViTForImageClassification", {
            **{key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")},
            "num_hidden_layers": layers, "image_size": 32, "patch_size": 8,
        }),
    }[name]  # fmt: skip


def built(name: str = "llama", layers: int = 3, dtype: torch.dtype = torch.float32, **changed: Any) -> Any:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    kind, settings = config_of(name, layers)
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    return cls(cls.config_class(**{**settings, **changed})).to(dtype).eval()


def saved(folder: Path, name: str = "llama", *, tokenizer: bool = True, shard: str = "5GB", **options: Any) -> Path:
    """A folder of ``save_pretrained``."""
    built(name, **options).save_pretrained(folder, max_shard_size=shard)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """One that knows ``WORDS``."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    table = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(table, unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=raw, **names).save_pretrained(folder)


CODE = {
    "configuration_mine.py": """
from transformers import LlamaConfig
class MineConfig(LlamaConfig):
    model_type = "mine"
""",
    "modeling_mine.py": """
from transformers import LlamaForCausalLM
from .configuration_mine import MineConfig
class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2  # which no class of transformers does
        return output
""",
    "tokenization_mine.py": """
from transformers import PreTrainedTokenizerFast
class MineTokenizer(PreTrainedTokenizerFast):
    pass
""",
}


def with_code(folder: Path) -> Path:
    """Make the Llama in ``folder`` a model, and its tokenizer one, whose code lies there."""
    for name, code in CODE.items():
        (folder / name).write_text(code)
    changes: dict[str, dict[str, Any]] = {
        "config.json": {
            "model_type": "mine",
            "architectures": ["MineForCausalLM"],
            "auto_map": {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "MineTokenizer",
            "auto_map": {"AutoTokenizer": [None, "tokenization_mine.MineTokenizer"]},
        },
    }
    for name, values in changes.items():
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **values}))
    return folder


def write_text(path: Path, words: int = 2000) -> Path:
    """Words that follow each other by chance, with a seed."""
    chance = random.Random(0)
    path.write_text("\n".join(" ".join(chance.choice(WORDS) for _ in range(10)) for _ in range(words // 10)))
    return path


def batches(count: int = 3, size: int = 2, length: int = 32, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(4, VOCABULARY, (size, length), generator=generator)} for _ in range(count)]


def content(folder: Path) -> dict[str, bytes]:
    """Every file and folder below ``folder``, by its path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}
