"""Every case can be listed without memory, built, proved and timed; words narrow the list down."""

from __future__ import annotations

import pytest
import torch

from bench import cases, registry, runner, shapes, targets
from bench.cases import eager, ffn
from bench.registry import Ask, Spec
from bench.timing import on_cpu
from nmkernels import NMError, reference
from nmkernels.gemm import choose as choosing
from nmkernels.gemm.methods import Method
from nmkernels.gemm.problem import Problem
from python_tests.bench.samples import SMALL
from python_tests.nn.test_effective import Calls

RATIOS = {"x fastest dense", "x dense", "share of copy", "time over dense", "time over nn.Linear", "time over fused AdamW"}
RATIOS |= {"us beyond a no-op", "us beyond torch"}


@pytest.mark.quick(2)
@pytest.mark.parametrize("spec", SMALL, ids=str)
def test_case_is_proved_and_timed(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.runner.matmul_rate", lambda dtype, device: 1e9)
    monkeypatch.setattr("bench.cases.machine.fma_rate", lambda dtype: 1e9)
    rows = runner.measure(spec, "cpu", 0.001)
    assert {(r.op, r.pattern, r.dtype, r.shape) for r in rows} == {(spec.op, spec.pattern, spec.dtype, spec.shape)}
    assert len({(r.provider, r.metric) for r in rows}) == len(rows)
    # a difference of two times may be negative on a busy machine
    assert all(r.p20 <= r.p50 <= r.p80 and (r.p20 >= 0 or "beyond" in r.metric) for r in rows)
    providers = {r.provider for r in rows if r.metric == "us"}
    if spec.op not in runner.LIMITS:
        assert any(p.startswith("nmkernels ") for p in providers) and any(p.startswith("torch") for p in providers)
        assert {r.metric for r in rows} & RATIOS


def test_every_case_of_a_full_run_is_one() -> None:
    specs, gpu = cases.select(Ask()), cases.select(Ask(), "cuda:1")
    assert len(set(specs)) == len(specs) > 100 and len(set(gpu)) == len(gpu)
    # what the targets and the quick run measure is part of the whole
    assert set(targets.specs()) <= set(specs) and {s.op for s in targets.quick("cpu")} <= {s.op for s in specs}
    assert set(targets.quick("cuda")) | set(specs) <= set(gpu) and not any(s.op.startswith("host") for s in specs)


def test_words_name_ops() -> None:
    assert cases.matching(["linear", "nm_mask"]) == ("nm_linear", "nm_mask")
    gemms = {"nm_linear", "nm_linear_dgrad", "nm_linear_wgrad", "nm_linear_quantized", "nm_linear_integers"}
    assert set(cases.matching(["linear*"])) == gemms | {"nm_linear(cores)", "nm_linear_wgrad(cores)"}
    with pytest.raises(NMError, match="no op matches 'linaer'"):
        cases.matching(["linaer"])


def test_models_name_shapes() -> None:
    assert shapes.parse(["gpt2:fc", "8x16"]) == ("3072x768", "8x16")
    assert set(shapes.parse(["GPT2"])) == set(shapes.MODELS["gpt2"].values())
    assert "llama3-8b q" in shapes.names("4096x4096") and shapes.names("3x4") == []
    for word, said in [("gtp2", "unknown shape 'gtp2'"), ("gpt2:x", "has no layer 'x'; it has qkv")]:
        with pytest.raises(NMError, match=said):
            shapes.parse([word])
    for text in ("4x", "x4", "4", "0x4", "-4x4"):
        with pytest.raises(NMError, match="is not a matrix"):
            registry.sizes(text)


def test_torch_formulations_compute_the_same() -> None:
    w = torch.randn(8, 32)
    for name in ("mask", "prune", "soft_threshold"):
        assert torch.equal(getattr(eager, name)(w, 2, 4), getattr(reference, name)(w, 2, 4))
    # two groups of one nibble each make a byte, the earlier group in the low half
    assert all(map(torch.equal, eager.compress(w, 2, 4), reference.compress(w, 2, 4)))
    values, positions = eager.compress(w, 2, 8)
    groups = (values.unflatten(-1, (-1, 2)), positions.long().unflatten(-1, (-1, 2)))
    assert torch.equal(eager.decompress(*groups, 8), reference.prune(w, 2, 8))


def test_parts_of_a_step_make_up_the_step() -> None:
    work = cases.build(next(s for s in SMALL if s.op == "train_step"), "cpu")
    steps = [p for p in work.providers if p.parts]
    for p in steps:
        took = min(on_cpu(p.call) for _ in range(3))
        assert 0.5 * took < min(sum(samples) for samples in zip(*p.parts.values(), strict=True)) <= took
    assert all(value > 0 for value in work.finish().values()) and len(work.finish()) == len(steps) == 4


@pytest.mark.parametrize("tokens", [1, 16])
def test_a_kernel_does_the_gemms_that_it_is_asked_for(tokens: int) -> None:
    spec = Spec("llama_ffn", "2:4", "float32", 16, 64, tokens)
    work = cases.build(spec, "cpu")
    mine = next(p for p in work.providers if p.name == "nmkernels fst, cpu")
    choosing.forget()
    with mine.under(), Calls() as calls:
        mine.call()
    # fprop, and dgrad of the transposed weight, then wgrad
    assert [calls.names.count(name) for name in ("linear", "linear_wgrad", "linear_dgrad")] == [6, 3, 0]
    assert work.facts[mine.name, "GEMMs by it"] == 9 and not choosing._chosen
    gemm = Problem("dgrad", 8, 16, 64, 2, 4, torch.float64, torch.device("meta"))
    assert ffn.declines(Method("cpu rows", "rows", "cpu"), gemm)
