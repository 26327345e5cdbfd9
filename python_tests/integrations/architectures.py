"""A tiny model of every architecture of transformers, and inputs for it, made by the names that configs and forwards use.

Run as a script, it loads models that another process has saved, see ``main``.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

import nmkernels as nm
import nmkernels.integrations.hf  # from_pretrained of compressed models
from nmkernels.nn.experts import sparse_layers

LARGEST = 8_000_000
"""Parameters; a config that stays larger than this was not made tiny, and is not built."""

SIZES: tuple[tuple[str, int], ...] = (
    (r".*_(cost|coefficient|coef|ratio|rate|factor|width|stride|padding)|qk_head_dim|pad_size", 0),
    (r".*vocab_size.*|codebook_size|.*hash_byte_group_vocab|num_hash_buckets|n_?codes|num_codebook_vectors", 128),
    (r"num_hidden_layers|(.*_)?(num_|n_)?(layers?|depth|blocks|depths)|num_.*_layers|n_layers?", 2),
    (r"(.*_)?(num_|n_)?(heads?|nhead|kv_heads|key_value_heads)(_kv)?|num_(query|key|value|attention)_heads", 2),
    (r"(.*_)?(head_dim|d_kv|head_size|kv_channels)(_\w+)?", 16),
    (r"(.*_)?(intermediate_size|ffn_dim|d_ff|dff|dim_ff|mlp_dim|n_inner|dim_feedforward|ffn_hidden_size|feedforward_dim|ffn_size)", 64),
    (r"(.*_)?(linear_units|inner_dim|expand_dim|mlp_hidden_size|intermediate_dim|feed_forward_size)", 64),
    (r"(.*_)?(hidden_size|d_model|hidden_dim|embed_dim|embedding_size|embedding_dim|embd|dim|embed_size|d_embed|width|units)", 32),
    (r"(.*_)?(projection_dim|projection_size|proj_dim|output_dim|output_channels|channels_out|lora_rank|proj_size|latent_dim)", 32),
    (r"(.*_)?(feature_size|mask_feature_size|mask_dim|mask_feature|out_channels|input_dim|rnn_width|in_dim|codebook_dim|inplanes)", 32),
    (r"(.*_)?(num_|n_)(routed_|local_)?experts|(moe_)?num_experts|num_routed_experts", 4),
    (r"num_experts_per_(tok|token)|(moe_)?(top_?k|k)(_experts)?|num_selected_experts|top_k_experts", 2),
    (r"n_group|topk_group|num_expert_groups|num_limited_groups|n_groups|mamba_n_groups", 1),
    (r"(.*_)?(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions)", 128),
    (r"(.*_)?num_(queries|latents)|(.*_)?(query_num|num_query_tokens|n_latents|num_proposals|num_denoising|index_topk)", 8),
    (r"(.*_)?(sliding_window(_size)?|local_attention|attention_window|window_len)", 8),
    (r"(.*_)?(image_size|resolution|img_size|crop_size)", 64),
    (r"(.*_)?(num_mel_bins|n_mels|mel_dim|num_mels)", 32),
    (r"num_filters|(.*_)?initial_channels?|upsample_initial_channel", 32),
    (r"num_pos_feats", 16),
    (r"num_conv_pos_embeddings|num_conv_pos_embedding_groups", 4),
)
"""The size, at most, of what a config calls so; the first name that fits, and 0: as it is."""


UNSAID = {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "prediction_length": 4, "n_routed_experts": 4}
"""The same for what a config may leave open, and its model may not."""


MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
EFFICIENT = {
    **{name: 1.0 for name in ("width_coefficient", "depth_coefficient")},
    **{name: [32, 32] for name in ("in_channels", "out_channels")},
    **{"kernel_sizes": [3, 3], "strides": [1, 2], "num_block_repeats": [1, 1], "expand_ratios": [1, 2], "depthwise_padding": []},
    "hidden_dim": 1280,
}
OWN: dict[str, dict[str, Any]] = {
    **{
        name: {"rope_parameters": MROPE}
        for name in ("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm_ocr_text", "glm_image_text", "cosmos3_edge_text")
    },
    "glm4v_moe_text": {"rope_parameters": {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    "audio-spectrogram-transformer": {"max_length": 128},
    "bit": {"num_groups": 4},
    "bridgetower": {"hidden_size": 64},
    "bridgetower_text_model": {"hidden_size": 64},
    "bridgetower_vision_model": {"hidden_size": 64},
    "bros": {"hidden_size": 64},
    "codegen": {"n_head": 4, "rotary_dim": 4},
    "cvt": {"depth": [1, 2, 3]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dinov3_convnext": {"hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 1, 1]},
    "dinov2": {"reshape_hidden_states": False},
    "donut-swin": {"window_size": 4},
    "dots1": {"num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32},
    "efficientnet": EFFICIENT,
    "align_vision_model": EFFICIENT,
    "encodec": {"num_filters": 8},
    "esm": {"pad_token_id": 1, "mask_token_id": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "lilt": {"hidden_size": 48},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "mimi": {"upsample_groups": 32, "vector_quantization_hidden_dimension": 32},
    "patchtsmixer": {"d_model": 32},
    "rwkv": {"rescale_every": 0},  # else it divides weights in place as soon as it is in evaluation, and packed ones do not change
    "rt_detr": {"encode_proj_layers": [2]},
    "rt_detr_v2": {"encode_proj_layers": [2]},
    "tapas": {"max_num_rows": 4, "max_num_columns": 4},
    "xmod": {"default_language": "en_XX"},
}
"""What else a config of this type needs."""


def _shrunk(name: str, value: int) -> int:
    limit = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), 0)
    return min(value, limit) if limit else value


def _list(name: str, values: Any) -> Any:
    """Widths, depths and numbers of heads of stages, with their ratios."""
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        return values
    if "image_size" in name:
        return type(values)(64 for _ in values)
    limit, least = _shrunk(name, 10**9), max(1, min(values))
    if limit > 2 and least < 8:  # the channels of an image among them
        return values
    if limit == 2 and "head" not in name:
        return type(values)(min(v, 1) for v in values)
    if re.fullmatch(r"(.*_)?(hidden_sizes|embed_dims|dims|conv_dim|channels|hidden_dims|widths)", name):
        limit = 32
    if limit == 2:
        return type(values)(v // least for v in values)
    return type(values)(max(limit, limit * v // least) if limit < 10**9 else v for v in values)


def shrunk(config: PreTrainedConfig, **own: Any) -> PreTrainedConfig:
    """A config of the class of ``config`` in which every size is tiny, in its sub-configs too; ``own`` replaces what the rules say."""
    kind = type(config)
    keywords: dict[str, Any] = {}
    ids = iter(range(100, 128))
    for field in dataclasses.fields(kind):
        name, value, default = field.name, config.__dict__.get(field.name), field.default
        if not field.init or name.startswith("_"):
            continue
        if isinstance(value, PreTrainedConfig):
            keywords[name] = shrunk(value)
        elif re.fullmatch(r".*_token_(id|index)|.*_token", name) and isinstance(value, int) and value >= 100:
            keywords[name] = next(ids)
        elif name in UNSAID and value is None:
            keywords[name] = UNSAID[name]
        elif name == "rope_parameters" and isinstance(value, dict) and "mrope_section" in value:
            half = int(8 * value.get("partial_rotary_factor", 1.0))
            keywords[name] = {**value, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
        elif isinstance(default, float) and re.search("drop|mask_(time|feature)_prob|jitter|noise", name):
            keywords[name] = 0.0
        elif isinstance(default, int) and not isinstance(default, bool):
            keywords[name] = _shrunk(name, default)
        elif isinstance(default, (list, tuple)) and default:
            keywords[name] = _list(name, default)
    if "layer_types" in keywords or hasattr(config, "layer_types"):
        keywords |= {name: 4 for name in ("num_hidden_layers", "num_layers") if name in keywords}  # some are of every kind
    for name in kind.sub_configs:
        if isinstance(getattr(config, name, None), PreTrainedConfig):
            keywords[name] = shrunk(getattr(config, name))
    stages = len(config.__dict__.get("_out_features") or ())
    if stages > 1 and "num_hidden_layers" in keywords:
        keywords["num_hidden_layers"] = stages
    made = kind(**{**keywords, **OWN.get(kind.model_type, {}), **own})
    if stages > 1:  # of a backbone, as many as the model around it takes
        made.out_features = made.stage_names[-stages:]
    made.use_cache = False
    return made


FIRST = (
    "_FOR_CAUSAL_LM", "_FOR_SEQ_TO_SEQ_CAUSAL_LM", "_FOR_MASKED_LM", "_FOR_SPEECH_SEQ_2_SEQ", "_FOR_CTC", "_FOR_IMAGE_TEXT_TO_TEXT",
    "_FOR_IMAGE_CLASSIFICATION", "_FOR_OBJECT_DETECTION", "_FOR_SEMANTIC_SEGMENTATION", "_FOR_AUDIO_CLASSIFICATION",
    "_FOR_SEQUENCE_CLASSIFICATION", "_FOR_PRETRAINING", "",
)  # fmt: skip
"""The tasks whose classes are tried first."""

_TABLES = {name[len("MODEL") : -len("_MAPPING")]: name for name in dir(modeling_auto) if re.fullmatch(r"MODEL(_FOR_\w+)?_MAPPING", name)}
TABLES = [getattr(modeling_auto, _TABLES[task]) for task in (*FIRST, *sorted(_TABLES.keys() - set(FIRST)))]
ARCHITECTURES = sorted({key for table in TABLES for key in table._model_mapping} & set(CONFIG_MAPPING_NAMES))
"""The types of config for which transformers has a model."""


def classes(architecture: str) -> Iterator[Any]:
    """The classes of models for a config's type, those with a head first."""
    config, seen = CONFIG_MAPPING[architecture], set()
    for table in TABLES:
        try:
            kinds = table.get(config, ())
        except ValueError:  # it names a class that transformers does not have
            continue
        for kind in kinds if isinstance(kinds, tuple) else (kinds,):
            if kind not in seen:
                seen.add(kind)
                yield kind


