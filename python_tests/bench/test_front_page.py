"""The table of the front page says what the rows say, machine by machine, and leaves out machines that were timed otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import cases, front_page
from bench.front_page import BEGIN, END, LINES, MACHINES, MACHINES_END, METHODS, METHODS_END
from bench.registry import Ask
from python_tests.bench.samples import HEAD, STAMP

LINEAR = "nm_linear,nmkernels cpu,2:4,float32,1x4096x4096,x fastest dense,1,1.876,2," + STAMP
GENERATE = 'generate,nmkernels CompressedLinear,2:4,float32,"16 tokens, GPT 1024x4",x dense,1,3.3,4,' + STAMP


def test_lines_are_of_cases_that_are_measured() -> None:
    known = {(s.op, s.pattern, s.dtype, s.shape) for s in cases.select(Ask())}
    assert {(line.row[0], *line.row[2:5]) for line in LINES} <= known


def test_what_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, readme = tmp_path / "results", tmp_path / "README.md"
    results.mkdir()
    train = [
        f'train,step,2:4,float32,GPT,"{metric}",1,{value},1,' + STAMP
        for metric, value in ((front_page.LOSS, 1.016), (front_page.BYTES, 0.53))
    ]
    intel = LINEAR.replace("AMD", "Intel").replace("1.876", "2.5")
    allowed = intel.replace("x fastest dense", "x roofline allows").replace("2.5,", "1.9,")
    (results / "a.csv").write_text(HEAD + LINEAR + GENERATE + intel + allowed + GENERATE.replace("AMD", "Old") + "".join(train))
    readme.write_text(f"# Name\n\n{BEGIN}\nstale\n{END}\n\n{METHODS}\nold methods\n{METHODS_END}\n\nmore\n")
    assert front_page.main(["--check"], results, [readme]) == 1 and "run: python -m bench.front_page" in capsys.readouterr().out
    assert front_page.main([], results, [readme]) == 0 == front_page.main(["--check"], results, [readme])
    text = readme.read_text()
    assert text.startswith("# Name") and text.endswith("more\n") and "stale" not in text
    assert "old methods" not in text and "*Not run yet:" in text
    assert "| against | AMD, 2 threads (2026-11-21) | Intel, 2 threads (2026-11-21) |" in text and "Old" not in text
    assert "4096×4096, 1 token | torch's fastest dense GEMM | 1.88 × | 2.50 × (slow opponent: bytes allow 1.90) |" in text
    assert "| dense | 3.30 × |  |" in text and "16 tokens" not in text
    assert "1.016 × its dense baseline's loss with 0.53 × the bytes (AMD, 2 threads, 2026-11-21)" in text


def test_every_machine_has_a_tab(tmp_path: Path) -> None:
    results, page = tmp_path / "results", tmp_path / "performance.md"
    (results / "figures").mkdir(parents=True)
    (results / "figures" / "amd-2-threads-roofline.svg").touch()
    (results / "a.csv").write_text(HEAD + GENERATE.replace("AMD", "Old (R)") + LINEAR)
    page.write_text(f"{MACHINES}\n{MACHINES_END}\n")
    assert front_page.main([], results, [page]) == 0
    first, second = page.read_text().split('=== "')[1:]
    assert first.startswith('AMD, 2 threads"\n\n    **AMD, 2 threads** (') and "1 token | torch's fastest dense GEMM | 1.88 × |" in first
    assert "1 of the 1 measured targets are met" in first and "figures/amd-2-threads-roofline.svg)" in first
    # timed in another way: no ratio is shown with the others
    assert (
        second.startswith("Old (R), 2 threads") and "3.30" not in second and "README.md#old-r-2-threads)" in second and ".svg" not in second
    )
