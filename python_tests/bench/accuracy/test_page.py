"""The pages: cells, contrasts and words that follow from the rows, and a check that catches what the rows do not prove."""

from __future__ import annotations

import dataclasses
import hashlib
import math

import jinja2
import pytest

from bench.accuracy import contrasts, page, studies, tables, tasks
from bench.accuracy.methods import DECAYS, SRSTE
from bench.accuracy.plan import Results
from bench.accuracy.rows import save
from bench.accuracy.stats import verdict
from bench.accuracy.tables import Tables
from bench.accuracy.tasks import base
from nmkernels import recipes
from python_tests.bench.accuracy.conftest import made
from python_tests.examples.program import train
from python_tests.house.paths import ROOT

SETTINGS = tasks.Settings(steps=100, lr=1e-2, patterns=("2:4", "1:8"), margin=0.02)
EXTRA = {
    "dense": 0.0,
    "ste": 0.1,
    "srste-2e-2": 0.05,
    "srste-2e-4": 0.1,
    "sste": 0.005,
    "step-10": 0.15,
    "step-25": 0.1,
    "step-25-thawed": 0.1,
}
"""Loss over dense."""


def noise(*words: object) -> float:
    """From −1 to 1, always the same for the same words."""
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:4], "big") / 2**31 - 1


def loss(spec) -> float:
    """The seed's own noise, a little of the run's, a parabola in log lr, and the method's own part."""
    own = 0.1 * math.log10(spec.lr / 1e-2) ** 2 + EXTRA.get(spec.case.method, 0.1)
    return 0.3 + own + 0.05 * noise(spec.seed, spec.case.task) + 0.001 * noise(spec.key)


@pytest.fixture
def rows(monkeypatch):
    """The rows of a matrix on two tasks that only have settings, and of some of STEP's contrasts."""
    for name in ("mlp", "vit"):
        monkeypatch.setitem(base._tasks, name, type(name, (tasks.Task,), {"settings": SETTINGS, "name": name, "tokens": 1}))
    base.get.cache_clear()
    monkeypatch.setattr(studies, "TASKS", ("mlp", "vit"))
    monkeypatch.setattr(tables, "TASKS", ("mlp", "vit"))
    monkeypatch.setattr(tables, "COARSE", {})
    monkeypatch.setattr(tables, "WANTS", (tables.Want("train from scratch", tables.LEAVES, ("mlp", "vit"), "asp"),))
    cases = [
        studies.case(t, m, "2:4") for t in ("mlp", "vit") for m in ("dense", "ste", "srste", "sste", "step-10", "step-25", "step-25-thawed")
    ]
    done: list = []
    while todo := [spec for case in cases for spec in studies.todo(case, Results(done))]:
        done += [made(s.case, s.lr, s.seed, loss(s)) for s in {s.key: s for s in todo}.values()]
    yield done
    base.get.cache_clear()


def test_the_matrix_is_paired_and_says_what_is_level(rows):
    text = Tables(rows).matrix("2:4")
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    assert "dense 0.3" in text.splitlines()[0] and "n = 5" in text.splitlines()[0]
    assert lines["`sste`"].count("≈") == 2 and lines["`ste`"].count("≈") == 0
    assert "+0.10" in lines["`ste`"] and "± 0.00" in lines["`ste`"], "the noise of a seed is the same in both"
    assert "+0.05" in lines["SR-STE (λ tuned)"] and "| 0.75 |" in lines["`ste`"]
    assert Tables(rows).wins("2:4") == {"ste": (0, 4), "srste": (2, 2), "sste": (4, 0)}
    clones = [dataclasses.replace(r, method="mdgf-ste") for r in rows if r.method == "ste"]
    clones += [dataclasses.replace(r, method="mdgf-chain") for r in rows if r.method == "sste"]
    assert Tables([*rows, *clones]).wins("2:4")["mdgf-ste"] == (0, 4), "of its own family nothing is counted"
    assert Tables([*rows, *clones]).wins("2:4")["srste"] == (2, 4), "a family counts once"
    assert Tables(rows).first("2:4") == "sste"
    assert "1:8" not in text and Tables(rows).matrix("1:8") == tables.MISSING


