"""The page: cells, contrasts, comparisons at equal FLOPs, and a check that catches what the rows do not prove."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import jinja2
import pytest

from bench.accuracy import contrasts, costs, figures, page, rankings, tables, tasks, traces
from bench.accuracy.cells import Case, Cells, difference, mean
from bench.accuracy.rows import REPEATS, save
from bench.accuracy.spec import RunSpec
from bench.accuracy.stats import Estimate
from bench.accuracy.tasks import base
from bench.accuracy.worker import with_flops
from python_tests.bench.accuracy import fake_rows


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, task in fake_rows.registered():
        monkeypatch.setitem(base._tasks, name, task)
    base.get.cache_clear()
    yield
    base.get.cache_clear()


@pytest.fixture
def cells(known: None) -> Cells:
    return Cells([*fake_rows.rows(), *fake_rows.rows("sentiment", ("tune", "tuned"))])


def replaced(cells: Cells, method: str, seed: int, value: float) -> Cells:
    """The same rows, with another loss of one tuned run at 1:8 under AdamW."""
    lr = cells.search(Case("mlp", method, "1:8")).rate
    key = RunSpec("mlp", method, "dense" if method == "dense" else "1:8", seed, lr, 1000).key
    assert any(row.spec.key == key for row in cells.rows)
    status = "ok" if math.isfinite(value) else "diverged"
    return Cells([dataclasses.replace(r, val_loss=value, status=status) if r.spec.key == key else r for r in cells.rows])


def test_cells_are_tuned_and_paired_by_seed(cells):
    ours, theirs = (cells.tuned(Case("mlp", m, "1:8")) for m in ("step-25", "srste"))
    assert list(ours) == list(range(6)) and {row.lr for row in ours.values()} == {1e-2}
    delta = difference(ours, theirs)
    # the seeds' own noise, ten times a run's, is the same on both sides
    assert delta.mean == pytest.approx(0.05, abs=0.004) and delta.half < 0.01 < mean(ours).half + 0.005
    text = tables.results(cells, "mlp")
    assert "| method | 1:8 | 1:16 |" in text and "lr 0.01 (2, 2)" in text and "open" not in text and "T₀ 51 (t_min 6)" in text
    assert tables.results(cells, "mlp", optimizer="sgd").count("lr 0.1") == 4


def test_missing_and_diverged_seeds(cells):
    lost = replaced(cells, "step-25", 3, math.nan)
    delta = difference(lost.tuned(Case("mlp", "step-25", "1:8")), lost.tuned(Case("mlp", "srste", "1:8")))
    assert (delta.n, delta.lost) == (5, 1) and "1 diverged" in tables.results(lost, "mlp")
    assert "step-25" not in rankings.candidates(lost, "mlp", "1:8")
    few = Cells([row for row in cells.rows if row.seed not in (4, 5)])
    assert "n = 4 of 6" in tables.results(few, "mlp") and "4 of 6" in rankings.best_methods(few)
    assert contrasts.findings(few)["step-mlp"].verdict == "too few seeds yet (n = 4)"


def test_verdicts_of_primary_contrasts(cells):
    found = contrasts.findings(cells)
    assert len(found) <= 4 and list(found) == [c.name for c in contrasts.PRIMARY]
    assert found["gap-1:8"].estimate.mean == pytest.approx(-0.05, abs=0.006) and found["gap-1:8"].verdict == "no, less"
    assert found["step-mlp"].verdict == "no, worse" and found["step-mlp"].significant
    assert found["step-sentiment"].verdict == "no difference found" and not found["step-sentiment"].significant
    assert tables.primary(cells).count("**") == 2 * 3
    assert contrasts.findings(Cells([]))["gap-1:8"].verdict == "not run yet" and "**" not in tables.primary(Cells([]))


def test_the_plan_runs_what_the_primary_contrasts_need():
    for contrast in contrasts.PRIMARY:
        for _, case in contrast.terms:
            s = case.settings
            assert case.method in (s.sgd_methods if case.optimizer == "sgd" else s.methods)
            assert case.method == "dense" or case.pattern in s.patterns
            assert (s.start_sgd if case.optimizer == "sgd" else s.start) and {"tune", "tuned"} <= set(s.stages)


def test_an_open_search_is_not_tuned(cells):
    # a search that was given up: the loss fell at each of nine rates
    rates = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
    edge = [
        fake_rows.row(RunSpec("mlp", "srste", "1:8", seed, lr, 1000), 0.3 - 0.01 * i)
        for i, lr in enumerate(rates)
        for seed in (100, 101, 102)
    ]
    runs = [fake_rows.row(RunSpec("mlp", "srste", "1:8", seed, rates[-1], 1000), 0.2) for seed in range(6)]
    kept = [r for r in cells.rows if (r.method, r.pattern, r.optimizer) != ("srste", "1:8", "adamw")]
    opened = Cells([*kept, *edge, *runs])
    assert not opened.search(Case("mlp", "srste", "1:8")).closed
    assert "(8, 0) open" in tables.results(opened, "mlp")
    finding = contrasts.findings(opened)["step-mlp"]
    assert finding.verdict == "undecided: a rate lies at the edge of its search" and not finding.significant
    assert ", open" in rankings.best_methods(opened) and "1:8" not in rankings.best_methods(opened, brief=True)


def test_nothing_is_claimed_below_the_spread_of_repeats(cells):
    first = next(r for r in cells.rows if r.task == "mlp")
    moved = Cells(cells.rows, [dataclasses.replace(first, val_loss=first.val_loss + 0.07, machine="another")])
    assert moved.spread("mlp") == pytest.approx(0.07) and moved.spread("sentiment") == 0
    assert contrasts.findings(moved)["step-mlp"].verdict == "undecided: smaller than what another machine changes"
    assert "†" in tables.results(moved, "mlp") and "†" not in tables.results(cells, "mlp")
    assert "+0.07" in tables.repeats(moved) and "another" in tables.repeats(moved)


def test_phrases_follow_from_the_interval():
    assert rankings.in_words(Estimate(-0.5, 0.25, 6, 0.002), "x") == "ahead of x by 0.500 ± 0.250 (n = 6)"
    assert rankings.in_words(Estimate(0.2, 0.25, 6, 0.09), "x").startswith("not distinguishable from x (+0.200")
    assert rankings.in_words(Estimate(0.2, 0.1, 6, 0.01), "x", spread=0.3).startswith("not distinguishable")
    assert rankings.in_words(Estimate(0.2, 0.1, 3, 0.01), "x").startswith("not ranked")
    assert rankings.in_words(Estimate(math.nan, math.nan, 0, math.nan), "x") == "not compared with x yet"


def test_a_tally_counts_only_what_is_sure(cells):
    found = rankings.everywhere(cells, "step-25")
    delta = "`mlp` 1:8 (+0.049"
    assert delta in found.behind and not found.ahead and "`sentiment` 1:4" in found.level
    assert delta.replace("+", "−") in rankings.everywhere(cells, "srste", "step-25").ahead
    first = next(r for r in cells.rows if r.task == "mlp")
    moved = Cells(cells.rows, [dataclasses.replace(first, val_loss=first.val_loss + 0.07, machine="another")])
    assert delta in rankings.everywhere(moved, "step-25").level
    few = Cells([row for row in cells.rows if row.seed not in (4, 5)])
    assert "mlp" not in "".join(rankings.everywhere(few, "step-25"))


def test_runs_that_end_at_chance_are_counted(cells):
    def says(which):
        """With 50.5 % instead where ``which`` says."""
        known = [dataclasses.replace(r, accuracy=50.5 if which(r) else 80.0) for r in cells.rows]
        return rankings.at_chance(Cells(known), "mlp", 50)

    assert says(lambda r: False) == "none"
    assert (
        says(lambda r: r.method == "step" and r.pattern == "1:8" and r.seed in (0, 3)) == "2 of 6 of `step` at 1:8 (0 of 3 in the search)"
    )
    assert says(lambda r: r.method == "step" and r.pattern == "1:8") == "6 of 6 of `step` at 1:8 (3 of 3 in the search)"


def test_flops_are_compared_only_between_runs(cells):
    ours, dense = tables.curve(cells, Case("mlp", "srste", "1:8")), tables.curve(cells, Case("mlp", "dense", "dense"))
    assert set(ours) == set(range(6)) and sorted(ours[0]) == [0.75e9, 1.5e9, 3e9] and sorted(dense[0]) == [1e9, 2e9, 4e9]
    assert ours[0][1.5e9] < tables.at_flops(ours, 1e9)[0] < ours[0][0.75e9]
    assert tables.at_flops(ours, 4e9) == {} and tables.at_flops(ours, 0.7e9) == {}
    head, _, *body = tables.equal_flops(cells, "mlp", "1:8").splitlines()
    assert "4 × dense's FLOPs" in head and body[0].startswith("| `srste` | +0.09") and body[0].endswith("| – |")
    few = Cells([row for row in cells.rows if row.steps == 1000 or row.seed < 3 or row.seed >= 100])
    all_lengths, some = (text.count("n = 3 |") for text in (rankings.best_methods(cells), rankings.best_methods(few)))
    assert all_lengths == 0 and some >= 1, "a comparison on fewer seeds than the plan has says so"


def test_longer_runs(cells):
    found = rankings.longer(cells, "mlp", "1:8")
    assert found.method == "srste" and found.steps.startswith("+0.1") and found.steps.count("(n = 6)") == 3 and not found.overtaken
    assert found.flops.count("dense's of") == 2 and "4000" not in found.flops, "no sparse run reaches dense's longest"
    lines = tables.by_length(cells, "mlp", "1:8").splitlines()
    assert lines[0] == "| method | 1000 steps | 2000 steps | 4000 steps |" and lines[2].startswith("| `dense` | 0.3") and len(lines) == 7
    ahead = Cells(
        [
            dataclasses.replace(row, val_loss=row.val_loss - 0.2) if row.method == "srste" and row.steps == 1000 else row
            for row in cells.rows
        ]
    )
    found = rankings.longer(ahead, "mlp", "1:8")
    assert found.steps.startswith("−0.1") and found.overtaken
    assert rankings.longer(cells, "sentiment", "1:4") is None and tables.by_length(cells, "sentiment", "1:4") == tables.MISSING


def test_controls_and_rates(cells):
    text = tables.controls(cells, "mlp", "1:8")
    assert "| SR-STE at three times STEP's rate | 0.03 |" in text and "v not frozen" in text
    assert tables.by_rate(cells, "mlp", "1:8", ["step-25"], against="srste").count("n = 3") == 5
    assert rankings.same_rate(cells, "mlp", "1:8", "step-25").startswith("+0.0") and "SR-STE's best" in rankings.same_rate(
        cells, "mlp", "1:8", "step"
    )
    assert rankings.same_rate(cells, "mlp", "1:8", "mdgf") == "not compared yet"
    assert tables.smallest_and_best(cells, "mlp", "1:8") == [0.001, 0.01] and tables.in_short(1e-5) == "< 0.001"
    assert tables.rate_ratio(cells, "mlp", "1:8") == "dense training's (0.01 against 0.01)"
    assert "AdamW minus SGD | −0.05" in tables.gaps(cells, "mlp")


def test_remaining_runs_have_their_cost(cells):
    assert tables.progress(cells, "unknown") == tables.MISSING
    few = Cells([row for row in cells.rows if row.seed < 100])
    text = tables.progress(few, "mlp")
    assert "CPU-hours of one core" in text and "more if a search" in text and "--tasks mlp" in text


def test_rows_of_other_data_are_not_compared(cells):
    assert cells.mixed() == []
    other = Cells([dataclasses.replace(r, data="other") if r.method == "step-25" and r.seed == 0 else r for r in cells.rows])
    assert other.mixed() == ["mlp", "sentiment"]
    assert difference(*(other.tuned(Case("mlp", m, "1:8")) for m in ("step-25", "srste"))).n == 5


def test_the_ablation_is_paired_with_the_same_rate(cells):
    lower = [
        dataclasses.replace(row, beta2=0.99, val_loss=row.val_loss + 0.5)
        for row in cells.rows
        if (row.task, row.lr, row.steps, row.optimizer) == ("mlp", 1e-2, 1000, "adamw") and row.method in ("dense", "srste", "step")
    ]
    both = Cells([*cells.rows, *lower])
    assert "| `srste` | +0.500 ± 0.000<br>n = 6 |" in tables.betas(both, "mlp", 0.99)
    assert tables.ablation(both, "mlp", 0.99).startswith("all at lr 0.01:")
    assert tables.betas(cells, "mlp", 0.99) == tables.MISSING
    assert tables.autoswitch(both, 0.99).startswith("by its test 0, at T_min ") and "0.99" not in tables.switches(both, "mlp")


def test_flops_are_counted_by_the_rule():
    s = base.settings("gpt")
    row = lambda method, pattern, **more: fake_rows.row(RunSpec("gpt", method, pattern, 0, s.lr, s.steps), 2.0, switch_step=0, **more)  # noqa: E731
    dense = with_flops(row("dense", "dense"))
    weights = 2 * 12 * 64 * 64 + 64 * 256
    assert dense.inference_flops == 2 * weights and dense.training_flops == 3 * 2 * weights * tasks.get("gpt").tokens * s.steps
    ste = with_flops(row("ste", "1:8"))
    assert ste.inference_flops == 2 * (weights - 2 * 12 * 64 * 64 * 7 / 8)
    early, late = (with_flops(dataclasses.replace(row("step", "1:8"), switch_step=t)).training_flops for t in (100, 500))
    assert early < late < dense.training_flops
    assert with_flops(dataclasses.replace(row("dense", "dense"), done=s.steps // 2)).training_flops == dense.training_flops / 2


TEMPLATE = """# Page

