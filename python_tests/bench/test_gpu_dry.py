"""A dry run of ``make gpu``, really run: it gets over a test file that crashes, one that hangs, one that loses the device, and others."""

from __future__ import annotations

import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from textwrap import dedent

import pytest

from bench import gpu
from python_tests.house.paths import ROOT

INJECTED = {
    "test_good.py": """
        @pytest.mark.parametrize("i", range(3))
        def test_a(i): print("good ran")
        @pytest.mark.skip(reason="no 60 GiB here")
        def test_large(): pass
        @pytest.mark.gpu
        def test_on_a_gpu(): raise AssertionError("not in a dry run")
    """,
    "test_bad.py": """
        def test_plain(): assert 1 == 2, "one is not two"
        def test_crash(): os.kill(os.getpid(), signal.SIGSEGV)
        def test_hang(): time.sleep(600)
        def test_after(): pass
    """,
    "test_lost.py": """
        def test_fixture(no_such_fixture): pass
        def test_loses_the_device():
            fake = types.ModuleType("torch")
            fake.cuda = types.SimpleNamespace(is_initialized=lambda: True)
            sys.modules["torch"] = fake
            sys.modules["bench.device"] = types.SimpleNamespace(lost=lambda device: "an illegal memory access")
            raise RuntimeError("CUDA error")
        def test_after(): assert "torch" not in sys.modules
    """,
    "test_import.py": "import no_such_module",
    "test_alone.py": """
        @pytest.mark.alone
        def test_large(): pass
    """,
}


@pytest.fixture
def injected(tmp_path: Path) -> Path:
    return write(tmp_path / "injected", INJECTED)


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu, "WORK", tmp_path)
    return tmp_path / "gpu-dry"


def write(folder: Path, tests: dict[str, str]) -> Path:
    folder.mkdir()
    for name, text in tests.items():
        (folder / name).write_text(f"import os, signal, sys, time, types\nimport pytest\n{dedent(text)}")
    return folder


@pytest.mark.slow
def test_a_dry_run_gets_over_every_kind_of_failure(
    injected: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "TEST_SECONDS", 1.0)
    monkeypatch.setattr(gpu, "WORKERS", 2)
    words = ["tests", "memcheck", "--dry-run", "--tests", str(injected)]
    assert gpu.main(words) == 1
    lines = capsys.readouterr().out.splitlines()
    summary = lines[lines.index("== summary") :]
    assert "6 passed; 6 failed; 1 skipped" in next(line for line in summary if "  tests " in line)
    text = "\n".join(summary)
    for failed in (
        "test_import.py: ModuleNotFoundError: No module named 'no_such_module'",
        "test_crash: its process was ended by SIGSEGV",
        "test_hang: took more than 1 s and was ended",
        "test_plain: test_bad.py:4: AssertionError: one is not two",
        "test_loses_the_device: test_lost.py:10: RuntimeError: CUDA error",
        "test_fixture: ",
    ):
        assert failed in text and any(failed in line for line in lines[: lines.index("== summary")]), (
            "printed as its job ends, and in the summary"
        )
    # alone comes last, after the others that run in parallel
    done = [Path(line.split(":")[0]).name for line in lines[lines.index("== tests") : lines.index("== summary")] if " passed" in line]
    assert done[0].startswith("collect") and done[-1] == "test_alone.py" and len(done) == 5
    # what is finished is not done again, until the sources change
    assert gpu.main(words) == 1
    again = capsys.readouterr().out
    assert "6 passed; 6 failed" in again
    logs = list((work / "tests").glob("*good*.log"))
    assert len(logs) == 1 and logs[0].read_text().count("passed") == 1


@pytest.mark.slow
def test_a_folder_without_such_tests_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_a.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_a(): pass\n")
    assert gpu.main(["tests", "--dry-run", "--tests", str(tmp_path)]) == 1
    assert "collect: no test in " in capsys.readouterr().out


def drive(*words: str, work: Path) -> subprocess.Popen[str]:
    """``make gpu-dry`` as a process of its own, with its folders in ``work``."""
    text = f"from pathlib import Path; from bench import gpu; gpu.WORKERS = 1; gpu.WORK = Path({str(work)!r}); raise SystemExit(gpu.main())"
    words = (sys.executable, "-c", text, "tests", "--dry-run", *words)
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


SLOW = {
    "test_a.py": """
        def test_bad(): assert 1 == 2, "one is not two"
        def test_good(): pass
    """,
    "test_b.py": """
        def test_first(): pass
        def test_long(): time.sleep(600 if not os.path.exists("FREE") else 0)
        def test_last(): pass
    """,
}


@pytest.mark.slow
def test_what_is_cut_short_goes_on_in_another_checkout(tmp_path: Path) -> None:
    """By SIGTERM: the summary names failures and what is left, and the archive goes on where it stopped."""
    free, out = tmp_path / "free", tmp_path / "out"
    folder = write(tmp_path / "tests", {name: text.replace("FREE", str(free)) for name, text in SLOW.items()})
    words = "--tests", str(folder), "--out", str(out)
    first = drive(*words, work=tmp_path / "one")
    begun = tmp_path / "one" / "gpu-dry" / "tests"
    while not any("test_long" in path.read_text() for path in begun.glob("*b-py*.jsonl")):
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    said, _ = first.communicate(timeout=60)
    assert first.returncode == 143, said
    text = said[said.index("== summary") :]
    assert "test_bad: test_a.py:4: AssertionError: one is not two" in text and "2 passed; 1 failed; left: " in text
    assert sorted(path.name for path in out.iterdir()) == ["gpu.tar.gz", "summary.txt"] and (out / "summary.txt").read_text() == text
    with tarfile.open(out / "gpu.tar.gz") as archive:
        assert any(name.endswith("test_a-py.log") for name in archive.getnames())
    free.touch()
    second = drive(*words, "--resume", str(out / "gpu.tar.gz"), work=tmp_path / "two")
    said, _ = second.communicate(timeout=120)
    assert second.returncode == 1 and "4 passed; 1 failed" in said, said
    (log,) = (tmp_path / "two" / "gpu-dry" / "tests").glob("*b-py*.log")
    assert log.read_text().count("2 passed") == 1, "test_first has not run once more"
