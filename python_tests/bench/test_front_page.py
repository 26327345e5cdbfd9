"""The table of the front page says what the rows say, machine by machine, and leaves out machines that were timed otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import cases, front_page
from bench.front_page import LINES, markers
from bench.registry import Ask
from python_tests.bench.samples import HEAD, STAMP

(BEGIN, END), (METHODS, METHODS_END) = markers("measured"), markers("best methods")
(INTEGERS, INTEGERS_END), (MACHINES, MACHINES_END) = markers("integers"), markers("machines")
LINEAR = "nm_linear,nmkernels cpu,2:4,float32,1x4096x4096,x fastest dense,1,1.876,2," + STAMP
GENERATE = 'generate,nmkernels CompressedLinear,2:4,float32,"16 tokens, GPT 1024x4",x dense,1,3.3,4,' + STAMP


def test_lines_are_of_cases_that_are_measured() -> None:
    known = {(s.op, s.pattern, s.dtype, s.shape) for s in cases.select(Ask())}
    assert {(line.row[0], *line.row[2:5]) for line in LINES} <= known


def test_what_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, readme = tmp_path / "results", tmp_path / "README.md"
    results.mkdir()
    intel = LINEAR.replace("AMD", "Intel").replace("1.876", "2.5")
    allowed = intel.replace("x fastest dense", "x roofline allows").replace("2.5,", "1.9,")
    (results / "a.csv").write_text(HEAD + LINEAR + GENERATE + intel + allowed + GENERATE.replace("AMD", "Old"))
    readme.write_text(f"# Name\n\n{BEGIN}\nstale\n{END}\n\n{METHODS}\nold methods\n{METHODS_END}\n\nmore\n")
    assert front_page.main(["--check"], results, [readme]) == 1 and "run: python -m bench.front_page" in capsys.readouterr().out
    assert front_page.main([], results, [readme]) == 0 == front_page.main(["--check"], results, [readme])
    text = readme.read_text()
    assert text.startswith("# Name") and text.endswith("more\n") and "stale" not in text
    assert "old methods" not in text and "*No runs yet.*" in text
    assert "| against | AMD, 2 threads (2026-11-21) | Intel, 2 threads (2026-11-21) |" in text and "Old" not in text
    assert "4096×4096, 1 token | torch's fastest dense GEMM | 1.88 × | 2.50 × (slow opponent, 1.90 is allowed) |" in text
    assert "| dense, as PyTorch runs it | 3.30 × (slow opponent, 1.88 is allowed) |  |" in text and "16 tokens" not in text


def test_integers_have_a_line_for_each_kind_of_values(tmp_path: Path) -> None:
    page = tmp_path / "pays.md"
    page.write_text(f"{INTEGERS}\n{INTEGERS_END}\n")
    start = "nm_linear_integers,{},2:4,bfloat16,4x4096x4096,{},1,{},3," + STAMP
    made = [
        ('"nmkernels cpu, int8"', "us", 900),
        ('"nmkernels cpu, int8"', "x weight-only int8", 1.554),
        ('"nmkernels cpu, int8"', "x 16 bits", 1.3),
        ('"nmkernels cpu avx2, int4"', "x weight-only int4", 0.9),
        ('"nmkernels, 16 bits"', "us", 1200),
    ]
    (tmp_path / "a.csv").write_text(HEAD + "".join(start.format(*row) for row in made))
    assert front_page.main([], tmp_path, [page]) == 0
    lines = page.read_text().splitlines()
    assert [line for line in lines if "2:4" in line] == [
        "| 4096×4096 2:4 | 4 | int8 | 1.55 × |  | 1.30 × |  |",
        "| 4096×4096 2:4 | 4 | int4 avx2 |  | 0.90 × |  |  |",
    ]
    assert "| weight | tokens | values | against torch's int8 | against torch's int4 | against ours in 16 bits | against dense |" in lines
    assert any(line.startswith("**AMD, 2 threads** (") for line in lines)
    (tmp_path / "a.csv").write_text(HEAD + LINEAR)
    assert (
        front_page.main([], tmp_path, [page]) == 0 and "*Not run yet: `python -m bench.run --op nm_linear_integers`.*" in page.read_text()
    )


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
