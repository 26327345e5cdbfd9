"""``python -m nmkernels convert``: what it prints, and one sentence for whatever is wrong."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nmkernels import cli
from nmkernels.cli import convert as verb

transformers = pytest.importorskip("transformers", minversion="5.0")
FIXTURES = Path(__file__).parents[1] / "export" / "fixtures" / "compressed_tensors"


def convert(folder: object, out: object, *more: str) -> int:
    return cli.main(["convert", str(folder), str(out), *more])


def test_it_says_what_was_exact_and_what_was_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(FIXTURES / "bitmask-int8", tmp_path / "out") == 0
    said = capsys.readouterr()
    assert said.out.startswith("bitmask-int8: 7 layers were int-quantized and sparse-24-bitmask, 1 of them rounded; 3,686 bytes, now ")
    table = {" ".join(line.split()) for line in said.out.splitlines()}
    name = "model.layers.*.mlp.{}_proj 1 sparse-24-bitmask, int8, a {} scale per {} 2:4 int8, a bfloat16 step per {}"
    assert name.format("gate", "bfloat16", "4 columns", "4 columns") + " exact" in table
    assert any(line.startswith(name.format("down", "float32", "row", "row") + " 0.") for line in table)
    assert "Left dense: lm_head (0 % of its weights are 0, in no N:M pattern)." in table
    assert "Activations, which the model's own library quantises too, stay in floating point." in table
    assert "Not needed, and left out: 1 tensors (model.layers.0.self_attn.k_proj.input_scale)." in table
    assert f'LlamaForCausalLM.from_pretrained("{tmp_path}/out")' in said.out and "converting model.safetensors\n" in said.err
    assert convert(FIXTURES / "bitmask-int8", tmp_path / "exact", "--exact", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["layers"]["model.layers.0.mlp.down_proj"]["now"] == "2:4 float32"
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exact").dtype == torch.float32


def test_what_is_wrong_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(folder: Path, out: Path) -> str:
        assert convert(folder, out) == 1
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(("reading ", "converting "))]
        assert len(lines) == 1 and lines[0].startswith("python -m nmkernels"), lines
        return lines[0].partition("error: ")[2]

    source, out = tmp_path / "source", tmp_path / "out"
    assert refused(source, out).startswith(f"{source}: there is no such folder; pass one that save_pretrained wrote")
    shutil.copytree(FIXTURES / "bitmask", source)
    assert refused(source, source / "out").startswith(f"{source}/out is inside the model's folder {source}, which is not changed")
    (source / "model-00002-of-00002.safetensors").unlink()
    assert refused(source, out).startswith(f"{source} lacks model-00002-of-00002.safetensors, which model.safetensors.index.json names")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["NewForCausalLM"]}))
    assert "names the architecture 'NewForCausalLM'; transformers " in refused(source, out)
    (source / "config.json").write_text(json.dumps({**config, "hidden_act": "nope"}))
    assert refused(source, out) == f"transformers cannot build a LlamaForCausalLM as {source}/config.json says: KeyError: 'nope'."
    (source / "config.json").write_text("{")
    assert refused(source, out).startswith(f"{source}/config.json is damaged (")
    assert os.listdir(tmp_path) == ["source"]


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopping(*args: Any, progress: Any, **options: Any) -> Any:
        def step(done: int, total: int, what: str) -> None:
            if (done, what) == (1, "converting model-00002-of-00002.safetensors"):
                raise KeyboardInterrupt

        return whole(*args, progress=step, **options)

    whole = verb.convert_folder
    monkeypatch.setattr(verb, "convert_folder", stopping)
    monkeypatch.setattr(sys, "argv", ["nmkernels", "convert", "a folder"])
    assert convert(FIXTURES / "bitmask", tmp_path / "out") == 130
    work = tmp_path / ".out.nmkernels-convert"
    again = f"\nStopped.\nFinished files are kept in {work}. To resume:\n  python -m nmkernels convert 'a folder'\n"
    assert capsys.readouterr().err.endswith(again) and os.listdir(tmp_path) == [work.name]
    monkeypatch.undo()
    assert convert(FIXTURES / "bitmask", tmp_path / "out") == 0 and os.listdir(tmp_path) == ["out"]
