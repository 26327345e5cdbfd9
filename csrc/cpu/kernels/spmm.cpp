// C = A B (+ bias) for many tokens, A compressed: every stored weight is multiplied with a row of B, absent ones with
// nothing. fprop takes B = xᵀ and C = yᵀ, wgrad B = x and C = dW.
#include "spmm.h"

#include <atomic>
#include <vector>

namespace nm {
namespace {

constexpr int kMaxEntries = 1024;  // of a row in one block of columns

// The compressed operand, and how its columns are cut into blocks.
template <class T, class P>
struct Stored {
    const T* values;
    const uint8_t* indices;
    P p;
    int64_t cols, kept, bytes, groups_each;

    Stored(const SpmmCall& call, P pattern, int64_t row_bytes)
        : values(static_cast<const T*>(call.values)), indices(call.indices), p(pattern), cols(call.cols) {
        kept = (cols + p.m - 1) / p.m * p.n;
        bytes = index_bytes(kept, index_bits(p.m));
        // blocks begin at a whole byte of indices: at every fourth group
        const int64_t fit = std::min<int64_t>(kPanelBytes / row_bytes / p.m, kMaxEntries / p.n);
        groups_each = p.m > 16 ? std::max<int64_t>(fit, 1) : std::max<int64_t>(fit / 4 * 4, 4);
    }
};

// The value of what is stored past the last column is padding and counts for nothing, even NaN.
inline void drop_padding(Entries& e, uint32_t end, float* values, uint32_t* offsets) {
    int left = 0;
    for (int k = 0; k < e.count; ++k) {
        if (e.offsets[k] >= end) continue;
        values[left] = e.values[k];
        offsets[left++] = e.offsets[k];
    }
    e = {values, offsets, left};
}

// One tile of C: rows [row, row + rows), all columns.
template <int V, class T, class P>
bool tile_sums(const Stored<T, P>& a, const uint32_t* first, const float* b, int64_t row, int64_t rows, float* c) {
    constexpr int64_t kWidth = V * kLanes;
    constexpr uint32_t kRowBytes = kWidth * sizeof(float);
    alignas(64) uint32_t offsets[kMaxEntries];
    alignas(64) float floats[kMaxEntries];
    const P p = a.p;
    const int bits = index_bits(p.m);
    int largest = 0;
    for (int64_t g = 0; g * p.m < a.cols; g += a.groups_each) {
        const int64_t k = g * p.n;
        const int count = int(std::min(a.groups_each * p.n, a.kept - k));
        const int64_t columns_left = a.cols - g * p.m;
        const bool ragged = columns_left < a.groups_each * p.m && columns_left % p.m != 0;
        for (int64_t r = 0; r < rows; ++r) {
            const T* values = a.values + (row + r) * a.kept + k;
            const uint8_t* indices = a.indices + (row + r) * a.bytes + k * bits / 8;
            largest = std::max(largest, decode(bits, indices, count, p.m, first, kRowBytes, offsets));
            Entries e{as_floats(values, count, floats), offsets, count};
            if (ragged) drop_padding(e, uint32_t(columns_left) * kRowBytes, floats, offsets);
            add_row<V>(e, b + g * p.m * kWidth, c + r * kWidth, g == 0);
        }
    }
    return largest < p.m;
}

template <class T, class P>
bool some_tokens(const Stored<T, P>& a, const Operands<T>& op, const Tiles& tiles, int threads) {
    const float* packed = pack_all(op, tiles, threads);
    std::vector<uint32_t> first(size_t(a.groups_each * a.p.n));
    for (size_t k = 0; k < first.size(); ++k) first[k] = uint32_t(k / size_t(a.p.n) * size_t(a.p.m * tiles.width)) * uint32_t(sizeof(float));
    const int64_t block = row_block(op.rows, tiles, threads), blocks = (op.rows + block - 1) / block;
    std::atomic<bool> valid{true};
    parallel_for(blocks * tiles.count, threads, [&](int64_t i) {
        const int64_t tile = i / blocks, row = i % blocks * block, rows = std::min(block, op.rows - row);
        float* c = tile_room(block * tiles.width);
        const float* b = packed + tile * op.cols * tiles.width;
        if (op.cols == 0) std::fill(c, c + rows * tiles.width, 0.0f);
        by_vectors(tiles.vectors, [&](auto v) {
            if (!tile_sums<decltype(v)::value>(a, first.data(), b, row, rows, c)) valid = false;
        });
        deliver(op, c, row, rows, tile * tiles.width, tiles.width);
    });
    return valid;
}

}  // namespace

namespace NM_ISA {

bool spmm(const SpmmCall& call, int dtype, int n, int m, int threads) {
    bool valid = true;
    by_dtype_and_pattern(dtype, n, m, [&](auto element, auto p) {
        using T = decltype(element);
        by_chunks(operands<T>(call, call.rows, call.cols), [&](const Operands<T>& op, const Tiles& tiles) {
            const Stored<T, decltype(p)> a(call, p, tiles.width * int64_t(sizeof(float)));
            valid = some_tokens(a, op, tiles, threads) && valid;
        });
    });
    return valid;
}

}  // namespace NM_ISA
}  // namespace nm
