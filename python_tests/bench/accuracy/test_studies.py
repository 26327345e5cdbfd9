"""The studies: their cases, and SR-STE's λ."""

from __future__ import annotations

from bench.accuracy import contrasts, methods, studies, tasks
from bench.accuracy.plan import Results
from bench.accuracy.studies import STUDIES, Study, cases, resolve, todo
from python_tests.bench.accuracy.conftest import made


def test_names_of_all_studies_are_known():
    for study in STUDIES.values():
        for name in study.methods:
            assert name == methods.SRSTE or methods.get(name).note
        assert set(study.tasks) <= set(tasks.names())


def test_the_studies_run_what_the_contrasts_need():
    every = {case for study in STUDIES.values() for task in study.tasks for case in cases(study, task)}
    needed = {case for family in contrasts.FAMILIES.values() for contrast in family for _, case in contrast.terms}
    assert needed <= every


def test_dense_training_is_one_case_of_all_patterns(tiny):
    found = list(cases(Study("", ("dense", "ste"), ("tiny",), ("2:4", "1:8", "1:16")), "tiny"))
    assert [(c.method, c.pattern) for c in found] == [("dense", "dense"), ("ste", "2:4"), ("ste", "1:8")]


def test_the_decay_is_chosen_once_on_tuning_seeds(tiny):
    case, rows = studies.case("tiny", methods.SRSTE, "1:8"), []
    best = {"srste-2e-4": 0.3, "srste-2e-3": 0.2, "srste-2e-2": 0.1, "srste-2e-1": 0.4, "srste-2e0": 0.5}
    for _ in range(10):
        results = Results(rows)
        if (known := resolve(case, results)) is not None:
            break
        specs = todo(case, results)
        assert {spec.case.pattern for spec in specs} == {"2:4"} and all(spec.tuning or spec.case.method == "srste-2e-4" for spec in specs)
        rows += [made(s.case, s.lr, s.seed, best[s.case.method] + abs(s.lr - 1e-2) + 0.001 * s.seed) for s in specs]
    assert known is not None and (known.method, known.pattern) == ("srste-2e-2", "1:8")
    others = [r for r in rows if r.method != "srste-2e-4"]
    assert {r.lr for r in others} == {1e-2} and len(others) == 12, "the other λ only at the best rate of the first"
    assert {spec.case for spec in todo(case, Results(rows))} == {known}


def test_hours_left_shrink(tiny):
    ste = studies.case("tiny", "ste", "2:4")
    before = studies.hours_left([ste], Results([]))
    after = studies.hours_left([ste], Results([made(ste, lr, 100 + k, abs(lr - 1e-2)) for lr in (5.5e-3, 1e-2, 0.017) for k in range(3)]))
    assert before > after > 0 and studies.hours_left([studies.case("tiny", methods.SRSTE, "2:4")], Results([])) > before
