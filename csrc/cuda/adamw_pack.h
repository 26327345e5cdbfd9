// Packing the new weights of a warp while they are in its registers: 2:4 along their rows, and along their columns.
//
// A thread has 4x4 neighbours, and a warp 32 rows of 16 columns: lane % 4 counts across, lane / 4 down. So 16 elements in
// a row, whose indices are one half of a metadata word (reference/layouts.py), belong to four lanes, and 16 in a column too.
#pragma once

#include "adamw_chunk.h"

namespace nm::cuda {

// One operand: W, or its transpose, whose lines are the columns of W.
struct PackedOperand {
    int64_t values, indices;  // addresses
    int dtype, layout;
    int64_t length;  // of a line, in dense elements
};

// The two that are kept of four, in order, from the bits of their mask.
NM_DEVICE Floats<2> two_of_four(float a, float b, float c, float d, uint32_t bits) {
    return {{bits & 1 ? a : bits & 2 ? b : c, bits & 8 ? d : bits & 4 ? c : b}};
}

NM_DEVICE uint32_t index_nibble(uint32_t bits) { return uint32_t(__ffs(bits) - 1) | uint32_t(31 - __clz(bits)) << 2; }

// Nibble j becomes nibble `i` of the lane that is number j of its four, `i` this lane's number; they are `far` apart.
NM_DEVICE uint32_t exchanged(uint32_t x, int i, int far) {
    uint32_t y = __shfl_xor_sync(~0u, x, far);
    x = i & 1 ? (x & 0xf0f0u) | (y & 0xf0f0u) >> 4 : (x & 0x0f0fu) | (y & 0x0f0fu) << 4;
    y = __shfl_xor_sync(~0u, x, 2 * far);
    return i & 2 ? (x & 0xff00u) | (y & 0xff00u) >> 8 : (x & 0x00ffu) | (y & 0x00ffu) << 8;
}

template <int K>
NM_DEVICE void store_values(const PackedOperand& to, int64_t line, int64_t first, const Floats<K>& values) {
    const Raw<K> raw = narrowed(values, to.dtype);
    const int64_t at = (line * to.length + first) / 2;
    if (to.dtype == kFloat32) {
        store_global<K>(reinterpret_cast<uint32_t*>(to.values) + at, raw.word);
    } else {
        store_global<K / 2>(reinterpret_cast<uint32_t*>(to.values) + at / 2, raw.word);
    }
}

// The indices of 16 elements of a line from `first` on; eight lines further is the lane `far` away. Needs the whole warp.
NM_DEVICE void store_indices(const PackedOperand& to, int64_t line, int64_t first, bool inside, uint32_t half, int far) {
    if (to.layout != kCanonicalLayout) {
        const uint32_t other = __shfl_xor_sync(~0u, half, far);
        if (!inside || line % 16 >= 8) return;
        const int64_t across = to.length / 64, column = first / 64, row = line / 16;
        const int64_t tile = to.layout == kMmaSpLayout ? row * across + column : (row / 4 * across + column) * 4 + row % 4;
        const uint32_t word = half | other << 16;
        store_global<1>(reinterpret_cast<uint32_t*>(to.indices) + (tile * 32 + line % 8 * 4 + first / 16 % 4), &word);
        return;
    }
    if (!inside) return;
    auto* bytes = reinterpret_cast<uint8_t*>(to.indices) + line * ((to.length + 7) / 8) + first / 8;
    if (to.length - first > 8 && reinterpret_cast<uintptr_t>(bytes) % 2 == 0) {
        st_global(bytes, uint16_t(half));
    } else {
        bytes[0] = uint8_t(half);
        if (to.length - first > 8) bytes[1] = uint8_t(half >> 8);
    }
}

// Bits of column c of the 16 bits of a mask of four rows.
NM_DEVICE uint32_t column_bits(uint32_t mask, int c) {
    const uint32_t x = mask >> c & 0x1111u;
    return (x | x >> 3 | x >> 6 | x >> 9) & 15u;
}

// The thread's square begins at (row, col) and has `height` rows inside the matrix, 0 for none. Needs the whole warp.
NM_DEVICE void pack_rows_of(const PackedOperand& to, const Floats<4>* p, uint32_t mask, int64_t row, int64_t col, int height) {
    uint32_t nibbles = 0;
    NM_UNROLL
    for (int r = 0; r < 4; ++r) {
        if (r >= height) continue;
        const uint32_t bits = mask >> (4 * r) & 15u;
        nibbles |= index_nibble(bits) << (4 * r);
        store_values(to, row + r, col, two_of_four(p[r].at[0], p[r].at[1], p[r].at[2], p[r].at[3], bits));
    }
    const int i = int(threadIdx.x) % 4;  // its row for the exchange; the first of the four lanes is inside wherever one is
    const uint32_t half = exchanged(nibbles, i, 1);
    const int64_t first = col - 4 * i;
    const int rows = __shfl_sync(~0u, height, int(threadIdx.x) % 32 - i);
    store_indices(to, row + i, first, i < rows, half, 8);
}

NM_DEVICE void pack_columns_of(const PackedOperand& to, const Floats<4>* p, uint32_t mask, int64_t row, int64_t col, int height) {
    uint32_t nibbles = 0;
    if (height > 0) {
        NM_UNROLL
        for (int c = 0; c < 4; ++c) {
            const uint32_t bits = column_bits(mask, c);
            nibbles |= index_nibble(bits) << (4 * c);
            store_values(to, col + c, row, two_of_four(p[0].at[c], p[1].at[c], p[2].at[c], p[3].at[c], bits));
        }
    }
    const int lane = int(threadIdx.x) % 32, i = lane / 4 % 4;
    const uint32_t half = exchanged(nibbles, i, 4);
    const bool inside = __shfl_sync(~0u, height, lane - 4 * i) > 0;
    store_indices(to, col + i, row - 4 * i, inside, half, 2);
}

}  // namespace nm::cuda
