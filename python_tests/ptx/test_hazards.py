"""Each hazard by itself, in a few instructions; and the limits of tensor maps."""

from __future__ import annotations

import pytest
import torch

from .machine import execute
from .order import Hazard
from .parse import parse
from .tensor_map import TensorMap, encode

MODES: list[str | int] = ["earliest", "latest", 3]
HEAD = """
.visible .entry kernel(.param .u64 data) .maxntid 256, 1, 1 {
.reg .pred %p<9>; .reg .b32 %r<99>; .reg .f32 %f<99>; .reg .b64 %rd<99>;
.shared .align 1024 .b8 memory[8192]; .shared .align 8 .b8 bars[64];
mov.u32 %r1, %tid.x; setp.ne.s32 %p1, %r1, 0; shr.u32 %r2, %r1, 5; setp.ne.s32 %p2, %r2, 0; mov.u32 %r3, memory; mov.u32 %r4, bars;
shl.b32 %r5, %r1, 2; add.s32 %r5, %r5, %r3; ld.param.u64 %rd1, [data]; cvta.to.global.u64 %rd2, %rd1;
"""
INIT = "@!%p1 mbarrier.init.shared::cta.b64 [%r4], 1; @!%p1 fence.mbarrier_init.release.cluster; bar.sync 0;"
COPY = """@!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 512;
@!%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd2], 512, [%r4];"""
WAIT = "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%r4], 0; @!p bra AGAIN; }"
STORE = """@!%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r3], 512;
@!%p1 cp.async.bulk.commit_group; @!%p1 cp.async.bulk.wait_group.read 0;"""
ASYNC = "shl.b32 %r6, %r1, 2; cvt.u64.u32 %rd3, %r6; add.s64 %rd4, %rd2, %rd3; cp.async.ca.shared.global [%r5], [%rd4], 4, 4;"
GROUP = "cp.async.commit_group; cp.async.wait_group 0;"


def run(body: str, mode: str | int = "earliest", threads: int = 128, cluster: int = 1) -> torch.Tensor:
    data = torch.arange(256, dtype=torch.int32)
    execute(parse(HEAD + body + " ret; }"), cluster, [data], mode=mode, threads=threads, cluster=cluster, shared=0)
    return data


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "body",
    [
        INIT + COPY + WAIT + "ld.shared.u32 %r7, [%r5]; st.global.u32 [%rd2], 7;",
        "st.shared.u32 [%r5], %r1; fence.proxy.async.shared::cta; bar.sync 0;" + STORE,
        "st.shared.u32 [%r5], %r1; bar.sync 0; ld.shared.u32 %r7, [memory];",
        ASYNC + GROUP + "bar.sync 0; ld.shared.u32 %r7, [memory];",
        ASYNC + GROUP + "ld.shared.u32 %r7, [%r5];",
    ],
    ids=["bulk load", "bulk store", "stores", "cp.async", "cp.async of its own"],
)
def test_in_order(body: str, mode: str | int) -> None:
    run(body, mode)


