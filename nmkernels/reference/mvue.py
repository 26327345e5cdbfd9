"""The unbiased N:M estimate of least variance: E X = g, at most N of every M elements kept.

The best X keeps element i with probability p_i = min(1, c |g_i|), Σ p_i = N, and value g_i / p_i (Chmiel, Hubara, Banner, Soudry, "Minimum
Variance Unbiased N:M Sparsity for the Neural Gradients", ICLR 2023: 1:2, 2:4; general N:M is ours). Selection is systematic sampling, which
needs running sums without rounding errors, or some uniforms would select too many elements. For N <= 2 and M = 2, 4, 8, 16 they are floats
on a grid (``_by_level``), for every other pattern integers (``_exact``).

Philox4x32-7 computes random words from a key and a counter, so any element can be drawn on any device (Salmon, Moraes, Dror, Shaw,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011: seven rounds pass all their tests). Words are stored as int64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .common import compute_dtype, grouped
from .compress import compress
from .layouts import to_layout
from .mask import mask

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7


def philox4x32(counter: Tensor, key: tuple[Tensor | int, Tensor | int]) -> Tensor:
    """Seven rounds of Philox4x32: four random 32-bit words, int64 ``(..., 4)`` like the counter, under a key of two words.

    One round: (c0, c1, c2, c3) -> (hi(B c2) ^ c1 ^ k0, lo(B c2), hi(A c0) ^ c3 ^ k1, lo(A c0)), A and B the ``MULTIPLIERS``;
    the key words grow by ``KEY_STEPS`` between rounds.
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key
    for _ in range(ROUNDS):
        # the 64-bit product may wrap into the sign bit; masking after the shift gives the same 32 bits
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((b >> 32) & WORD) ^ c1 ^ k0, b & WORD, ((a >> 32) & WORD) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return torch.stack((c0, c1, c2, c3), dim=-1)


def _words(seed: Tensor, first: int, blocks: int) -> Tensor:
    """The words of counters (j lo, j hi, offset lo, hi), j from ``first``, under the key (seed lo, hi): ``(blocks, 4)``."""
    j = torch.arange(first, first + blocks, dtype=torch.int64, device=seed.device)
    low, high = seed & WORD, (seed >> 32) & WORD
    counter = torch.stack((j & WORD, j >> 32, low[1].expand_as(j), high[1].expand_as(j)), dim=-1)
    return philox4x32(counter, (low[0], high[0]))


def words(seed: Tensor, count: int, first: int = 0) -> Tensor:
    """One 32-bit word for each of groups first, ..., first + count - 1 (the exact method).

    Group j takes word j & 3 of counter (j >> 2, offset) under the key ``seed``.
    """
    skip = first & 3
    blocks = _words(seed, first >> 2, (skip + count + 3) >> 2)
    return blocks.flatten()[skip : skip + count]


def uniforms24(seed: Tensor, count: int, first: int = 0) -> Tensor:
    """Numbers in [0, 2^24): the upper 24 bits of ``words``."""
    return words(seed, count, first) >> 8


def word_pairs(seed: Tensor, count: int, first: int = 0) -> Tensor:
    """Two words for each group ``(count, 2)`` (the approximate method): words 0 and 1 of counter (j, offset)."""
    return _words(seed, first, count)[:, :2]


ONE = 1 << 24
"""1 as a 24-bit fixed-point probability."""
CHUNK = 1 << 20
"""Elements processed at a time, to bound memory."""