def test_few_and_diverged_seeds(rows):
    few = [r for r in rows if (r.method, r.task) != ("sste", "mlp") or r.seed >= 100 or r.seed < 2]
    line = next(line for line in Tables(few).matrix("2:4").splitlines() if line.startswith("| `sste`"))
    assert line.split(" | ")[1] == tables.NONE, "fewer than three seeds are not shown"
    assert Tables(few).wins("2:4") == {"ste": (0, 3), "srste": (2, 1), "sste": (2, 0)}, "each task counts who has run it"
    some = [r for r in rows if r.method != "sste" or r.seed >= 100 or r.seed < 4]
    assert "(n = 4)" in Tables(some).matrix("2:4") and "sste" not in Tables(some).wins("2:4")
    best = next(iter(Tables(rows).best(studies.case("mlp", "ste", "2:4")).values())).lr
    lost = [dataclasses.replace(r, val_loss=math.nan) if (r.task, r.method, r.lr, r.seed) == ("mlp", "ste", best, 1) else r for r in rows]
    assert "1 diverged" in Tables(lost).matrix("2:4") or Tables(lost).best(studies.case("mlp", "ste", "2:4"))[1].lr != best


def test_words(rows):
    t = Tables(rows)
    assert "ahead on `mlp`" in t.tally("sste", "ste", "2:4") and "behind on" in t.tally("step-10", "ste", "2:4")
    assert t.tally("sste", "dense", "2:4").startswith("level on") and t.levels("2:4").startswith("on `mlp` `sste`; on `vit` `sste`")
    assert t.tally("slope", "ste", "2:4") == "not compared yet" and Tables([]).levels("2:4") == "none yet"
    better = Tables(dataclasses.replace(r, val_loss=r.val_loss - 0.2) if (r.method, r.task) == ("sste", "vit") else r for r in rows)
    lr = next(iter(better.best(studies.case("vit", "sste", "2:4")).values())).lr
    assert better.ahead("2:4").startswith(f"on `vit` `sste` (at {lr:g}), where dense is best at ") and not t.ahead("2:4")
    assert better.levels("2:4").endswith("on `vit` none")
    alone = Tables(r for r in rows if r.method == "dense" or r.method in DECAYS)
    assert "| train from scratch | `srste` (λ tuned) | `mlp` +0.05" in alone.choices() and "(λ = 0.02)" in alone.choices()
    assert alone.choices().endswith("| 15 of 15 not compared |")
    assert "| `sste` | `mlp` +0.00" in t.choices() and t.choices().endswith("| every other is behind on some task; 13 of 15 not compared |")
    assert better.choices().endswith("| every other is behind on some task; 13 of 15 not compared |"), "STE and SR-STE are behind"


def test_what_is_ahead_of_dense_survives_the_correction(rows):
    """One method that is ahead with p just below 5 % is not said to be, beside others."""
    losses = {k: r.val_loss for k, r in Tables(rows).best(studies.case("vit", "dense", "2:4")).items()}
    gain = dict(zip(losses, (0.45, 0.1, 0.3, 0.02, 0.2), strict=True))
    with_others = Tables(
        dataclasses.replace(r, val_loss=losses[r.seed] - gain[r.seed]) if (r.method, r.task) == ("sste", "vit") and r.seed in gain else r
        for r in rows
    )
    single = Tables(r for r in with_others.rows if r.method in ("dense", "sste"))
    equal = [
        dataclasses.replace(r, method="slope", pattern="2:4", val_loss=r.val_loss + 0.01 * noise(r.seed))
        for r in rows
        if r.method == "dense"
    ]
    with_others = Tables([*single.rows, *equal])
    p = single.less("vit", "sste", "2:4", "dense").p
    assert 0.025 < p < 0.05 and "`sste`" in single.ahead("2:4") and "`sste`" not in with_others.ahead("2:4")