def config(architecture: str) -> PreTrainedConfig:
    """The tiny config of this type."""
    return shrunk(CONFIG_MAPPING[architecture]())


def built(kind: Any, config: PreTrainedConfig, seed: int = 0) -> Any:
    """A model of the class ``kind``, unless it is large all the same."""
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config).parameters())
    if size > LARGEST:
        raise Untrained(f"{size} parameters")
    torch.manual_seed(seed)
    return kind(config)


UNTRAINED: dict[str, str] = {
    "their configs stay large, or have sizes under names of their own": """
        chmv2 dots3_note_text edgetam_video janus neucodec perceiver sam2 sam2_hiera_det_model sam2_video sam2_vision_model
        univnet vibevoice vibevoice_acoustic_tokenizer vibevoice_acoustic_tokenizer_decoder
        vibevoice_acoustic_tokenizer_encoder vibevoice_asr xcodec2
    """,
    "the sizes that the rules give do not fit together": """
        blt chameleon clap clvp cohere_compass cohere_compass_text d_fine dbrx deepseek_ocr2 deimv2 depth_pro diffusion_gemma
        donut-swin dots3_note efficientloftr emu3 ernie4_5_vl_moe fun_asr_nano fun_asr_nano_encoder gemma4_assistant
        gemma4_unified_assistant glm5_next glm5_next_text granite4_vision hgnet_v2 hunyuan_vl_text inkling2_vision
        kyutai_speech_to_text lfm2_moe mimi_decoder mimo_v2_flash mobilevit molmo2 moonshine_streaming muse_glimmer_vision
        muse_spark muse_spark_audio muse_spark_vision musicgen nemotron_h_omni pe_audio pix2struct pocket_tts_audio_tokenizer
        pocket_tts_audio_tokenizer_decoder pp_doclayout_v2 pp_doclayout_v3 pp_doclayout_v4 pp_formulanet pp_ocrv5_mobile_rec
        pp_ocrv5_server_det pp_ocrv5_server_rec pp_ocrv6_medium_det pp_ocrv6_small_det qwen2_5_omni_thinker qwen3_omni_moe
        qwen4_exp qwen4_exp_text reformer slanext t5gemma2_encoder tvp uvdoc vitmatte voxtral_realtime_text
        voxtral_realtime_text zamba zamba2
    """,
    "they take inputs that no rule makes, such as labels, prompts, or images cut into pieces": """
        autoformer bark blip-2 blip_2_qformer decision_transformer fastspeech2_conformer fastspeech2_conformer_with_hifigan
        gemma3n_audio gemma4_vision glm_image_vqmodel grounding-dino hunyuan_vl idefics informer instructblip
        instructblipvideo jev kosmos-2 lightglue lw_detr minicpm_ocr_vision minicpmv4_7_vision mm-grounding-dino
        muse_glimmer_assistant musicgen_melody paddleocr_vl pi0 pvt qwen2_5_omni qwen3_asr_encoder sam3_tracker
        sam3_tracker_video seggpt speech-encoder-decoder step3p7 superglue superpoint time_series_transformer tipsv2_dpt
        video_llama_3_vision xcodec zoedepth
    """,
}
"""Architectures of which no tiny model is trained here, and why. One that trains must leave this table."""


