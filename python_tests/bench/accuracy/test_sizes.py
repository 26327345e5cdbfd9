"""Byte GPTs of several widths: their text, their bytes, and what stands beside a sparse one of as many."""

from __future__ import annotations

import math
import sys
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import nmkernels as nm
from bench.accuracy import __main__ as command
from bench.accuracy import data, sizes, studies, tasks, worker
from bench.accuracy.rows import load
from bench.accuracy.sizes import Point
from bench.accuracy.spec import DENSE, Case, RunSpec
from bench.accuracy.stats import estimate
from bench.accuracy.tables import Tables
from bench.accuracy.tasks import base, code, pretrained
from examples.train_gpt.data import make_corpus
from examples.train_gpt.model import GPTConfig
from python_tests.bench.accuracy.conftest import made
from python_tests.house.paths import ROOT


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path) -> code.Code:
    """The task of width 32 on a text of a few kilobytes, with an evaluation of a few windows."""
    text = make_corpus({str(i): f"def f{i}(x): return x + {i}\n".encode() * 40 for i in range(40)}, "made up")
    monkeypatch.setattr(code, "corpus", lambda: text)
    monkeypatch.setattr(code.Code, "windows", 16)
    monkeypatch.setattr(worker, "TRAINED", tmp_path)
    base.get.cache_clear()
    yield tasks.get("code-32")
    base.get.cache_clear()


def test_equal_files_are_read_once(tmp_path, monkeypatch):
    for name, files in (("one", {"a.py": b"x = 1\n", "b.txt": b"no"}), ("two", {"c.py": b"x = 1\n", "d.py": b"", "e.py": b"y = 2\n" * 9})):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for file, content in files.items():
                archive.writestr(file, content)
    monkeypatch.setattr(data, "files", lambda task: {"two": tmp_path / "two", "one": tmp_path / "one"})
    code.corpus.cache_clear()
    found = code.corpus()
    code.corpus.cache_clear()
    assert found.files == 2 and bytes([*found.train, *found.val]) == b"x = 1\n\n" + b"y = 2\n" * 9


def test_a_run_is_judged_in_integers_too(small):
    rows = {m: worker.run(RunSpec(Case("code-32", m, "2:4", 3), 1e-2, 0)).row for m in (DENSE, "srste-2e-1")}
    for row in rows.values():
        losses = row.val_loss, row.int8, row.int4
        assert len({*losses}) == 3 and all(abs(x - row.val_loss) < 0.05 for x in losses)
    tuning = worker.run(RunSpec(Case("code-32", DENSE, "2:4", 3), 1e-2, 100)).row
    assert math.isnan(tuning.int8) and tuning.val_loss != rows[DENSE].val_loss


@pytest.mark.parametrize("pattern", ["2:4", "1:4"])
def test_the_plain_model_has_the_weights_that_are_deployed(small, pattern):
    model = small.model()
    handle = nm.sparsify_(model, f"srste:{pattern}", small.filter_fn)
    with handle.deployable():
        plain, rounded = small.plain(model), small.in_integers(model, "int4")
        torch.testing.assert_close(plain(small.batch(0, 1)[0]), model(small.batch(0, 1)[0]))
    assert {name for name, module in plain.named_modules() if nm.ops.is_nm(getattr(module, "weight", torch.ones(1, 4)), pattern)} == {
        *handle.layers
    }
    assert small.plain(model, torch.bfloat16).lm_head.weight.equal(model.lm_head.weight.bfloat16().float())
    kinds = {name: module.weight for name, module in rounded.named_modules() if isinstance(module, nm.CompressedLinear)}
    assert {name for name, w in kinds.items() if str(w.pattern) == pattern} == {*handle.layers} and len(kinds) == 10


@pytest.mark.parametrize("pattern", [DENSE, "2:4"])
@pytest.mark.parametrize("values", sizes.VALUES)
def test_bytes_are_those_of_the_stored_tensors(small, pattern, values):
    model = small.model()
    if pattern != DENSE:
        nm.sparsify_(model, f"ste:{pattern}", small.filter_fn).finish(allow_unused=True)
    if pattern != DENSE or values:
        names = ("blocks", *code.IN_8_BITS) if pattern == DENSE and values == "int8" else code.IN_8_BITS
        model = nm.compress_(model, values=values or "float") if pattern != DENSE else model
        if values:
            nm.compress_(model, values="int8", dense=names)
            if pattern == DENSE and values == "int4":
                nm.compress_(model, values="int4", dense=("blocks",))
    stored = sum(t.numel() * (2 if t.is_floating_point() else t.element_size()) for t in (*model.parameters(), *model.buffers()))
    assert sizes.sizes(32, pattern, values)[0] == stored