def test_choices_come_from_the_runs_of_their_length(rows, monkeypatch):
    want = tables.Want("train from scratch", ("ste", "sste", "slope"), ("mlp",), "asp", 200)
    monkeypatch.setattr(tables, "WANTS", (want, tables.Want("make it", ("ste",), ("mlp",), "ste")))
    longer = [
        dataclasses.replace(r, steps=200, val_loss=r.val_loss + {"sste": 0.3}.get(r.method, 0.0)) for r in rows if r.method not in DECAYS
    ]
    first, second = Tables([*rows, *longer]).choices().splitlines()[2:]
    assert (
        "| `ste` | `mlp` +0.10" in first and "after 200 steps" in first and first.endswith("| all others are behind; 1 of 2 not compared |")
    )
    assert second.endswith("| no other method does this |")
    assert "| `asp` | untested | 3 of 3 not compared |" in Tables(rows).choices()


def test_tasks_that_cannot_tell_methods_apart_are_left_out(rows, monkeypatch):
    monkeypatch.setattr(tables, "COARSE", {"2:4": ("mlp",)})
    assert Tables(rows).tasks("2:4") == ["vit"]


def test_rates_are_the_best_and_the_others_that_were_as_good(rows):
    text = Tables(rows).rates("mlp", "2:4")
    assert "| `ste` | 0.01 |" in text and "open" not in text and "(2e-2)" in text
    doubled = [
        dataclasses.replace(r, val_loss=r.val_loss if r.lr != 0.017 else 0.4 + 0.2 * (r.seed % 2)) for r in rows if r.method == "ste"
    ]
    assert Tables(doubled + [r for r in rows if r.method == "dense"]).rates("mlp", "2:4").count("`ste`") <= 1


def test_each_decay_is_compared_with_the_best_of_its_task(rows):
    head, _, *lines = Tables(rows).decays().splitlines()
    assert head == "| λ | `mlp` at 0.01 | `vit` at 0.01 | worst |"
    lost = {float(cells[0]): [*map(float, cells[1:])] for cells in (line.strip("| ").split(" | ") for line in lines)}
    assert [*lost] == [*DECAYS.values()] and lost[2e-2] == [0, 0, 0]
    assert lost[2e-4] == pytest.approx([0.05] * 3, abs=0.002) and lost[2e-1] == pytest.approx([0.05] * 3, abs=0.002)
    assert Tables(rows).best_decay() == 2e-2
    bad = [dataclasses.replace(r, val_loss=r.val_loss + 0.2) if (r.task, r.method) == ("vit", "srste-2e-2") else r for r in rows]
    assert Tables(bad).best_decay() == 2e-4, "0.15 on one task is worse than 0.05 on the other, and of equals it is the smallest"
    half = [r for r in rows if r.task != "vit" or r.method != "srste-2e0"]
    assert "`vit`" not in Tables(half).decays(), "a task is shown when all its λ are known"


def test_contrasts_and_holm(rows, monkeypatch):
    places = (("mlp", "2:4"), ("vit", "2:4"))
    monkeypatch.setitem(contrasts.FAMILIES, "freeze", contrasts._at("step-25", "step-25-thawed", places))
    monkeypatch.setitem(contrasts.FAMILIES, "oracle", contrasts._at("step-10", "ste", (*places, ("mlp", "1:8"))))
    frozen, worse = (contrasts.findings(Results(rows), name) for name in ("freeze", "oracle"))
    assert [f.verdict for f in frozen] == ["level", "level"]
    assert [f.verdict for f in worse] == ["behind", "behind", "not known"] and worse[2].estimate.n == 0
    single = contrasts.findings(Results(rows), "oracle")[0].estimate.p
    assert worse[0].p >= 2 * single, "corrected over the family, with the contrast that has no rows"
    assert Tables(rows).summary("oracle") == "behind 2, of 2 (1 not run yet)"
    assert "| `mlp` 1:8 | – | not known | 0 | – | – |" in Tables(rows).contrasts("oracle")
    where, *cells = Tables(rows).contrasts("freeze").splitlines()[2].strip("| ").split(" | ")
    e = frozen[0].estimate
    gap = Tables(rows).less("mlp", "ste", "2:4", "dense").mean
    assert where == "`mlp` 2:4 †", "25 steps are less than a window of 1000"
    assert cells[-1] == f"{(e.half - e.mean) / gap:.0%}".replace("%", " %") and 0.09 < gap < 0.11
    level = [dataclasses.replace(r, val_loss=r.val_loss - 0.1) if r.method == "ste" else r for r in rows]
    assert Tables(level).contrasts("freeze").count("STE has none") == 2


