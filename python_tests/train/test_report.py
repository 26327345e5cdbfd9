"""The report: every layer, and why."""

from torch import nn

import nmkernels as nm
from nmkernels.capability import compiled_core
from nmkernels.train.report import Entry, Report

ENTRIES = [
    Entry("encoder.fc", "Linear", (64, 32), True, "2:4"),
    Entry("", "Linear", (8, 8), False, "tiny"),
    Entry("lazy", "LazyLinear", (), False, "not initialised"),
]


def test_table():
    assert str(Report()).splitlines()[-1] == "0 of 0 linear layers sparse, with 0 of 0 weights"
    assert str(Report(ENTRIES)).splitlines() == [
        "layer       kind        shape    sparse  why",
        "encoder.fc  Linear      (64,32)  yes     2:4",
        "(root)      Linear      (8,8)    no      tiny",
        "lazy        LazyLinear  ()       no      not initialised",
        "1 of 3 linear layers sparse, with 2048 of 2112 weights (97.0 %); left dense:",
        "   3.0 %  tiny (1 layer)",
        "   0.0 %  not initialised (1 layer)",
    ]


def test_the_remark_comes_last():
    assert str(Report(ENTRIES, remark="STEP: said")).splitlines() == [*str(Report(ENTRIES)).splitlines(), "STEP: said"]


def test_other_layers_are_counted_apart():
    others = [Entry(f"emb{i}", "Embedding", (10, 4), False, "looks up", linear=False) for i in range(2)]
    lines = str(Report([ENTRIES[0], *others, Entry("lstm", "LSTM", (), False, "recurrent", linear=False)])).splitlines()
    assert lines[-2:] == [
        "1 of 1 linear layers sparse, with 2048 of 2048 weights (100.0 %)",
        "other layers have 80 weights: Embedding ×2, LSTM",
    ]
    assert sum("looks up" in line for line in lines) == 2


def test_a_long_report_is_short():
    """A line for all blocks where they are alike; where one differs, every layer of that name has its own, in the model's order."""
    report = Report()
    for i in range(32):
        report.entries.append(Entry(f"h.{i}.up", "Linear", (64, 32), True, "2:4"))
        report.entries += [Entry(f"h.{i}.experts.{j}", "Linear", (32, 64), False, "a reason") for j in range(4)]
        report.entries.append(Entry(f"h.{i}.down", "Linear", (32, 64), i != 7, "2:4" if i != 7 else "not chosen by the filter"))
    lines = str(report).splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["h.*.up", "×32", "Linear", "(64,32)", "yes", "2:4"],
        ["h.*.experts.*", "×128", "Linear", "(32,64)", "no", "a", "reason"],
    ]
    assert [line.split()[0] for line in lines[3:35]] == [f"h.{i}.down" for i in range(32)]
    assert lines[35:] == [
        "63 of 192 linear layers sparse, with 129024 of 393216 weights (32.8 %); left dense:",
        "  66.7 %  a reason (128 layers)",
        "   0.5 %  not chosen by the filter (1 layer)",
    ]


def test_the_report_says_where_the_choice_of_gemms_is_unmeasured(monkeypatch):
    monkeypatch.delenv("NMKERNELS_CHOICE", raising=False)
    said = "the choice of GEMMs is unmeasured on"
    for known in (True, False):
        monkeypatch.setattr("nmkernels.gemm.estimate.measured", lambda p, known=known: known)
        for packed in ("auto", False):
            handle = nm.sparsify_(nn.Sequential(nn.Linear(64, 64)), nm.recipes.SRSTE("2:4", packed=packed))
            assert (said in str(handle.report)) == (not known and packed == "auto" and compiled_core().ok)
