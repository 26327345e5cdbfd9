"""A dry run of ``make gpu``, really run: it gets over a test file that crashes, one that hangs, one that loses the device, and others."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from bench import gpu

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
    folder = tmp_path / "injected"
    folder.mkdir()
    for name, text in INJECTED.items():
        (folder / name).write_text(f"import os, signal, sys, time, types\nimport pytest\n{dedent(text)}")
    return folder


@pytest.mark.slow
def test_a_dry_run_gets_over_every_kind_of_failure(
    injected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "TEST_SECONDS", 1.0)
    words = ["tests", "sanitizer", "--dry-run", "--out", str(tmp_path / "out"), "--tests", str(injected), "--jobs", "2"]
    assert gpu.main(words) == 1
    lines = capsys.readouterr().out.splitlines()
    summary = lines[lines.index("== summary") :]
    assert "6 passed; 6 failed; 1 skipped; skipped: 1 no 60 GiB here" in summary[1]
    text = "\n".join(summary)
    for failed in (
        "test_import.py: ModuleNotFoundError: No module named 'no_such_module'",
        "test_crash: its process was ended by SIGSEGV",
        "test_hang: took more than 1 s and was ended",
        "test_plain: test_bad.py:4: AssertionError: one is not two",
        "test_loses_the_device: test_lost.py:10: RuntimeError: CUDA error",
        "test_fixture: ",
    ):
        assert failed in text
    # alone comes last, after the two that run side by side
    done = [Path(line.split()[3].rstrip(":")).name for line in lines[1 : lines.index("== sanitizer")] if " s  " in line]
    assert done[0] == "collect" and done[-1] == "test_alone.py" and len(done) == 5
    # what is finished is not done again, until the sources change
    assert gpu.main(words) == 1
    again = capsys.readouterr().out
    assert "4 of 4 were finished by an earlier call" in again and "6 passed; 6 failed" in again
    logs = list((tmp_path / "out" / "tests").glob("*good*.log"))
    assert len(logs) == 1 and logs[0].read_text().count("passed") == 1


@pytest.mark.slow
def test_a_folder_without_such_tests_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_a.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_a(): pass\n")
    assert gpu.main(["tests", "--dry-run", "--out", str(tmp_path / "out"), "--tests", str(tmp_path)]) == 1
    assert "collect: exit status 5" in capsys.readouterr().out
