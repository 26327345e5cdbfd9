"""The tasks for owners of a GPU, at tiny sizes on a CPU: they read their files, learn, and evaluate on both splits."""

from __future__ import annotations

import importlib
import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch

import nmkernels as nm
from bench.accuracy import tasks, worker
from bench.accuracy.spec import TUNING_SEEDS, Case, RunSpec
from bench.accuracy.tasks import base, cifar, glue, lm
from examples.train_gpt.model import GPTConfig

METHODS = pytest.mark.parametrize("method", ["dense", "srste-2e-4"])
GPU_TASKS = ("gpt-124m", "gpt-350m", "cifar10", "glue-rte", "glue-sst2", "glue-qnli", "glue-mnli")


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    for variable in (lm.VARIABLE, cifar.VARIABLE, glue.FOLDER, glue.MODEL):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(worker, "TRAINED", tmp_path / "trained")
    base.get.cache_clear()
    yield
    base.get.cache_clear()


def learns(name: str, method: str, steps: int, lr: float, layers: int, seed: int = 0) -> worker.Training:
    """Train by the harness; the loss falls by a fifth, and both splits have finite values."""
    it = worker.Training(RunSpec(Case(name, method, "2:4", steps), lr, seed))
    losses = [it.step(step) for step in range(1, steps + 1)]
    assert math.isfinite(sum(losses)) and sum(losses[-3:]) < 0.8 * sum(losses[:3]), losses
    assert len(it.handle.layers) == layers, list(it.handle.layers)
    values = [it.task.evaluate(it.model.eval(), tuning) for tuning in (False, True)]
    assert values[0] != values[1] and all(map(math.isfinite, [*values[0].values(), *values[1].values()])) and it.task.digest
    a, b, c = (it.task.batch(seed, step) for step in (2, 2, 3))
    assert all(map(torch.equal, a, b)) and not torch.equal(a[0], c[0])
    return it


@pytest.mark.parametrize("name", GPU_TASKS)
def test_without_files_the_error_names_the_variable_and_where_to_get_them(name):
    with pytest.raises(RuntimeError, match=r"NMKERNELS_(TOKENS|CIFAR10|GLUE)"):
        tasks.get(name)


# ---- language models


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    """A text of 32 tokens in which every token but each eighth follows from the one before."""
    rng = np.random.default_rng(0)
    for name, count in (("train.bin", 4000), ("val.bin", 1000)):
        text = (np.arange(count) * 3) % 32
        text[::8] = rng.integers(0, 32, len(text[::8]))
        text.astype(np.uint16).tofile(tmp_path / name)
    monkeypatch.setenv(lm.VARIABLE, str(tmp_path))
    monkeypatch.setattr(lm.GPT124M, "config", GPTConfig(vocab=64, width=64, layers=2, heads=2, context=16))
    monkeypatch.setattr(lm.GPT124M, "batch_size", 8)
    monkeypatch.setattr(lm.GPT124M, "most", 4)
    return tmp_path


@METHODS
def test_language_model(tokens, method):
    it = learns("gpt-124m", method, 30, 3e-3, layers=8)
    x, y = it.task.batch(0, 1)
    assert x.shape == (8, 16) and torch.equal(x[:, 1:], y[:, :-1])
    assert it.model.lm_head.weight is it.model.tokens.weight


def test_the_second_half_of_val_is_the_test_set(tokens):
    task, seen = tasks.get("gpt-124m"), []
    task._windows, windows = lambda half, starts: seen.append((half, starts)) or windows(half, starts), task._windows
    model = task.model().eval()
    for tuning in (True, False):
        seen.clear()
        task.evaluate(model, tuning)
        starts = torch.cat([starts for _, starts in seen])
        assert len(starts) == (500 - 1) // 16 and np.array_equal(seen[0][0], task.val[:500] if tuning else task.val[500:])
        assert starts.max() + 17 <= 500


def test_token_files_that_cannot_be_used_are_refused(tokens):
    (tokens / "val.bin").write_bytes(np.full(1000, 64, np.uint16).tobytes())
    with pytest.raises(RuntimeError, match=r"val\.bin has the token 64; the model's vocabulary is 64"):
        lm.GPT124M()
    (tokens / "val.bin").write_bytes(b"\0" * 20)
    with pytest.raises(RuntimeError, match="too few for two sequences of 16"):
        lm.GPT124M()
    (tokens / "val.bin").unlink()
    with pytest.raises(RuntimeError, match=r"does not find val\.bin there"):
        lm.GPT124M()