def _tree(x: Tensor) -> Tensor:
    """Sum of the last dimension as a balanced binary tree: ((x0 + x1) + (x2 + x3)) + ..., zero-padded to a power of two; keeps the dim."""
    x = torch.nn.functional.pad(x, (0, (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x


def _cumulative(q: Tensor, live: Tensor, total: Tensor | int) -> Tensor:
    """C_i = min(q_0 + ... + q_i, total), and C_i = total from the last live element on."""
    still_to_come = live.long().flip(-1).cumsum(-1).flip(-1) - live.long()
    return torch.where(still_to_come == 0, total, torch.minimum(q.cumsum(-1), torch.as_tensor(total, device=q.device)))


def _fixed(p: Tensor) -> Tensor:
    return (p * ONE).floor().long()


def has_level_rule(n: int, m: int) -> bool:
    """Whether ``_by_level`` defines the exact method of N:M."""
    return n <= 2 and m in (2, 4, 8, 16) and n < m


def _rounded_level(h: Tensor, word: Tensor, dtype: torch.dtype) -> Tensor:
    """Round h > 0 to ``dtype`` at random with mean h, using the lower 16 (float16: 13) bits of the word."""
    if dtype not in (torch.bfloat16, torch.float16):
        return h
    bits = 16 if dtype == torch.bfloat16 else 13
    random = word & (1 << bits) - 1
    rounded = ((h.view(torch.int32) + random.int()) & -(1 << bits)).view(torch.float32)
    if dtype == torch.bfloat16:
        return rounded
    # below its normal range float16 is fixed point with quantum 2^-24; h is a multiple of 2^-25, so this is exact
    return torch.where(h < 2.0**-14, ((h + random * 2.0**-37) * 2.0**24).floor() * 2.0**-24, rounded)


def _by_level(g: Tensor, a: Tensor, word: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Systematic sampling in floating point, for n <= 2. g, a = |g|: ``(G, m)``; word: int64 ``(G,)``; values fit ``dtype``.

    Uses only + - × min max and bit operations, each rounded once. Sampled elements are raised to the level h = S, or for n = 2 min(S / 2,
    R), R the sum without the largest element (the least sum without one element). With e the exponent of h and M = 8 · 2^e, every sum below
    is in [M, 2 M), where a float32 is fixed point with quantum 2^(e - 20); H is h without its last three bits, a multiple of it.

        x = 1 + (k + 1/2) / 2^16, k the upper 16 bits of the word (m = 16: 15 bits)
        T2 = M + x · H, T1 = T2 - H;  C_i = M + min(a_0, H) + ... + min(a_i, H)
        i1 = #{i <= m - 2: C_i <= T1}, i2 = 1 + #{1 <= i <= m - 2: C_i <= T2};  kept: i1, for n = 2 i2 as well

    A kept element becomes sign(g) · max(a, H), H rounded at random to ``dtype``. T1 and T2 are H apart and no interval between two C is
    longer, so no element is selected twice and every a >= H is selected; T2 stays below the last C, so no zero is selected.
    |E x - g| <= (2^-16 + (m / 2 + 3) · 2^-20) · h, for m = 16 with 2^-15. If h is below the normal range, or M would not be finite,
    everything is first scaled by a power of two. float64 works the same with its own widths.
    """
    m, real = a.shape[-1], a.dtype
    info, as_bits = torch.finfo(real), torch.int64 if real == torch.float64 else torch.int32
    fraction, wide = (52, 512) if real == torch.float64 else (23, 64)
    h = _tree(a)
    if n == 2:
        without_one = [_tree(torch.where(torch.arange(m, device=a.device) == i, 0.0, a)) for i in range(m)]
        h = torch.minimum(0.5 * h, torch.stack(without_one).amin(0))
    # from 2^124 (2^1020) on 2 M is not finite
    scale = torch.ones_like(h).masked_fill(h < info.tiny, 2.0**wide).masked_fill(h >= 2.0 ** (2 * wide - 4), 2.0**-wide)
    b, level = a * scale, ((h * scale).view(as_bits) & -8).view(real)
    base = ((level.view(as_bits) & ~((1 << fraction) - 1)) + (3 << fraction)).view(real)
    k, ulp = (word >> 16, 16) if m < 16 else (word >> 17, 15)
    t2 = base + (1 + (k.unsqueeze(-1).to(real) + 0.5) * 2.0**-ulp) * level
    t1, c = t2 - level, base
    first, second = torch.zeros_like(k), torch.ones_like(k)
    for i in range(m - 1):
        c = c + torch.minimum(b[:, i : i + 1], level)
        first += (c <= t1).squeeze(-1)
        if i > 0:
            second += (c <= t2).squeeze(-1)
    drawn = torch.zeros_like(a, dtype=torch.bool).scatter_(-1, first.unsqueeze(-1), True)
    if n == 2:
        drawn.scatter_(-1, second.unsqueeze(-1), True)
    value = _rounded_level(level * (1 / scale), word.unsqueeze(-1), dtype)
    return torch.where(drawn, torch.maximum(a, value).copysign(g), 0.0)


def _exact(g: Tensor, a: Tensor, u: Tensor, n: int) -> Tensor:
    """Water-filling, then systematic sampling in integers with one uniform. g, a = |g|: ``(G, m)``; u: int64 in [0, 2^24) ``(G,)``."""
    saturated = torch.zeros_like(a, dtype=torch.bool)
    while True:
        room = n - saturated.sum(-1, keepdim=True)
        s = _tree(a.masked_fill(saturated, 0.0))
        more = ~saturated & (a != 0) & (a * room.to(a.dtype) >= s) & (room > 0)
        if not bool(more.any()):
            break
        saturated |= more
    live = ~saturated & (a != 0) & (room > 0)
    r = room.to(a.dtype)
    q = _fixed(torch.where(live, (a * r) / s, 0.0))
    end = _cumulative(q, live, room * ONE)
    start = torch.nn.functional.pad(end[:, :-1], (1, 0))
    shift = ONE - u.unsqueeze(-1)
    selected = live & ((end + shift) >> 24 > (start + shift) >> 24)
    return torch.where(saturated, g, torch.where(selected, (s / r).expand_as(g).copysign(g), 0.0))


def _approximate(g: Tensor, a: Tensor, s: Tensor, u: Tensor) -> Tensor:
    """Draw i by |g_i|, then j among the others; each kept value is divided by its probability. u: int64 ``(G, 2)``."""
    m = a.shape[-1]
    t = a / s
    p = t.clone()
    for j in range(m):
        other = torch.arange(m, device=a.device) != j
        ratio = a / _tree(torch.where(other, a, 0.0))
        p = torch.where(other, p + ratio * t[..., j : j + 1], p)
    p = p.clamp_min(1.0 / ONE)
    first = (u[:, :1] >= _cumulative(_fixed(t), a != 0, ONE)).sum(-1, keepdim=True)
    b = a.scatter(-1, first, 0.0)
    rest = _cumulative(_fixed(b / _tree(b)), b != 0, ONE)
    second = (u[:, 1:] >= rest).sum(-1, keepdim=True)
    selected = torch.zeros_like(a, dtype=torch.bool).scatter_(-1, torch.cat((first, second), -1), True)
    return torch.where(selected, (a / p).copysign(g), 0.0)


def group_mvue(groups: Tensor, word: Tensor, n: int, method: str = "exact") -> Tensor:
    """Estimate whole groups ``(G, m)`` with the given 32-bit words, int64 ``(G,)``, or ``(G, 2)`` for "approx".

    A group whose sum of magnitudes is not finite gives NaN at ``mask(group)``; one with at most n non-zeros is copied. Computed in float32
    (float64 for float64), rounded once. "approx" (n = 2 only) is two draws without replacement.
    """
    m = groups.shape[-1]
    g = groups.to(compute_dtype(groups.dtype))
    a = g.abs()
    s = _tree(a)
    finite = s.isfinite()
    few = (a != 0).sum(-1, keepdim=True) <= n
    # special groups are replaced by ones, so that the arithmetic below never sees them
    easy = torch.where(few | ~finite, 1.0, a)
    if method == "approx":
        drawn = _approximate(g, easy, _tree(easy), word >> 8)
    elif has_level_rule(n, m):
        drawn = _by_level(g, easy, word, n, groups.dtype)
    else:
        drawn = _exact(g, easy, word >> 8, n)
    out = torch.where(few, torch.where(a == 0, 0.0, g), drawn).to(groups.dtype)
    lost = torch.zeros_like(out).masked_fill_(mask(groups, n, m), float("nan"))
    return torch.where(finite, out, lost)


def _estimate(g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str) -> Tensor:
    """g with ``dim`` moved last and padded to whole groups, estimated: ``(..., padded)``."""
    moved = g.movedim(dim, -1)
    if dim not in (-1, g.dim() - 1):
        moved = torch.nn.functional.pad(moved, (0, -moved.shape[-1] % m))
    groups = grouped(moved.contiguous(), m).flatten(0, -2)
    out, step = torch.empty_like(groups), max(1, CHUNK // m)
    for start in range(0, groups.shape[0], step):
        part = groups[start : start + step]
        random = (words if method == "exact" else word_pairs)(seed, part.shape[0], start)
        out[start : start + step] = group_mvue(part, random, n, method)
    return out.view(moved.shape)


def mvue(g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str = "exact") -> Tensor:
    """Replace g by an unbiased estimate with at most n non-zeros in every m elements along ``dim``; only the last has no partial group.

    Group j, counted row-major after moving ``dim`` last, draws its own Philox words, so ``mvue(g, dim=0) == mvue(g.T, dim=1).T`` if both
    exist.
    """
    out = _estimate(g, n, m, dim, seed, method)
    return out[..., : g.shape[dim]].movedim(-1, dim).contiguous()


def mvue_compress(
    g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str = "exact", layout: str = "canonical"
) -> tuple[Tensor, Tensor]:
    """``mvue`` in compressed form, with ``dim`` moved last and the last group padded: gᵀ packed, for a matrix and dim=0."""
    out = _estimate(g, n, m, dim, seed, method)
    values, indices = compress(out, n, m, out != 0)
    return values, to_layout(indices, g.shape[dim], layout)
