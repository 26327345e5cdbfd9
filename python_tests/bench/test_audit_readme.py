"""The README shows what nm.audit says: the prediction as it is now, the measurement with its machine."""

from __future__ import annotations

import re

import pytest

from bench import audit_readme
from bench.audit_readme import END, MEASURED, PREDICTED, README, between


def test_the_prediction_is_the_present_one(capsys):
    assert audit_readme.main(["--check"]) == 0
    text = README.read_text(encoding="utf-8")
    assert audit_readme.predicted() in text
    block = text[text.index(MEASURED) : text.index(PREDICTED)]
    assert re.search(r"\*\*.+, \d+ threads\*\* \(.*torch .*; \d{4}-\d\d-\d\d; commit [0-9a-f]{7}\)", block)
    assert "Measured: medians" in block and "lm_head" in block


def test_what_is_written(tmp_path, monkeypatch, capsys):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{MEASURED}\nold\n{PREDICTED}\nolder\n{END}\nafter\n")
    assert audit_readme.main(["--check"], path) == 1 and "audit_readme --predicted" in capsys.readouterr().out
    assert audit_readme.main(["--predicted"], path) == 0
    assert "old\n" in path.read_text() and "H200 SXM" in path.read_text() and audit_readme.main(["--check"], path) == 0
    monkeypatch.setattr(audit_readme, "measured", lambda: "new figures")
    assert audit_readme.main([], path) == 0
    text = path.read_text()
    assert text.startswith(f"before\n{MEASURED}\n\nnew figures\n\n{PREDICTED}") and text.endswith(f"{END}\nafter\n") and "old\n" not in text


def test_the_measured_table_is_stamped(monkeypatch):
    monkeypatch.setattr(audit_readme, "CPU_TOKENS", 16)
    monkeypatch.setattr(audit_readme, "model_shapes", lambda name: Small)
    text = audit_readme.measured(lambda task: 1e-3, 600.0)
    assert "--tokens 16 --device cpu` on **" in text and "fc " in text and "Measured: medians" in text


class Small:
    """A model of one small layer."""

    @staticmethod
    def shapes():
        return {"fc": (64, 64)}


@pytest.mark.parametrize("text", ["nothing", f"{END} {PREDICTED}", f"{PREDICTED} {PREDICTED} {END}"])
def test_markers_must_be_there(text):
    with pytest.raises(ValueError, match="once each"):
        between(text, PREDICTED, END, "x")
