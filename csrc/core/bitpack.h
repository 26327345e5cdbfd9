// Packed positions of kept elements: index k of a row occupies bits [k*bits, (k+1)*bits) of the row's bytes, lowest first.
// bits is 2 (m <= 4), 4 (m <= 16) or 8, so an index never straddles two bytes.
#pragma once

#include "types.h"

namespace nm {

NM_HD int index_bits(int m) { return m <= 4 ? 2 : m <= 16 ? 4 : 8; }

NM_HD int64_t index_bytes(int64_t count, int bits) { return (count * bits + 7) / 8; }

// The target bits must be zero.
NM_HD void put_index(uint8_t* row, int64_t k, int bits, int index) {
    const int64_t bit = k * bits;
    row[bit >> 3] = uint8_t(row[bit >> 3] | (index << (bit & 7)));
}

NM_HD int get_index(const uint8_t* row, int64_t k, int bits) {
    const int64_t bit = k * bits;
    return (row[bit >> 3] >> (bit & 7)) & ((1 << bits) - 1);
}

// Packs `count` positions into bytes, rounded up to whole bytes; positions past the last are 0.
inline void pack_positions(const uint8_t* positions, int64_t count, int bits, uint8_t* packed) {
    const int64_t bytes = index_bytes(count, bits);
    if (bits == 8) {
        std::memcpy(packed, positions, size_t(bytes));
    } else if (bits == 4) {
        for (int64_t i = 0; i < bytes; ++i) packed[i] = uint8_t(positions[2 * i] | positions[2 * i + 1] << 4);
    } else {
        for (int64_t i = 0; i < bytes; ++i) {
            const uint8_t* four = positions + 4 * i;
            packed[i] = uint8_t(four[0] | four[1] << 2 | four[2] << 4 | four[3] << 6);
        }
    }
}

// The inverse; unpacks whole bytes, so up to three positions past the last.
inline void unpack_positions(const uint8_t* packed, int64_t count, int bits, uint8_t* positions) {
    const int64_t bytes = index_bytes(count, bits);
    if (bits == 8) {
        std::memcpy(positions, packed, size_t(bytes));
    } else if (bits == 4) {
        for (int64_t i = 0; i < bytes; ++i) {
            positions[2 * i] = packed[i] & 15;
            positions[2 * i + 1] = packed[i] >> 4;
        }
    } else {
        for (int64_t i = 0; i < bytes; ++i) {
            const uint32_t x = packed[i], four = (x | x << 6 | x << 12 | x << 18) & 0x03030303u;
            std::memcpy(positions + 4 * i, &four, 4);  // little endian, as everywhere
        }
    }
}

// The stored values and positions of one group in order of index: the kept elements and, if fewer than n are kept, +0.0 at
// the lowest unkept positions. `keep` is 0 or 1 and keeps at most n. Both outputs need room for m: to avoid branches, every
// element is written to the next place, which advances only if the element is stored.
template <class T>
NM_HD void compact_group(const T* w, const uint8_t* keep, int n, int m, T* values, uint8_t* positions) {
    int missing = n;
    for (int i = 0; i < m; ++i) missing -= keep[i];
    int k = 0;
    for (int i = 0; i < m; ++i) {
        const int padding = (keep[i] ^ 1) & (missing > 0);
        missing -= padding;
        values[k] = kept_or_zero(w[i], keep[i]);
        positions[k] = uint8_t(i);
        k += keep[i] | padding;
    }
}

}  // namespace nm
