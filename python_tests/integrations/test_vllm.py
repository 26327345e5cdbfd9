"""The vLLM plug-in in vLLM's own layers and its LlamaForCausalLM, in processes of their own. Without vLLM the tests skip, as in CI."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import nmkernels as nm
from python_tests.house.paths import ROOT

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def run(*commands: list[str]) -> list[str]:
    start = [sys.executable, "-W", "ignore", "-m", "python_tests.integrations.vllm_alone"]
    where = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]))
    running = [
        subprocess.Popen([*start, *words], cwd=ROOT, env=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for words in commands
    ]
    said = [process.communicate(timeout=300)[0] for process in running]
    if missing := [line for text in said for line in text.splitlines() if line.startswith("ModuleNotFoundError")]:
        pytest.skip(f"vLLM lacks a dependency: {missing[0]}")
    for process, text in zip(running, said, strict=True):
        assert process.returncode == 0, text[-4000:]
    return said


def test_the_entry_point_is_declared() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points."vllm.general_plugins"]\nnmkernels = "nmkernels.integrations.vllm:register"\n' in project
    assert "\ndef register() -> None:" in (ROOT / "nmkernels" / "integrations" / "vllm.py").read_text(encoding="utf-8")


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_fused_and_split_layers(world: int) -> None:
    home = port()
    for text in run(*(["layers", str(rank), str(world), home] for rank in range(world))):
        assert "layers agree" in text


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("values", [None, "int4"])
def test_a_folder_through_load_weights(values: str | None, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).eval()
    # o_proj of the first layer stays dense
    handle = nm.sparsify_(
        model, "ste:2:4", filter_fn=lambda layer, name: "lm_head" not in name and name != "model.layers.0.self_attn.o_proj"
    )
    handle.finish(allow_unused=True)
    nm.compress_(model, values=values).save_pretrained(tmp_path)
    run(["llama", str(tmp_path), port()])
    ids, logits = torch.load(tmp_path / "logits.pt")
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    assert float((logits - want).norm() / want.norm()) < 2e-6
