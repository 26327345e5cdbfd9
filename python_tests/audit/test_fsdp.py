"""nm.audit(cluster=...): bytes, memory and seconds of a tiny model by hand, and what is said of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.audit import Cluster
from nmkernels.audit.shapes import MODELS
from nmkernels.gemm.devices import DEVICES, HGX, Links

BF16 = {"device": "H100", "dtype": "bfloat16"}
WIDTH, BLOCKS = 64, 3
LAYER = WIDTH * WIDTH


def model(bias: bool = False, blocks: int = BLOCKS) -> nn.Module:
    """Blocks of two layers of 64 x 64, an embedding of 100 and an output layer that shares it."""
    with torch.device("meta"):
        net = nn.Module()
        net.embed = nn.Embedding(100, WIDTH)
        net.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias) for _ in range(2))) for _ in range(blocks))
        net.lm_head = nn.Linear(WIDTH, 100, bias=False)
        net.lm_head.weight = net.embed.weight
    return net


def audit_cluster(gpus: Cluster | int, recipe: str = "srste:2:4", net: nn.Module | None = None, tokens: int = 64, **keywords):
    found = nm.audit(net if net is not None else model(), tokens, recipe, cluster=gpus, **BF16, **keywords).cluster
    assert found is not None
    return found


# ---- bytes


@pytest.mark.parametrize(("pattern", "bytes_each"), [("2:4", 0.5625 * 2), ("1:8", 0.15625 * 2)])
@pytest.mark.parametrize("gpus", [2, 8, 64])
def test_what_is_gathered_and_reduced(pattern: str, bytes_each: float, gpus: int) -> None:
    found = audit_cluster(gpus, f"srste:{pattern}")
    layers, root, part = 2 * BLOCKS * LAYER, -(-100 // gpus) * gpus * WIDTH, (gpus - 1) / gpus
    assert found.dense.gathered == part * 2 * (2 * layers + root)  # the blocks twice, the root once, bf16
    assert found.packed.gathered == part * (2 * layers * bytes_each + 2 * root)
    assert found.dense.reduced == found.packed.reduced == part * 4 * (layers + root)
    half = audit_cluster(Cluster(gpus, reduce_dtype="bfloat16"), f"srste:{pattern}")
    assert half.packed.reduced == found.packed.reduced / 2


def test_shares_of_a_whole_step() -> None:
    """The design's figures: 0.71 of the bytes at 2:4 and 0.44 at 1:8 with gradients in bf16, 0.78 at 2:4 with fp32."""
    plain = nn.Sequential(nn.Sequential(nn.Linear(64, 64, bias=False)))
    for pattern, dtype, share in (("2:4", "bfloat16", 0.71), ("1:8", "bfloat16", 0.44), ("2:4", "float32", 0.78)):
        found = audit_cluster(Cluster(8, reduce_dtype=dtype), f"srste:{pattern}", plain)
        packed, dense = (step.gathered + step.reduced for step in (found.packed, found.dense))
        assert packed / dense == pytest.approx(share, abs=0.005)


def test_gathered_once_where_weights_stay() -> None:
    often, once = audit_cluster(8), audit_cluster(Cluster(8, reshard_after_forward=False))
    root = 104 * WIDTH * 2 * 7 / 8
    assert once.packed.gathered - root == (often.packed.gathered - root) / 2


@pytest.mark.parametrize(
    ("recipe", "shape", "each"),
    [
        ("srste:2:4", (WIDTH - 1, WIDTH), 2.0),  # uneven rows are gathered dense, padded
        ("mdgf:2:4(gradient=chain)", (WIDTH, WIDTH), 4.0),  # the master itself, whose mask has no straight gradient
        ("srste:2:4(packed=False)", (WIDTH, WIDTH), 2.0),
        ("dense", (WIDTH, WIDTH), 2.0),
    ],
)
def test_what_cannot_be_packed(recipe: str, shape: tuple[int, int], each: float) -> None:
    found = audit_cluster(2, recipe, nn.Sequential(nn.Linear(shape[1], shape[0], bias=False, device="meta")))
    assert found.packed.gathered == LAYER * each and found.dense.gathered == LAYER * 2