def test_a_difference_at_each_rate_is_of_the_tuning_seeds(rows):
    found = Tables(rows).by_rate("mlp", "2:4", "step-25", "ste")
    rates = {r.lr for r in rows if r.method == "ste" and r.task == "mlp"}
    assert found.keys() == rates and all(abs(e.mean) < 0.002 and e.n == SETTINGS.tuning_seeds for e in found.values())
    assert Tables(rows).by_rate("mlp", "2:4", "step-25", "slope") == {}


def test_long_runs_are_compared_where_the_contrasts_have_rows(rows, monkeypatch):
    monkeypatch.setitem(contrasts.FAMILIES, "freeze", contrasts._at("step-25", "step-25-thawed", contrasts.PLACES))
    t, names = Tables(rows), ("ste", "step-25", "oracle")
    own = t.places("freeze")
    assert [p[:2] for p in own] == [("mlp", "2:4"), ("vit", "2:4")] and not t.places("long-freeze")
    text = t.compared(names, own, "ste")
    cells = [line.split(" | ")[1:] for line in t.compared(names, [("mlp", "2:4"), ("vit", "2:4")], "ste").splitlines()]
    assert [line.split(" | ")[1:] for line in text.splitlines()][1:] == cells[1:] and f"`vit` 2:4, β₂ = {own[1][2]:g}, 100 steps" in text
    assert "(" not in cells[2][0] and "(+0.0" in cells[3][0] and cells[4][0] == tables.NONE
    # the same losses in runs of another length and β₂, which the own ones must not be mixed with
    some = [r for r in rows if r.method not in DECAYS and r.seed != 4]
    longer = [dataclasses.replace(r, steps=200, beta2=0.98, val_loss=r.val_loss + 1) for r in some]
    both = Tables([*rows, *longer])
    shown = [both.compared(["ste"], [where], "ste").splitlines()[2] for where in (("mlp", "2:4"), ("mlp", "2:4", 0.98, 200))]
    assert shown[0].startswith("| `ste` | 0.") and shown[1].startswith("| `ste` | 1.")
    assert "n =" not in shown[0] and shown[1].endswith(" (n = 4) |"), "one seed fewer than the task has"
    paired = Tables([r for r in rows if r.method != "ste" or r.seed != 4]).compared(["step-25"], [("mlp", "2:4")], "ste")
    assert paired.endswith(" (n = 4) |"), "the seeds that both have"
    # in words
    assert both.longer() == "", "too few seeds"
    monkeypatch.setitem(studies.STUDIES, "long-gpt", studies.Study("long", ("dense", "ste", "sste", "slope"), ("mlp",), steps=200))
    longer = [dataclasses.replace(r, steps=200, val_loss=r.val_loss + 1) for r in rows if r.method not in DECAYS]
    said = Tables([*rows, *longer]).longer()
    assert said.startswith("After 200 steps of `mlp` instead of 100, all at ") and ", level with dense: `sste` (+0.00" in said
    assert "; behind dense: `ste` (+0.10" in said and "slope" not in said


