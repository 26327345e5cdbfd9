"""``audit``: the table and the JSON of ``nm.audit`` for models by name and by shape."""

from __future__ import annotations

import json

import pytest
import torch

import nmkernels as nm
from examples.train_gpt.model import GPT, GPTConfig
from nmkernels import cli
from nmkernels.audit.shapes import MODELS, byte_gpt, model_shapes


def run(capsys, *words):
    assert cli.main(["audit", "--device", "H200", *words]) == 0
    return capsys.readouterr().out


def test_a_model_by_name(capsys):
    text = run(capsys)
    shapes = model_shapes("gpt2").shapes()
    assert text == str(nm.audit(shapes, device="H200", dtype="bfloat16")) + "\n"
    assert "layers.*.mlp.gate_proj ×32" in run(capsys, "--model", "Llama-3-8B", "--tokens", "64")
    head = next(line for line in run(capsys, "--model", "vit-l").splitlines() if line.startswith("head"))
    assert " 0.0 %" in head or " 0.1 %" in head, "it sees one of 197 tokens"


def test_options_reach_the_audit(capsys):
    words = "--shapes 4096x4096 64X128 4096x4096 --recipe fst --pattern 1:4 --tokens 2048 --accumulate 2 --dtype float16 --json"
    found = json.loads(run(capsys, *words.split()))
    shapes = {"4096x4096": (4096, 4096), "64X128": (64, 128), "4096x4096 #2": (4096, 4096)}
    want = nm.audit(shapes, 2048, "fst:1:4", device="H200", dtype="float16", accumulate=2)
    assert found == json.loads(json.dumps(want.as_dict()))
    assert found["layers"][0]["dtype"] == "float16" and found["accumulate"] == 2


@pytest.mark.slow
def test_a_model_of_the_zoo_and_this_cpu(capsys):
    assert "blocks.*.attn.qkv ×3" in run(capsys, "--model", "64x3", "--no-measure")
    words = ["audit", "--device", "cpu", "--model", "64x1", "--tokens", "64", "--json", "--budget", "600"]
    assert cli.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured_step"] > 0 and found["layers"][0]["dtype"] == "float32" and "threads" in found["device"]
    assert cli.main([*words, "--no-measure"]) == 0
    assert json.loads(capsys.readouterr().out)["measured_step"] is None


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--model", "quux"], "no model is called 'quux'; choose one of gpt2"),
        (["--shapes", "40x"], "'40x' is not a shape"),
        (["--device", "H20"], "no device is called 'H20'; did you mean 'H200'?"),
        (["--recipe", "fst:2:4", "--pattern", "2:4"], "both set the pattern"),
        (["--recipe", "sste(foo=1)"], "the recipe sste has no keyword 'foo'. It takes "),
    ],
)
def test_wrong_arguments_are_refused(words, match, capsys):
    assert cli.main(["audit", "--device", "H200", *words]) == 1
    error = capsys.readouterr().err
    assert match in error and len(error.splitlines()) == 1


def test_the_byte_gpt_has_the_layers_of_the_example():
    model = GPT(GPTConfig(width=64, layers=2, heads=1))
    layers = {name: tuple(module.weight.shape) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert byte_gpt(64, 2).shapes() == layers


def test_named_models_have_their_known_sizes():
    """Parameters of the linear layers, from the models' papers and code."""
    assert {name: sum(out * cols for out, cols in model_shapes(name).shapes().values()) for name in MODELS} == {
        "gpt2": 12 * 12 * 768**2 + 50257 * 768,
        "llama-3-8b": 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096) + 128256 * 4096,
        "llama-3-70b": 80 * (2 * 8192**2 + 2 * 1024 * 8192 + 3 * 28672 * 8192) + 128256 * 8192,
        "vit-l": 24 * 12 * 1024**2 + 1000 * 1024,
        "bert-large": 24 * 12 * 1024**2,
    }
    assert model_shapes("LLAMA3_8B") is MODELS["llama-3-8b"]
    # with the norms, 8,030,261,248 and 70,553,706,496
    norms = {"llama-3-8b": 65 * 4096, "llama-3-70b": 161 * 8192}
    found = {name: sum(p.numel() for p in MODELS[name].module().parameters()) + more for name, more in norms.items()}
    assert found == {"llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496}
