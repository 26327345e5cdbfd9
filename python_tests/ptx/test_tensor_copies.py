"""Boxes of tensors there and back: coordinates outside, ranks, swizzles, alignment."""

from __future__ import annotations

import pytest
import torch

from .machine import execute
from .order import Hazard
from .parse import parse
from .tensor_map import encode

MODES: list[str | int] = ["earliest", "latest", 3]
INT32, SPANS = 3, {0: 0, 32: 1, 64: 2, 128: 3}
CODE = """
.visible .entry kernel(.param .align 64 .b8 from[128], .param .align 64 .b8 to[128], .param .u64 image) .reqntid 32 {{
.reg .pred %p<9>; .reg .b32 %r<99>; .reg .b64 %rd<99>;
.shared .align 1024 .b8 memory[4096]; .shared .align 8 .b8 bars[8];
mov.u32 %r1, %tid.x; setp.ne.s32 %p1, %r1, 0; mov.u32 %r3, memory; mov.u32 %r4, bars;
@!%p1 mbarrier.init.shared::cta.b64 [%r4], 1; @!%p1 fence.mbarrier_init.release.cluster; bar.warp.sync -1;
mov.b64 %rd1, from; cvta.param.u64 %rd2, %rd1; mov.b64 %rd3, to; cvta.param.u64 %rd4, %rd3;
ld.param.u64 %rd5, [image]; cvta.to.global.u64 %rd6, %rd5;
@!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], {size};
@!%p1 cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r3+{at}], [%rd2, {{{corner}}}], [%r4];
{{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%r4], 0; @!p bra AGAIN; }}
@!%p1 cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group [%rd4, {{{corner}}}], [%r3+{at}];
@!%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd6], [%r3], 4096;
@!%p1 cp.async.bulk.commit_group; @!%p1 cp.async.bulk.wait_group 0; ret; }}
"""


def copied(shape: tuple[int, ...], box: tuple[int, ...], corner: tuple[int, ...], span: int, mode: str | int, at: int = 0):
    """A box there and back: shared memory after it, the tensor, and what came of a second one. Sizes are outermost first."""
    x = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    y, image = torch.zeros_like(x), torch.full((1024,), -1, dtype=torch.int32)

    def map_of(t: torch.Tensor) -> bytes:
        return encode(INT32, t.data_ptr(), shape[::-1], [4 * s for s in t.stride()[-2::-1]], box[::-1], swizzle=SPANS[span])

    size = 4 * torch.Size(box).numel()
    code = CODE.format(size=size, rank=len(shape), corner=", ".join(str(c) for c in corner[::-1]), at=at)
    execute(parse(code), 1, [map_of(x), map_of(y), image], [x, y], mode=mode)
    return image[at // 4 :][: size // 4].reshape(box), x, y


@pytest.mark.parametrize("mode", [3, *(pytest.param(m, marks=pytest.mark.slow) for m in MODES[:2])])
@pytest.mark.parametrize(
    ("shape", "box", "corner"),
    [
        ((20, 16), (16, 8), (0, 0)),
        ((20, 16), (16, 8), (8, 12)),  # beyond both ends
        ((20, 16), (16, 8), (-3, -5)),
        ((20, 16), (16, 8), (20, 0)),  # nothing of it inside
        ((64,), (32,), (48,)),
        ((3, 5, 8), (2, 4, 4), (2, -1, 6)),
        ((2, 3, 2, 2, 8), (2, 2, 2, 2, 8), (0, 2, -1, 0, 0)),
    ],
)
def test_what_lies_outside_is_zero_and_is_not_stored(shape, box, corner, mode) -> None:
    staged, x, y = copied(shape, box, corner, 0, mode)
    want, stored = torch.zeros(box, dtype=torch.int32), torch.zeros_like(x)
    for place in torch.cartesian_prod(*(torch.arange(b) for b in box)).reshape(-1, len(box)).tolist():
        source = tuple(c + p for c, p in zip(corner, place, strict=True))
        if all(0 <= s < n for s, n in zip(source, shape, strict=True)):
            want[tuple(place)] = stored[source] = x[source]
    assert torch.equal(staged, want) and torch.equal(y, stored)


@pytest.mark.parametrize("span", [32, 64, 128])
def test_swizzles(span: int) -> None:
    """Sixteen bytes of a row change places by the row, as the manual's figures have it (5.5.7)."""
    box = (16, span // 4)
    staged, x, y = copied((16, 64), box, (0, 8), span, "latest")
    for r in range(16):
        turn = r % 8 * span // 128
        for c in range(span // 16):
            piece = staged[r, 4 * (c ^ turn) : 4 * (c ^ turn) + 4]
            assert torch.equal(piece, x[r, 8 + 4 * c : 12 + 4 * c])
    assert torch.equal(y[:, 8 : 8 + span // 4], x[:, 8 : 8 + span // 4]) and int(y[:, 8 + span // 4 :].abs().sum()) == 0


@pytest.mark.parametrize(("span", "at"), [(0, 64), (128, 128), (64, 256)])
def test_destinations_are_aligned(span: int, at: int) -> None:
    with pytest.raises(Hazard, match="^alignment"):
        copied((16, 64), (16, span // 4 or 4), (0, 0), span, "earliest", at)
