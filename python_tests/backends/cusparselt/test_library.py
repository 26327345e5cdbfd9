"""The library is found and opened, or it is said in words what is wrong with it."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch

from bench import cusparselt_abi
from nmkernels import BackendError, capability
from nmkernels.backends import cusparselt
from nmkernels.backends.cusparselt import context
from python_tests.backends.cusparselt.conftest import normal, packed
from python_tests.for_each import for_each

needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None or not cusparselt_abi.REPORT.exists(), reason="the sources and a C++ compiler are needed"
)


def probe() -> capability.Probe:
    capability._opened.cache_clear()
    return capability.cusparselt.__wrapped__()


@for_each(
    "version, text", [(800, "0.8.0"), (801, "0.8.1"), (1000, "0.10.0"), (1_000_203, "1.2.3"), (700, "0.7.0"), (1, "0.0.1"), (602, "0.6.2")]
)
def test_versions(fake, version, text) -> None:
    fake.set("version", version)
    ok, reason = probe()
    assert ok == (version >= 800) and reason.startswith(f"cuSPARSELt {text}, {fake.path}")
    if not ok:
        way_out = "NMKERNELS_CUSPARSELT names this file; unset it, or name another."
        assert reason.endswith(f", is too old: 0.8.0 or newer is needed. {way_out}")
        with pytest.raises(BackendError, match="is too old"):
            cusparselt.compress(torch.ones(16, 16, dtype=torch.float16), mask=torch.zeros(16, 16, dtype=torch.bool))


def test_a_file_that_is_missing_or_no_library(fake, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(capability.ENV, str(tmp_path / "nowhere.so"))
    assert "cannot open shared object file" in probe().reason
    text = tmp_path / "text.so"
    text.write_text("no library")
    monkeypatch.setenv(capability.ENV, str(text))
    ok, reason = probe()
    assert not ok and reason.startswith(f"{text} is not usable: it cannot be opened") and "names this file" in reason


@pytest.fixture(scope="module")
def without(build):
    """The library, but for one entry."""
    return build("without", "-DNM_WITHOUT_DENSE")


def test_a_missing_entry_is_named(fake, without, monkeypatch) -> None:
    monkeypatch.setenv(capability.ENV, str(without))
    ok, reason = probe()
    assert not ok and "is not usable: it has no cusparseLtDenseDescriptorInit." in reason


@pytest.fixture
def wheels(monkeypatch, tmp_path):
    """The folder of NVIDIA's pip packages, which is the only place to look in."""
    monkeypatch.delenv(capability.ENV, raising=False)
    monkeypatch.setattr(capability.util, "find_spec", lambda _: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    # a CUDA build of torch has loaded the real one, which the loader then knows by this name whatever is in the wheel
    monkeypatch.setattr(capability, "SONAMES", ("libcusparseLt-that-nobody-has.so.0",))
    yield tmp_path
    capability._opened.cache_clear()


def test_none_at_all(wheels) -> None:
    ok, reason = probe()
    start = "libcusparseLt is neither in a pip wheel nor on the system; `pip install -U nvidia-cusparselt-cu13`"
    assert not ok and reason.startswith(start)


@pytest.mark.parametrize("folder", ["cusparselt", "cu13"])
def test_the_pip_wheel_comes_first(fake, wheels, monkeypatch, folder) -> None:
    library = wheels / folder / "lib" / "libcusparseLt.so.0"
    library.parent.mkdir(parents=True)
    shutil.copy(fake.path, library)
    assert probe() == (True, f"cuSPARSELt 0.8.0, {library}")
    library = library.with_name("libcusparseLt.so.0.8")  # by another name: the loader knows the one that it has loaded
    library.write_text("damaged")
    library.with_name("libcusparseLt.so.0").unlink()
    ok, reason = probe()
    assert not ok and str(library) in reason and "pip install -U" in reason
    monkeypatch.setattr(capability, "SONAMES", (str(fake.path),))
    assert probe() == (True, f"cuSPARSELt 0.8.0, {fake.path}")


def test_the_library_needs_the_core(monkeypatch) -> None:
    monkeypatch.setattr(capability, "compiled_core", lambda: capability.Probe(False, "nmkernels._C is not built"))
    assert capability.opened() == (None, "it needs the compiled core, and nmkernels._C is not built")


@pytest.mark.parametrize(
    "entry",
    ["Init", "StructuredDescriptorInit", "DenseDescriptorInit", "MatmulDescriptorInit", "MatmulAlgSelectionInit", "MatmulPlanInit",
     "MatmulGetWorkspace", "Matmul", "SpMMACompressedSize2", "SpMMACompress2", "MatmulDescSetAttribute", "MatmulAlgGetAttribute"],
)  # fmt: skip
def test_a_failing_entry_is_named_and_leaves_nothing_behind(fake, ours, entry) -> None:
    fake.set(f"fail:{entry}", 10)
    args = normal(8, 64), *packed(), normal(32), "relu2"
    # a bias and an activation can do without
    if entry == "MatmulDescSetAttribute":
        assert torch.isfinite(ours("nm_linear").fn(*args)).all()
        return
    with pytest.raises(BackendError, match=f"cusparseLt{entry} failed: CUSPARSE_STATUS_NOT_SUPPORTED .10., operation not supported"):
        ours("nm_linear").fn(*args)
    if entry not in ("Init", "SpMMACompress2"):
        can, reason = ours("nm_linear").supports(*args)
        assert not can and f"cusparseLt{entry} failed" in reason
    fake.set(f"fail:{entry}", 0)
    context._threads.sessions.clear()
    cusparselt.algorithms._checked.clear()
    assert torch.isfinite(ours("nm_linear").fn(*args)).all()


# ---- the binary interface


@needs_compiler
def test_our_declarations_agree_with_every_version() -> None:
    mine, table = cusparselt_abi.ours(), cusparselt_abi.read()
    assert {"0.8.0", "0.10.0"} <= set(table)
    assert len(mine) > 50
    for version, found in table.items():
        assert {name: found.get(name) for name in mine} == mine, version


@needs_compiler
def test_the_installed_header_agrees() -> None:
    header, toolkit = cusparselt_abi.installed(), cusparselt_abi.toolkit()
    if header is None or toolkit is None:
        pytest.skip("cusparseLt.h is not installed")
    if "cusparseLtMatmulAlgSelectionDestroy" not in header.joinpath("cusparseLt.h").read_text(encoding="utf-8"):
        pytest.skip("cusparseLt.h is older than 0.8, which the extra cuda asks for")
    found = cusparselt_abi.theirs(header, toolkit)
    assert {name: found[name] for name in cusparselt_abi.ours()} == cusparselt_abi.ours()


@needs_compiler
def test_a_different_header_is_reported(tmp_path, capsys, monkeypatch) -> None:
    """A made-up header: as ours, but for one value and one parameter."""
    monkeypatch.setattr(cusparselt_abi, "TABLE", tmp_path / "table.csv")
    mine = cusparselt_abi.ours()
    changed = {**mine, "CUSPARSELT_MATMUL_SPLIT_K": "5", "cusparseLtInit": "4(* 8)", "version": "0.11.0"}
    monkeypatch.setattr(cusparselt_abi, "theirs", lambda *_: dict(changed))
    assert cusparselt_abi.main(["--header", str(tmp_path), "--toolkit", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["CUSPARSELT_MATMUL_SPLIT_K: 3 here, 5 in 0.11.0", "cusparseLtInit: 4(*) here, 4(* 8) in 0.11.0"]
    assert not (tmp_path / "table.csv").exists()


@needs_compiler
def test_a_missing_library_call_is_reported(fake, without) -> None:
    assert cusparselt_abi.missing_symbols(fake.path) == []
    assert cusparselt_abi.missing_symbols(without) == ["cusparseLtDenseDescriptorInit"]
