"""The main job from text to a checked file, at the smallest size; and its result in every form."""

from __future__ import annotations

import argparse
import csv
import json
import re
from pathlib import Path

import pytest
import torch

import nmkernels as nm
from nmkernels.cli import deploy
from nmkernels.cli.config import add_arguments, new_config, settings
from nmkernels.models import GPT, GPTConfig, load_corpus
from nmkernels.recipes.compose import deployed

from .conftest import train

MODEL = GPTConfig(width=32, layers=1, heads=2, context=16)


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "out"
    assert train(text, out, "--baseline", "--recipe", "step:2:4") == 0
    return out


def test_the_result_is_true(finished, text):
    result = json.loads((finished / "result.json").read_text())
    assert {p.name for p in finished.iterdir()} == {*result["files"], "checkpoints", "baseline", ".nmkernels-train"}
    assert {"model.safetensors", "model-dense.safetensors", "curves.png", "log.csv", "sample.txt", "result.json"} <= set(result["files"])
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in (finished / "checkpoints").iterdir()] == ["step-00000012.pt"]
    sparse = result["sparse"]
    assert sparse["reload"] == {"identical": True, "max_difference_to_dense": pytest.approx(0, abs=1e-5)}
    weights = 12 * 32 * 32
    assert sparse["bytes"]["layers_dense"] == 4 * weights
    assert sparse["bytes"]["layers_compressed"] == 4 * weights // 2 + weights // 8
    assert sparse["bytes"]["file_compressed"] == (finished / "model.safetensors").stat().st_size
    steps = 2 * (3 + 1 + 4 + 1) * 32  # one per row, whose 32 or 128 inputs are one group
    assert {values: one["layers"] for values, one in sparse["rounded"].items()} == {
        "int8": weights // 2 + weights // 8 + steps,
        "int4": weights // 4 + weights // 8 + steps,
    }
    assert sparse["layers"] == 4
    assert result["val_loss_ratio"] == sparse["val_loss"] / result["baseline"]["val_loss"]
    assert 1 <= sparse["switch_step"] < 12 and sparse["switch_reason"] in ("test", "t_min") and sparse["remark"] == ""
    assert min(*sparse["tokens_per_s"].values(), sparse["train_tokens_per_s"]) > 0
    # 4 layers of 12·32² weights and a head of 256·32, 12 steps of 32 bytes; scores of 2·16·32 a layer, half of the two GEMMs
    dense, switch = 2 * (weights + 256 * 32) + 2 * 16 * 32, sparse["switch_step"]
    assert sparse["flops"] == {
        "training": 32 * (12 * 3 * dense - (12 - switch) * weights),
        "dense_training": 32 * 12 * 3 * dense,
        "inference": dense - weights,
        "dense_inference": dense,
    }
    # the validation loss is the one of the file that was written
    corpus = load_corpus(text)
    for values, one in (("float", sparse), *sparse["rounded"].items()):
        model = nm.load_compressed(GPT(MODEL), finished / "model.safetensors")
        if values != "float":
            nm.compress_(model, values=values)
        with torch.no_grad():
            losses = [(model.loss(x, y).item(), len(x)) for x, y in corpus.val_batches(16, 2, 256)]
        assert sum(v * n for v, n in losses) / sum(n for _, n in losses) == pytest.approx(one["val_loss"], rel=1e-5)
    assert len({one["val_loss"] for one in (sparse, *sparse["rounded"].values())}) == 3
    assert result["corpus"]["train_bytes"] == len(corpus.train)


def test_the_demo_has_no_warnings(text, tmp_path, capsys):
    assert train(text, tmp_path / "out", "--demo") == 0
    out, err = capsys.readouterr()
    assert "note:" not in out and not err
    lines, result = out.splitlines(), json.loads((tmp_path / "out" / "result.json").read_text())
    assert lines[0].startswith("Training a GPT of ") and lines[0].endswith(
        f" parameters on {text}, byte by byte: 12 steps of 32 bytes with SRSTE 2:4, then a dense one to compare."
    )
    assert result["config"]["options"] == {"decay": 2.0} and result["sparse"]["remark"] == ""
    # every row of the table is full, and what was gained follows it
    table = lines[lines.index("", lines.index("") + 1) + 2 :]
    assert all(len(re.split("  +", line)) == 4 for line in table[: table.index("")]) and table.index("") == 7
    assert table[8] == "Against the dense model:" and [line.split()[0] for line in table[9:12]] == ["size", "speed", "loss"]


def test_the_demo_of_another_recipe_has_that_ones_options():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    demo, other = (new_config(settings(parser.parse_args(["--demo", *more]))) for more in ([], ["--recipe", "step:1:4"]))
    assert (demo.recipe, demo.options) == ("srste:2:4", {"decay": 2.0}) and demo.build_recipe().decay == 2
    assert (other.recipe, other.options) == ("step:1:4", {}) and other.model == demo.model and other.steps == demo.steps


