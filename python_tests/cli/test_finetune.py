"""``python -m nmkernels finetune``: masks held, the same folder out, resumed after a kill, a teacher, and a sentence for what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file

from nmkernels import cli
from nmkernels.prune.progress import Progress
from nmkernels.testing import equal_bits
from python_tests.house.paths import ROOT
from python_tests.integrations.folders import WORDS, batches, content, saved, write_text, write_tokenizer

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")

from nmkernels.integrations.hf import NMConfig  # noqa: E402
from nmkernels.prune import finetune as library  # noqa: E402
from nmkernels.prune.folder import prune_folder, work_folder  # noqa: E402

SHORT = ["--length", "32", "--batch", "4", "--steps", "6", "--lr", "1e-3", "--device", "cpu"]
pytestmark = pytest.mark.filterwarnings("ignore:prune_. layer")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A dense model, what ``prune`` wrote of it in several forms, and a text; no test changes them."""
    root = tmp_path_factory.mktemp("finetune")
    saved(root / "dense", layers=2)
    saved(root / "tied", "llama-tied", layers=2)
    write_text(root / "a.txt")
    (root / "cycle.txt").write_text(" ".join(WORDS * 20))
    options = {"method": "wanda", "held_out": batches(1)}
    prune_folder(root / "dense", "2:4", batches(), root / "float", **options)
    table = {"*.0.mlp.*": "1:4", "*.k_proj": "dense", "*.layers.*": "4:8"}
    prune_folder(root / "dense", table, batches(), root / "mixed", values="int4", group=32, dtype=torch.bfloat16, **options)
    prune_folder(root / "tied", "2:4", batches(), root / "whole", dense_values="int8", **options)
    return root


def tune(model, data, out, *more):
    return cli.main(["finetune", str(model), "--data", str(data), "--out", str(out), *SHORT, *more])


