"""What is measured, with clocks that tell what the test wants, and once with the real one."""

from dataclasses import replace

import pytest
import torch

import nmkernels as nm
from nmkernels import capability
from nmkernels.audit import advice
from nmkernels.audit import pieces as measure
from nmkernels.audit.pieces import expected, gemm_of, gemms, needed, tasks_of, time_layer, time_layers
from nmkernels.audit.rules import Layer, LayerCosts, Rules, of_recipe, speedup
from nmkernels.gemm.devices import DEVICES
from nmkernels.timing import Task
from python_tests.audit.layer_zoo import COSTS

P = nm.Pattern("2:4")
CPU = torch.device("cpu")
SECONDS = COSTS | {
    "fprop op": 6.5,
    "dgrad op": 7.5,
    "wgrad estimated dense": 14.0,
    "wgrad estimated op": 9.0,
    "adapter": 1.5,
    "copy": 1.0,
    "launch": 0.0,
    "call": 0.0,
}


def clock(task):
    task.run()
    return SECONDS[task.name]


def costs(layer=None, transposed=True, rules=None, **words):
    layer = layer or Layer((64, 64), 4096, torch.float32, torch.float32)
    return LayerCosts(replace(DEVICES["H200"], transposed=transposed), layer, rules or Rules(P), **words)


@pytest.fixture(autouse=True)
def small_probe(monkeypatch):
    """Probing this machine costs a second; the numbers of a fake clock do not care."""
    monkeypatch.setattr(measure, "COPY", 1 << 23)
    monkeypatch.setattr(measure, "PROBE", Layer((1024, 1024), 32, torch.float32, torch.float32))
    measure.probe.cache_clear()
    yield
    measure.probe.cache_clear()


def test_measured_columns_by_hand():
    found = nm.audit({"fc": (64, 128), "lm_head": (64, 128)}, 32, "sste:2:4", device="cpu", timer=clock)
    fc, head = found.layers
    want = {"fprop": (6.5, "op"), "dgrad": (7.5, "op"), "weight": (0.75, "rows"), "wgrad": (9, "of mvue 2:4")}
    assert {p.name: (p.used, p.form) for p in fc.measured_step} == want
    assert {p.name: p.used for p in fc.measured_inference} == {"fprop": 6.5}
    assert speedup(head.measured_step) == 1.0 and {p.name: p.used for p in head.measured_step} == {"fprop": 10, "dgrad": 11, "wgrad": 12}
    assert found.measured_step == pytest.approx(66 / (33 + 23.75)) and found.measured_inference == pytest.approx(20 / 16.5)
    assert fc.note == "" and "Measured: medians" in str(found)


def test_a_gpu_that_is_not_here_is_not_measured():
    found = nm.audit({"fc": (64, 128)}, 32, device="H200", timer=clock)
    assert found.measured_step is None and "Measured" not in str(found) and not found.layers[0].note
    assert nm.audit({"fc": (64, 128)}, 32, device="cpu", timer=clock, measure=False).measured_step is None


def test_this_machine_is_what_its_measurement_says():
    device = measure.probe("here", CPU, torch.float32, P, "float", clock, 1)
    assert device.bandwidth == 2 * measure.COPY and device.dense == {"float32": 2.0 * 1024 * 1024 * 32 / 10}
    assert device.ratio == {"fprop": 10 / 6, "dgrad": 11 / 7, "wgrad": 12 / 8} and (device.low, device.high) == (1.5, 10 / 6)
    assert device.passes == pytest.approx(1024 * 1024 * 6.125 / 0.75 / device.bandwidth)
    assert device.few is None and device.transposed and device.rows == 1
    odd = measure.probe("here", CPU, torch.float32, nm.Pattern("1:3"), "float", clock, 1)
    assert odd.dense == {"float32": 2.0 * 1023 * 1023 * 30 / 10}


