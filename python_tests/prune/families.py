"""Tiny random models of the families of transformers, by name: a function that builds one, and one that draws a batch."""

from __future__ import annotations

import pytest
import torch

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 99, "max_position_embeddings": 64,
}  # fmt: skip
EMBEDDING = {"d_model": 64, "vocab_size": 99}


def ids(g, length=20):
    return torch.randint(1, 99, (2, length), generator=g)


def text(g):
    return {"input_ids": ids(g)}


def both(g):
    return {"input_ids": ids(g), "decoder_input_ids": ids(g, 7)}


def image(g):
    return torch.randn(2, 3, 32, 32, generator=g)


def families():
    t = pytest.importorskip("transformers", minversion="5.0")
    lists = {"encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    sliding = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    opt = {"ffn_dim": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "word_embed_proj_dim": 64, "max_position_embeddings": 64}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    audio = {"max_source_positions": 20, "num_mel_bins": 8, "encoder_layers": 2, "decoder_layers": 2}
    clip_text, clip_image = {**small, "vocab_size": 99, "max_position_embeddings": 32}, {**small, "image_size": 32, "patch_size": 8}
    llava = {"vision_config": {"model_type": "clip_vision_model", **small, "num_hidden_layers": 4, "image_size": 32, "patch_size": 8}}
    llava |= {"text_config": {"model_type": "llama", **SIZES}, "image_token_index": 98, "vision_feature_layer": -2}

    def heard(g):
        return {"input_features": torch.randn(2, 8, 40, generator=g), "decoder_input_ids": ids(g, 7)}

    def seen(g):
        tokens = torch.cat([torch.full((2, 16), 98), torch.randint(1, 97, (2, 6), generator=g)], 1)
        return {"input_ids": tokens, "pixel_values": image(g)}

    return {
        "llama": (lambda: t.LlamaForCausalLM(t.LlamaConfig(**SIZES)), text),
        "gemma3": (lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**SIZES, head_dim=16, **sliding)), text),
        "qwen3_moe": (lambda: t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**SIZES, **moe)), text),
        "gpt2": (lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=99)), text),
        "opt": (lambda: t.OPTForCausalLM(t.OPTConfig(hidden_size=64, vocab_size=99, **opt)), text),
        "bert": (lambda: t.BertModel(t.BertConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"})), text),
        "albert": (lambda: t.AlbertModel(t.AlbertConfig(**{**small, "num_hidden_layers": 3}, embedding_size=32, vocab_size=99)), text),
        "t5": (lambda: t.T5ForConditionalGeneration(t.T5Config(d_ff=128, num_layers=3, num_heads=4, d_kv=16, **EMBEDDING)), both),
        "bart": (lambda: t.BartForConditionalGeneration(t.BartConfig(**EMBEDDING, **lists, **heads)), both),
        "vit": (lambda: t.ViTModel(t.ViTConfig(**{**small, "num_hidden_layers": 3}, image_size=32, patch_size=8)), image),
        "whisper": (
            lambda: t.WhisperForConditionalGeneration(t.WhisperConfig(**{**lists, **audio}, **heads, **EMBEDDING, **tokens)),
            heard,
        ),
        "mamba": (lambda: t.MambaForCausalLM(t.MambaConfig(hidden_size=64, num_hidden_layers=3, vocab_size=99, state_size=8)), text),
        "clip": (
            lambda: t.CLIPModel(t.CLIPConfig(text_config=clip_text, vision_config=clip_image)),
            lambda g: {"input_ids": ids(g), "pixel_values": image(g)},
        ),
        "llava": (lambda: t.LlavaForConditionalGeneration(t.LlavaConfig(**llava)), seen),
    }


NAMES = (
    "llama", "gemma3", "qwen3_moe", "gpt2", "opt", "bert", "albert", "t5", "bart", "vit", "whisper", "mamba", "clip", "llava",
)  # fmt: skip


@torch.no_grad()
def inputs_of(model, run, names=None):
    """name -> the input of each call of these layers, or of all linear ones, while ``run()`` runs."""
    names = names or [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) or type(m).__name__ == "Conv1D"]
    seen = {name: [] for name in names}
    hooks = [model.get_submodule(n).register_forward_pre_hook(lambda m, a, n=n: seen[n].append(a[0].clone())) for n in names]
    run()
    for hook in hooks:
        hook.remove()
    return seen


def built(name):
    """The model, in eval mode, and three batches."""
    build, draw = families()[name]
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    return build().eval(), [draw(g) for _ in range(3)]