def loaded(folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


@pytest.mark.slow
def test_embeddings_with_integers_are_rounded_again(places, tmp_path):
    assert tune(places / "whole", places / "cycle.txt", tmp_path / "out", "--lr", "1e-2") == 0
    before, after = loaded(places / "whole"), loaded(tmp_path / "out")
    source, trained = before.state_dict(), after.state_dict()
    assert {key: (t.dtype, t.shape) for key, t in trained.items()} == {key: (t.dtype, t.shape) for key, t in source.items()}
    embedding = after.get_input_embeddings()
    assert type(embedding).__name__ == "CompressedEmbedding" and after.lm_head.values.data_ptr() == embedding.values.data_ptr()
    assert not equal_bits(before.get_input_embeddings().values, embedding.values)
    assert json.loads((tmp_path / "out" / "report.json").read_text())["values"] == ["int8"]


def masks(folder):
    return {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name.endswith("indices")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float", "mixed"])
def test_the_same_folder_with_better_weights(places, tmp_path, capsys, monkeypatch, name):
    before, out, models = content(places), tmp_path / "out", []
    compress = library.compress_
    monkeypatch.setattr(library, "compress_", lambda model, data: models.append(compress(model, data=data)))
    assert tune(places / name, places / "cycle.txt", out, "--lr", "1e-2", "--dtype", "float32" if name == "float" else "bfloat16") == 0
    said = capsys.readouterr()
    facts = json.loads((out / "report.json").read_text())
    ppl = facts["perplexity"]
    assert ppl["after"] < ppl["before"] and facts["loss"]["last"] < facts["loss"]["first"]
    assert f"held-out tokens: {ppl['before']:.3f} before, {ppl['after']:.3f} after." in said.out
    assert " left, training, loss " in said.err and os.listdir(tmp_path) == ["out"] and content(places) == before
    # the folder holds the trained model: same kind, masks, dtypes and files, other weights
    trained, again, source = models[0].state_dict(), loaded(out).state_dict(), loaded(places / name).state_dict()
    assert trained.keys() == again.keys() and all(equal_bits(value, again[key]) for key, value in trained.items())
    assert {key: (t.dtype, t.shape) for key, t in again.items()} == {key: (t.dtype, t.shape) for key, t in source.items()}
    assert not equal_bits(source["model.layers.1.mlp.up_proj.values"], again["model.layers.1.mlp.up_proj.values"])
    assert not equal_bits(source["model.norm.weight"], again["model.norm.weight"])
    one, other = masks(places / name), masks(out)
    assert len(one) == (14 if name == "float" else 12) and one.keys() == other.keys()
    if name == "float":
        assert all(torch.equal(value, other[key]) for key, value in one.items())
        assert facts["values"] == []
    else:  # integers were decoded and rounded again; what became zero may be stored elsewhere in its group
        assert facts["values"] == ["int4"] and "Values were rounded to int4 again." in said.out
        assert set(facts["patterns"].values()) == {"1:4", "4:8"} and again["model.norm.weight"].dtype == torch.bfloat16
        held = {name: m.weight.dense() != 0 for name, m in loaded(places / name).named_modules() if hasattr(m, "indices")}
        moved = [int((m.weight.dense() != 0)[~held[name]].sum()) for name, m in loaded(out).named_modules() if hasattr(m, "indices")]
        assert sum(moved) < 0.2 * sum(int(mask.sum()) for mask in held.values())
    assert set(os.listdir(places / name)) == set(os.listdir(out)) and facts["pruning"]["method"] == "wanda"
    card = (out / "README.md").read_text()
    assert "## How it was pruned" in card and "## How it was fine-tuned" in card and f"{ppl['after']:.3f}" in card
    assert cli.main(["finetune", str(out), "--data", str(places / "a.txt"), "--out", str(tmp_path / "on"), *SHORT, "--steps", "1"]) == 0


KILL = """
import os, signal, sys
from nmkernels import cli
from nmkernels.prune import finetune
write = finetune.atomic_write
def kill(path, fill):
    def half(temporary):
        if killed.step == 5:  # in the middle of a checkpoint
            temporary.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        fill(temporary)
    write(path, half)
class killed: step = 0
save = finetune._Tuning._save
def _save(self):
    killed.step = self.step
    save(self)
finetune._Tuning._save = _save
finetune.atomic_write = kill
cli.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_killed_it_goes_on_to_the_same_bytes(places, tmp_path, capsys):
    before, out = content(places), tmp_path / "killed" / "out"
    words = ["finetune", str(places / "float"), "--data", str(places / "a.txt"), *SHORT, "--save-every", "1"]
    out.parent.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KILL, *words, "--out", str(out)], env=environment, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL and not out.exists()
    checkpoint = work_folder(out, "finetune") / "checkpoint.pt"
    assert torch.load(checkpoint, weights_only=True)["step"] == 4
    assert cli.main([*words, "--out", str(out), "--seed", "1"]) == 1
    said = capsys.readouterr().err
    assert "holds the results of another run: its seed is 0, not 1." in said and "The last checkpoint is in " in said
    assert cli.main([*words, "--out", str(out)]) == 0
    assert "training, loss" in capsys.readouterr().err and os.listdir(out.parent) == ["out"]
    assert cli.main([*words, "--out", str(tmp_path / "whole" / "out")]) == 0
    one, other = content(out), content(tmp_path / "whole" / "out")
    assert one.keys() == other.keys() and [name for name in one if one[name] != other[name]] in ([], ["model.safetensors"])
    one, other = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "whole" / "out"))  # metadata have no order
    assert one.keys() == other.keys() and all(equal_bits(tensor, other[name]) for name, tensor in one.items())
    assert content(places) == before


@pytest.mark.slow
def test_a_teacher_lowers_the_divergence(places, tmp_path, capsys):
    """More than the text alone does, from random words."""
    ids = batches(1, 8, 32, seed=7)[0]["input_ids"]
    dense = loaded(places / "dense")

    def divergence(folder):
        with torch.no_grad():
            wanted, found = (torch.log_softmax(model(input_ids=ids).logits, -1) for model in (dense, loaded(folder)))
        return float(torch.nn.functional.kl_div(found, wanted, log_target=True, reduction="batchmean"))

    more = ["--steps", "40", "--held-out", "0"]
    assert tune(places / "float", places / "a.txt", tmp_path / "taught", *more, "--teacher", str(places / "dense"), "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["loss"]["last"] < 0.7 * facts["loss"]["first"] and facts["teacher"] == "dense" and facts["perplexity"] is None
    assert tune(places / "float", places / "a.txt", tmp_path / "alone", *more) == 0
    assert "Perplexity was not measured: --held-out 0." in capsys.readouterr().out
    assert divergence(tmp_path / "taught") < 0.7 * divergence(places / "float") < divergence(tmp_path / "alone")


@pytest.mark.filterwarnings("ignore:compress_. layers .* got fewer than 2 tokens")
def test_layers_without_zeros_are_trained_too(places, tmp_path):
    """N = M, which has nothing to hold, with and without integers; experts with dense integers too."""
    ids = batches(1, 8, 32)[0]["input_ids"]
    prune_folder(places / "dense", {"*.mlp.*": "2:4", "*.self_attn.*": "4:4"}, batches(), tmp_path / "4:4", method="magnitude")
    saved(tmp_path / "moe", "qwen3-moe", layers=1)
    config = NMConfig("1:1", values="int8")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe", quantization_config=config).save_pretrained(tmp_path / "1:1")
    (tmp_path / "4:4" / "README.md").write_bytes("# Modèle".encode("latin-1"))
    for name in ("4:4", "1:1"):
        out = tmp_path / f"{name} trained" / "checkpoint.pt"  # also the name of something where results are until then
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Converting a tensor with requires_grad=True to a scalar")
            facts = library.finetune_folder(tmp_path / name, ids, out, steps=2, batch=2, lr=1e-2)
        source, trained = (loaded(folder) for folder in (tmp_path / name, out))
        layers = {n: (m.pattern, m.weight.kind) for n, m in source.named_modules() if hasattr(m, "values")}
        assert layers == {n: (m.pattern, m.weight.kind) for n, m in trained.named_modules() if hasattr(m, "values")}
        assert all(not equal_bits(source.get_submodule(n).values, trained.get_submodule(n).values) for n in layers)
        assert facts["values"] == (["int8"] if name == "1:1" else [])
    assert "# Modèle\n\n## N:M".encode("latin-1") in (tmp_path / "4:4 trained" / "checkpoint.pt" / "README.md").read_bytes()


def test_the_rate_rises_and_falls():
    rates = [library.share(step, 20) for step in range(20)]
    assert rates[:3] == [0.5, 1.0, 1.0] and rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True) and 0 < rates[-1] < 0.02
    assert library.share(0, 1) == 1.0


def test_windows_depend_on_the_step_alone(tmp_path):
    run = library._Tuning.__new__(library._Tuning)
    run.windows, run.options, run.device = torch.arange(5)[:, None], {"batch": 2, "seed": 3}, torch.device("cpu")
    taken = []
    for step in range(5):
        run.step = step
        taken += run._windows().flatten().tolist()
    assert sorted(taken[:5]) == sorted(taken[5:]) == list(range(5)) and taken[:5] != taken[5:]


def other(root, model, **changed):
    return saved(root / "other", layers=1, tokenizer=False, **changed)


def configure(model, **values):
    (model / "config.json").write_text(json.dumps({**json.loads((model / "config.json").read_text()), **values}))
    return {}


def whole(root, model):
    dense = transformers.AutoModelForCausalLM.from_pretrained(root / "dense", quantization_config=NMConfig("1:1", values="int8"))
    dense.save_pretrained(root / "whole")
    write_tokenizer(root / "whole")
    return {"model": root / "whole"}


SPOILED = {
    "dense": (lambda root, model: {"model": root / "dense"}, "{root}/dense is not compressed by nmkernels; pass a folder that python -m"),
    "no mask": (whole, "{root}/whole has no N:M layer to hold, only dense integers; train the dense model that it was made from."),
    "teacher": (
        lambda root, model: {"more": ["--teacher", str(other(root, model, vocab_size=64))]},
        "the teacher {root}/other has a vocabulary of 64 tokens, and {root}/model one of 128; pass the dense model that it was pruned ",
    ),
    "no teacher": (lambda root, model: {"more": ["--teacher", str(root / "b")]}, "{root}/b: there is no such folder"),
    "rate": (lambda root, model: {"more": ["--lr", "-1"]}, "--lr -1.0 must be a number above 0."),
    "diverges": (lambda root, model: {"more": ["--lr", "1e30"]}, "is not finite; start again with a learning rate below 1e+30."),
    "device": (lambda root, model: {"more": ["--device", "nothing"]}, "device 'nothing' cannot be used here: "),
    "sizes": (
        lambda root, model: configure(model, vocab_size=130),
        "{root}/model: 'lm_head.weight' has shape (128, 64) in the files, and (130, 64) in a LlamaForCausalLM with this config.json; ",
    ),
    "activation": (lambda root, model: configure(model, hidden_act="nope"), "transformers cannot load {root}/model: KeyError: 'nope'."),
    "report": (lambda root, model: (model / "report.json").write_text("{") and {}, "{root}/model/report.json is damaged (Expecting"),
    "data": (lambda root, model: {"data": root / "b.txt"}, "--data {root}/b.txt cannot be read: No such file or directory."),
    "inside": (lambda root, model: {"out": model / "out"}, "{root}/model/out is inside the model's folder"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_what_is_wrong_is_one_sentence_and_changes_nothing(places, tmp_path, capsys, what):
    shutil.copytree(places / "float", tmp_path / "model")
    shutil.copytree(places / "dense", tmp_path / "dense")
    spoil, sentence = SPOILED[what]
    args = {
        "model": tmp_path / "model",
        "data": places / "a.txt",
        "out": tmp_path / "out",
        "more": (),
        **spoil(tmp_path, tmp_path / "model"),
    }
    before = content(tmp_path)
    capsys.readouterr()
    assert tune(args["model"], args["data"], args["out"], *args["more"]) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("python -m")]
    assert len(said) == 1 and said[0].startswith("python -m nmkernels finetune: error: ") and sentence.format(root=tmp_path) in said[0]
    assert content(tmp_path) == before


def test_ctrl_c_before_the_first_checkpoint_leaves_nothing(places, tmp_path, capsys, monkeypatch):
    def stop(self, done, total, what):
        if what.startswith("training") and done == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "__call__", stop)
    assert tune(places / "float", places / "a.txt", tmp_path / "out") == 130
    assert capsys.readouterr().err.endswith("\nStopped.\n") and os.listdir(tmp_path) == []