def point(method: str, size: int, losses: list[float], values: str = "") -> Point:
    return Point(64, method, DENSE if method == DENSE else "2:4", values, size, size, 2.0 * size, dict(enumerate(losses)))


def test_a_dense_model_of_as_many_bytes_is_between_two():
    dense = [point(DENSE, 100, [3.0, 3.2, 3.4]), point(DENSE, 400, [2.0, 2.2, 2.4]), point(DENSE, 400, [9.0] * 3, "int4")]
    sparse = point("asp", 200, [2.4, 2.7, 2.7])
    found = sizes.beside(sparse, [*dense, sparse], sizes.whole)  # half way by the logarithm
    assert found == estimate([2.4 - 2.5, 2.7 - 2.7, 2.7 - 2.9]) and found.n == 3
    assert sizes.beside(sparse, [*dense, sparse], sizes.training) == found
    for size in (99, 401):
        assert sizes.beside(point("asp", size, [2.0] * 3), dense, sizes.whole).n == 0, "nothing is extrapolated"


@pytest.fixture
def shown() -> Tables:
    """The rows of all sizes and lengths: dense loses less the wider it is, and sparse models lose more the longer they train."""
    rows = []
    for name in (*sizes.STUDIES_OF_SIZES, *(f"length-{steps}" for steps in studies.LENGTHS)):
        for task in studies.STUDIES[name].tasks:
            for case in studies.cases(studies.STUDIES[name], task):
                width = int(task.partition("-")[2] or 64)
                extra = 0 if case.method == DENSE else 0.01 * math.log10(case.steps)
                for lr in (5.5e-4, 1e-3, 1.7e-3, 3e-3):
                    for seed in (100, 0, 1, 2):
                        loss = 3 - math.log10(width) + extra + abs(math.log(lr / 1e-3)) + 0.001 * seed * (seed < 100)
                        rows.append(made(case, lr, seed, loss, int8=loss + 0.01, int4=loss + 0.1, training_flops=1e9 * width**2))
    return Tables(rows)


def test_the_table_and_the_words(shown):
    text = sizes.text(shown)
    assert text.count("| `dense` |") == 15 and text.count("2:4 |") == 27 and text.count("1:4 |") == 6
    line = next(line for line in text.splitlines() if line.startswith("| `asp` 2:4 | 64 | bf16 |"))
    own, dense = 3 - math.log10(64) + 0.01 * math.log10(20_000), 3 - math.log10(48)
    assert f"| {own + 0.001:.3f} ± 0.002 |" in line and f"| {own - dense:+.3f} ± 0.000 |".replace("-", "−") in line
    assert sizes.summary(shown).startswith("in bfloat16 −0.0") and sizes.summary(shown).count("width 128") == 3
    said = sizes.outcome(shown)
    level = Tables([replace(r, val_loss=r.val_loss - 0.01 + 0.04 * r.seed) if r.method != DENSE else r for r in shown.rows])
    assert sizes.outcome(level).count("it is not known to differ (+") == 1, "three seeds show nothing level"
    assert "width 128, compared" in said and "in nats 0.08" in said and said.count(" lower in ") == 3 and said.count(" higher. ") == 2
    assert sizes.text(Tables([])) == sizes.summary(Tables([])) == sizes.outcome(Tables([])) == ""


def test_a_rate_at_an_end_of_those_tried_is_named(shown):
    names = (DENSE, "asp", "ste")
    assert shown.ends("code-64", "2:4", names) == "Of the rates 0.001 and 0.0017 the lowest was best for all: others may be better."
    moved = {1e-3: 1.7e-3, 1.7e-3: 1e-3}
    other = Tables(replace(r, lr=moved.get(r.lr, r.lr)) if r.method == "asp" else r for r in shown.rows)
    assert other.ends("code-64", "2:4", names).endswith(
        "the lowest was best for `dense`, the highest was best for `asp`: others may be better."
    )
    assert shown.ends("code-64", "2:4", ("ste",)) == ""


