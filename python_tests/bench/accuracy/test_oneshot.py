"""One-shot cells: a tiny one runs from end to end, cells with rows are skipped, and the guide's tables show the committed rows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nmkernels as nm
from bench.accuracy import __main__ as command
from bench.accuracy import layers, oneshot, rounding
from bench.accuracy import oneshot_page as page
from bench.accuracy.oneshot import Cell
from bench.accuracy.rows import load_lines
from bench.accuracy.tasks.pretrained import PretrainedGPT
from bench.accuracy.worker import learning_rate
from bench.rows import typed

pytestmark = pytest.mark.filterwarnings("ignore:prune_.*fewer than 2 tokens")

TINY = Cell("gpt", "2:4", "admm", "held", 8)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PretrainedGPT:
    """A byte GPT of two layers instead of the plan's."""
    (tmp_path / "text.txt").write_bytes(b"def f(x): return x + 1\n" * 400)
    made = PretrainedGPT(32, 2, 16, pretraining=4, text=str(tmp_path / "text.txt"), folder=tmp_path)
    monkeypatch.setattr(oneshot, "model_of", {"gpt": made}.get)
    return made


def test_a_cell_prunes_tunes_and_evaluates(tiny: PretrainedGPT) -> None:
    row = oneshot.run(TINY, steps=2)
    assert row.key == TINY.key and (row.steps, row.tokens) == (2, 8 * 16) and 0 < row.error < 1 and math.isnan(row.cosine)
    assert oneshot.run(TINY, steps=2).loss == row.loss != oneshot.run(replace(TINY, seed=1), steps=2).loss
    pruned = oneshot.run(replace(TINY, recipe=""))
    assert pruned.steps == 0 and pruned.loss != row.loss and pruned.error == row.error
    dense = oneshot.run(Cell("gpt", "dense", "dense"))
    assert dense.loss == round(tiny.evaluate(tiny.model())["val_loss"], 5) and math.isnan(dense.error) and dense.tokens == 0


@pytest.mark.parametrize("method", ["dense", "wanda"])
@pytest.mark.parametrize("recipe", ["srste", "mdgf"])
def test_recipes_start_from_dense_and_from_pruned_weights(
    method: str, recipe: str, tiny: PretrainedGPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.nn.Module] = []
    monkeypatch.setattr(tiny, "evaluate", lambda model: seen.append(model) or {"val_loss": 1.0})
    row = oneshot.run(Cell("gpt", "1:4", method, recipe, 8 if method != "dense" else 0), steps=2)
    assert row.steps == 2 and math.isnan(row.error) == (method == "dense")
    weights = [p for name, p in seen[0].named_parameters() if "blocks" in name and p.dim() == 2]
    assert len(weights) == 8 and all(nm.ops.is_nm(w.detach(), "1:4") for w in weights)


