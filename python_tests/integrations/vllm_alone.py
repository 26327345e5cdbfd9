"""A program that runs nmkernels' plug-in in vLLM's own layers on CPUs, also where only the wheel's Python files can be used.

python -m python_tests.integrations.vllm_alone layers RANK WORLD PORT, or: llama FOLDER PORT

VLLM_TARGET_DEVICE=cpu chooses vLLM's platform without compiled parts; packages that are missing, and that layers never call, are stand-ins.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="ERROR", VLLM_PLUGINS="", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
# fmt: off
NEVER_CALLED = [
    "anthropic", "cv2", "cutlass", "depyf", "fastsafetensors", "flashinfer", "gguf", "ijson", "instanttensor", "lark", "llguidance",
    "lmformatenforcer", "mcp", "mistral_common", "model_hosting_container_standards", "numba", "openai_harmony", "oss_harmony",
    "outlines_core", "partial_json_parser", "prometheus_fastapi_instrumentator", "pythonjsonlogger", "quack", "sentencepiece",
    "setproctitle", "tiktoken", "tilelang", "torchaudio", "torchcodec", "tvm_ffi", "uvicorn", "uvloop", "watchfiles", "xgrammar",
]
# fmt: on


class StandIn(ModuleType):
    """A module that has everything."""

    __path__: list[str] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = type(name, (), {}) if name[0].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


class Missing:
    """Finds stand-ins where nothing else finds a module; compiled parts of vLLM too."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        compiled = name.startswith("vllm.") and name.rpartition(".")[2].startswith("_")
        return ModuleSpec(name, self, is_package=True) if compiled or name.partition(".")[0] in NEVER_CALLED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


if __name__ == "__main__":
    sys.meta_path.append(Missing())  # type: ignore[arg-type]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import nmkernels as nm  # noqa: E402

PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"), "o_proj": ("o_proj",)}
ROWS = {"q_proj": 256, "k_proj": 128, "v_proj": 128, "gate_proj": 512, "up_proj": 512, "o_proj": 256}


def connected(config: Any, rank: int, world: int, port: int) -> None:
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo")
    initialize_model_parallel(world, backend="gloo")


