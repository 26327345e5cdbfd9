"""The page says what the rows say, and ``--check`` notices when it does not."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from bench import report
from python_tests.bench.samples import HEAD, STAMP

MASK = "nm_mask,{},2:4,float32,4096x11008,{},{}" + STAMP
LINEAR = "nm_linear,{},{},float32,{},{},{}" + STAMP


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with one CSV, and one reason."""
    folder = tmp_path / "results"
    folder.mkdir()
    rows = [
        MASK.format("nmkernels cpu", "us", "9,10,11,"),
        MASK.format("torch copy_", "us", "7,8,9,"),
        MASK.format("nmkernels cpu", "share of copy", "0.7,0.7512,0.8,"),
    ]
    (folder / "amd.csv").write_text(HEAD + "".join(rows))
    (folder / "missed.txt").write_text("mask: because\n")
    return folder


def test_the_page_has_targets_and_every_case(results: Path) -> None:
    assert report.main([], results) == 0
    text = (results / "README.md").read_text()
    assert text.count("**AMD, 2 threads** (torch 2.13.0; 2026-11-21; commit abc1234)") == 1 and text.count("## AMD, 2 threads") == 1
    assert "| mask, `out=`, 4096×11008 | bandwidth of `copy_` | ≥ 0.7 (0.9) | fp32 0.75 | 0.75 | met where measured |" in text
    assert "| case | provider | µs (p20 to p80) | share of copy | torch copy_, µs |" in text
    assert "| 2:4 fp32 4096x11008 | nmkernels cpu | 10 (9 to 11) | 0.751 | 8 |" in text


def test_slow_opponents_are_named(results: Path) -> None:
    rows = [
        LINEAR.format("nmkernels cpu", "2:4", f"{tokens}x64x64", metric, f"1,{value},9,")
        for tokens, speed in ((1, 1.8), (16, 2.5))
        for metric, value in (("x fastest dense", speed), ("x roofline allows", 2))
    ]
    with (results / "amd.csv").open("a") as csv:
        csv.writelines(rows)
    report.main([], results)
    text = (results / "README.md").read_text()
    assert "| 2:4 fp32 1x64x64 | nmkernels cpu |  | 1.8 | 2 |" in text
    assert "| 2:4 fp32 16x64x64 | nmkernels cpu |  | 2.5 (slow opponent) | 2 |" in text


def test_check_notices_a_stale_page_and_writes_nothing(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = results / "README.md"
    assert report.main(["--check"], results) == 1 and not page.exists()
    assert "results/README.md does not show" in capsys.readouterr().out
    report.main([], results)
    once = page.read_bytes()
    assert report.main(["--check"], results) == report.main([], results) == 0 and page.read_bytes() == once
    page.write_text(page.read_text().replace("0.75", "0.95"))
    assert report.main(["--check"], results) == 1


def test_rows_of_an_archive_are_added(results: Path, tmp_path: Path) -> None:
    """``make gpu`` leaves one; of it the measurements alone are taken."""
    (tmp_path / "gpu" / "rows").mkdir(parents=True)
    row = MASK.format("nmkernels cuda", "us", "9,10,11,").replace("AMD, 2 threads", "NVIDIA H200")
    (tmp_path / "gpu" / "rows" / "nvidia-h200.csv").write_text(HEAD + row)
    (tmp_path / "gpu" / "other.csv").write_text("no rows")
    with tarfile.open(tmp_path / "gpu.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "gpu", ".")
    assert report.main(["--add", str(tmp_path / "gpu.tar.gz")], results) == 0
    assert "NVIDIA H200" in (results / "nvidia-h200.csv").read_text() and not (results / "other.csv").exists()
    assert "## NVIDIA H200" in (results / "README.md").read_text()


def test_rows_of_another_folder_are_added(results: Path, tmp_path: Path) -> None:
    new = MASK.format("nmkernels cpu", "share of copy", "0.8,0.85,0.9,").replace("abc1234", "def5678")
    other = new.replace("AMD, 2 threads", "Intel, 2 threads")
    (tmp_path / "amd.csv").write_text(HEAD + new)
    (tmp_path / "other.csv").write_text(HEAD + other)
    before = (results / "amd.csv").read_text().splitlines()
    for folder in (tmp_path, results):  # the folder itself is nothing to add
        assert report.main(["--add", str(folder)], results) == 0
        after = (results / "amd.csv").read_text().splitlines()
        assert set(before) - set(after) == {line for line in before if "share of copy" in line}, "the same figure is replaced"
        assert set(after) - set(before) == {new.strip()} and (results / "other.csv").read_text() == HEAD + other
    text = (results / "README.md").read_text()
    assert "| fp32 0.85 |" in text and "## Intel, 2 threads" in text


def test_figures_are_drawn_and_shown(results: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        LINEAR.format("nmkernels cpu", pattern, "1x64x64", metric, value)
        for pattern, speed in (("2:4", "3"), ("1:8", "7"))
        for metric, value in (("x fastest dense", f"1,{speed},9,"), ("GFLOP/s", "1,20,30,"), ("GB/s", "1,40,50,"))
    ]
    limits = [f"copy,torch,,float32,8x8,GB/s,1,60,70,{STAMP}", f"matmul,torch,,float32,8x8,GFLOP/s,1,200,300,{STAMP}"]
    with (results / "amd.csv").open("a") as csv:
        csv.writelines([*rows, *limits])
    report.main([], results)
    drawn = {path.name: path.stat().st_size for path in (results / "figures").iterdir()}
    assert drawn.keys() == {"amd-2-threads-roofline.svg", "amd-2-threads-speedup.svg"} and max(drawn.values()) < 200_000
    assert all(f"(figures/{name})" in (results / "README.md").read_text() for name in drawn)