def test_training_starts_from_the_same_batches(tiny: PretrainedGPT) -> None:
    a, b = (tiny.batch(0, 3)[0] for _ in range(2))
    assert a.equal(b) and not a.equal(tiny.batch(1, 3)[0]) and len(tiny.calibration(20)) == 2
    model, rates = tiny.model(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    oneshot.train(tiny, model, optimizer, tiny.settings, 3, 0)
    assert rates == [learning_rate(tiny.settings, tiny.settings.lr, step, 3) for step in (1, 2, 3)] and not model.training


def test_cells_with_rows_are_skipped(tiny: PretrainedGPT, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["prune", "--models", "gpt", "--cells", "gpt/dense/dense/-/*", "gpt/2:4/w*/-/*", "--out", str(tmp_path / "rows.csv")]
    torch.set_num_threads(1)
    assert command.main(words) == 0 and "[2/2] gpt/2:4/wanda/-/128/0: loss " in capsys.readouterr().out
    assert command.main(words) == 0 and capsys.readouterr().out == ""
    assert command.main([*words, "--again", "--list"]) == 0 and len(capsys.readouterr().out.splitlines()) == 2
    rows = oneshot.load(tmp_path / "rows.csv")
    assert [row.method for row in rows] == ["dense", "wanda"] and rows[1].pattern == "2:4" and rows[0].loss > 0


def test_the_plan_has_each_cell_once() -> None:
    keys = [cell.key for cell in oneshot.plan()]
    assert len(keys) == len(set(keys)) and "sentiment/1:4/admm/held/640/2" in keys and "smollm2/2:4/admm/-/32/0" in keys


@pytest.mark.parametrize("name", layers.METHODS)
def test_layers_are_measured(name: str) -> None:
    rows = {row.metric: row for row in layers.measure(name, 64, repeats=1)}
    assert all(row.p50 >= 0 for row in rows.values()) and len(rows) == (1 if name in ("matmul", "hessian") else 3)


def test_the_loop_over_columns_is_sparsegpt() -> None:
    w, h = layers.problem(64)
    solved = layers.solve(nm.prune.SparseGPT(), w, h, 1000, nm.Pattern("2:4"))[0].dense()
    torch.testing.assert_close(layers.columns(w, h, nm.Pattern("2:4"), block=16), solved, rtol=1e-3, atol=1e-5)


def test_tables_show_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blank = dict.fromkeys(oneshot.COLUMNS, "0")
    (row,) = typed(oneshot.CellRow, [blank | {"recipe": ""}])
    dense = replace(row, model="gpt", pattern="dense", method="dense", loss=2.0, accuracy=math.nan, machine="AMD, 1 threads")
    pruned = [replace(dense, pattern="2:4", method=method, sequences=128, loss=loss) for method, loss in (("wanda", 2.5), ("admm", 2.25))]
    tuned = [replace(pruned[1], recipe="held", seed=seed, steps=2, loss=2.125 + seed / 4) for seed in (0, 1)]
    for one in (dense, *pruned, *tuned):
        oneshot.append(one, tmp_path / "rows.csv")
    guide, rest = tmp_path / "oneshot.md", (tmp_path, tmp_path / "rows.csv", tmp_path / "none.csv")
    guide.write_text("".join(f"# {name}\n{page.begin(name)}\nold\n{page.END}\n" for name in page.texts([], [])))
    (tmp_path / "quantized.md").write_text("no marker")
    assert page.write(True, *rest) == 1 and "run: python -m bench.accuracy report" in capsys.readouterr().out
    assert page.write(False, *rest) == 0 == page.write(True, *rest)
    text = guide.read_text()
    assert "| byte GPT, loss, 2:4 | 2.000 |  | 2.500 |  | **2.250** |" in text and "old" not in text
    assert "| ADMM → masks held | **2.250** (2.125 to 2.375) |" in text and "*AMD, 1 threads;" in text


def test_the_guides_show_the_committed_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert page.write(check=True) == 0, capsys.readouterr().out


def test_rounding_in_both_orders(tiny: PretrainedGPT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "model_of", {"gpt": tiny}.get)
    monkeypatch.setattr(rounding, "SEQUENCES", {"gpt": 8})
    rounding.measure(["gpt"], tmp_path / "rows.csv")
    rows = {(row["method"], row["first"], row["values"]): row for row in rounding.load(tmp_path / "rows.csv")}
    pruned = {(method, "prune" if values else "", values) for method in ("wanda", "admm") for values in rounding.VALUES}
    others = (("wanda", "round"), ("admm", "data"), ("admm", "together"))
    assert set(rows) == {("", "", values) for values in rounding.VALUES} | pruned | {(*o, v) for o in others for v in ("int8", "int4")}
    loss = {key: float(row["loss"]) for key, row in rows.items()}
    assert loss["", "", ""] == pytest.approx(tiny.evaluate(tiny.model())["val_loss"], abs=1e-5)
    assert abs(loss["", "", "int8"] - loss["", "", ""]) < abs(loss["", "", "int4"] - loss["", "", ""]) != 0
    assert loss["wanda", "prune", "int4"] != loss["wanda", "round", "int4"] != loss["wanda", "", ""]
    size = {key: int(row["bytes"]) for key, row in rows.items() if row["first"] != "round"}
    assert size["", "", ""] > size["wanda", "", ""] > size["wanda", "prune", "int8"] > size["wanda", "prune", "int4"] > 0
    for first in ("data", "together"):
        assert abs(loss["admm", first, "int4"] - loss["admm", "", ""]) < loss["admm", "prune", "int4"] - loss["admm", "", ""]
        assert size["admm", first, "int4"] == size["admm", "prune", "int4"]
    assert all(line in rounding.text(list(rows.values())) for line in ("| dense |", "| 2:4, ADMM |", "rounded first"))


def test_integers_of_embedding_and_head(tiny: PretrainedGPT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "model_of", {"gpt": tiny}.get)
    monkeypatch.setattr(rounding, "SEQUENCES", {"gpt": 8})
    monkeypatch.setattr(rounding, "BOTH", ("tokens", "lm_head"))
    rounding.measure_embeddings("gpt", tmp_path / "rows.csv")
    rows = load_lines(tmp_path / "rows.csv")
    size = {(row["pattern"], row["values"], row["embeddings"]): int(row["bytes"]) for row in rows}
    assert len(size) == len(rounding.BODIES) * len(rounding.VALUES)
    for body in rounding.BODIES:
        assert size[(*body, "")] > size[(*body, "int8")] > size[(*body, "int4")]
    assert size["dense", "", "int8"] > size["2:4", "", "int8"] > size["2:4", "int8", "int8"] > size["2:4", "int4", "int8"]
    assert "| 2:4, int4 | " in rounding.embeddings_text(tmp_path / "rows.csv")
