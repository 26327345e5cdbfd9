"""The README's table says what the rows say, and ``--check`` notices when it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import report

HEAD = "op,provider,pattern,dtype,shape,metric,p20,p50,p80,machine,versions,commit,date\n"
STAMP = '"AMD, 2 threads",torch 2.13.0,abc1234,2026-11-21\n'


@pytest.fixture
def tree(tmp_path: Path) -> tuple[Path, Path]:
    """A README with the markers, and a folder with one CSV."""
    results = tmp_path / "results"
    results.mkdir()
    (results / "amd.csv").write_text(
        HEAD
        + f"nm_mask,nmkernels cpu,2:4,float32,8x8,us,9,10,11,{STAMP}"
        + f"nm_mask,torch,2:4,float32,8x8,us,90,100,110,{STAMP}"
        + f"nm_mask,torch other,2:4,float32,8x8,us,49,50,51,{STAMP}"
        + f"copy,torch,,float32,8x8,GB/s,9,10,11,{STAMP}"
    )
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n")
    return readme, results


def _main(tree: tuple[Path, Path], *options: str) -> int:
    return report.main(list(options), readme=tree[0], results=tree[1])


def test_written_between_the_markers(tree: tuple[Path, Path]) -> None:
    assert _main(tree) == 0
    text = tree[0].read_text()
    assert text.startswith("above\n") and text.endswith("below\n") and "old" not in text
    assert "**AMD, 2 threads** (torch 2.13.0; 2026-11-21; commit abc1234)" in text
    # five times faster than the fastest of the others
    assert (
        "| nm_mask 2:4 float32 8x8 | nmkernels cpu | 10 (9 to 11) | us | 5.00× |\n"
        "|  | torch | 100 (90 to 110) | us |  |\n"
        "|  | torch other | 50 (49 to 51) | us |  |\n"
    ) in text
    assert "| copy float32 8x8 | torch | 10 (9 to 11) | GB/s |  |" in text


def test_writing_twice_changes_nothing(tree: tuple[Path, Path]) -> None:
    _main(tree)
    once = tree[0].read_text()
    _main(tree)
    assert tree[0].read_text() == once


def test_check_notices_stale_tables_and_writes_nothing(tree: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    before = tree[0].read_text()
    assert _main(tree, "--check") == 1
    assert tree[0].read_text() == before and "python -m bench.report" in capsys.readouterr().out
    _main(tree)
    assert _main(tree, "--check") == 0
    (tree[1] / "more.csv").write_text(HEAD + f"nm_prune,torch,2:4,float32,8x8,us,9,10,11,{STAMP}")
    assert _main(tree, "--check") == 1


def test_nothing_measured_is_said(tmp_path: Path) -> None:
    assert report.markdown(report.load(tmp_path)) == "No measurements are committed yet."


@pytest.mark.parametrize("text", ["", report.BEGIN, f"{report.END}\n{report.BEGIN}", f"{report.BEGIN}{report.END}{report.END}"])
def test_missing_markers_are_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        report.insert(text, "table")
