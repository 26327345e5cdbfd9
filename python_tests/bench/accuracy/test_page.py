"""Tables, figures and the page that holds them."""

import dataclasses
import math

import pytest

from bench.accuracy import figures, page, tables, tasks, traces
from bench.accuracy.rows import RunRow
from bench.accuracy.tasks.base import settings
from bench.accuracy.worker import with_flops

S = settings("gpt")


def row(method="srste", pattern="2:4", seed=0, loss=2.0, lr=S.lr, steps=S.steps, **values):
    blank = {f.name: {"int": 0, "float": 0.0, "str": "x"}[f.type] for f in dataclasses.fields(RunRow)}
    known = {
        "optimizer": "adamw",
        "beta2": 0.999,
        "task": "gpt",
        "method": method,
        "pattern": pattern,
        "seed": seed,
        "val_loss": loss,
        "lr": lr,
        "steps": steps,
    }
    return RunRow(**{**blank, "done": steps, "status": "ok", **known, **values})


ROWS = [
    row("dense", "dense", 0, 1.5),
    row("dense", "dense", 1, 1.7),
    *(row("srste", p, s, 2.0 + s) for p in ("2:4", "1:8") for s in (0, 1, 2)),
    *(row("ste", "2:4", s, 2.1 + s + 0.001 * s) for s in (0, 1, 2)),
    row("ste", "1:8", 0, math.nan, status="diverged"),
    row("ste", "1:8", 1, 3.5),
]


def test_cells_are_means_with_paired_differences():
    text = tables.results(tables.shared(ROWS, "gpt"))
    head, _, dense, ste, srste = text.splitlines()
    assert head == "| method | 2:4 | 1:8 |"
    assert dense.startswith("| `dense` | 1.600 ± 0.100<br>n=2 |")
    assert srste.startswith("| `srste` | 3.000 ± 0.577<br>n=3 |")
    # paired: 0.1, 0.101, 0.102, far beyond its error though the losses themselves spread by one
    assert "3.101 ± 0.578<br>**+0.101 ± 0.001**<br>n=3" in ste
    assert ste.endswith("3.500<br>n=2<br>1 diverged |")


def test_only_runs_of_the_same_settings_are_compared():
    other = [row(loss=9.0, lr=S.lr * 2), row(loss=9.0, steps=7), row(loss=9.0, seed=100), row(loss=9.0, task="vit")]
    assert tables.shared([*ROWS, *other], "gpt").runs == tables.shared(ROWS, "gpt").runs


def test_tuned_runs_are_those_at_the_best_rate():
    rates = (S.start[0] / 4, S.start[0] / 2, *S.start)
    search = [row(seed=s, lr=lr, loss=abs(lr - S.start[0])) for s in (100, 101) for lr in rates]
    final = [row(seed=s, lr=S.start[0], loss=1.0) for s in (0, 1)]
    cases = tables.tuned([*search, *final, *ROWS], "gpt")
    assert [r.val_loss for r in cases.of("srste", "2:4").values()] == [1.0, 1.0]
    assert f"lr {S.start[0]:g}" in tables.results(cases, rates=True)


def test_flops_are_counted_by_the_rule():
    dense = with_flops(row("dense", "dense"))
    weights = 2 * 12 * 64 * 64 + 64 * 256
    assert dense.inference_flops == 2 * weights and dense.training_flops == 3 * 2 * weights * tasks.get("gpt").tokens * S.steps
    ste = with_flops(row("ste", "1:8"))
    assert ste.inference_flops == 2 * (weights - 2 * 12 * 64 * 64 * 7 / 8)
    early, late = (with_flops(row("step", "1:8", switch_step=t)).training_flops for t in (100, 500))
    assert early < late < dense.training_flops
    assert with_flops(row("dense", "dense", done=S.steps // 2)).training_flops == dense.training_flops / 2


def test_the_page_is_written_between_its_markers():
    text = "Before\n<!-- shared gpt -->\nold\n<!-- end -->\nbetween\n<!-- shared gpt srste dense -->\n<!-- end -->\nafter"
    new = page.render(text, ROWS)
    assert new.startswith("Before\n<!-- shared gpt -->\n\n| method") and "old" not in new and new.endswith("<!-- end -->\nafter")
    assert "`ste`" not in new[new.index("between") :] and page.render(new, ROWS) == new
    with pytest.raises(ValueError, match="nothing"):
        page.render("<!-- nothing gpt -->\n<!-- end -->", ROWS)
    for what in ["shared", "sharedaccuracy", "tuned", "tunedaccuracy", "costs", "switches", "names", "flips", "decays", "variance"]:
        assert page.piece(what, "gpt", [], []), "every table can be empty"


@pytest.mark.slow
def test_figures_are_the_same_bytes_again(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [with_flops(r) for r in [*ROWS, row("dense", "dense", 0, 1.4, steps=S.steps * 2)]]
    blank = {**dict.fromkeys(traces.COLUMNS, ""), "flip_rate_stride": "0.1", "v_mean": "1e-6"}
    traces.append([{**blank, "run": r.spec.key, "step": step} for r in ROWS for step in ("25", "50")], tmp_path, "gpt")
    first, second = (figures.draw(rows, tmp_path, tmp_path / folder, "gpt") for folder in "ab")
    assert {p.name for p in first} == {"gpt-sparsity.svg", "gpt-flips.svg", "gpt-moments.svg", "gpt-flops.svg"}
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_the_committed_page_shows_the_committed_rows():
    assert not page.stale(), "run: python -m bench.accuracy report"