def test_biases_and_frozen_weights() -> None:
    with_bias = audit_cluster(2, net=model(bias=True)).packed
    plain = audit_cluster(2).packed
    assert with_bias.gathered - plain.gathered == 2 * (2 * BLOCKS * WIDTH) * 2 / 2
    frozen = model()
    frozen.requires_grad_(False)
    frozen.blocks[0][0].weight.requires_grad_(True)
    assert audit_cluster(2, net=frozen).packed.reduced == LAYER * 4 / 2


# ---- memory


def test_memory() -> None:
    found, one = audit_cluster(4), LAYER * 2 * BLOCKS + 100 * WIDTH
    root, block = 100 * WIDTH, 2 * LAYER
    state = 16 * one / 4  # master, gradient and two moments in fp32
    # the root and its gradients stay in bf16; a block, the next one, its gradients, and those in fp32
    assert found.dense.memory == state + (2 + 2) * root + (2 + 2 + 2 + 4) * block
    assert found.packed.memory == state + (2 + 2) * root + (2 + 2 * 1.125 + 2 + 4) * block
    fits = audit_cluster(512, net=MODELS["llama-3-70b"].module())
    assert audit_cluster(8, net=MODELS["llama-3-70b"].module()).notes[0].startswith("It exceeds the 80 GB of H100 SXM")
    assert not any("does not fit" in note for note in fits.notes)


