"""The tables say what the rows say, and ``--check`` notices when they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import figures, report, tables
from python_tests.bench.samples import HEAD, STAMP

MASK = "nm_mask,{},2:4,float32,4096x11008,{},{}" + STAMP
LINEAR = "nm_linear,{},{},float32,{},{},{}" + STAMP


@pytest.fixture
def tree(tmp_path: Path) -> tuple[Path, Path]:
    """A README with the markers, and a folder with one CSV."""
    results = tmp_path / "results"
    results.mkdir()
    (results / "amd.csv").write_text(
        HEAD
        + MASK.format("nmkernels cpu", "us", "9,10,11,")
        + MASK.format("torch copy_", "us", "7,8,9,")
        + MASK.format("nmkernels cpu", "share of copy", "0.7,0.7512,0.8,")
        + MASK.format("nmkernels cpu avx2", "us", "9,20000,11,")
        + "train,dense twin,2:4,float32,byte GPT,loss,1,2,3,"
        + STAMP
    )
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{report.BEGIN}\nstale\n{report.END}\nbelow\n")
    return readme, results


def _main(tree: tuple[Path, Path], *options: str) -> int:
    return report.main(list(options), readme=tree[0], results=tree[1])


def test_readme_gets_targets_and_what_is_no_speed(tree: tuple[Path, Path]) -> None:
    (tree[1] / "shortfalls.txt").write_text("mask: because\n")
    assert _main(tree) == 0
    text = tree[0].read_text()
    assert text.startswith("above\n") and text.endswith("below\n") and "stale" not in text
    assert text.count("**AMD, 2 threads** (torch 2.13.0; 2026-11-21; commit abc1234)") == 2
    assert "| mask, `out=`, 4096×11008 | bandwidth of `copy_` | ≥ 0.7 (0.9) | fp32 0.75 | met where measured |" in text
    assert "| train 2:4 float32 byte GPT | dense twin | 2 (1 to 3) | loss |" in text
    # times are told on the other page
    assert "µs" not in text and "(bench/results/README.md)" in text


def test_every_case_is_told_in_full(tree: tuple[Path, Path]) -> None:
    _main(tree)
    text = (tree[1] / "README.md").read_text()
    assert "## AMD, 2 threads" in text and "train" not in text
    assert (
        "### nm_mask\n\n"
        "| case | provider | µs (p20 to p80) | share of copy | torch copy_, µs |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| 2:4 fp32 4096x11008 | nmkernels cpu | 10 (9 to 11) | 0.751 | 8 |\n"
        "| 2:4 fp32 4096x11008 | nmkernels cpu avx2 | 20000 (9 to 11) |  | 8 |"
    ) in text


def test_shapes_are_told_with_their_layers() -> None:
    row = dict(
        zip(HEAD.strip().split(","), LINEAR.format("nmkernels cpu", "2:4", "16x3072x768", "us", "1,1,1,a,b,c,d").split(","), strict=False)
    )
    assert "| 2:4 fp32 16x3072x768 (gpt2 fc) |" in tables.details([row])


def test_writing_twice_changes_nothing(tree: tuple[Path, Path]) -> None:
    _main(tree)
    once = {path: path.read_bytes() for path in tree[1].rglob("*") if path.is_file()} | {tree[0]: tree[0].read_bytes()}
    _main(tree)
    assert {path: path.read_bytes() for path in once} == once


@pytest.mark.parametrize("stale", [0, 1])
def test_check_notices_stale_tables_and_writes_nothing(tree: tuple[Path, Path], capsys: pytest.CaptureFixture[str], stale: int) -> None:
    before = tree[0].read_text()
    assert _main(tree, "--check") == 1
    assert tree[0].read_text() == before and "python -m bench.report" in capsys.readouterr().out
    _main(tree)
    assert _main(tree, "--check") == 0
    path = (tree[0], tree[1] / "README.md")[stale]
    path.write_text(path.read_text().replace("0.75", "0.95"))
    assert _main(tree, "--check") == 1
    assert f"{path.parent.name}/README.md does not show" in capsys.readouterr().out


def test_rows_of_another_folder_are_added(tree: tuple[Path, Path], tmp_path: Path) -> None:
    visit = tmp_path / "visit"
    visit.mkdir()
    new = MASK.format("nmkernels cpu", "share of copy", "0.8,0.85,0.9,").replace("abc1234", "def5678")
    (visit / "amd.csv").write_text(HEAD + new)
    (visit / "other.csv").write_text(HEAD + new.replace("AMD, 2 threads", "Intel, 2 threads"))
    before = (tree[1] / "amd.csv").read_text().splitlines()
    assert _main(tree, "--add", str(visit)) == 0
    after = (tree[1] / "amd.csv").read_text().splitlines()
    assert set(before) - set(after) == {line for line in before if "share of copy" in line}, "the same figure is replaced"
    assert set(after) - set(before) == {new.strip()}
    assert (tree[1] / "other.csv").read_text() == (visit / "other.csv").read_text()
    assert "| fp32 0.85 |" in tree[0].read_text() and "Intel, 2 threads" in tree[0].read_text()
    # the folder itself is nothing to add
    assert _main(tree, "--add", str(tree[1])) == 0 and (tree[1] / "amd.csv").read_text().splitlines() == after


def test_nothing_measured_is_said(tmp_path: Path) -> None:
    rows = report.load(tmp_path)
    assert report.front(rows, {}) == "No measurements are committed yet."
    assert report.full(rows, []).endswith("No measurements are committed yet.\n")


@pytest.mark.parametrize("text", ["", report.BEGIN, f"{report.END}\n{report.BEGIN}", f"{report.BEGIN}{report.END}{report.END}"])
def test_missing_markers_are_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        report.insert(text, "table")


def test_numbers_are_readable() -> None:
    assert [tables.number(n) for n in ("1.797e+06", "12.345", "0.0123456", "999.96", "0")] == ["1797000", "12.35", "0.0123", "1000", "0"]


def test_figures_are_drawn_and_shown(tree: tuple[Path, Path]) -> None:
    pytest.importorskip("matplotlib")
    csv = tree[1] / "amd.csv"
    rows = [
        LINEAR.format("nmkernels cpu", pattern, "1x64x64", metric, value)
        for pattern, speed in (("2:4", "3"), ("1:8", "7"))
        for metric, value in (("x dense", f"1,{speed},9,"), ("GFLOP/s", "1,20,30,"), ("GB/s", "1,40,50,"))
    ]
    limits = [f"copy,torch,,float32,8x8,GB/s,1,60,70,{STAMP}", f"matmul,torch,,float32,8x8,GFLOP/s,1,200,300,{STAMP}"]
    csv.write_text(csv.read_text() + "".join([*rows, *limits]))
    _main(tree)
    drawn = sorted(path.name for path in (tree[1] / "figures").iterdir())
    assert drawn == ["amd-2-threads-roofline.svg", "amd-2-threads-speedup.svg"]
    assert all(f"(figures/{name})" in (tree[1] / "README.md").read_text() for name in drawn)
    assert all((tree[1] / "figures" / name).stat().st_size < 200_000 for name in drawn)


class _Axes:
    """Remembers the lines that are plotted; takes every other call."""

    def __init__(self) -> None:
        self.lines: dict[str, tuple[list[float], list[float]]] = {}

    def plot(self, x: list[float], y: list[float], *style: object, label: str, **more: object) -> None:
        self.lines[label] = (list(x), list(y))

    def __getattr__(self, name: str) -> _Axes:
        return self

    def __call__(self, *args: object, **more: object) -> None:
        pass


@pytest.mark.parametrize(("machine", "dtype", "said"), [("AMD, 2 threads", "float32", "fp32"), ("NVIDIA H200", "bfloat16", "bf16")])
def test_figures_show_the_medians(machine: str, dtype: str, said: str) -> None:
    def row(pattern: str, metric: str, value: float) -> dict[str, str]:
        where = {"op": "nm_linear", "provider": "nmkernels cpu", "pattern": pattern, "shape": "1x64x64"}
        return {**where, "dtype": dtype, "machine": machine, "metric": metric, "p50": str(value)}

    axes = _Axes()
    assert figures.speedup([row("2:4", "x dense", 3.0), row("1:8", "x dense", 7.0)], axes)
    assert axes.lines["1x64x64"] == ([2.0, 8.0], [3.0, 7.0])
    limits = [{**row("", metric, value), "op": op} for op, metric, value in (("copy", "GB/s", 60.0), ("matmul", "GFLOP/s", 240.0))]
    assert figures.roofline([row("2:4", "GFLOP/s", 20.0), row("2:4", "GB/s", 40.0), *limits], axes)
    assert axes.lines[f"linear 2:4, {said}"] == ([0.5], [20.0])
    # the roof bends where the copy feeds what the product eats
    assert axes.lines["copy bandwidth, dense matmul rate"] == ([0.25, 4.0, 8.0], [15.0, 240.0, 240.0])
    assert not figures.speedup([], axes) and not figures.roofline([], axes)