def test_switches(rows):
    t0 = {"step-25": (25, "fixed"), "step-auto": (31, "test")}
    own = studies.case("mlp", "step-auto", "2:4").beta2
    assert own == 0.9, "a window of a tenth of 100 steps"
    more = [dataclasses.replace(r, method="step-auto", beta2=own) for r in rows if r.method == "step-25"]
    mine = [dataclasses.replace(r, switch_step=t0[r.method][0], switch_reason=t0[r.method][1]) for r in more + rows if r.method in t0]
    text = Tables([*rows, *mine]).switches(["step-auto"], [("mlp", "2:4")], ["step-25", "step-10"])
    assert "| 31 | test 5 |" in text and "+0.000 ± 0.000 (`step-25`)" in text
    assert Tables(mine).decided("step-auto") == f"{len(more)} of {len(more)}"


def test_spread_between_machines(rows):
    again = [dataclasses.replace(rows[0], val_loss=rows[0].val_loss + 0.0123, machine="another, 1 threads")]
    assert "+0.0123" in Tables(rows, again).spread() and Tables(rows).spread() == tables.MISSING


def test_pages_are_checked_against_the_rows(rows, tmp_path):
    template, written, folder = tmp_path / "page.md", tmp_path / "README.md", tmp_path / "rows"
    save(rows, folder)
    template.write_text('{# 1.5 #}`ste`: {{ t.tally("ste", "dense", "2:4") }} at 95 % and `0.5`\n')
    pages = {template: written}
    assert page.problems(folder, pages) == ["README.md does not show the rows; run: python -m bench.accuracy report"]
    assert page.write(folder, pages) == [written] and page.write(folder, pages) == [] and page.problems(folder, pages) == []
    written.write_text(written.read_text().replace("+0.1", "+0.2"))
    assert len(page.problems(folder, pages)) == 1
    template.write_text("better by 0.12 nats, 40 %\n")
    assert [p.split(": ")[0] for p in page.problems(folder, pages)][:2] == ["page.md, line 1", "page.md, line 1"]
    template.write_text("{{ nothing }}\n")
    with pytest.raises(jinja2.UndefinedError):
        page.write(folder, pages)
    save([*rows, dataclasses.replace(rows[0], seed=9, data="another")], folder)
    template.write_text("text\n")
    assert any("several data sets" in p for p in page.problems(folder, pages))


def test_the_committed_pages_agree_with_the_committed_rows():
    assert page.problems() == []
    assert len((page.FOLDER / "README.md").read_bytes()) <= 20_000


@pytest.mark.parametrize("want", tables.WANTS[:3], ids=lambda want: want.what)
def test_no_recommendation_is_behind_another_in_the_longest_runs(want):
    shown, study = page.read(), studies.STUDIES["long-gpt"]
    chosen = shown.first("2:4", want.methods, want.tasks, want.steps)
    assert chosen and chosen not in ("ste", "srste-2e-4")
    for other in study.methods[1:]:
        e = shown.less("gpt", chosen, "2:4", other, steps=study.steps)
        assert verdict(e, tasks.get("gpt").settings.margin) != "behind", other


def test_the_default_recipe_is_behind_none_in_short_runs_and_in_the_longest():
    """If this fails, another recipe becomes the default of the demo."""
    shown, name = page.read(), train.RECIPE.split(":")[0]
    for want in tables.WANTS[:2]:
        known = shown.wins("2:4", want.methods, want.tasks, want.steps)
        assert known[tables.METHOD.get(name, name)][1] == 0, want.what


def test_the_default_decay_has_the_least_worst_loss():
    assert page.read().best_decay() == recipes.SRSTE("2:4").decay


def test_the_demos_decay_is_the_best_one_of_the_gpt():
    known = studies.resolve(studies.case("gpt", SRSTE, "2:4"), page.read().results)
    assert known is not None and DECAYS[known.method] == recipes.get(train.RECIPE).decay


def test_the_readme_recommends_what_the_rows_say():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert page.read().choices() in text and "untested" in Tables([]).choices()
