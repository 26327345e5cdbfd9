"""What publishes a release says what is so: Pythons, extras, scripts, the image's toolkit, the workflows, the sdist."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no reader of TOML")
pytestmark = pytest.mark.skipif(not WORKFLOWS.exists(), reason="not a source checkout")


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_same_pythons_are_named_everywhere(config: dict[str, Any]) -> None:
    named = re.findall(r"Python :: (3\.\d+)", " ".join(config["project"]["classifiers"]))
    build = config["tool"]["cibuildwheel"]["build"]
    built = [f"3.{minor}" for minor in re.findall(r"cp3(\d+)-\*", build)]
    assert named == built == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    # free threads: their module must say that it needs no lock, or Python takes it again
    assert re.findall(r"cp(\d+)t-\*", build) == ["314"] and config["tool"]["cibuildwheel"]["test-skip"] == "cp314t-*"
    for file in ("bindings.cpp", "bindings_emulated.cpp"):
        assert "::mod_gil_not_used()" in (ROOT / "csrc" / file).read_text(encoding="utf-8")
    assert config["project"]["requires-python"] == f">={named[0]}"
    assert " ".join(f"python{one}" for one in named) in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_a_wheel_requires_little_and_cusparselt_only_when_asked(config: dict[str, Any]) -> None:
    assert [re.split(r"[<>=;\s]", one)[0] for one in config["project"]["dependencies"]] == ["torch", "safetensors", "numpy"]
    for extra, version in (("cuda", 13), ("cuda12", 12)):
        (cusparselt,) = config["project"]["optional-dependencies"][extra]
        assert cusparselt.startswith(f"nvidia-cusparselt-cu{version}>=")
        assert f"Environment :: GPU :: NVIDIA CUDA :: {version}" in config["project"]["classifiers"]


def test_a_build_requires_no_more_than_it_uses(config: dict[str, Any]) -> None:
    assert [re.split(r"[<>=]", one)[0] for one in config["build-system"]["requires"]] == ["setuptools", "cmake", "ninja", "pybind11"]


def test_the_package_has_a_page_and_authors(config: dict[str, Any]) -> None:
    addresses = config["project"]["urls"]
    assert set(addresses) == {"Homepage", "Documentation", "Changelog", "Issues"} and config["project"]["authors"]
    files = [one.partition("/blob/main/")[2] for one in addresses.values() if "/blob/" in one]
    assert len(files) == 2 and all((ROOT / one).is_file() for one in files)


def test_the_image_runs_scripts_that_exist(config: dict[str, Any]) -> None:
    every = config["tool"]["cibuildwheel"]
    linux, macos = every["linux"], every["macos"]
    commands = [every["test-command"], linux["before-all"], *linux["repair-wheel-command"], *macos["repair-wheel-command"]]
    scripts = re.findall(r"\{project\}/(\S+)", " ".join(commands))
    assert len(scripts) == 5 and [one for one in scripts if not (ROOT / one).is_file()] == []
    assert linux["before-all"].endswith(linux["environment"]["CUDA_HOME"])
    excluded = re.findall(r"--exclude (\S+)", linux["repair-wheel-command"][0])
    assert tuple(excluded) == runpy.run_path(str(ROOT / "cmake" / "wheel.py"))["EXCLUDED"]


def test_every_runner_builds_its_own_wheels_and_their_names_differ(config: dict[str, Any]) -> None:
    yaml = pytest.importorskip("yaml", reason="no reader of YAML")
    jobs = yaml.safe_load((WORKFLOWS / "wheels.yml").read_text(encoding="utf-8"))["jobs"]
    assert jobs["wheels"]["strategy"]["matrix"]["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm", "macos-15"]
    assert config["tool"]["cibuildwheel"]["linux"]["archs"] == ["auto64"]
    # an artifact of a name that is taken is refused
    names = [step["with"]["name"] for job in jobs.values() for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert sorted(names) == ["pure", "sdist", "wheels-${{ matrix.runner }}"]


def test_only_a_tag_publishes_and_only_what_was_built() -> None:
    yaml = pytest.importorskip("yaml", reason="no reader of YAML")
    found = yaml.safe_load((WORKFLOWS / "wheels.yml").read_text(encoding="utf-8"))
    # YAML 1.1 reads the key `on` as true
    assert found[True]["push"] == {"tags": ["v*"]}
    publish = found["jobs"]["publish"]
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert set(publish["needs"]) == set(found["jobs"]) - {"publish"}
    assert publish["permissions"]["id-token"] == "write"
    assert [job for job in found["jobs"].values() if "id-token" in job.get("permissions", {})] == [publish]
    (check,) = [step["run"] for step in publish["steps"] if "run" in step]
    version = re.search(r'"(.*)"', (ROOT / "nmkernels" / "_version.py").read_text(encoding="utf-8").split("__version__ = ")[1])
    assert version is not None
    for tag, status in ((f"v{version[1]}", 0), ("v99.0", 1)):
        env = {"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"}
        assert subprocess.run(["bash", "-c", check], cwd=ROOT, env=env, check=False).returncode == status


def test_the_sdist_has_what_builds_it(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    no_builds = shutil.ignore_patterns("__pycache__", "*.so")
    for folder in ("csrc", "cmake", "nmkernels", "docs", "examples", ".ci"):
        shutil.copytree(ROOT / folder, checkout / folder, ignore=no_builds)
    for file in (p for p in ROOT.iterdir() if p.is_file() and p.suffix not in (".log", ".running")):
        shutil.copy(file, checkout)
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist"], cwd=checkout, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (archive,) = (checkout / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        packed = {name.partition("/")[2] for name in sdist.getnames()}
    folders = ("csrc", "cmake", "nmkernels", "docs", "examples")
    sources = [p.relative_to(checkout) for folder in folders for p in (checkout / folder).rglob("*") if p.is_file()]
    assert [str(one) for one in sources if str(one) not in packed] == []
    assert {"setup.py", "pyproject.toml", "constraints.txt", "LICENSE", "README.md", "Makefile", "mkdocs.yml", ".ci/run"} <= packed
    # that of a checkout without the tests, which are the larger part
    assert archive.stat().st_size < 3e6
