"""Whole models of the GPU's cases, in sizes for tests: each is built, checked and timed, and a decoder decodes what it computes at once."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

import nmkernels as nm
from bench import cases, runner
from bench.cases import model as models
from bench.cases._decoder import SIZES, Decoder, prunable
from bench.registry import Ask, Spec
from nmkernels.audit.shapes import model_shapes
from python_tests.bench.samples import small

LLAMA, GPT = "Llama 128x1", "GPT-2 128x1"
FIRST = ("decode", "model_step(captured fst)", "model_step(srste)")
EVERY = dict.fromkeys(small(s) for s in cases.select(Ask(ops=(*models.STEPS.values(), *models.GRAPHS.values(), "decode")), "cuda"))
ORDER = sorted(EVERY, key=lambda s: (s.model != LLAMA, s.op not in FIRST, s.tokens > 1 and s.op == "decode"))


@pytest.mark.quick(3)
@pytest.mark.parametrize("spec", ORDER, ids=str)
def test_every_case_is_proved_and_timed(spec: Spec) -> None:
    rows = runner.measure(spec, "cpu", 0.0)
    ratios = {(r.provider, r.metric) for r in rows if r.metric.startswith("x ")}
    if spec.op == "decode":
        ours = {"nmkernels 2:4 (captured)", "nmkernels 2:4 in int4 (captured)"}
        assert ratios == {(name, metric) for name in ours for metric in ("x dense", "x compiled dense")} | {
            ("torch dense, compiled (captured)", "x dense")
        }
        assert {r.provider for r in rows if r.metric == "tokens/s"} == ours
    else:
        ((provider, metric),) = ratios
        assert metric == "x dense" and ("(captured)" in provider) == ("captured" in spec.op)
        assert {r.provider for r in rows if r.metric == "us"} == {provider, f"torch dense, {provider.partition(', ')[2]}"}


def test_a_model_has_its_cases() -> None:
    assert {(s.model, s.tokens) for s in EVERY if s.op == "decode"} == {(name, t) for name in (LLAMA, GPT) for t in (1, 16)}
    assert {s.model for s in EVERY if s.op == "model_step(fst)"} == {LLAMA, GPT}
    full = cases.select(Ask(ops=("model_step(fst)",)), "cuda")
    assert {s.tokens for s in full} == {4096, 16384} and not cases.select(Ask(ops=("model_step(fst)", "decode")))


@pytest.mark.parametrize("name", [LLAMA, GPT])
def test_decoding_with_a_cache_computes_the_same(name: str) -> None:
    torch.manual_seed(0)
    model, ids = Decoder(SIZES[name]), torch.randint(96, (2, 10))
    whole = model(ids)
    assert whole.shape == (2, 10, 96) and (model(ids[:, :6]) - whole[:, :6]).abs().max() < 1e-5, "it is causal"
    cache = model.cache(2, 16)
    for i in range(10):
        step = model(ids[:, i : i + 1], cache, torch.tensor([i]))
        assert (step[:, 0] - whole[:, i]).abs().max() < 1e-5
    turned = model(ids.flip(1))
    assert (turned[:, -1] - whole[:, 0]).abs().max() > 1e-3, "positions matter"


@pytest.mark.parametrize(("name", "shapes"), [("Llama-3-8B x4", model_shapes("llama-3-8b")), ("GPT-2-medium x4", None)])
def test_layers_have_the_sizes_of_the_model(name: str, shapes: object) -> None:
    with torch.device("meta"):
        model = Decoder(SIZES[name])
    block = sum(layer.weight.numel() for layer_name, layer in prunable(model) if layer_name.startswith("blocks.0."))
    # GPT-2-medium: 12 width² a block
    assert block == (sum(out * cols for out, cols in shapes.layers.values()) if shapes else 12 * 1024**2)
    inside, head = 4 * block, model.lm_head.weight.numel()
    whole, full = (32 * block, 128256 * 4096) if shapes else (24 * block, 50257 * 1024)
    assert head / (head + inside) == pytest.approx(full / (full + whole), rel=1e-3), "the head has its share"


def test_wrong_weights_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    compress_ = nm.compress_

    def wrong(model: Decoder, values: str | None = None) -> None:
        compress_(model, values=values)
        if values == "int4":
            monkeypatch.setattr(model.blocks[0].ffn.up, "dense", lambda: torch.zeros(256, 128))

    monkeypatch.setattr(nm, "compress_", wrong)
    with pytest.raises(runner.Partly, match="timed without nmkernels 2:4 in int4 .captured.: its result is wrong: outputs differ"):
        runner.measure(Spec("decode", "2:4", "bfloat16", tokens=1, model=GPT), "cpu", 0.0)
    monkeypatch.setattr(torch.optim.AdamW, "step", Mock())
    monkeypatch.setattr(nm.optim.MaskedAdamW, "step", Mock())
    with pytest.raises(AssertionError, match="does not change the weights of blocks.0"):
        runner.measure(Spec("model_step(captured srste)", "2:4", "bfloat16", tokens=32, model=GPT), "cpu", 0.0)