class Untrained(Exception):
    """The rules of this file make no model of the architecture that trains on a CPU; for each class and each input the reason."""


@dataclass
class Dense:
    """A tiny model that has taken a step of training, without an optimizer: its class, its inputs and what got a gradient."""

    model: Any
    inputs: dict[str, Tensor]
    trained: frozenset[str]


def dense(architecture: str) -> Dense:
    """The tiny model of an architecture.

    Raises:
        ImportError: it needs a library that is not installed.
        Untrained: no class of its models could be built tiny and run forward and backward.
    """
    reasons: list[Exception] = []
    for kind in classes(architecture):
        try:
            model = built(kind, config(architecture)).train()
        except Exception as error:
            reasons.append(error)
            continue
        for x in inputs(model):
            try:
                loss = loss_of(model(**x))
                loss.backward()
            except Exception as error:
                reasons.append(error)
                continue
            if bool(loss.isfinite()):
                trained = frozenset(name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any()))
                model.zero_grad()
                return Dense(model, x, trained)
    for error in reasons:
        if isinstance(error, ImportError):
            raise error
    raise Untrained("\n".join(f"{type(error).__name__}: {error}" for error in reasons) or "no rule makes its inputs")


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """What the model says in evaluation."""
    model.eval()
    torch.manual_seed(5)  # some draw numbers there too
    with torch.no_grad():
        return [t.clone() for t in tensors_of(model(**inputs))]