def test_where_the_sign_changes_is_said(shown):
    places = [(task, steps) for task, _, _, steps in shown.lengths()]
    assert places == [("code", 1000), ("code", 3000), ("code", 10_000), ("code-64", 20_000), ("code", 30_000)]
    assert shown.flips() == "" and "+0.040 ± 0.000" in shown.compared((DENSE, "asp"), shown.lengths(), DENSE)

    def moved(row, steps, by):
        return replace(row, val_loss=row.val_loss + by) if row.method == "asp" and row.steps <= steps else row

    assert Tables(moved(r, 3000, -0.1) for r in shown.rows).flips() == "`asp` ends below dense after 3,000 steps and above it after 10,000"
    assert Tables(moved(r, 30_000, -0.1) for r in shown.rows).flips() == "" == Tables([]).flips()
    level = [moved(r, 10_000, -0.04 + 0.1 * (r.seed == 1)) for r in shown.rows]
    assert Tables(level).flips() == "", "an interval around 0 is neither"


def test_figures_are_drawn(shown, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "figures"))
    import evidence

    for draw, words in ((evidence.what_it_buys, ["asp 1:4", "int4", "100 kB"]), (evidence.lengths, ["ste", "30,000 steps", "+0.04"])):
        text = draw(shown)
        assert all(f">{word}<" in text for word in words) and "nan" not in text
        assert draw(Tables([])) == ""
    sys.modules.pop("evidence")


def test_models_for_a_gpu_train_at_tiny_size(small, unforked, monkeypatch, tmp_path, capsys):
    for name in studies.GPU:
        kind = base._tasks[name]
        assert 0.8 < 12 * kind.config.layers * kind.config.width**2 / (1e6 * int(name[5:-1])) < 1.3
        monkeypatch.setattr(kind, "config", GPTConfig(width=32, layers=1, heads=2, context=16))
        monkeypatch.setattr(kind, "settings", replace(kind.settings, steps=4))
        monkeypatch.setattr(kind, "size", 2)
    torch.set_num_threads(1)
    words = ["run", "gpu-sizes", "gpu-smaller", "--seeds", "1", "--out", str(tmp_path / "rows")]
    assert command.main([*words, "--tasks", "code-2m", "code-1m", "--methods", DENSE, "asp", "--workers", "1"]) == 0
    rows = load(tmp_path / "rows")
    assert {(row.task, row.method) for row in rows} == {(t, m) for t in ("code-1m", "code-2m") for m in (DENSE, "asp")}
    assert all(row.lr == 1e-3 and row.seed == 0 and math.isfinite(row.int4) for row in rows), "one rate needs no search"


def test_a_pretrained_language_model_is_trained_on(monkeypatch, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes_ = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    task = object.__new__(pretrained.OnCode)
    task.dense, task.digest = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes_)), "made up"
    text = torch.arange(600, dtype=torch.int32) * 3 % 64
    task.ids = {"train": text, "val": text[:200]}
    for name, value in (("context", 16), ("size", 4), ("windows", 5), ("most", 2)):
        monkeypatch.setattr(pretrained.OnCode, name, value)
    monkeypatch.setattr(tasks, "get", lambda name: task)
    monkeypatch.setattr(worker, "TRAINED", tmp_path)
    losses = {}
    for method in studies.STUDIES["gpu-finetune"].methods:
        row = worker.run(RunSpec(Case("smollm2-code", method, "2:4", 30, beta2=0.95), 3e-3, 0)).row
        losses[method] = row.val_loss
    assert all(0 < loss < math.log(64) for loss in losses.values()) and len({*losses.values()}) == 4
    knows = lambda input_ids, use_cache: SimpleNamespace(logits=50.0 * F.one_hot((input_ids + 3) % 64, 64))  # noqa: E731
    assert task.loss(knows, task.batch(0, 1)) < 1e-3, "each token from those before it"
    pieces = SimpleNamespace(reader=lambda text, verbose: {"input_ids": [*map(ord, text)]})
    assert pretrained.OnCode._tokens(pieces, torch.arange(100, dtype=torch.uint8)).tolist() == list(range(100))