def layers(rank: int, world: int, port: int) -> None:
    """Fused and split layers of vLLM against the dense product, for each kind of values."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear

    from nmkernels.integrations import vllm

    vllm.register()
    vllm.register()
    config = VllmConfig()
    with set_current_vllm_config(config), torch.no_grad():
        connected(config, rank, world, port)
        x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
        for pattern, values, group in (
            ("2:4", None, None),
            ("2:4", "int8", 0),
            ("2:4", "int4", 64),
            ("1:4", "int4", 0),
            ("4:8", "int8", 32),
        ):
            packed = {}
            for i, (name, rows) in enumerate(ROWS.items()):
                dense = torch.randn(rows, 256, generator=torch.Generator().manual_seed(i + 1))
                packed[name] = nm.ops.compress(dense, pattern)
                if values is not None:
                    packed[name] = nm.ops.quantize_values(packed[name], values, group)
            form = {"pattern": pattern, "layout": "linear"} | ({} if values is None else {"values": values, "group": group})
            table = {f"l.{name}": form | {"shape": [rows, 256]} for name, rows in ROWS.items()}
            quant = vllm.NMConfig.from_config({"version": 5, "layers": table})
            quant.packed_modules_mapping = {key: list(parts) for key, parts in PARTS.items() if len(parts) > 1}
            common: dict[str, Any] = {"bias": False, "quant_config": quant, "params_dtype": torch.float32}
            made = {
                "qkv_proj": QKVParallelLinear(256, 32, 8, 4, prefix="l.qkv_proj", **common),
                "gate_up_proj": MergedColumnParallelLinear(256, [512, 512], prefix="l.gate_up_proj", **common),
                "o_proj": RowParallelLinear(256, 256, input_is_parallel=False, prefix="l.o_proj", **common),
            }
            for name, layer in made.items():
                shards = {"qkv_proj": ("q", "k", "v"), "gate_up_proj": (0, 1), "o_proj": ((),)}[name]
                for part, shard in zip(PARTS[name], shards, strict=True):
                    for key in ("values", "indices", "step")[: 2 if values is None else 3]:
                        parameter = getattr(layer, key)
                        parameter.weight_loader(parameter, getattr(packed[part], key), *(() if shard == () else (shard,)))
                    layer.weight.weight_loader(layer.weight, torch.empty(0), *(() if shard == () else (shard,)))
                layer.quant_method.process_weights_after_loading(layer)
                whole = [F.linear(x, packed[part].dense(torch.float32)) for part in PARTS[name]]
                want = whole[0] if name == "o_proj" else torch.cat([y.chunk(world, -1)[rank] for y in whole], -1)
                error = float((layer(x)[0] - want).norm() / want.norm())
                assert error < 1e-6, (pattern, values, name, error)
        dense = RowParallelLinear(256, 256, prefix="l.dense_proj", **common)
        assert type(dense.quant_method).__name__ == "UnquantizedLinearMethod"
        refused(quant, table, world, common)
    print("layers agree")


def refused(quant: Any, table: dict[str, Any], world: int, common: dict[str, Any]) -> None:
    """Each refusal, with its words."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    from nmkernels.integrations import vllm

    def says(words: str, call: Any) -> None:
        try:
            call()
        except nm.NMError as error:
            assert words in str(error), str(error)
            return
        raise AssertionError(f"nothing said {words!r}")

    def config(version: int = 5, **change: Any) -> Any:
        return vllm.NMConfig.from_config({"version": version, "layers": {"l.o_proj": table["l.o_proj"] | change}})

    says("upgrade nmkernels", lambda: config(version=99))
    for words, change in {
        "layout 'experts'": {"layout": "experts"},
        "layout 'embedding'": {"layout": "embedding", "pattern": "1:1"},
        "is dense, in integers": {"pattern": "1:1"},
        "has an adapter": {"rank": 4},
        "reordered inputs": {"columns": True},
    }.items():
        says(words, lambda change=change: config(**change))
    says("names no compressed layers", lambda: vllm.NMConfig.from_config({"version": 5}))
    head = vllm.NMConfig.from_config({"version": 5, "layers": {"lm_head": table["l.o_proj"]}})
    says("'lm_head' is a ParallelLMHead", lambda: ParallelLMHead(256, 64, quant_config=head, prefix="lm_head"))
    half = vllm.NMConfig({"l.gate_proj": table["l.gate_proj"]})
    half.packed_modules_mapping = quant.packed_modules_mapping
    says(
        "l.up_proj: dense",
        lambda: MergedColumnParallelLinear(256, [512, 512], prefix="l.gate_up_proj", **(common | {"quant_config": half})),
    )
    says("256 columns in the folder, 128", lambda: RowParallelLinear(128, 256, prefix="l.o_proj", **common))
    row = RowParallelLinear(256, 256, prefix="l.o_proj", **common)
    says("lacks values", lambda: row.quant_method.process_weights_after_loading(row))
    says("dense weight", lambda: row.weight.weight_loader(row.weight, torch.zeros(256, 256)))
    if world > 1:
        for words, change in {
            "bytes of packed 1:8 indices": {"pattern": "1:8", "values": None, "shape": [256, 24]},
            "bytes of two integers": {"pattern": "1:32", "values": "int4", "group": 0, "shape": [256, 64]},
            "groups of 64 columns": {"values": "int8", "group": 64, "shape": [256, 192]},
        }.items():
            odd, size = common | {"quant_config": config(**change)}, change["shape"][1]
            says(words, lambda odd=odd, size=size: RowParallelLinear(size, 256, prefix="l.o_proj", **odd))


def attend(self: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **keywords: Any) -> Tensor:
    """Causal attention of one sequence, in place of vLLM's paged kernels."""
    sizes = ((query, self.num_heads), (key, self.num_kv_heads), (value, self.num_kv_heads))
    q, k, v = (t.view(-1, heads, self.head_size).transpose(0, 1) for t, heads in sizes)
    return (
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=self.impl.scale).transpose(0, 1).reshape(query.shape)
    )


def llama(folder: str, port: int) -> None:
    """A folder through vLLM's LlamaForCausalLM: every tensor is loaded, and the logits are written next to it."""
    import vllm.model_executor.models.registry as registry
    from safetensors.torch import load_file
    from vllm.config import CompilationConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    from nmkernels.integrations import vllm

    vllm.register()
    registry._run_in_subprocess = lambda fn: fn()
    about = ModelConfig(model=folder, skip_tokenizer_init=True, enforce_eager=True, dtype="float32")
    assert about.quantization == "nmkernels"
    config = VllmConfig(model_config=about, compilation_config=CompilationConfig(custom_ops=["none"], mode=0))
    assert type(config.quant_config) is vllm.NMConfig
    with set_current_vllm_config(config), torch.no_grad():
        connected(config, 0, 1, port)
        with set_default_torch_dtype(torch.float32):
            model = initialize_model(config)
        names = model.load_weights(load_file(f"{folder}/model.safetensors").items())
        unloaded = {name for name, p in model.named_parameters() if p.numel()} - names
        assert not unloaded, unloaded
        process_weights_after_loading(model, about, torch.device("cpu"))
        Attention.forward = attend
        ids = torch.arange(24) * 7 % 256
        logits = model.compute_logits(model(ids, torch.arange(24), None, None))
    torch.save((ids, logits), f"{folder}/logits.pt")
    print("llama runs")


if __name__ == "__main__":
    if find_spec("vllm") is None:
        raise SystemExit("vllm is not installed")
    if sys.argv[1] == "layers":
        layers(*map(int, sys.argv[2:]))
    else:
        llama(sys.argv[2], int(sys.argv[3]))
