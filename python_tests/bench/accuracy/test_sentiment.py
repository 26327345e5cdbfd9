"""The sentiment task on a stand-in checkpoint of two layers and sixty snippets, in the published files' formats."""

from __future__ import annotations

import json
import zipfile

import pytest
import torch

import nmkernels as nm
from bench.accuracy import data
from bench.accuracy.tasks import sentiment
from python_tests.bench.accuracy.conftest import tar, trained

GOOD, BAD = ("great", "funny", "warm"), ("dull", "flat", "cold")


def lines(count: int = 30) -> list[str]:
    """A file sorted by class, with one text twice and one that is neither good nor bad."""
    rated = [(2.5, f"{GOOD[i % 3]} film number {i} {'very ' * (i % 7)}great") for i in range(count)]
    rated += [(-2.5, f"{BAD[i % 3]} film number {i} {'very ' * (i % 7)}dull") for i in range(count)]
    return [f"{i}\t{rating}\t{text}" for i, (rating, text) in enumerate([*rated, (-1.5, rated[-1][1]), (0.2, "flat film")])]


@pytest.fixture
def sdist(tmp_path):
    path = tmp_path / "vader.tar.gz"
    inner = tar({"hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt": "\r\n".join(lines()).encode()}, "w:gz")
    path.write_bytes(tar({"vader/additional_resources/hutto_ICWSM_2014.tar.gz": inner}, "w:gz"))
    return path


def wheel(path) -> None:
    """A random BERT of 2 layers, and a tokenizer by words."""
    import tokenizers
    import transformers
    from safetensors.torch import save

    words = ["[PAD]", "unused", "[UNK]", "[CLS]", "[SEP]", *sorted({word for line in lines() for word in line.split("\t")[2].split()})]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = [(word, words.index(word)) for word in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": len(words)}
    torch.manual_seed(1)
    weights = transformers.BertModel(transformers.BertConfig(**sizes)).state_dict()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (
            ("model/1_Pooling/config.json", "{}"),
            ("model/config.json", json.dumps(sizes)),
            ("model/tokenizer.json", tokenizer.to_str()),
            ("model/model.safetensors", save(weights)),
        ):
            archive.writestr(f"minilm/{name}", content)


@pytest.fixture
def task(tmp_path, monkeypatch, sdist):
    pytest.importorskip("transformers")
    wheel(tmp_path / "minilm.whl")
    monkeypatch.setenv(data.VARIABLE, str(tmp_path))
    named = ((sentiment.WHEEL, tmp_path / "minilm.whl"), (sentiment.SDIST, sdist))
    sources = tuple(data.Source(name, "0", path.name, path.stat().st_size, "") for name, path in named)
    monkeypatch.setitem(data.SOURCES, "sentiment", sources)
    for name, value in (("TEST", 12), ("VALIDATION", 10), ("BATCH", 4), ("SORTED", 3)):
        monkeypatch.setattr(sentiment, name, value)
    return sentiment.Sentiment()


def test_snippets(sdist):
    texts = sentiment.snippets(sdist)
    assert len(texts) == len(dict(texts)) == 60 and sum(good for _, good in texts) == 30
    assert 8 <= sum(good for _, good in texts[:30]) <= 22 and all(("great" in text) is good for text, good in texts)


def test_missing_data_is_an_error_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv(data.VARIABLE, str(tmp_path))
    with pytest.raises(RuntimeError, match=r"python -m bench.accuracy fetch sentiment \(86.0 MB"):
        sentiment.Sentiment()


@pytest.mark.slow
def test_batches_are_epochs_of_texts_of_like_length(task):
    assert [len(part) for part in (task.test, task.validation, task.train)] == [12, 10, 38]
    seen = []
    for step in range(57):  # six epochs, nineteen times three batches
        ids, mask, labels = task.batch(7, step)
        assert ids.shape == mask.shape and ids.shape[0] == len(labels) == 4 and mask.sum(1).max() == ids.shape[1]
        assert all(torch.equal(a, b) for a, b in zip(task.batch(7, step), (ids, mask, labels), strict=True))
        seen += [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)]
    train = sorted(task.ids[i].tolist() for i in task.train)
    assert sorted(row.tolist() for row in seen) == sorted(6 * train)
    assert not all(torch.equal(a, b) for a, b in zip(task.batch(7, 0), task.batch(8, 0), strict=True))


@pytest.mark.slow
def test_model_equals_the_checkpoint(task):
    from transformers import BertConfig, BertModel

    model = task.model().eval()
    sizes = {k: getattr(model.config, k) for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
    torch.manual_seed(1)
    whole = BertModel(BertConfig(**sizes, vocab_size=model.config.vocab_size + 2)).eval()
    ids, mask, _ = task.batch(0, 0)
    original = torch.where(ids > 0, ids + 2, ids)  # "unused" and "[UNK]" were left out
    mine, theirs = (m(input_ids=i, attention_mask=mask).last_hidden_state for m, i in ((model.bert, ids), (whole, original)))
    assert torch.equal(mine, theirs)


@pytest.mark.slow
def test_encoder_is_sparse_and_learns(task):
    torch.manual_seed(0)
    model = task.model()
    handle = nm.sparsify_(model, nm.recipes.SRSTE("1:4", decay=2e-4), task.filter_fn)
    assert len(handle.layers) == 12 and all(".encoder." in name for name in handle.layers)
    optimizer = handle.attach(nm.optim.MaskedAdamW(model.parameters(), lr=2e-3))
    trained(task, model, optimizer, 30)
    handle.finish()
    result = task.evaluate(model.eval())
    assert result["accuracy"] > 80 and result["val_loss"] < 0.6
    assert task.evaluate(model, tuning=True) != result and task.digest
