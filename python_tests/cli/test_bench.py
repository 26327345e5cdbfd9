"""The verb ``bench`` finds the measurements beside the package, and says how to get them where they are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nmkernels import NMError, cli
from nmkernels.cli import bench

ROOT = Path(__file__).resolve().parents[2]
needs_sources = pytest.mark.skipif(bench.HOME != ROOT, reason="not the package of this source checkout")


@needs_sources
def test_verb_is_the_run_of_the_source_tree(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--list", "--targets", "--op", "nm_mask"]) == 0
    assert capsys.readouterr().out.splitlines() == ["nm_mask 2:4 float32 4096x11008", "nm_mask 2:4 bfloat16 4096x11008"]


@needs_sources
def test_wrong_word_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--op", "nosuch"]) == 1
    assert "error: no op to time is called 'nosuch'" in capsys.readouterr().err


def test_installed_package_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NMError, match="folder bench/ of the source tree"):
        bench.measurements(tmp_path)
    monkeypatch.setattr(bench, "HOME", tmp_path)
    assert cli.main(["bench", "--quick"]) == 1
    assert "pip install -e '.[bench]'" in capsys.readouterr().err


@pytest.mark.slow
@needs_sources
def test_works_from_any_folder(tmp_path: Path) -> None:
    # another module of that name must not be taken
    (tmp_path / "bench.py").write_text("raise SystemExit('the wrong one')\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "nmkernels", "bench", "--list", "--quick", "--device", "cpu"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "nm_mask 2:4 float32 1024x4096" in done.stdout, done.stderr
