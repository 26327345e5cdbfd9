"""``docs/pays.md`` shows what nm.audit says: the prediction as it is now, the measurement with its machine."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from bench import audit_page
from bench.audit_page import END, MEASURED, PAGE, PREDICTED
from bench.tables import between


def test_the_committed_prediction_is_the_present_one():
    assert audit_page.main(["--check"]) == 0
    text = PAGE.read_text(encoding="utf-8")
    block = text[text.index(MEASURED) : text.index(PREDICTED)]
    assert re.search(r"\*\*.+, \d+ threads\*\* \(.*torch .*; \d{4}-\d\d-\d\d; commit [0-9a-f]{7}\)", block)
    assert "Measured: medians" in block and "lm_head" in block


def test_what_is_written(tmp_path, monkeypatch, capsys):
    path = tmp_path / "audit.md"
    path.write_text(f"before\n{MEASURED}\nold\n{PREDICTED}\nolder\n{END}\nafter\n")
    assert audit_page.main(["--check"], path) == 1 and "audit_page --predicted" in capsys.readouterr().out
    assert audit_page.main(["--predicted"], path) == 0
    assert "old\n" in path.read_text() and "H200 SXM" in path.read_text() and audit_page.main(["--check"], path) == 0
    monkeypatch.setattr(audit_page, "measured", lambda: "new figures")
    assert audit_page.main([], path) == 0
    text = path.read_text()
    assert text.startswith(f"before\n{MEASURED}\n\nnew figures\n\n{PREDICTED}") and text.endswith(f"{END}\nafter\n") and "old\n" not in text
    with pytest.raises(ValueError, match="once, followed by"):
        between(f"{END} {PREDICTED}", PREDICTED, END, "x")


def test_whole_steps_are_predicted_next_to_rows():
    row = {
        "op": "ffn",
        "pattern": "2:4",
        "dtype": "bfloat16",
        "shape": "4096x14336x4096",
        "metric": "x dense",
        "versions": "v",
        "date": "d",
    }
    row |= {"machine": "NVIDIA H100 80GB HBM3", "provider": "nmkernels fst, step", "p50": "0.61", "commit": "ef776ec"}
    others = [row | {"commit": "abc", "p50": "1.3"}, row | {"provider": "nmkernels fst, forward"}, row | {"machine": "AMD EPYC, 2 threads"}]
    lines = audit_page.whole_steps([row, *others]).splitlines()
    assert lines[0].startswith("**NVIDIA H100") and "ef776ec" in lines[0] and len(lines) == 6
    old, new = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[-2:])
    assert old[2] == "0.61 ×" and old[3].endswith("(115)") and abs(float(old[3].split()[0]) - 0.61) < 0.06
    assert new[2] == "1.30 ×" and new[3] == "" and old[4] == new[4] and float(new[4].split()[0]) > 1
    assert "No GPU has measured" in audit_page.whole_steps(others[2:])
    text = PAGE.read_text(encoding="utf-8")
    assert "predicted for that code" in text[text.index(audit_page.STEPS) : text.index(audit_page.STEPS_END)]


def test_the_measured_table_is_stamped(monkeypatch):
    monkeypatch.setattr(audit_page, "CPU_TOKENS", 16)
    monkeypatch.setattr(audit_page, "model_shapes", lambda name: SimpleNamespace(shapes=lambda: {"fc": (64, 64)}))
    text = audit_page.measured(lambda task: 1e-3, 600.0)
    assert "--tokens 16 --device cpu` on **" in text and "fc " in text and "Measured: medians" in text