# ---- seconds


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose every GEMM takes 1 s, and its dense master weight none, with wires of 1 kB/s and latencies of seconds."""
    gpu = replace(DEVICES["H100"], dense={"bfloat16": 2.0 * LAYER}, bandwidth=1e30, launch=0.0, call=0.0)
    monkeypatch.setitem(DEVICES, "H100", replace(gpu, links=Links(1e3, (100.0, 200.0, 400.0), 50.0, start=5.0, hop=0.5, far=3.0)))


def blocks(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False, device="meta")) for _ in range(count)))


def test_seconds_by_hand(toy: None) -> None:
    """Three groups of one layer, one token: 1 s forward, 2 s backward each; the root has nothing."""
    found = audit_cluster(Cluster(8, reduce_dtype="bfloat16"), "srste:2:4", blocks(3), tokens=1)
    g, p = (5 + 7 * 0.5 + 7 / 8 * LAYER * each / 1e3 for each in (2, 1.125))  # a gather of W, or a reduction; a gather of W̃ packed
    assert g > p > 2, "the wires are what a step waits for"
    assert found.dense.seconds == pytest.approx((g + g + g + 1) + (g + g + (g + g) + g + g))
    assert found.packed.seconds == pytest.approx((p + p + p + 1) + (p + p + (p + g) + g + g))
    assert found.dense.waiting == pytest.approx(found.dense.seconds - 9)


def test_fast_wires_are_hidden(toy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = DEVICES["H100"]
    fast = replace(gpu, links=Links(7 / 8 * LAYER * 2 / 0.1, (1.0, 1.0, 1.0), 1.0, start=0.0, hop=0.0))  # 0.1 s a gather of W
    monkeypatch.setitem(DEVICES, "H100", fast)
    found = audit_cluster(Cluster(8, reduce_dtype="bfloat16"), "srste:2:4", blocks(3), tokens=1)
    assert found.dense.waiting == pytest.approx(0.1 + 0.1 + 0.1), "the first gather, the first of backward, the last reduction"
    assert found.packed.waiting == pytest.approx(2 * 0.05625 + 0.1)


def test_nodes_and_replicas(toy: None) -> None:
    one = blocks(1)
    moved = 15 / 16 * LAYER * 2
    ring = 5 + 14 * 0.5 + 1 * 3 + moved / 200  # 14 steps in two nodes, one between them
    found = audit_cluster(Cluster(16, reduce_dtype="bfloat16"), "dense", one, tokens=1)
    assert found.dense.seconds == pytest.approx(3 * ring + 3)
    fast, slow = found.dense.seconds_range
    assert fast == pytest.approx(3 * (15 + moved / 400) + 3) and slow == pytest.approx(3 * (15 + moved / 100) + 3)
    near = 5 + 7 * 0.5 + 7 / 8 * LAYER * 2 / 1e3
    between = 5 + 2 * 3 + LAYER * 2 / 8 / 50  # two replicas: 2 (R-1)/R of a shard by each GPU's own card
    hsdp = audit_cluster(Cluster(16, shards=8, reduce_dtype="bfloat16"), "dense", one, tokens=1)
    assert hsdp.dense.seconds == pytest.approx(3 * near + between + 3)
    assert hsdp.dense.reduced == 7 / 8 * LAYER * 2 + LAYER * 2 / 8
    assert len(set(hsdp.dense.seconds_range)) == 1, "no ring leaves its node"


def test_accumulation_repeats_the_passes() -> None:
    once, thrice = audit_cluster(8).packed, audit_cluster(8, accumulate=3).packed
    assert thrice.gathered == 3 * once.gathered and thrice.seconds == pytest.approx(3 * once.seconds) and thrice.memory == once.memory


def test_accumulation_reduces_and_waits_in_every_pass() -> None:
    once, thrice = audit_cluster(8).packed, audit_cluster(8, accumulate=3).packed
    assert thrice.reduced == 3 * once.reduced and thrice.waiting == pytest.approx(3 * once.waiting)
    assert thrice.seconds_range == pytest.approx(tuple(3 * seconds for seconds in once.seconds_range))


def test_one_gpu_does_not_wait() -> None:
    found = audit_cluster(1).packed
    assert found.gathered == found.reduced == 0 and found.waiting == pytest.approx(0, abs=1e-12)


# ---- the models of the issue


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b"])
@pytest.mark.parametrize("recipe", ["srste:2:4", "srste:1:8"])
def test_llama(name: str, recipe: str) -> None:
    net = MODELS[name].module()
    before = None
    for gpus in (8, 64, 512):
        found = nm.audit(net, 8192, recipe, cluster=gpus, **BF16).cluster
        assert found.packed.gathered < found.dense.gathered and found.packed.waiting <= found.dense.waiting
        assert before is None or (found.dense.memory < before.dense.memory and found.dense.seconds >= before.dense.seconds)
        before = found


def test_nothing_reads_like_a_measurement() -> None:
    audit = nm.audit(model(), 64, "srste:2:4", cluster=64, **BF16)
    text = " ".join(str(audit).split())
    assert "one of 64 GPUs, predicted" in text and "FSDP2, predicted and not measured" in text
    assert "200 GB/s of bus bandwidth over 8 nodes (50 to 360)" in text and HGX.across == (50e9, 200e9, 360e9)
    plain = json.loads(json.dumps(audit.as_dict()))["cluster"]
    assert plain["predicted"] is True and plain["cluster"]["gpus"] == 64 and not any("measured" in key for key in plain)
    assert nm.audit(model(), 64, **BF16).as_dict()["cluster"] is None


# ---- refused in words


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: audit_cluster(8, "maxq:2:4"), "MaxQ"),
        (lambda: nm.audit({"a": (64, 64)}, 8, device="cpu", cluster=8), "device='H100'"),
        (lambda: nm.audit({"a": (64, 64)}, 8, device="A100", cluster=8), "device='H100'"),
        (lambda: Cluster(0), "gpus=0"),
        (lambda: Cluster(8, shards=3), "not a multiple of shards=3"),
        (lambda: Cluster(8, reduce_dtype="int8"), "reduce_dtype='int8'"),
    ],
)
def test_what_is_refused(make, match: str) -> None:
    with pytest.raises(nm.RecipeError, match=match):
        make()


def test_a_finished_model_has_no_step() -> None:
    net = nn.Sequential(nn.Linear(64, 64))
    nm.sparsify_(net, "ste:2:4").finish(allow_unused=True)
    nm.compress_(net)
    with pytest.raises(nm.RecipeError, match="is not trained"):
        nm.audit(net, 8, cluster=8, **BF16)