{{ finding("gap-1:8") }} and {{ results("mlp") }}

{{ figure("rates", "loss against rate", rates_figure("mlp", "1:8", ["dense", "srste"])) }}
"""


@pytest.fixture
def written(cells: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    def digest_only(figure: figures.Figure, path: Path) -> bool:
        path.parent.mkdir(exist_ok=True)
        return bool(path.write_text(figure.digest, encoding="utf-8"))

    monkeypatch.setattr(figures, "draw", digest_only)  # matplotlib takes seconds; the slow test draws
    paths = tmp_path / "page.md", tmp_path / "README.md", tmp_path / "results"
    save(cells.rows, paths[2])
    save([], paths[2], REPEATS)
    paths[0].write_text(TEMPLATE, encoding="utf-8")
    assert {path.name for path in page.write(*paths)} == {"README.md", "rates.svg"}
    assert page.problems(*paths) == [] and page.write(*paths) == []
    return paths


def test_check_catches_what_the_rows_do_not_prove(written, cells):
    template, readme, folder = written
    text = readme.read_text(encoding="utf-8")
    readme.write_text(text.replace("0.413", "0.313"), encoding="utf-8")
    assert page.problems(*written) == [f"README.md {page.INSTEAD}"]
    page.write(*written)

    template.write_text(TEMPLATE + "\nSTEP is behind by 0.049, `0.5` is code.\n", encoding="utf-8")
    assert any("line 7: 0.049" in problem for problem in page.problems(*written))
    template.write_text(TEMPLATE, encoding="utf-8")

    moved = [dataclasses.replace(r, val_loss=r.val_loss + 0.01) if r.seed == 100 else r for r in cells.rows]
    save(moved, folder)
    assert f"figures/rates.svg {page.INSTEAD}" in page.problems(*written)
    page.write(*written)
    (folder / "figures" / "old.svg").write_text("<svg/>", encoding="utf-8")
    assert page.problems(*written) == [f"figures/old.svg {page.INSTEAD}"]
    page.write(*written)
    assert page.problems(*written) == [] and not (folder / "figures" / "old.svg").exists()


def test_the_template_uses_only_known_names(cells, tmp_path):
    with pytest.raises(jinja2.UndefinedError):
        page.render("{{ nothing }}", cells, tmp_path)
    assert page.literals("a 0.5\nb ± c, 30 %, {{ 0.5 }} `0.5` [x](1.5.md)\n```\n0.5\n```\n3.5") == [
        "line 1: 0.5",
        "line 2: ±",
        "line 2: 30 %",
        "line 6: 3.5",
    ]


def test_the_whole_template_reads_well_with_any_rows(cells, tmp_path):
    template = page.TEMPLATE.read_text(encoding="utf-8")
    for some in (Cells([]), cells, Cells([r for r in cells.rows if r.seed in (100, 0)])):
        text, _ = page.render(template, some, tmp_path)
        assert "nan" not in text and "None" not in text and "inf " not in text and "\n\n\n" not in text
        assert "](#repeated-runs)" in text and text.count("## Results") == 1
    assert "no, less (−0.0" in page.render(template, cells, tmp_path)[0]


def test_moments_are_bias_corrected_and_stay_where_they_froze(cells, tmp_path):
    spec = RunSpec("mlp", "step", "1:8", 100, 1e-2, 1000)
    blank = dict.fromkeys(traces.COLUMNS, "")
    lines = [{**blank, "run": spec.key, "step": step, "v_mean": v} for step, v in (("25", "1e-6"), ("100", "2e-6"), ("200", "2e-6"))]
    traces.append(lines, tmp_path, "mlp")
    (line,) = figures.moments(cells, tmp_path, "mlp", "1:8", ["step"], 1e-2).lines
    assert line.x == [25, 100, 200] and line.y[1] == line.y[2] == pytest.approx(math.sqrt(2e-6 / (1 - 0.999**51)))
    assert line.y[0] == pytest.approx(math.sqrt(1e-6 / (1 - 0.999**25)))


@pytest.mark.slow
def test_figures_are_the_same_bytes_again(cells, tmp_path):
    pytest.importorskip("matplotlib")
    for figure in (figures.rates(cells, "mlp", "1:8", ["dense", "srste", "step"]), figures.flops(cells, "mlp", "1:8")):
        assert all(figures.draw(figure, tmp_path / f"{name}.svg") for name in "ab")
        assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes() and figures.current(figure, tmp_path / "a.svg")
        assert not figures.current(dataclasses.replace(figure, ylabel="other"), tmp_path / "a.svg")


def test_labels_do_not_meet():
    found = figures.spaced([0.5, 0.52, 0.1, 0.51], 0.05)
    assert sorted(found)[1:] == pytest.approx([sorted(found)[1] + 0.05 * i for i in range(3)]) and found[0] < found[3] < found[1]


def test_estimates_and_costs(cells):
    assert "hours of 105 runs" in costs.estimates() and "| `mlp` | x |" in costs.spent(cells)


def test_the_committed_page_shows_the_committed_rows():
    assert page.problems() == [], "run: python -m bench.accuracy report"