# ---- inputs


def configs_of(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for name in type(config).sub_configs:
        if isinstance(own := getattr(config, name, None), PreTrainedConfig):
            yield from configs_of(own)


def setting(config: PreTrainedConfig, *names: str, default: Any = None) -> Any:
    """What the config, or the first of its sub-configs that says it, has under the first of ``names`` that is there."""
    for name in names:
        for own in configs_of(config):
            with suppress(Exception):
                if (value := getattr(own, name, None)) is not None:
                    return value
    return default


def _number(value: Any) -> int:
    return int(value[-1] if isinstance(value, (list, tuple)) else value.get("height", 64) if isinstance(value, dict) else value)


def candidates(name: str, config: PreTrainedConfig) -> list[Tensor | None]:
    """Values that a forward's parameter ``name`` may take, the likeliest first; none for a name that no rule knows."""
    g = torch.Generator().manual_seed(1)
    vocab = min(128, _number(setting(config, "vocab_size", default=64)))

    def ids(*shape: int) -> Tensor:
        return torch.randint(3, min(vocab, 100), shape, generator=g) if vocab > 3 else torch.zeros(shape, dtype=torch.long)

    def real(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    channels = _number(setting(config, "num_channels", "in_chans", "in_channels", default=3))
    side = _number(setting(config, "image_size", "img_size", "resolution", default=64))
    patch = _number(setting(config, "patch_size", default=16))
    mel = _number(
        setting(config, "num_mel_bins", "n_mels", "mel_dim", "feature_size", "input_feat_per_channel", "num_mels", "input_dim", default=32)
    )
    frames = 2 * _number(setting(config, "max_source_positions", default=64))
    hidden = _number(setting(config, "hidden_size", "d_model", default=32))
    video = _number(setting(config, "num_frames", "frames_per_clip", default=4))
    if name in ("input_ids", "decoder_input_ids"):
        books = _number(setting(config, "num_codebooks", "n_codebooks", default=1))
        return [ids(2, 16)] if books == 1 else [ids(2, 16), ids(2, 16, books), ids(2 * books, 16), ids(2, books, 16)]
    if name == "pixel_values":
        return [
            real(2, channels, side, side),
            real(2, video, channels, side, side),
            real(2, 1, channels, side, side),
            real(2, 16, channels * patch * patch),
        ]
    if name in ("pixel_values_videos", "pixel_values_target"):
        return [real(2, video, channels, side, side)]
    if name in ("input_values",):
        return [real(2, 4000), real(2, 1, 4000), real(2, frames, mel), real(2, mel, frames)]
    if name == "input_features":
        return [real(2, mel, frames), real(2, 64, mel), real(2, 1, mel, frames), real(2, 64, hidden)]
    if name in ("input_features_mask", "feature_attention_mask"):
        return [torch.ones(2, frames, dtype=torch.long), torch.ones(2, 64, dtype=torch.long)]
    if name in ("prompt_pixel_values", "prompt_masks"):
        return candidates("pixel_values", config)
    if name == "pixel_attention_mask":
        return [torch.ones(2, 16, dtype=torch.long)]
    if name == "spatial_shapes":
        return [torch.full((2, 2), 4)]
    if name == "flattened_patches":
        return [torch.cat([torch.arange(32.0).view(2, 16, 1) % 16 + 1, torch.ones(2, 16, 1), real(2, 16, channels * patch * patch)], -1)]
    if name == "visual_feats":
        return [real(2, 4, _number(setting(config, "visual_feat_dim", default=32)))]
    if name == "task_inputs":
        return [real(2, _number(setting(config, "task_seq_len", default=77)))]
    if name == "visual_pos":
        return [real(2, 4, 4)]
    if name == "bbox":
        return [torch.tensor([1, 2, 30, 40]).expand(2, 16, 4).clone()]
    if name == "inputs_embeds":
        return [real(2, 16, hidden)]
    if name in ("encoder_hidden_states", "hidden_states"):
        return [real(2, 16, hidden)]
    grid = _number(setting(config, "spatial_merge_size", "merge_size", default=2)) * 2
    if name in ("grid_thw", "image_grid_thw"):
        return [torch.tensor([[1, grid, grid], [1, grid, grid]])]
    if name == "past_values":
        length, width = (_number(setting(config, *names, default=d)) for *names, d in (("context_length", 32), ("num_input_channels", 1)))
        return [real(2, length, width), real(2, length)]
    return []


def inputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Arguments for the model's forward, each more or other than the one before."""
    config, parameters = model.config, inspect.signature(model.forward).parameters
    main = model.main_input_name if isinstance(model.main_input_name, str) else model.main_input_name[0]
    needed = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if "grid_thw" in parameters:
        yield from patches(model.config, next(iter(parameters)))
    first = "pixel_values", "input_ids", "decoder_input_ids", "input_features", "input_values", "bbox", "input_features_mask"
    rest = "flattened_patches", "pixel_attention_mask", "spatial_shapes", "visual_feats", "visual_pos"
    more = [n for n in (*first, *rest) if n in parameters]
    for i in range(4):
        for names in ({main, *needed, *more}, {main, *needed}, {main, *needed, "decoder_input_ids"} & {main, *needed, *more}):
            made = {name: values for name in names if (values := candidates(name, config))}
            if any(len(values) > i for values in made.values()):
                yield {name: values[min(i, len(values) - 1)].clone() for name, values in made.items()}


def patches(config: PreTrainedConfig, name: str) -> Iterator[dict[str, Tensor]]:
    """Two images cut into patches already, as rows, for towers that take the grid on which they lie."""
    grid = 2 * _number(setting(config, "spatial_merge_size", "merge_size", default=2))
    side, frames = (_number(setting(config, n, default=d)) for n, d in (("patch_size", 16), ("temporal_patch_size", 1)))
    channels = _number(setting(config, "num_channels", "in_channels", "in_chans", default=3))
    g = torch.Generator().manual_seed(1)
    for shape in ((2 * grid * grid, channels * frames * side * side), (2 * grid * grid, channels, side, side)):
        yield {name: torch.randn(shape, generator=g), "grid_thw": torch.tensor([[1, grid, grid], [1, grid, grid]])}


def tensors_of(output: Any) -> Iterator[Tensor]:
    """The tensors of floating point in a model's output."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors_of(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors_of(value)


def loss_of(output: Any) -> Tensor:
    """A loss that needs no labels: the mean square of everything that the model says."""
    parts = [t.float().square().mean() for t in tensors_of(output) if t.requires_grad and t.numel()]
    return torch.stack(parts).sum()


def saved_(folder: Path, dense: Dense) -> None:
    """Write a compressed model in both ways, its inputs and what it says."""
    kind, model = type(dense.model), dense.model
    model.save_pretrained(folder / "pretrained")
    nm.save_compressed(model, folder / "model.safetensors")
    torch.save({"inputs": dense.inputs, "outputs": outputs(model, dense.inputs)}, folder / "outputs.pt")
    (folder / "class.txt").write_text(f"{model.config.model_type} {kind.__name__}")


def read(folder: Path, architecture: str) -> None:
    """Load what ``saved_`` wrote, in both ways, and see that the models say the same.

    Raises:
        AssertionError: one of them does not, or has nothing compressed.
    """
    kind = next(kind for kind in classes(architecture) if kind.__name__ == (folder / "class.txt").read_text().split()[1])
    made = torch.load(folder / "outputs.pt")
    for how in ("from_pretrained", "load_compressed"):
        if how == "from_pretrained":
            model = kind.from_pretrained(folder / "pretrained")
        else:
            model = nm.load_compressed(built(kind, config(architecture), seed=7), folder / "model.safetensors")
        assert sparse_layers(model), f"{how}: nothing is compressed"
        again = outputs(model, made["inputs"])
        assert len(again) == len(made["outputs"]), how
        for one, other in zip(again, made["outputs"], strict=True):
            # where a file's tensors begin in memory is another place, and torch may sum in another order then
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, equal_nan=True, msg=lambda text, how=how: f"{how}: {text}")


def main() -> None:
    """Of each line on stdin, a folder and an architecture, say on stdout ``ok``, or what was raised."""
    torch.set_num_threads(1)
    say, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        folder, architecture = json.loads(line)
        try:
            read(Path(folder), architecture)
            answer = "ok"
        except Exception:
            answer = traceback.format_exc()
        print(json.dumps(answer), file=say, flush=True)


if __name__ == "__main__":
    main()
