// 2:4 in registers, four groups at a time: a quad. A quad is four groups of one row, or four neighbouring columns, or the
// four rows of a 4x4 tile; its elements are in words in order, group g from word g * kGroupWords<T> on. Its mask has bit 4g + i for
// element i of group g, as core/transposable.h writes it.
//
// The two kept are looked up for four groups at once: a byte permutation with the mask as selector reads a table of eight bytes at
// four positions. The six masks of two bits differ in their three low bits.
#pragma once

#include "../core/threshold.h"
#include "ptx.h"
#include "threshold_pairs.h"

namespace nm::cuda {

template <class T>
constexpr int kGroupWords = int(sizeof(T));  // of four elements

// The largest two of each group are kept, ties keep the lower index; third[g] is the largest magnitude of the others: as bits of an
// fp32, or of 16 bits in both halves.
template <class T>
struct LargestTwo {
    uint32_t mask;
    uint32_t third[4];

    NM_DEVICE explicit LargestTwo(const uint32_t* words) : mask(0) {
        NM_UNROLL
        for (int g = 0; g < 4; ++g) {
            if constexpr (sizeof(T) == 2) {
                group16(words[2 * g], words[2 * g + 1], g);
            } else {
                group32(words + 4 * g, g);
            }
        }
    }

  private:
    static NM_DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
    static NM_DEVICE uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

    // The magnitude of a 16-bit element followed by the complement of its bit: all differ, and on a tie the lower index is larger.
    static NM_DEVICE uint32_t marked_low(uint32_t pair, int i) { return pair * 65536u + (15u ^ (1u << i)); }
    static NM_DEVICE uint32_t marked_high(uint32_t pair, int i) { return (pair & 0xffff0000u) | (15u ^ (1u << i)); }
    // All NaNs become the same.
    static NM_DEVICE uint32_t magnitudes(uint32_t pair) { return largest_pair<T>(pair & 0x7fff7fffu, pair & 0x7fff7fffu); }

    NM_DEVICE void group16(uint32_t low, uint32_t high, int g) {
        low = magnitudes(low);
        high = magnitudes(high);
        const uint32_t a = marked_low(low, 0), b = marked_high(low, 1), c = marked_low(high, 2), d = marked_high(high, 3);
        const uint32_t x = larger(a, b), y = larger(c, d);
        const uint32_t rest = smaller(x, y), losers = larger(smaller(a, b), smaller(c, d));
        // if an element is kept, one of the two lacks its mark
        mask |= (~(larger(x, y) & larger(rest, losers)) & 15u) << (4 * g);
        const uint32_t next = smaller(rest, losers);
        third[g] = __byte_perm(next, next, 0x3232);
    }

    static NM_DEVICE bool two(bool a, bool b, bool c) { return (a && b) || (c && (a || b)); }

