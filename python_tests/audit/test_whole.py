"""Whole steps with the optimizer: bytes a weight, seconds by hand, and from how many tokens they pay."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import nmkernels as nm
from examples.train_gpt.model import GPT, GPTConfig
from nmkernels.audit import traffic
from nmkernels.audit.whole import rounded
from nmkernels.gemm.devices import DEVICES
from python_tests.train.test_step_bytes import STEPS, bytes_of_a_step, on_a_gpu

H200 = {"device": "H200", "dtype": "bfloat16"}
ONE = {"fc": (4096, 4096)}


def steps(model=ONE, tokens=8192, recipe="srste:2:4", **words):
    found = nm.audit(model, tokens, recipe, **{**H200, **words})
    return {step.recipe.partition("(")[0]: step for step in found.whole}


@pytest.fixture
def bare(monkeypatch):
    """An H200 whose launches take no time, with this speed-up of sparse GEMMs."""

    def device(ratio=1.4):
        monkeypatch.setitem(DEVICES, "H200", replace(DEVICES["H200"], launch=0.0, call=0.0).at(ratio))

    device()
    return device


def test_bytes_a_weight():
    found = steps()
    assert {name: step.sparse_bytes for name, step in found.items()} == {
        "srste:2:4": 35.125, "sste:2:4": 35.125, "fst:2:4": 34.25, "step:2:4": 31.125
    }  # fmt: skip
    assert {step.dense_bytes for step in found.values()} == {34.0}
    # the last recipe of a model whose layers stay dense in training
    assert steps(recipe="asp:2:4")["asp:2:4"].sparse_bytes == 28 + 0.125 + 6
    brain = steps(nn.Linear(4096, 4096, device="meta", dtype=torch.bfloat16))
    assert brain["srste:2:4"].dense_bytes == 14 and brain["srste:2:4"].sparse_bytes == 3 * 2 + 16 + 2 + 1.125 + 2
    full = steps(dtype="float32")["srste:2:4"]
    assert full.dense_bytes == 28 and full.sparse_bytes == 28 + 8, "no cast, and no packed form"


@pytest.mark.parametrize(("recipe", "form"), [("srste", "rows+dense"), ("sste", "rows+dense"), ("fst", "both")])
def test_the_bytes_are_those_of_the_ops_that_run(recipe, form, monkeypatch):
    on_a_gpu(monkeypatch)
    step, making = (sum(part.values()) for part in bytes_of_a_step(recipe, True, packed=True, **STEPS[recipe][0]))
    held = recipe == "fst"
    assert step == traffic.update(torch.float32, ours=True, held=held)
    assert making == traffic.forms(form, nm.Pattern("2:4"), torch.float32, torch.bfloat16, held)


def test_seconds_by_hand(bare):
    n, t, rate, memory = 4096**2, 8192, 770e12, 0.85 * 4.8e12
    gemm, estimate = 2 * n * t / rate, 4096 * t * 3.125 / memory
    found = steps()
    assert len({step.dense for step in found.values()}) == 1
    assert found["step:2:4"].dense == pytest.approx(3 * gemm + (34 + 6) * n / memory)
    assert found["srste:2:4"].sparse == pytest.approx((2 + 1 / 1.4) * gemm + (35.125 + 6) * n / memory)
    assert found["sste:2:4"].sparse == pytest.approx((1 + 2 / 1.4) * gemm + estimate + (35.125 + 6) * n / memory)
    assert found["fst:2:4"].sparse == pytest.approx(3 / 1.4 * gemm + estimate + (34.25 + 6) * n / memory)
    low, high = found["fst:2:4"].speedup_range
    assert low < found["fst:2:4"].speedup == found["fst:2:4"].dense / found["fst:2:4"].sparse < high
    # four passes: each casts the dense weight and all gradients, W̃ is made once
    four = steps(accumulate=4)["srste:2:4"]
    assert four.dense == pytest.approx(12 * gemm + (28 + 4 * 12) * n / memory)
    assert four.sparse == pytest.approx(4 * (2 + 1 / 1.4) * gemm + (35.125 + 4 * 6) * n / memory)
    # the head is dense in both, and everything else takes as long in both
    more = steps({**ONE, "lm_head": (4096, 4096)}, other=2.0 * n)["srste:2:4"]
    assert more.dense == pytest.approx(9 * gemm + 2 * (34 + 6) * n / memory)
    assert more.dense - more.sparse == pytest.approx(found["srste:2:4"].dense - found["srste:2:4"].sparse)


def test_tokens_from_which_it_pays(bare):
    found = steps()["srste:2:4"].pays_from
    memory = 0.85 * 4.8e12
    # 35.125 - 34 bytes a weight are gained by one of three GEMMs
    assert found == pytest.approx(1.125 / memory * 770e12 / (2 * (1 - 1 / 1.4)), rel=0.03)
    assert steps(tokens=found)["srste:2:4"].speedup > 1
    below = steps(tokens=int(0.95 * found))["srste:2:4"]
    assert below.speedup == 1 and below.sparse_bytes == 34, "there the masked weight is multiplied in dense layout"
    assert steps(tokens=64)["srste:2:4"].pays_from == pytest.approx(found, rel=0.03), "whatever the audit's tokens"
    wide = nm.audit({"fc": (8192, 8192), "lm_head": (8192, 8192)}, 8192, "srste:2:4", other=1e9, **H200).whole[0]
    assert wide.pays_from == pytest.approx(found, rel=0.03)
    assert steps()["step:2:4"].pays_from == 1
    bare(1.0)
    assert steps()["srste:2:4"].pays_from is None
    assert "never" in str(nm.audit(ONE, 8192, "srste:2:4", **H200))


def test_its_own_recipe_is_first_and_alone_for_a_sparse_model():
    def names(model, recipe=None, **words):
        return [step.recipe for step in nm.audit(model, 1024, recipe, **{**H200, **words}).whole]

    assert names(ONE) == ["sste:2:4", "srste:2:4", "fst:2:4", "step:2:4"]
    assert names(ONE, "fst:2:4(end=None)") == ["fst:2:4(end=None)", "srste:2:4", "sste:2:4", "step:2:4"]
    assert names(ONE, "srste:1:4")[0] == "srste:1:4" and all("1:4" in name for name in names(ONE, "srste:1:4"))
    assert "dense:2:4" not in names(ONE, "dense:2:4"), "no layer of it is sparse"
    model = GPT(GPTConfig(width=64, layers=1, heads=2, context=16))
    handle = nm.sparsify_(model, "fst:2:4(end=None)")
    assert names(handle) == ["fst:2:4(end=None)"] and names(model) == [""]
    assert "its own rules" in str(nm.audit(model, 1024, **H200))
    handle.finish(allow_unused=True)
    nm.compress_(model)
    assert names(model) == []


def test_layers_that_the_filter_refuses_are_left_out():
    model = nn.Sequential(nn.Linear(64, 66))
    found = nm.audit(model, 64, "srste:2:4", filter_fn=lambda module, name: True, **H200)
    assert "fst:2:4" not in [step.recipe for step in found.whole] and found.whole[0].recipe == "srste:2:4"


def test_a_cpu_has_no_prediction():
    found = nm.audit({"fc": (64, 64)}, 64, "srste:2:4", device="cpu", timer=lambda task: 1e-3)
    assert found.whole == () and found.as_dict()["whole"] == [] and "whole step" not in str(found)


def test_the_table_and_the_values():
    found = nm.audit(ONE, 8192, "fst:2:4(end=None)", **H200)
    table = str(found).split("whole step with the optimizer, predicted")[1].splitlines()
    assert table[0].split() == ["bytes", "a", "weight", "ms", "over", "dense", "range", "pays", "from"]
    assert table[1].startswith("dense, AdamW(fused=True)") and "34.0" in table[1]
    assert table[2].startswith("fst:2:4(end=None)") and f"{found.whole[0].speedup:.2f}x" in table[2]
    (first, *_) = found.as_dict()["whole"]
    assert first["speedup"] == found.whole[0].speedup and first["pays_from"] == found.whole[0].pays_from
    assert [rounded(value) for value in (7, 99, 101, 1999)] == [7, 99, 110, 2000]


def test_frozen_weights_move_only_what_is_made():
    model = nn.Linear(4096, 4096, device="meta").requires_grad_(False)
    found = steps(model)["srste:2:4"]
    assert (found.dense_bytes, found.sparse_bytes) == (6.0, 7.125)