HAZARDS = {
    "a bulk load is not waited for": (INIT + COPY + "ld.shared.u32 %r7, [memory];", "read before the wait"),
    "one warp waits for the others": (INIT + COPY + "@%p2 bra X;" + WAIT + "X: ld.shared.u32 %r7, [memory];", "read before the wait"),
    "a bulk load overwrites a read": (INIT + "ld.shared.u32 %r7, [%r5];" + COPY + WAIT, "overwritten before it was read"),
    "a bulk load overwrites a store": (INIT + "st.shared.u32 [%r5], %r1; bar.sync 0;" + COPY + WAIT, "not fenced for the async proxy"),
    "a store that is not fenced": ("st.shared.u32 [%r5], %r1; bar.sync 0;" + STORE, "not fenced for the async proxy"),
    "a fence by another thread": (
        "st.shared.u32 [%r5], %r1; bar.sync 0; @!%p2 fence.proxy.async.shared::cta;" + STORE,
        "not fenced for the async proxy",
    ),
    "a fence without a barrier": ("st.shared.u32 [%r5], %r1; fence.proxy.async.shared::cta;" + STORE, "race"),
    "a store that nobody waits for": (STORE.replace("@!%p1 cp.async.bulk.wait_group.read 0;", ""), "left before wait_group"),
    "no barrier between warps": ("st.shared.u32 [%r5], %r1; ld.shared.u32 %r7, [memory];", "race"),
    "two warps write one place": ("@!%p2 st.shared.u32 [memory], 7; @%p2 st.shared.u32 [memory], 7;", "race"),
    "cp.async is not waited for": (ASYNC + "cp.async.commit_group; ld.shared.u32 %r7, [%r5];", "read before the wait"),
    "cp.async of another warp": (ASYNC + GROUP + "ld.shared.u32 %r7, [memory];", "read before the wait"),
    "no mbarrier": ("@!%p1 mbarrier.arrive.shared::cta.b64 _, [%r4];", "no mbarrier"),
    "initialised twice": (INIT + "@!%p1 mbarrier.init.shared::cta.b64 [%r4], 1;", "mbarrier initialised twice"),
    "not visible": (
        "@!%p1 mbarrier.init.shared::cta.b64 [%r4], 1; @!%p1 bar.arrive 1, 128; @%p2 bar.sync 1, 128;" + WAIT,
        "mbarrier used before its init|wrong count|divergent|deadlock|no mbarrier",
    ),
    "more arrivals": (INIT + "@!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 16;" * 2, "more arrivals than count"),
    "too many bytes": (INIT + COPY.replace("_, [%r4], 512", "_, [%r4], 256") + WAIT, "bytes differ from expect_tx"),
    "too few bytes": (INIT + COPY.replace("_, [%r4], 512", "_, [%r4], 1024") + WAIT, "deadlock: [^$]*bars.0 .*phase 0 .parity 0"),
    "tx overflow": (INIT + "@!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 1048576;", "tx overflow"),
    "a parity of 2": (INIT + WAIT.replace(", 0;", ", 2;"), "parity"),
    "nobody arrives": (INIT + WAIT, "deadlock"),
    "a copy of 8 bytes": (INIT + COPY.replace("512", "8"), "alignment"),
    "a copy beyond the end": (
        INIT + COPY.replace("[%r3]", "[memory+8064]").replace("memory+8064", "%r3+8064"),
        "outside|mbarrier overwritten",
    ),
    "a copy on a barrier": (INIT + COPY.replace("[%r3]", "[%r3+7744]"), "mbarrier overwritten"),
    "half a block at a barrier": ("@!%p2 bar.sync 0;", "deadlock"),
    "half a warp at a barrier": ("@!%p1 bar.sync 0;", "divergent barrier"),
    "counts that differ": ("mov.u32 %r7, 128; @!%p2 mov.u32 %r7, 96; bar.sync 1, %r7;", "wrong count|deadlock"),
    "barrier 16": ("bar.sync 16, 128;", "wrong count"),
    "half a warpgroup": ("@%p2 bra X; wgmma.fence.sync.aligned; X:", "half a warpgroup"),
    "some threads of a warpgroup": ("@!%p1 wgmma.fence.sync.aligned;", "divergent warpgroup"),
    "17 registers": ("setmaxnreg.dec.sync.aligned.u32 20;", "setmaxnreg"),
    "fewer registers by inc": ("setmaxnreg.inc.sync.aligned.u32 24;", "setmaxnreg"),
    "wait without arrive": ("barrier.cluster.wait.acquire.aligned;", "barrier.cluster"),
    "arrive twice": ("barrier.cluster.arrive.aligned; barrier.cluster.arrive.aligned;", "barrier.cluster"),
}


@pytest.mark.parametrize("mode", [3, *(pytest.param(m, marks=pytest.mark.slow) for m in MODES[:2])])
@pytest.mark.parametrize("name", HAZARDS)
def test_a_hazard(name: str, mode: str | int) -> None:
    body, message = HAZARDS[name]
    with pytest.raises(Hazard, match=f"^({message})"):
        run(body, mode)


def test_a_remote_arrive_without_a_wait() -> None:
    """The other block may be gone."""
    remote = "mapa.shared::cluster.u32 %r8, %r4, 1; @!%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];"
    both = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
    alone = "mov.u32 %r9, %cluster_ctarank; setp.ne.s32 %p3, %r9, 0; @%p3 bra X;"
    for mode in MODES:
        run(INIT + both + alone + remote + "X:" + both, mode, cluster=2)
        with pytest.raises(Hazard, match="a block (has left|may leave too early)"):
            run(INIT + both + alone + remote + "X:", mode, cluster=2)


FINE = {"dtype": 9, "address": 1 << 20, "sizes": (256, 512), "strides": (512,), "box": (64, 128), "swizzle": 3}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"address": (1 << 20) + 8}, "multiple of 16"),
        ({"sizes": (256, 0)}, "not all in"),
        ({"sizes": (256, (1 << 32) + 1)}, "not all in"),
        ({"strides": (520,)}, "multiples of 16"),
        ({"strides": (1 << 40,)}, "below 2"),
        ({"strides": (256,)}, "less than the 512 bytes"),
        ({"box": (64, 257)}, "more than 256"),
        ({"box": (72, 128)}, "more than the 128 of the swizzle"),
        ({"box": (12, 128)}, "no multiple of 16"),
        ({"sizes": (256,) * 6, "strides": (512,) * 5, "box": (8,) * 6}, "rank 6"),
    ],
)
def test_limits_of_tensor_maps(changed: dict, message: str) -> None:
    made = TensorMap.unpack(encode(**FINE), "")  # type: ignore[arg-type]
    assert made == TensorMap(1 << 20, 2, (256, 512), (512,), (64, 128), 128)
    with pytest.raises(Hazard, match=message):
        encode(**FINE | changed)  # type: ignore[arg-type]
