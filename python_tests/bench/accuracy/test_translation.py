"""Translation: catalogs are read and cleaned, the splits are apart, the decoder does not look ahead, greedy is teacher-forced argmax."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

import pytest
import torch

import nmkernels as nm
from bench.accuracy import catalogs, data
from bench.accuracy.catalogs import BEGIN, END, LONGEST, PAD, Pair
from bench.accuracy.tasks import translation
from python_tests.bench.accuracy.conftest import deb, trained

WORDS = {
    "the": "die", "a": "eine", "file": "Datei", "page": "Seite", "line": "Zeile", "open": "öffnen", "close": "schließen",
    "delete": "löschen", "new": "neue", "old": "alte", "first": "erste", "last": "letzte", "and": "und",
}  # fmt: skip
"""The language of the tests."""


def sentences() -> list[tuple[str, str]]:
    """Two hundred texts of three to six words with their translations."""
    nouns, which, verbs = ("file", "page", "line"), ("new", "old", "first", "last"), ("open", "close", "delete")
    one = [f"{verb} the {adjective} {noun}" for verb, adjective, noun in itertools.product(verbs, which, nouns)]
    two = [f"{first} and {verb} the last {noun}" for first, verb, noun in itertools.product(one, verbs, nouns)]
    return [(text, " ".join(WORDS[word] for word in text.split())) for text in (one + two)[:200]]


def mo(texts: dict[str, str]) -> bytes:
    """A compiled catalog: magic number, version, count, where the two tables of (length, offset) are; then texts that end with NUL."""
    rows = sorted((key.encode(), value.encode()) for key, value in texts.items())
    at, tables, body = 28 + 16 * len(rows), [b"", b""], b""
    for side in (0, 1):
        for row in rows:
            tables[side] += struct.pack("<II", len(row[side]), at + len(body))
            body += row[side] + b"\0"
    return struct.pack("<7I", 0x950412DE, 0, len(rows), 28, 28 + 8 * len(rows), 0, 0) + tables[0] + tables[1] + body


def package(path: Path, texts: dict[str, str]) -> Path:
    """A Debian package with a German catalog and a French one."""
    header = "Content-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=2; plural=(n != 1);\n"
    catalog = {"de": mo({"": header, **texts}), "fr": mo({"": header, "yes it is": "oui"})}
    return deb(path, {f"./usr/share/locale/{name}/LC_MESSAGES/{path.stem}.mo": content for name, content in catalog.items()})


def test_texts_are_cleaned(tmp_path):
    one = package(
        tmp_path / "one.deb",
        {
            "menu\x04Save <b>_As</b>\n now": "Jetzt &speichern  unter",
            "%d old file\x00%d old files": "%d alte Datei\x00%d alte Dateien",
            "Word": "ein einziges Wort",
            "same in both": "same in both",
            "no translation here": "",
            "100 % = 1,000 : 3": "Hundert Prozent",
            "is it": "ist das denn wirklich und wahrhaftig so",
            "long " * 26: "lang " * 26,
        },
    )
    other = package(tmp_path / "two.deb", {"Save As now": "anders", "fine ~words": "gute Wörter"})
    assert catalogs.pairs({"b": other, "a": one}) == [
        Pair("a", "%d old file", "%d alte Datei"),
        Pair("a", "Save As now", "Jetzt speichern unter"),
        Pair("b", "fine words", "gute Wörter"),
    ]


def test_nothing_that_is_judged_was_seen_in_training():
    found = [Pair(package, f"{s}{end}", t) for package in ("git", "mc-data") for s, t in sentences() for end in ("", "!", " (2)")]
    found += [Pair("git", "-x an option", "eine Option"), Pair("mc-data", "-y an option", "noch eine")]
    found += [Pair("mc-data", f"other {s}", f"andere {t}") for s, t in sentences()]
    parts = catalogs.split(found)
    seen = {catalogs.letters(text) for pair in parts["train"] for text in pair[1:]}
    assert all(parts.values()) and {pair.package for pair in parts["train"]} == {"git"}
    for name in ("val", "test", "packages"):
        assert not any(catalogs.letters(text) in seen or pair.source[0] == "-" for pair in parts[name] for text in pair[1:])
    assert {p.package for p in parts["packages"]} == {"mc-data"} and len(parts["packages"]) >= 200
    assert not {catalogs.letters(p.source) for p in parts["val"]} & {catalogs.letters(p.source) for p in parts["test"]}


# ---- the model


@pytest.fixture
def small() -> translation.Transformer:
    torch.manual_seed(0)
    return translation.Transformer(vocabulary=24, width=16, layers=2, heads=2).eval()


def test_the_decoder_sees_no_later_token_and_no_padding(small):
    source, target = torch.randint(3, 24, (4, 7)), torch.randint(3, 24, (4, 9))
    logits = small(source, target)
    changed = target.clone()
    changed[:, 5:] = END
    assert torch.allclose(small(source, changed)[:, :5], logits[:, :5], atol=1e-5)
    assert not torch.allclose(small(source, changed)[:, 5:], logits[:, 5:], atol=1e-2)
    padded = torch.nn.functional.pad(source, (0, 3), value=PAD)
    assert torch.allclose(small(padded, target), logits, atol=1e-5)
    assert not torch.allclose(small(source.flip(1), target), logits, atol=1e-2)


def test_greedy_translations_are_the_likeliest_tokens(small):
    source = torch.randint(3, 24, (16, 7))
    weight = torch.randn(24, 16)  # a fresh tied head repeats the last token for ever
    weight[END] *= 3  # so that some end early
    small.head.weight = torch.nn.Parameter(weight)
    ids = small.translate(source, longest=12)
    assert (ids[:, 0] == BEGIN).all() and ids.shape[1] <= 12
    likeliest = small(source, ids[:, :-1]).argmax(-1)
    going = (ids[:, :-1] != END).cumprod(1).bool()
    assert torch.equal(ids[:, 1:][going], likeliest[going]) and (ids[:, 1:][~going] == PAD).all()
    assert 0 < int((~going).sum()) < going.numel()


# ---- the task


@pytest.fixture
def task(tmp_path, monkeypatch) -> translation.EnglishToGerman:
    pytest.importorskip("tokenizers")
    pytest.importorskip("sacrebleu")
    texts, other = sentences()[:160], sentences()[160:]
    packages = {"git": package(tmp_path / "git.deb", dict(texts)), "mc-data": package(tmp_path / "mc-data.deb", dict(other))}
    monkeypatch.setattr(data, "files", lambda name: packages)
    monkeypatch.setattr(data, "folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(catalogs, "TEST", 20)
    return translation.EnglishToGerman()


def test_batches_and_cached_tokens(task, monkeypatch):
    train = task.splits["train"]
    assert 100 < len(train) < 160 and len(task.splits["packages"]) == 40
    assert "train" not in task.texts and task.tokenizer.get_vocab_size() < catalogs.VOCABULARY
    source, target = task.batch(1, 5)
    assert all(map(torch.equal, (source, target), task.batch(1, 5)))
    assert not all(torch.equal(target, task.batch(*other)[1]) for other in ((1, 6), (2, 5), (1, 5 + translation.POOL)))
    assert (target[:, 0] == BEGIN).all() and ((target == END).sum(1) == 1).all() and source.shape[1] < LONGEST
    longest = [(task.batch(1, step)[1] != PAD).sum(1) for step in range(20)]
    assert sum(int(x.max() - x.min()) for x in longest) < 20 * 2
    pair, split = task.texts["test"][0], task.splits["test"]
    assert task.tokenizer.decode(split.target[0].tolist()).strip() == pair.target
    monkeypatch.setattr(catalogs, "pairs", lambda packages: pytest.fail("read again"))
    again = translation.EnglishToGerman()
    assert again.digest == task.digest and torch.equal(again.splits["train"].source, train.source)


@pytest.mark.slow
def test_linear_layers_become_sparse_and_learn(task):
    torch.manual_seed(0)
    model = task.model()
    sparse = nm.sparsify_(model, nm.recipes.SRSTE("1:8"))
    assert len(sparse.layers) == 22 and sum(p.numel() for p in model.parameters()) == 361_728
    optimizer = sparse.attach(nm.optim.MaskedAdamW(model.parameters(), lr=1e-3))
    before = task.evaluate(model.eval(), tuning=True)
    trained(task, model, optimizer, 4)
    assert task.evaluate(model, tuning=True)["val_loss"] < before["val_loss"]


@pytest.mark.slow
def test_evaluation_translates(task, monkeypatch):
    monkeypatch.setattr(translation, "WORDS", 3)
    result = task.evaluate(task.model().eval())
    assert set(result) == {"val_loss", "bleu"} and 0 <= result["bleu"] <= 100
    given = iter([task.splits["test"].target])
    right = task.model()
    monkeypatch.setattr(right, "translate", lambda source: next(given)[task.splits["test"].order(torch.arange(len(source)))])
    assert task.bleu(right, "test") == pytest.approx(100)