@pytest.mark.parametrize(("cls", "millions", "layers"), [(lm.GPT124M, 124.5, 48), (lm.GPT350M, 354.9, 96)])
def test_sizes_are_those_of_gpt2(cls, millions, layers):
    with torch.device("meta"):
        model = cls.model(object.__new__(cls))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
    handle = nm.sparsify_(model, "ste:2:4")
    assert len(handle.layers) == layers and not any("lm_head" in name for name in handle.layers)
    assert cls.tokens == 2**19 and lm.BATCH % cls.most == 0
    # the estimate of the seconds on one H100: 40 % of its peak in bfloat16
    c = cls.config
    flops = cls.tokens * (6e6 * millions + 12 * c.layers * c.width * c.context) * 5000
    assert cls.settings.seconds * 5000 / cls.settings.steps == pytest.approx(flops / (0.4 * 989e12), rel=0.03)


def test_a_variable_sets_the_steps(monkeypatch):
    monkeypatch.setenv(lm.STEPS, "300000")
    s = lm._settings(3e-4, 100)
    assert s.steps == 300_000 and s.seconds == 6000


# ---- ResNet-18


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """120 pictures of noise whose brightness is their class."""
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        labels = rng.integers(0, 10, 20)
        pixels = (20 * labels[:, None] + rng.integers(0, 40, (20, 3072))).astype(np.uint8)
        (tmp_path / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": labels.tolist()}))
    monkeypatch.setenv(cifar.VARIABLE, str(tmp_path))
    monkeypatch.setattr(cifar, "BATCH", 16)
    monkeypatch.setattr(cifar, "HELD_OUT", 30)
    monkeypatch.setattr(cifar, "ResNet18", partial(cifar.ResNet18, width=16))
    return tmp_path


@pytest.mark.slow
@METHODS
def test_resnet18(pictures, method):
    learns("cifar10", method, 20, 1e-2, layers=19)


def test_cifar_format_and_splits(pictures):
    task = tasks.get("cifar10")
    assert task.images.shape == (100, 3, 32, 32) and task.test_labels.shape == (20,)
    raw = pickle.loads((pictures / "data_batch_1").read_bytes())[b"data"][0]
    assert task.images[0, 2, 5, 7] == raw[2 * 1024 + 5 * 32 + 7]
    task.labels = torch.arange(100)
    drawn = {seed: torch.cat([task.batch(seed, step)[1] for step in range(40)]) for seed in (0, TUNING_SEEDS[0])}
    assert drawn[0].max() == 99 and drawn[TUNING_SEEDS[0]].max() == 69
    (pictures / "test_batch").unlink()
    with pytest.raises(RuntimeError, match=r"does not find test_batch there"):
        cifar.Cifar10()


def test_resnet18_has_its_size_and_dense_ends():
    with torch.device("meta"):
        model = cifar.ResNet18()
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 10)
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
    handle = nm.sparsify_(model, "ste:2:4")
    assert len(handle.layers) == 19 and not {"conv", "head"} & set(handle.layers)
    # 556 million multiplications in a forward pass, as usually stated for this model, 2 million of them in the first convolution
    cost, dense = (nm.flops(cifar.ResNet18(), recipe, 1, rows=cifar.Cifar10.shares).inference for recipe in ("ste:2:4", "dense"))
    assert dense / 2 == pytest.approx(554e6, rel=0.005) and cost / dense == pytest.approx(0.5, abs=0.01)


# ---- GLUE

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "the", "a", "is", "plot", "so", "very", "and"]
LINES = {
    "RTE": ("index\tsentence1\tsentence2\tlabel", "{i}\tthe film is {w}\tplot {w}\t{nli}"),
    "SST-2": ("sentence\tlabel", "the film is {w} and\u2028 so is a plot\t{bit}"),
    "QNLI": ("index\tquestion\tsentence\tlabel", "{i}\tthe film is {w}\tplot {w}\t{nli}"),
    "MNLI": ("index\tgenre\tsentence1\tsentence2\tlabel1\tgold_label", "{i}\tfilm\tthe film is {w}\tplot {w}\tneutral\t{three}"),
}


