"""Timing on a fake GPU: the result is the device's time, whatever the host's is."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

from bench import device, runner, targets, targets_cuda
from bench.cases import power_or_port
from bench.device import rotated
from bench.registry import Provider, Ratio, Spec, Work
from nmkernels import reference
from python_tests.bench.fake_gpu import fake_gpu
from python_tests.bench.samples import broken, instead, small


def test_copies_take_turns() -> None:
    copy = Mock(side_effect=range(1, 7))
    turn = rotated(0, 30, 50, copy)
    # 7 of 30 bytes are the first to make up four times 50
    assert [turn() for _ in range(8)] == [0, 1, 2, 3, 4, 5, 6, 0]
    assert rotated(0, 400, 50, copy)() == rotated(0, 30, 0, copy)() == 0 and copy.call_count == 6


# ---- the cases of a GPU, on one that is not there


@pytest.mark.quick(2)
@pytest.mark.parametrize("spec", dict.fromkeys(small(s) for s in targets.quick("cuda")), ids=str)
def test_cases_of_a_gpu_are_built_and_timed(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu(monkeypatch):
        rows = runner.measure(spec, "cuda", 0.0)
    assert rows and all(r.machine == "NVIDIA H200" for r in rows)
    found = {(r.provider, r.metric) for r in rows}
    for target in targets_cuda.TARGETS:
        # of Triton and of cuSPARSELt, which are not here
        if spec in map(small, target.specs) and not target.provider.endswith(("scratch", "searched", "stream-k")):
            # the CPU's backend instead of a GPU's; the layouts of tensor cores are the reference's there
            ordered = "mma.sp" in target.key or target.key.startswith("cuda-gemm-wgmma")
            ours = "reference" if ordered else "cpu"
            assert (re.sub("triton|cusparselt|cuda", ours, target.provider), target.metric) in found


def test_a_gpu_is_judged_by_its_own_targets() -> None:
    row = {"op": "nm_compress", "provider": "nmkernels cuda", "pattern": "2:4", "dtype": "bfloat16", "shape": "8192x16384"}
    found = targets.verdicts([{**row, "metric": "share of copy", "p50": "0.9"}], "cuda", {})
    assert [v.target.key for v in found if v.measured] == ["cuda-compress"] and found[0].state == "met"


@pytest.mark.parametrize(("why", "after", "wrong"), [("an illegal memory access", 1, 1), ("", None, 2)])
def test_a_lost_device_ends_the_run_and_names_the_next_case(monkeypatch, tmp_path: Any, why: str, after: int | None, wrong: int) -> None:
    monkeypatch.setattr(runner, "measure", Mock(side_effect=RuntimeError("CUDA error: an illegal memory access was encountered")))
    monkeypatch.setattr(runner, "lost", lambda device: why)
    specs, said = [Spec("nm_mask", rows=16, cols=32), Spec("nm_prune", rows=16, cols=32)], []
    outcome = runner.run(specs, "cpu", tmp_path / "a.csv", 0.0, complain=said.append)
    assert (outcome.next, len(outcome.wrong)) == (after, wrong) and ("can no longer use cpu" in said[-1]) == bool(why)


@pytest.mark.quick
def test_failures_cost_no_other_provider(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def graphed(call: Any, device: str) -> Any:
        def replay() -> None:
            if os.environ.get("NMKERNELS_BACKEND") == "broken":
                raise RuntimeError("operation not permitted when stream is capturing")
            assert len(call()) == 100

        return replay

    def run(does: Any, priority: int) -> runner.Measured:
        with broken("nm_mask", does, priority), fake_gpu(monkeypatch):
            monkeypatch.setattr("bench.cases.host.graphed", graphed)
            return runner.run([Spec("host(nm_mask)", "2:4", "bfloat16", 64, 64)], "cuda", tmp_path / "a.csv", 0.0)

    outcome = run(instead(reference.mask), 1)
    why = "timed without nmkernels broken, graph: RuntimeError: operation not permitted when stream is capturing"
    assert [said for _, said in outcome.wrong] == [why]
    mine = next(r.provider for r in outcome.rows if r.provider.startswith("nmkernels") and "broken" not in r.provider).split(",")[0]
    found = {r.provider for r in outcome.rows if r.metric == "us"}
    assert found == {mine, f"{mine}, graph", "nmkernels broken", "torch no-op", "torch graph"}
    assert {r.provider for r in outcome.rows if r.metric == "us beyond torch's kernels"} == {f"{mine}, graph"}
    outcome = run(Mock(side_effect=RuntimeError("no kernel image")), 99)
    assert "timed without nmkernels broken: RuntimeError: no kernel image" in outcome.wrong[0][1]
    assert "nmkernels cpu" in {r.provider for r in outcome.rows}


def test_a_failed_capture_leaves_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = MagicMock()
    cuda.graph.return_value.__exit__.side_effect = RuntimeError("operation failed due to a previous error during capture")
    monkeypatch.setattr(torch, "cuda", cuda)
    with pytest.raises(RuntimeError, match="during capture"), device.captured("cuda"):
        pass
    called = [name for name, *_ in cuda.mock_calls]
    assert called.index("current_stream") < called.index("graph")
    cuda.set_stream.assert_called_once_with(cuda.current_stream.return_value)


def test_a_call_is_captured_once_after_calls_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    @contextmanager
    def noted(*words: Any) -> Iterator[Any]:
        said.append(str(words[-1]))
        yield SimpleNamespace(replay=lambda: said.append("replay"))
        said.append("end")

    monkeypatch.setattr(device, "captured", noted)
    monkeypatch.setattr(device, "on_own_stream", noted)
    step = device.graphed(lambda: said.append("call"), "cuda", lambda: "pool")
    assert said == []
    step(), step()
    assert said == ["cuda", *["call"] * device.WARM, "end", "pool", "call", "end", "replay", "replay"]
    assert device.graphed(step, "cpu") is step


def test_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = MagicMock()
    monkeypatch.setattr(torch, "cuda", cuda)
    new, before = cuda.Stream.return_value, cuda.current_stream.return_value
    with device.on_own_stream("cuda"):
        new.wait_stream.assert_called_once_with(before)
        cuda.stream.assert_called_once_with(new)
        before.wait_stream.assert_not_called()
    before.wait_stream.assert_called_once_with(new)


def test_a_step_that_cannot_be_captured_costs_only_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def graphed(call: Any, device: str) -> Any:
        graphs.append(call)
        return Mock(side_effect=RuntimeError("operation not permitted when stream is capturing")) if len(graphs) == 2 else call

    graphs: list[Any] = []
    with fake_gpu(monkeypatch):
        monkeypatch.setattr("bench.cases.ffn.graphed", graphed)
        with pytest.raises(
            runner.Partly, match="timed without nmkernels srste, step .captured.: RuntimeError: operation not permitted"
        ) as found:
            runner.measure(small(Spec("ffn(captured)", "2:4", "bfloat16", 4096, 1024, 4096)), "cuda", 0.0)
    ratios = {r.provider for r in found.value.rows if r.metric == "x dense"}
    assert ratios == {f"nmkernels {name}, step (captured)" for name in ("sste", "fst", "fst, every step", "step")}


@pytest.mark.parametrize("says", ["900, 640.5", "[N/A], [N/A]", None])
def test_power_or_port_records_clock_and_power(says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While each of the dense and the two sparse GEMMs runs; nothing where nvidia-smi is missing or does not say."""
    if says:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncase $2 in GPU-1) echo '{says}';; esac\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (ours, other), dense, calls = power_or_port.OURS, power_or_port.DENSE, list[str]()
    providers = [Provider(name, partial(calls.append, name)) for name in (ours, other, "nmkernels triton", dense)]
    monkeypatch.setattr(power_or_port, "gemms", lambda *_: Work(providers, [Ratio("x dense", ours, (dense,))]))
    with fake_gpu(monkeypatch):
        rows = runner.measure(Spec("power_or_port", "2:4", "bfloat16", 64, 64, 64), "cuda", 0.0)
    found = {(r.provider, r.metric): r.p50 for r in rows}
    assert {name for name, _ in found} == {ours, other, dense} == set(calls) and (ours, "x dense") in found
    clocks = {(name, metric): value for name in (ours, other, dense) for metric, value in (("MHz", 900.0), ("W", 640.5))}
    assert {key: value for key, value in found.items() if key[1] in ("MHz", "W")} == (clocks if says == "900, 640.5" else {})