def test_the_log_follows_the_phases(finished):
    rows, dense = ([*csv.DictReader((finished / name / "log.csv").open(newline=""))] for name in ("", "baseline"))
    steps = [int(row["step"]) for row in rows]
    assert steps[-1] == 12 and steps == sorted(set(steps))
    switch = json.loads((finished / "result.json").read_text())["sparse"]["switch_step"]
    for row, step in zip(rows, steps, strict=True):
        assert row["phase"] == "1" or step <= switch
        assert float(row["density"]) == (0.5 if step > switch else 1.0)
    assert any(row["val_loss"] for row in rows) and float(rows[-1]["loss"]) < float(rows[0]["loss"]) - 0.5
    assert all(not row["phase"] and float(row["loss"]) > 0 for row in dense)


def test_json_goes_to_standard_output_alone(text, tmp_path, capsys):
    assert train(text, tmp_path / "out", "--json", "--recipe", "srste:1:4", "--set", "decay=1e-3") == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result == json.loads((tmp_path / "out" / "result.json").read_text()) and "step 12/12" in captured.err
    assert (result["config"]["recipe"], result["config"]["options"], result["baseline"]) == ("srste:1:4", {"decay": 1e-3}, None)


QUICK = ("step", "maskllm", "slope", "sste")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in nm.recipes.names()])
def test_every_recipe_trains_to_a_checked_file(name, text, tmp_path, capsys):
    """At 1:8 where it can, else at its own pattern; to the file that ``final`` promises, in which each sparse layer is N:M."""
    try:
        recipe = nm.recipes.get(f"{name}:1:8", total_steps=12)
    except nm.NMError:
        recipe = nm.recipes.get(name, total_steps=12)
    spec, out = f"{name}:{recipe.pattern}", tmp_path / "out"
    assert train(text, out, "--json", "--recipe", spec) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["config"]["recipe"] == spec and 0 < result["sparse"]["val_loss"] < 6
    assert (out / "model-dense.safetensors").exists() and result["sparse"]["sample"]
    if recipe.final == "dense":
        assert not (out / "model.safetensors").exists() and "reload" not in result["sparse"]
        return
    assert result["sparse"]["reload"]["identical"] and result["sparse"]["layers"] == 4
    model = nm.load_compressed(GPT(MODEL), out / "model.safetensors")
    for layer in (m for m in model.modules() if isinstance(m, nm.CompressedLinear)):
        weight = layer.weight.dense()
        assert weight.count_nonzero() <= deployed(recipe).fprop * weight.numel()
        assert (layer.adapter is not None) == (recipe.final == "nm+adapter")


def test_a_recipe_inside_another():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for options in (["step:1:4(inner=mdgf(gradient=ste))"], ["step:1:4", "--set", "inner=mdgf(gradient=ste)"]):
        config = new_config(settings(parser.parse_args(["--recipe", *options])))
        assert config.recipe == "step:1:4" and config.options == {"inner": "mdgf(gradient=ste)"} and config.build_recipe().inner


def test_the_dense_recipe_equals_the_baseline(text, tmp_path, capsys):
    """The baseline is plain PyTorch; the dense recipe is this package's optimizer on the same batches."""
    assert train(text, tmp_path / "out", "--recipe", "dense", "--baseline") == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["val_loss_ratio"] == pytest.approx(1, abs=1e-4) and "bytes" not in result["sparse"]
    assert not (tmp_path / "out" / "model.safetensors").exists() and "model-dense.safetensors" in capsys.readouterr().out


def test_optional_packages_may_be_missing(text, tmp_path, monkeypatch, capsys):
    for name in ("matplotlib.figure", "tqdm", "torch.utils.tensorboard"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    assert train(text, tmp_path / "out") == 0
    assert not (tmp_path / "out" / "curves.png").exists()
    assert "curves.png" not in capsys.readouterr().out
    assert train(text, tmp_path / "out", "--tensorboard", "--overwrite") == 2
    assert "pip install tensorboard" in capsys.readouterr().err
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_file_that_does_not_reproduce_the_logits_fails(text, tmp_path, monkeypatch, capsys):
    def wrong(model, path):
        nm.load_compressed(model, path)
        model.lm_head.weight.data[0, 0] += 1e-3
        return model

    monkeypatch.setattr(deploy, "load_compressed", wrong)
    assert train(text, tmp_path / "out") == 1
    assert "other logits than the saved one" in capsys.readouterr().err
    assert not (tmp_path / "out" / "result.json").exists()


def test_a_loss_that_is_not_finite_stops_the_run(text, tmp_path, monkeypatch, capsys):
    real = GPT.loss
    monkeypatch.setattr(GPT, "loss", lambda self, x, y: real(self, x, y) * float("nan"))
    assert train(text, tmp_path / "out") == 1
    assert "loss is nan at step 1: training has diverged. Lower --lr" in capsys.readouterr().err


@pytest.mark.slow
def test_the_activation_is_one_that_the_recipe_can_work_on(text, tmp_path, capsys):
    for given, want in (((), "relu2"), (("--activation", "relu2:1:4"), "relu2:1:4")):
        assert train(text, tmp_path / "out", "--json", "--overwrite", "--recipe", "act24:2:4", *given) == 0
        assert json.loads(capsys.readouterr().out)["config"]["activation"] == want
    assert train(text, tmp_path / "out", "--resume") == 0
    assert train(text, tmp_path / "gelu", "--recipe", "act24:2:4", "--activation", "gelu") == 2
    assert "--activation relu2" in capsys.readouterr().err
    assert train(text, tmp_path / "odd", "--activation", "silu") == 2
    assert "choose gelu, relu2" in capsys.readouterr().err
