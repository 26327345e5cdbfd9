"""Hessians are those of what each layer multiplies: in fp32, of tokens and not of padding, of weights as they are and not as autocast has
cached them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nmkernels.pattern import Pattern
from nmkernels.prune import OneShot, prune_
from nmkernels.prune.base import resolve
from nmkernels.prune.data import call, padding
from nmkernels.prune.hessians import Hessians, problems_of
from nmkernels.prune.prune import choose
from nmkernels.prune.relay import Relay
from python_tests import moe
from python_tests.prune.families import built, inputs_of

P = Pattern("2:4")


def collected(model, batches, filter_fn=None, forward=call):
    """name -> (H, tokens) of a dense model, and name -> source."""
    chosen, _ = choose(model, P, filter_fn, resolve("magnitude"))
    relay, found, sources = Relay(model, chosen, batches, forward), {}, {}
    with relay.running():
        relay.trace()
        for unit in relay.units:
            problems = [p for c in unit.layers for p in problems_of(c, relay.sources[c.name])]
            hessians = Hessians(problems)
            with hessians.collecting(relay.tokens):
                relay.run(unit)
            hessians.warn()
            relay.finish(unit)
            means = {p.source: hessians.mean(p.source) for p in {p.source: p for p in problems}.values()}
            found |= {p.name: means[p.source] for p in problems}
            sources |= {p.name: p.source for p in problems}
    return found, sources


def by_hand(rows):
    x = torch.cat([r.reshape(-1, r.shape[-1]) for r in rows]).double()
    return x.t() @ x / len(x), len(x)


def close(got, want, tolerance=1e-5):
    (h, tokens), (exact, count) = got, want
    assert tokens == count and h.shape == exact.shape
    assert (h.double() - exact).abs().max() <= tolerance * exact.abs().max()


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64, dtype=dtype), nn.GELU(), nn.Linear(64, 32, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_linear(dtype):
    model, batches = mlp(dtype), [100 * torch.randn(2, 7, 32).to(dtype), 100 * torch.randn(64, 32).to(dtype), torch.randn(32).to(dtype)]
    found, _ = collected(model, batches)
    for name, rows in inputs_of(model, lambda: [call(model, batch) for batch in batches]).items():
        close(found[name], by_hand(rows), 1e-12 if dtype == torch.float64 else 1e-6)
        assert found[name][0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize(("family", "count"), [("gpt2", 12), ("llama", 21)])
def test_families_of_blocks(family, count):
    """Conv1D of GPT-2 and linear layers of Llama, each in its block."""
    model, batches = built(family)
    found, sources = collected(model, batches)
    seen = inputs_of(model, lambda: [call(model, batch) for batch in batches])
    assert len(found) == count
    for name in found:
        close(found[name], by_hand(seen[name]))
    if family == "llama":
        q, _, _, o, gate, _, down = list(sources)[:7]
        assert list(sources.values())[:7] == [q, q, q, o, gate, gate, down]


@pytest.mark.parametrize(
    "options",
    [
        {"padding": 1},
        {"stride": 2, "padding": (2, 1), "padding_mode": "reflect"},
        {"dilation": 2, "padding": 2, "padding_mode": "circular"},
        {"stride": (1, 2), "dilation": (2, 1), "padding": "valid"},
        {"padding": "same", "dilation": 2, "padding_mode": "replicate"},
    ],
    ids=str,
)
def test_convolutions(options):
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 20, (3, 2), **options)
    images = [torch.randn(2, 16, 8, 9), torch.randn(16, 8, 9)]
    found, _ = collected(nn.Sequential(conv), images)
    rows = []
    for x in images:
        x = x.view(-1, 16, 8, 9)
        out = conv(x).detach()
        padded = F.pad(x, conv._reversed_padding_repeated_twice, mode={"zeros": "constant"}.get(conv.padding_mode, conv.padding_mode))
        for i in range(out.shape[2]):
            for j in range(out.shape[3]):
                top, left = i * conv.stride[0], j * conv.stride[1]
                taps = [padded[:, :, top + a * conv.dilation[0], left + b * conv.dilation[1]] for a in range(3) for b in range(2)]
                rows.append(torch.cat(taps, 1))
                matrix = conv.weight.detach().permute(0, 2, 3, 1).reshape(20, -1)
                assert torch.allclose(rows[-1] @ matrix.t() + conv.bias, out[:, :, i, j], atol=1e-4)
    close(found["0"], by_hand(rows))


@pytest.mark.parametrize("options", [{}, {"transposed": True}, {"gate": False, "bias": True}], ids=str)
def test_experts(options):
    model = moe.mixture(**options)
    batches = [torch.randn(50, 16, dtype=torch.float64) for _ in range(2)]
    found, _ = collected(model, batches, lambda module, name: "experts" in name)
    first = model.experts.first
    for e in range(3):
        rows, hidden = [], []
        for x in batches:
            numbers = torch.stack([torch.arange(50) % 3, (torch.arange(50) + 1) % 3], 1)
            own = x[(numbers == e).any(1)]
            y = model.experts._times(first, e, own).detach()
            rows.append(own)
            hidden.append(model.experts._apply_gate(y) if model.experts.has_gate else F.silu(y))
        close(found[f"experts.{first}[{e}]"], by_hand(rows), 1e-12)
        close(found[f"experts.down_proj[{e}]"], by_hand(hidden), 1e-12)


class Readers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(16, 16) for _ in range(5))

    def forward(self, x):
        y = self.a(x) + self.b(x)
        x += 1
        y = y + self.c(x)  # the same tensor, changed in place
        y = y + self.d(x[:])  # equal, but another tensor
        return self.e(x) + self.e(y)  # c's input too, but not only that


def test_only_the_same_input_is_shared():
    torch.manual_seed(0)
    model, batches = Readers(), [torch.randn(30, 16), torch.randn(20, 16)]
    kept = [x.clone() for x in batches]
    found, sources = collected(model, batches, lambda module, name: True)
    assert sources == {"a": "a", "b": "a", "c": "c", "d": "d", "e": "e"}
    assert all(map(torch.equal, kept, batches)), "the model writes into its input, but not into the user's data"
    for name, rows in inputs_of(model, lambda: [call(model, batch) for batch in batches]).items():
        close(found[name], by_hand(rows))


# ---- padding


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "bert", "mixtral"])
def test_padding_is_left_out(family, side):
    model, batches = (moe.tiny("mixtral", layers=2).eval(), moe.tokens(3)) if family == "mixtral" else built(family)
    data = []
    for i, batch in enumerate(batches):
        ids = batch if family == "mixtral" else batch["input_ids"]
        mask = torch.ones_like(ids)
        mask[1, : 3 + i] = 0
        data.append({"input_ids": ids, "attention_mask": mask if side == "left" else mask.flip(1)})
    found, _ = collected(model, data)
    seen = inputs_of(model, lambda: [call(model, batch) for batch in data])
    tokens = sum(int(batch["attention_mask"].sum()) for batch in data)
    for name, (_, count) in found.items():
        if "experts" not in name and "pooler" not in name:
            rows = [x[batch["attention_mask"].bool()] for x, batch in zip(seen[name], data, strict=True)]
            close(found[name], by_hand(rows))
            assert count == tokens
    experts = [count for name, (_, count) in found.items() if "layers.0" in name and "gate_up" in name]
    assert family != "mixtral" or sum(experts) == moe.CHOSEN * tokens


def test_padding_of_encoder_and_decoder():
    model, batches = built("t5")
    for batch in batches:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, 11:] = 0
        batch["decoder_attention_mask"] = torch.ones_like(batch["decoder_input_ids"])
        batch["decoder_attention_mask"][1, :2] = 0
    found, _ = collected(model, batches)
    counts = {name: tokens for name, (_, tokens) in found.items()}
    for name, count in counts.items():
        keys = "EncDecAttention.k" in name or "EncDecAttention.v" in name
        assert count == 3 * (2 * 20 - 9 if name.startswith("encoder") or keys else 2 * 7 - 2), name


def test_a_row_for_each_sequence_is_no_padding():
    """A classification head with as many features as the sequences have tokens."""
    batch = {"input_ids": torch.ones(2, 16, dtype=torch.long), "attention_mask": torch.arange(32).view(2, 16) % 16 < 9}
    assert padding(nn.Identity(), batch, torch.ones(2, 16)) is None
    assert (
        int(padding(nn.Identity(), batch, torch.ones(2, 16, 8)).sum()) == int(padding(nn.Identity(), batch, torch.ones(32, 8)).sum()) == 18
    )


def test_a_convolution_has_no_padded_tokens():
    """Two images of 16 channels, and a mask of 2 × 16 tokens."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.body = nn.Conv2d(16, 16, 1), nn.Linear(16, 16)

        def forward(self, image, x, attention_mask):
            return self.conv(image).mean() + self.body(x)

    mask = torch.ones(2, 16)
    mask[0, 8:] = 0
    found, _ = collected(Both(), [{"image": torch.randn(2, 16, 4, 4), "x": torch.randn(2, 16, 16), "attention_mask": mask}])
    assert found["conv"][1] == 32 and found["body"][1] == 24


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_tokens_that_are_not_finite_are_left_out(bad):
    batches = [torch.randn(10, 32) for _ in range(4)]
    batches[2][4, 7] = bad
    batches[3][:2] = bad
    with pytest.warns(UserWarning, match="layer '0' got NaN or infinite input values in 3 tokens, first in batch 3"):
        found, _ = collected(mlp(), batches)
    close(found["0"], by_hand([x[x.isfinite().all(1)] for x in batches]))
    mask = torch.ones(2, 5)
    mask[1, 3:] = 0
    x = torch.where(mask[..., None] == 0, torch.nan, torch.randn(2, 5, 32))
    collected(mlp(), [{"input": x, "attention_mask": mask}], forward=lambda model, batch: model(batch["input"]))  # no warning: padding