def test_the_real_clock_once_per_process(monkeypatch):
    found = nm.audit({"fc": (64, 128)}, 32, "fst:2:4(end=None)", device="cpu", budget=600)
    assert found.measured_step > 0 and found.measured_inference > 0 and found.layers[0].measured_step[0].dense > 0
    monkeypatch.delattr(measure, "time_tasks")
    assert nm.audit({"fc": (64, 128)}, 32, "fst:2:4(end=None)", device="cpu", measure=False).device == found.device


@pytest.mark.parametrize("recipe", ["srste:2:4", "sste:2:4", "fst:2:4(end=None)", "srste:1:8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_task_runs_what_its_name_says(recipe, dtype):
    """On small layers the GEMMs of the tasks are those of the dense weight, masked or not."""
    rules = of_recipe(nm.recipes.get(recipe), nm.Pattern(recipe.split(":", 1)[1].split("(")[0]))
    layer = Layer((32, 64), 16, dtype, torch.float32)
    for transposed in (False, True):
        probed = ["fprop sparse", "dgrad sparse", "fprop dense", "dgrad dense", *(["wgrad sparse", "estimate"] if rules.estimate else [])]
        names = list(dict.fromkeys([*needed(costs(layer, transposed, rules)), *probed]))
        tasks = {task.name: task for task in tasks_of(layer, rules, CPU, names)}
        assert list(tasks) == names
        shapes = {"fprop": (16, 32), "dgrad": (16, 64), "wgrad": (32, 64), "expand": (32, 64)}
        for name, task in tasks.items():
            result = task.run()
            role = name.partition(" ")[0]
            if role in shapes:
                assert tuple(result.shape) == shapes[role] and result.dtype == dtype
            elif name == "weight dense":
                assert nm.ops.mask(result, rules.pattern).sum() and result.dtype == dtype
                assert int((result != 0).sum()) <= 32 * 64 * rules.pattern.density
            elif role == "weight":
                assert (result.columns is not None) == (name == "weight both")
                assert "weight dense" not in tasks or torch.equal(result.rows.dense(), tasks["weight dense"].run())


def test_only_what_decides_is_measured():
    assert needed(costs(sparse=False)) == ["fprop dense", "dgrad dense", "wgrad dense"]
    assert needed(costs(sparse=False, trains=False)) == ["fprop dense"]
    assert needed(costs(trains=False)) == ["expand"] and gemms(costs(trains=False)) == ["fprop"]
    assert needed(costs(transposed=False)) == ["dgrad dense", "wgrad dense", "expand", "weight dense", "weight rows"]
    assert gemms(costs(transposed=False)) == ["fprop"] and gemms(costs()) == ["fprop", "dgrad"]
    assert gemms(costs(transposed=False, rules=Rules(P, estimate=P))) == ["fprop", "wgrad"]
    assert gemms(costs(transposed=False, rules=Rules(P, estimate=P, trains=False))) == ["fprop"]
    assert needed(costs(rules=Rules(P, estimate=P))) == ["wgrad dense", "expand", "weight dense", "weight rows"]


def test_what_the_choice_is_among():
    layer, both, gpu = Layer((64, 128), 32, torch.bfloat16, torch.float32), Rules(P, dgrad=True, estimate=P), torch.device("cuda")
    here, there = costs(layer, rules=both), costs(layer, transposed=False, rules=both)
    assert gemm_of(here, "fprop", CPU)[1:6] == (32, 64, 128, 2, 4)
    assert gemm_of(here, "fprop", CPU).forms == ("dense", "rows") == gemm_of(here, "dgrad", CPU).forms
    assert gemm_of(there, "dgrad", gpu).forms == ("dense", "columns", "columns:mma.sp")
    assert gemm_of(there, "wgrad", gpu).forms == ("dense", "rows") != gemm_of(there.but(layer={"tokens": 64}), "wgrad", gpu).forms
    assert gemm_of(there, "wgrad", gpu).rule == "exact" and gemm_of(there, "fprop", gpu).rule == ""
    assert gemm_of(there.but(layer={"dtype": torch.float32}), "fprop", gpu).forms == ("dense", "rows")
    assert gemm_of(there.but({"pattern": nm.Pattern("4:8")}), "fprop", gpu).forms == ("dense", "rows")


def test_large_layers_are_shortened_or_left_out(monkeypatch):
    monkeypatch.setattr(LayerCosts, "predict", lambda self, piece: 1.0)
    large = costs(trains=False)
    assert expected(large) == 16, "checked and timed as often as sixteen GEMMs take"
    assert expected(replace(large, sparse=False, trains=True)) == 12, "four rounds of three GEMMs"

    def run(share):
        return time_layer(large, CPU, clock, share)

    few = run(8.0)
    assert few.note == "measured on 2048 tokens, scaled" and few.seconds["fprop dense"] == 20 and few.seconds["expand"] == 2
    assert few.seconds["fprop sparse"] == 13 and few.kernels == {"fprop": "op"}
    assert run(16.0).note == "" and run(16.0).seconds["fprop sparse"] == 6.5
    assert run(0.6).note == "measured on 256 tokens, scaled"
    assert not run(0.4).seconds and run(0.4).note == "not measured: it would take about 1 s of the budget"
    monkeypatch.setattr(LayerCosts, "predict", lambda self, piece: 100.0)
    assert time_layers([large], CPU, clock, 0.0)[large].note == "not measured: it would take about 100 s of the budget"
    monkeypatch.setattr(LayerCosts, "predict", lambda self, piece: 0.01)
    assert time_layers([large], CPU, clock, 0.0)[large].note == "", "what is short is measured though no time is left"


def test_each_shape_once_and_the_short_ones_first():
    progress = []
    shapes = {"a.up": (128, 64), "a.gate": (128, 64), "b.up": (128, 64), "a.down": (64, 64), "lm_head": (96, 64)}
    found = nm.audit(shapes, 16, device="cpu", timer=clock, progress=lambda *args: progress.append(args))
    assert progress == [(0, 3, "96x64, 16 tokens"), (1, 3, "64x64, 16 tokens"), (2, 3, "128x64, 16 tokens")], "the head has no candidates"
    up, gate = found.layers[:2]
    assert up.measured_step == gate.measured_step and up.measured_step and found.measured_step is not None


def test_memory_is_kept(monkeypatch):
    monkeypatch.setattr(measure, "free_bytes", lambda device: 1e5)
    found = nm.audit({"fc": (256, 256)}, 16, device="cpu", timer=clock)
    assert not found.layers[0].measured_step and "GB of memory" in found.layers[0].note and found.measured_step is None
    assert "GB of memory" in str(found)


def test_one_failure_costs_only_its_layer(monkeypatch):
    def fails(layer, *args, **more):
        if layer.shape == (64, 64):
            raise RuntimeError("out of luck\nand more")
        return tasks_of(layer, *args, **more)

    monkeypatch.setattr(measure, "tasks_of", fails)
    found = nm.audit({"a": (64, 64), "b": (64, 128)}, 16, device="cpu", timer=clock)
    first, second = found.layers
    assert first.note == "not measured: out of luck" and first.step and not first.measured_step and second.measured_step
    assert found.measured_step is None, "a total of some would be no total"
    calls = iter([0, 0])
    with pytest.raises(RuntimeError, match="StopIteration"):
        measure.time_tasks([Task("a", lambda: next(calls))], CPU, None, 0.0)


def test_a_missing_core_is_reported(monkeypatch):
    missing = capability.Probe(False, "nmkernels._C is not built")
    monkeypatch.setattr(advice, "compiled_core", lambda: missing)
    words = {"device": "cpu", "timer": clock, "measure": False}
    assert "so the plain reference runs: nmkernels._C is not built." in " ".join(str(nm.audit({"fc": (64, 64)}, 16, **words)).split())
    assert "plain reference" not in str(nm.audit({"fc": (64, 64)}, 16, device="H200"))
