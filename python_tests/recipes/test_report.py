"""The report: every layer, and why."""

from nmkernels.recipes.report import Entry, Report

ENTRIES = [
    Entry("encoder.fc", "Linear", (64, 32), True, "2:4"),
    Entry("", "Linear", (8, 8), False, "tiny"),
    Entry("lazy", "LazyLinear", (), False, "not initialised"),
]


def test_empty():
    assert str(Report()) == "layer  kind  shape  sparse  why\n0 of 0 layers sparse, 0 of 0 weights maskable"


def test_reports_share_no_entries():
    Report().entries.append(ENTRIES[0])
    assert Report().entries == []


def test_table():
    assert str(Report(ENTRIES)).splitlines() == [
        "layer       kind        shape    sparse  why",
        "encoder.fc  Linear      (64,32)  yes     2:4",
        "(root)      Linear      (8,8)    no      tiny",
        "lazy        LazyLinear  ()       no      not initialised",
        "1 of 3 layers sparse, 2048 of 2112 weights maskable",
    ]


def test_sparse_and_skipped():
    report = Report(ENTRIES)
    assert report.sparse == ENTRIES[:1] and report.skipped == ENTRIES[1:]