# ---- precision


def test_inside_autocast_sums_are_exact():
    torch.manual_seed(0)
    model, batches = mlp(), [torch.randn(64, 32) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = collected(model, batches)
        seen = inputs_of(model, lambda: [call(model, batch) for batch in batches])
    assert seen["2"][0].dtype == torch.bfloat16 and found["2"][0].dtype == torch.float32
    for name, rows in seen.items():
        close(found[name], by_hand(rows), 1e-6)


def loss(model, batch):
    return model(**batch, labels=batch["input_ids"]).loss


def autocast(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return call(model, batch)


@pytest.mark.parametrize(("decorated", "method"), [(False, "admm"), (True, "sparsegpt")])
def test_inside_autocast_pruned_weights_are_seen(decorated, method):
    """Autocast keeps bf16 copies of weights until its outermost region ends."""
    weights, losses = [], []
    for region in (False, True):
        model, batches = built("llama")
        if decorated:  # made where the cache was on, so that it turns it on again
            for layer in model.model.layers:
                layer.mlp.forward = torch.autocast("cpu", torch.bfloat16, cache_enabled=True)(layer.mlp.forward)
        if region:
            with torch.autocast("cpu", torch.bfloat16):
                dense = loss(model, batches[0])
                prune_(model, P, batches, method=method)
                losses.append(loss(model, batches[0]))
        else:
            prune_(model, P, batches, method=method, forward=autocast)
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(loss(model, batches[0]))
        weights.append(model.state_dict())
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
    assert losses[0] == losses[1] == losses[2] != dense


class Watching(OneShot):
    seen: list = []

    def solve(self, w, h, pattern):
        self.seen.append(precision())
        mask = self.mask(w, pattern)
        return w * mask, mask


def precision():
    return [backend.matmul.fp32_precision for backend in (torch.backends.cuda, torch.backends.mkldnn)]


@pytest.mark.parametrize("how", ["older", "newer", "newer for all", "allow_tf32"])
def test_lower_precision_of_fp32_gemms_is_off_for_a_while(how, monkeypatch):
    before, own = torch.get_float32_matmul_precision(), Hessians._add
    add = lambda self, *args: (Watching.seen.append(precision()), own(self, *args))  # noqa: E731
    monkeypatch.setattr(Hessians, "_add", add)
    Watching.seen = []
    try:
        if how == "older":
            torch.set_float32_matmul_precision("medium")
        elif how == "allow_tf32":
            torch.backends.cuda.matmul.allow_tf32 = True
        elif how == "newer":
            torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision = "bf16", "tf32"
        else:
            torch.backends.fp32_precision = "tf32"
        lower = precision()
        prune_(mlp(), P, [torch.randn(100, 32)], method=Watching())
        assert precision() == lower != ["none", "none"]
        assert len(Watching.seen) == 4 and all(seen == ["ieee", "ieee"] for seen in Watching.seen)
        if how == "older":
            assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.backends.fp32_precision = "none"
        for backend in (torch.backends.cuda, torch.backends.mkldnn):
            backend.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision(before)
