"""``--recipe-file``: one file with one class is trained, tuned and ranked like the methods of the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch.nn.functional as F
from torch import nn

from bench.accuracy import leaderboard, methods, rows, runner, studies
from bench.accuracy.__main__ import main
from bench.accuracy.plan import MOST_RATES, Results
from bench.accuracy.rows import RunRow
from bench.accuracy.spec import TUNING_SEEDS, Case
from bench.accuracy.tasks import Settings, base, gpt, mlp
from nmkernels.recipes import registry
from python_tests.bench.accuracy.conftest import made

PLAIN = "from nmkernels.recipes import STE\n\nclass Mine(STE):\n    pass\n"
REGISTERED = """\
from dataclasses import dataclass
from nmkernels.recipes import STE
from nmkernels.recipes.registry import recipe

class Helper(STE):
    pass

@recipe("own-ste")
@dataclass(frozen=True)
class Mine(Helper):
    strength: float = 0.5
"""
GRID = REGISTERED + "    grid = {'strength': (0.5, 1.0)}\n"


@pytest.fixture(autouse=True)
def undone(monkeypatch):
    monkeypatch.setattr(methods, "METHODS", dict(methods.METHODS))
    monkeypatch.setattr(registry, "_recipes", dict(registry._recipes))
    before = dict(methods.VARIANTS)
    yield
    methods.VARIANTS.clear()
    methods.VARIANTS.update(before)


@pytest.fixture
def short(monkeypatch):
    """The MLP in 20 steps, with three tuning and five evaluation seeds."""
    settings = replace(mlp.DigitsMLP.settings, steps=20, tuning_seeds=3, seeds=5)
    monkeypatch.setattr(mlp.DigitsMLP, "settings", settings)
    return settings


def written(folder: Path, text: str, name: str = "mine.py") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_one_class_becomes_a_method(tmp_path):
    assert methods.load(written(tmp_path, PLAIN)) == "mine"
    recipe = methods.get("mine").build("1:8", 100)
    assert (type(recipe).__name__, str(recipe.pattern), recipe.total_steps) == ("Mine", "1:8", 100)
    assert methods.load(written(tmp_path, REGISTERED, "other.py")) == "own-ste"
    assert methods.get("own-ste").build("2:4", 100).strength == 0.5
    assert registry.get("own-ste:2:4(strength=1.0)").strength == 1.0 and "own-ste" in registry.names()


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("x = 1\n", "mine.py", "has to define one recipe, and defines none. A recipe is a subclass of nmkernels.recipes.Recipe"),
        (PLAIN + "class Two(STE):\n    pass\n", "mine.py", r"defines Mine, Two\..*decorate the one to run"),
        (PLAIN, "ste.py", "there is a method 'ste' already; choose another name"),
        (PLAIN, "srste-2e-4.py", "there is a method 'srste-2e-4' already"),
        (REGISTERED.replace("own-ste", "sste"), "mine.py", "there is a method 'sste' already"),
        (PLAIN, "mine.txt", "its name has to end with .py"),
        (GRID.replace("(0.5, 1.0)", "tuple(range(6))"), "mine.py", "has 6 settings, and SR-STE's λ, the budget of all, has 5"),
        (GRID.replace("{'strength'", "{'weakness'"), "mine.py", "the grid names weakness, which the recipe does not have"),
    ],
)
def test_other_files_are_refused(tmp_path, text, name, message):
    with pytest.raises(ValueError, match=message):
        methods.load(written(tmp_path, text, name))
    with pytest.raises(ValueError, match="there is no file"):
        methods.load(tmp_path / "absent.py")


@pytest.mark.slow
def test_the_command_tunes_evaluates_and_ranks(tmp_path, monkeypatch, short, capsys):
    monkeypatch.setattr(leaderboard, "RESULTS", tmp_path / "page")
    monkeypatch.chdir(tmp_path)
    command = ["run", "--recipe-file", str(written(tmp_path, PLAIN)), "--tasks", "mlp", "--workers", "1"]
    assert main([*command, "--methods", "dense", "ste"]) == 0
    out = capsys.readouterr().out
    mine = rows.load(tmp_path / "accuracy-mine")
    assert {row.method for row in mine} == {"dense", "ste", "mine"} and "accuracy-mine" in out
    case = studies.case("mlp", "mine", "2:4")
    search = Results(mine).search(case)
    assert not search.todo and 3 <= len(search.tried) <= MOST_RATES
    assert {row.seed for row in mine if row.case == case} == {*TUNING_SEEDS[:3], *range(5)}
    table = [line for line in out.splitlines() if line.startswith("| ")][2:]
    assert len(table) == 3 and sum("**`mine`, yours**" in line for line in table) == 1
    # the same recipe under another name: the same losses, so level with ste
    ours = next(line for line in table if "`mine`" in line)
    assert "+0.0000 ± 0.0000, level" in ours and ours.endswith("| 5 |")
    assert "No rows of srste: add `--methods srste`" in out

    (tmp_path / "mine.py").write_text(PLAIN + "# changed\n")
    methods.METHODS.pop("mine")
    assert main(command) == 2
    assert "has runs of another version" in capsys.readouterr().err


def test_the_pages_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds the page's rows; choose another --out"):
        leaderboard.enter(written(tmp_path, PLAIN), rows.RESULTS)


def test_default_tasks_are_the_matrix_without_translation(tmp_path, monkeypatch, capsys):
    seen: list[Case] = []
    monkeypatch.setattr(runner, "run_cases", lambda cases, *args, **more: seen.extend(cases) or 0)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--recipe-file", str(written(tmp_path, PLAIN)), "--workers", "1"]) == 0
    assert {case.task for case in seen} == {"mlp", "finetune", "vit", "gpt"} and {case.method for case in seen} == {"mine"}
    assert capsys.readouterr().out.count("no results; see the failed runs above") == 4


# ---- the table, from rows that are made up


def finished(case: Case, loss: float, settings: Settings, data: str = "d") -> list[RunRow]:
    """The rows of a case whose middle rate is best, with ``loss`` plus a part that the seed determines and 0.001 that is its own."""
    found = []
    for lr, extra in ((3e-3, 0.5), (5.5e-3, 0.0), (1e-2, 0.5)):
        found += [made(case, lr, seed, loss + extra + 0.01 * (seed % 3), data=data) for seed in TUNING_SEEDS[: settings.tuning_seeds]]
    own = {seed: 0.001 * ((seed * len(case.method)) % 3) for seed in range(settings.seeds)}
    return found + [made(case, 5.5e-3, seed, loss + 0.1 * seed + own[seed], data=data) for seed in own]


def test_methods_are_sorted_paired_by_seed_and_put_into_words(tmp_path, monkeypatch, short):
    page, mine = tmp_path / "page", tmp_path / "mine"
    monkeypatch.setattr(leaderboard, "RESULTS", page)
    losses = {"dense": 1.0, "ste": 1.2, "sste": 1.1, "step-25-raw": 1.05, "srste-2e-4": 1.14, "srste-2e-2": 1.13}
    losses |= {"srste-2e-3": 1.3, "srste-2e-1": 1.3, "srste-2e0": 1.3}
    theirs = [row for name, loss in losses.items() for row in finished(studies.case("mlp", name, "2:4"), loss, short)]
    theirs += finished(studies.case("mlp", "asp", "2:4"), 0.5, short, data="other data")
    theirs += finished(studies.case("mlp", "slope", "1:8"), 0.5, short)
    rows.save(theirs, page)
    case = studies.case("mlp", "mine", "2:4")
    rows.save(finished(case, 1.15, short), mine)
    table = leaderboard.table("mine", [case, studies.case("mlp", "ste", "2:4")], mine)
    main, _, controls = table.partition("Controls, and other settings:")
    lines = [line for line in main.splitlines() if line.startswith("| ")][2:]
    assert [line.split(" | ")[0] for line in lines] == ["| `dense`", "| `sste`", "| `srste` (2e-2)", "| **`mine`, yours**", "| `ste`"]
    assert "| `step-25-raw` | " in controls and "| `srste" not in controls
    cells = lines[3].split(" | ")
    # seeds differ by 0.1 each, which pairing takes out
    assert cells[2].startswith("+0.1498 ± ") and cells[2].endswith(", behind")
    assert cells[3].startswith("−0.0492 ± ") and cells[3].endswith(", ahead")
    assert cells[4].startswith("+0.02") and cells[4].endswith(", behind") and cells[5:] == ["0.0055", "closed", "5 |"]
    assert float(cells[3].split("± ")[1].split(",")[0]) < 0.01 < float(cells[1].split("± ")[1])

    rows.save([row for row in theirs if row.method != "ste"], page)
    assert "No rows of ste: add `--methods ste`" in leaderboard.table("mine", [case], mine)


def test_a_grid_is_searched_as_the_decay_of_sr_ste_is(tmp_path, monkeypatch, short):
    assert methods.load(written(tmp_path, GRID)) == "own-ste"
    names = methods.VARIANTS["own-ste"]
    assert names == ("own-ste(strength=0.5)", "own-ste(strength=1.0)")
    assert [methods.get(name).build("2:4", 100).strength for name in names] == [0.5, 1.0]
    case = studies.case("mlp", "own-ste", "2:4")
    assert {spec.case.method for spec in studies.todo(case, Results([]))} == {names[0]}, "its rate first"
    done = [row for row in finished(studies.case("mlp", names[0], "2:4"), 1.2, short) if row.seed in TUNING_SEEDS]
    assert {spec.case.method for spec in studies.todo(case, Results(done))} == {names[1]}, "then the other setting, at that rate"
    done += finished(studies.case("mlp", names[1], "2:4"), 1.1, short)
    assert studies.resolve(case, Results(done)) == studies.case("mlp", names[1], "2:4")
    monkeypatch.setattr(leaderboard, "RESULTS", tmp_path / "page")
    rows.save(done, tmp_path / "mine")
    assert "**`own-ste` (strength=1.0), yours**" in leaderboard.table("own-ste", [case], tmp_path / "mine")


def test_gpt_calls_the_model_and_not_a_method_of_it(monkeypatch):
    class Constant(nn.Module):
        def forward(self, x):
            return F.one_hot(x, 256).float()

    task = base.get("gpt")
    assert isinstance(task, gpt.ByteGPT) and task.loss(Constant(), task.batch(0, 1)).isfinite()