    NM_DEVICE void group32(const uint32_t* x, int g) {
        uint32_t k[4];
        NM_UNROLL
        for (int i = 0; i < 4; ++i) k[i] = smaller(x[i] & 0x7fffffffu, Key<float>::nan);
        const bool ab = k[0] >= k[1], ac = k[0] >= k[2], ad = k[0] >= k[3], bc = k[1] >= k[2], bd = k[1] >= k[3], cd = k[2] >= k[3];
        // kept: at least as large as two others
        const uint32_t kept = (two(ab, ac, ad) ? 1u : 0u) | (two(!ab, bc, bd) ? 2u : 0u) | (two(!ac, !bc, cd) ? 4u : 0u) |
                              (two(!ad, !bd, !cd) ? 8u : 0u);
        mask |= kept << (4 * g);
        third[g] = smaller(smaller(larger(k[0], k[1]), larger(k[2], k[3])), larger(smaller(k[0], k[1]), smaller(k[2], k[3])));
    }
};

// Converts the mask of a tile's rows to that of its columns, and back.
NM_DEVICE uint32_t transposed(uint32_t mask) {
    uint32_t swap = (mask ^ (mask >> 3)) & 0x0a0au;
    mask ^= swap | (swap << 3);
    swap = (mask ^ (mask >> 6)) & 0x00ccu;
    return mask ^ swap ^ (swap << 6);
}

// The number of kept elements of each group, in its four bits.
NM_DEVICE uint32_t counts(uint32_t mask) {
    const uint32_t pairs = mask - ((mask >> 1) & 0x5555u);
    return (pairs & 0x3333u) + ((pairs >> 2) & 0x3333u);
}

NM_DEVICE bool two_each(uint32_t mask) { return counts(mask) == 0x2222u; }

NM_DEVICE bool more_than_two(uint32_t mask) { return ((counts(mask) + 0x5555u) & 0x8888u) != 0; }

// Adds the lowest unkept elements to groups with fewer than two.
NM_DEVICE uint32_t filled_up(uint32_t mask) {
    NM_UNROLL
    for (int g = 0; g < 4; ++g) {
        NM_UNROLL
        for (int times = 0; times < 2; ++times) {
            const uint32_t group = mask >> (4 * g) & 15u;
            if (__popc(group) < 2) mask |= (~group & (group + 1u)) << (4 * g);
        }
    }
    return mask;
}

// Zeroes elements that are not kept.
template <class T>
NM_DEVICE void clear_unkept(uint32_t* words, uint32_t mask) {
    NM_UNROLL
    for (int i = 0; i < 16; ++i) {
        if constexpr (sizeof(T) == 2) {
            if (!(mask >> i & 1u)) words[i / 2] &= i % 2 ? 0x0000ffffu : 0xffff0000u;
        } else {
            if (!(mask >> i & 1u)) words[i] = 0;
        }
    }
}

// The four bits "first | second << 2" of each group, a group in a byte.
NM_DEVICE uint32_t index_bytes_of(uint32_t mask) { return permute_bytes(0x040d0c04u, 0x0409080eu, mask & 0x7777u); }

// The low four bits of four bytes as two bytes.
NM_DEVICE uint32_t joined_nibbles(uint32_t bytes) { return __byte_perm(bytes | (bytes >> 4), 0, 0x4420); }

// The two kept elements of each group, in order: 16-bit ones as a word a group, fp32 as two.
template <class T>
NM_DEVICE void pick_two(const uint32_t* words, uint32_t mask, uint32_t* kept) {
    if constexpr (sizeof(T) == 2) {
        // selectors of bytes 2i and 2i + 1 for the first kept i of each group, and for the second
        const uint32_t first = permute_bytes(0x10321010u, 0x10321054u, mask & 0x7777u);
        const uint32_t second = permute_bytes(0x32767632u, 0x32545476u, mask & 0x7777u);
        NM_UNROLL
        for (int g = 0; g < 4; ++g) {
            const uint32_t selector = __byte_perm(first, second, uint32_t(g | (g + 4) << 4));
            kept[g] = permute_bytes(words[2 * g], words[2 * g + 1], selector);
        }
    } else {
        NM_UNROLL
        for (int g = 0; g < 4; ++g) {
            const uint32_t* x = words + 4 * g;
            const uint32_t bits = mask >> (4 * g);
            kept[2 * g] = bits & 1u ? x[0] : bits & 2u ? x[1] : x[2];
            kept[2 * g + 1] = bits & 8u ? x[3] : bits & 4u ? x[2] : x[1];
        }
    }
}

// The quad of four columns from the four rows of a tile, each row `stride` words apart.
template <class T>
NM_DEVICE void turn_tile(const uint32_t* rows, int stride, uint32_t* columns) {
    if constexpr (sizeof(T) == 2) {
        NM_UNROLL
        for (int c = 0; c < 4; ++c) {
            NM_UNROLL
            for (int h = 0; h < 2; ++h) {
                const uint32_t a = rows[2 * h * stride + c / 2], b = rows[(2 * h + 1) * stride + c / 2];
                columns[2 * c + h] = __byte_perm(a, b, c % 2 ? 0x7632 : 0x5410);
            }
        }
    } else {
        NM_UNROLL
        for (int i = 0; i < 16; ++i) columns[i] = rows[i % 4 * stride + i / 4];
    }
}

}  // namespace nm::cuda