@pytest.fixture
def bert(tmp_path, monkeypatch):
    """A checkpoint with one layer, and a folder in which a word decides the class."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "mask", "pad", "cls", "sep")}
    model = tmp_path / "model"
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **special).save_pretrained(model)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128, hidden_dropout_prob=0.0
    )
    torch.manual_seed(0)
    transformers.BertForMaskedLM(config).save_pretrained(model)
    for name, (first, line) in LINES.items():
        folder = tmp_path / "glue" / name
        folder.mkdir(parents=True)
        for file, count in (("train.tsv", 60), ("dev_matched.tsv" if name == "MNLI" else "dev.tsv", 12)):
            good = [i % 3 != 0 for i in range(count)]
            words = [
                {"w": "good" if g else "bad", "bit": int(g), "nli": glue.NLI[not g], "three": "entailment" if g else "contradiction"}
                for g in good
            ]
            text = [first, *(line.format(i=i, **word) for i, word in enumerate(words))]
            (folder / file).write_text("\r\n".join(text) + "\r\n", encoding="utf-8", newline="")
    monkeypatch.setenv(glue.FOLDER, str(tmp_path / "glue"))
    monkeypatch.setenv(glue.MODEL, str(model))
    monkeypatch.setattr(glue, "BATCH", 8)
    return tmp_path


@pytest.mark.slow
@METHODS
def test_bert_on_glue(bert, method):
    it = learns("glue-rte", method, 40, 3e-3, layers=7)  # six of the layer, and the pooler
    assert it.task.evaluate(it.model)["accuracy"] == 100


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glue-sst2", "glue-qnli", "glue-mnli"])
def test_files_of_the_other_glue_tasks(bert, name):
    task = tasks.get(name)
    assert (len(task.train), len(task.test), task.held_out) == (60, 12, 6)
    assert sum(text[0].split()[3] == "good" for text in task.train) == 40
    classes = {"glue-mnli": [0, 2]}.get(name, [0, 1])
    assert task.labels.unique().tolist() == classes
    for seed, size in ((0, 60), (TUNING_SEEDS[0], 54)):
        used = torch.cat([task.batch(seed, step)[3] for step in range(1, 9)])
        assert len(used) == 64 and size <= 64
    ids, mask, kinds, _ = task.batch(0, 1)
    assert ids.shape == mask.shape == kinds.shape and (kinds.max() == 1) == (name != "glue-sst2")
    model = task.model()
    assert model.training and model.config.num_labels == len(task.classes) and math.isfinite(task.evaluate(model.eval())["val_loss"])


@pytest.mark.slow
def test_an_epoch_has_every_text_once_and_tuning_holds_out(bert):
    task = tasks.get("glue-rte")
    task._tokens = lambda texts, labels: (torch.tensor([task.train.index(t) for t in texts]),)
    task.train = [(str(i),) for i in range(60)]
    for seed, count in ((0, 60), (TUNING_SEEDS[0], 54)):
        drawn = torch.cat([task.batch(seed, step)[0] for step in range(1, 31)])[: 4 * count]
        epochs = drawn.split(count)[: 240 // count]
        assert all(sorted(epoch.tolist()) == list(range(count)) for epoch in epochs)
        assert epochs[0].tolist() != epochs[1].tolist()


@pytest.mark.slow
def test_glue_files_that_cannot_be_used_are_refused(bert):
    file = bert / "glue/RTE/dev.tsv"
    file.write_text("sentence\tlabel\nx\t0\n")
    with pytest.raises(RuntimeError, match="has no column sentence1, sentence2; it has sentence, label"):
        glue.RTE()
    file.write_text("index\tsentence1\tsentence2\tlabel\n0\ta\tb\t?\n")
    with pytest.raises(RuntimeError, match="has no line with one of the labels entailment, not_entailment"):
        glue.RTE()
    file.unlink()
    with pytest.raises(RuntimeError, match=r"dev\.tsv is missing; download RTE of GLUE"):
        glue.RTE()


def test_evaluation_moves_its_data_to_the_model():
    class Probe(torch.nn.Linear):
        pass

    with torch.device("meta"):
        model = Probe(2, 2)
    assert [t.device.type for t in base.to_model(model, torch.ones(1), torch.ones(2))] == ["meta", "meta"]
    for name in ("digits", "gpt", "lm", "cifar", "glue", "hf", "sentiment", "translation"):
        assert importlib.import_module(f"bench.accuracy.tasks.{name}").to_model is base.to_model
