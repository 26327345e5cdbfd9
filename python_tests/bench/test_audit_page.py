"""``docs/pays.md`` shows what nm.audit says: the prediction as it is now, the measurement with its machine."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from bench import audit_page
from bench.audit_page import END, MEASURED, PAGE, PREDICTED, between


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
    with pytest.raises(ValueError, match="once each"):
        between(f"{END} {PREDICTED}", PREDICTED, END, "x")


def test_the_measured_table_is_stamped(monkeypatch):
    monkeypatch.setattr(audit_page, "CPU_TOKENS", 16)
    monkeypatch.setattr(audit_page, "model_shapes", lambda name: SimpleNamespace(shapes=lambda: {"fc": (64, 64)}))
    text = audit_page.measured(lambda task: 1e-3, 600.0)
    assert "--tokens 16 --device cpu` on **" in text and "fc " in text and "Measured: medians" in text
