// C = Aᵀ B for many tokens, A compressed along its rows: dgrad, with B = gᵀ and C = dxᵀ.
//
// A block of A is first sorted by columns, once for several tiles of tokens; then it is the product of spmm.cpp.
#include "spmm.h"

#include <atomic>
#include <vector>

namespace nm {
namespace {

// What one task works on, measured like the constants of spmm.h.
constexpr int64_t kColumns = 256;    // of A, rows of C
constexpr int64_t kTilesAtOnce = 4;  // of tokens

// Entries of some rows of A by column; a column has room for one of each row.
struct Sorted {
    int64_t room;
    std::vector<float> values;
    std::vector<uint32_t> offsets;
    std::vector<int> count;

    Sorted(int64_t columns, int64_t rows)
        : room(rows), values(size_t(columns * rows)), offsets(size_t(columns * rows)), count(size_t(columns)) {}

    Entries column(int64_t c) const { return {values.data() + c * room, offsets.data() + c * room}; }
};

template <class T>
struct Source {
    const T* values;
    const uint8_t* indices;
    int n, m, bits;
    int64_t rows, cols, kept, bytes;
    int64_t columns;  // of a block: whole groups that begin at a whole byte of indices
    std::vector<uint32_t> first;

    Source(const SpmmCall& call, int n, int m)
        : values(static_cast<const T*>(call.values)), indices(call.indices), n(n), m(m), bits(index_bits(m)), rows(call.rows), cols(call.cols) {
        kept = (cols + m - 1) / m * n;
        bytes = index_bytes(kept, bits);
        const int64_t whole = m > 16 ? m : 4 * m;
        columns = std::max(kColumns / whole, int64_t(1)) * whole;
        first.resize(size_t(columns / m * n + kLanes));
        for (int64_t k = 0; k < columns / m * n; ++k) first[size_t(k)] = uint32_t(k / n * m);
    }

    // Sorts columns [column, column + columns) of rows [begin, end). False: an index is not below m, or a group names a
    // column twice so often that there is no room for it.
    bool sort(int64_t column, int64_t begin, int64_t end, uint32_t row_bytes, Sorted& to) const {
        uint32_t at[kMaxEntries + kLanes];
        alignas(64) float floats[kMaxEntries];
        const int64_t k = column / m * n, there = std::min(columns, cols - column);
        const int count = int(std::min<int64_t>(columns / m * n, kept - k));
        Uints most = {};
        bool valid = true;
        std::fill(to.count.begin(), to.count.end(), 0);
        for (int64_t row = begin; row < end; ++row) {
            const uint8_t* packed = indices + row * bytes + k * bits / 8;
            by_bits(bits, [&](auto b) {
                most = decode<decltype(b)::value>(packed, indices + rows * bytes - packed, count, m, first.data(), 1, at, most);
            });
            const float* stored = as_floats(values + row * kept + k, count, floats);
            const uint32_t offset = uint32_t(row - begin) * row_bytes;
            for (int i = 0; i < count; ++i) {
                if (at[i] >= there) continue;  // padding of the last group
                int& used = to.count[at[i]];
                if (used == to.room) {
                    valid = false;
                    continue;
                }
                to.values[size_t(at[i] * to.room + used)] = stored[i];
                to.offsets[size_t(at[i] * to.room + used)] = offset;
                ++used;
            }
        }
        return valid && largest_lane(most) < uint32_t(m);
    }
};

// Tiles [tile, tile + count) of C's rows [column, column + rows) into c, one tile after the other.
template <int V, class T>
bool block_sums(const Source<T>& a, const float* packed, int64_t tile, int64_t count, int64_t column, int64_t rows, float* c) {
    constexpr int64_t kWidth = V * kLanes, kRowBytes = kWidth * int64_t(sizeof(float));
    const int64_t kRows = panel_bytes() / kRowBytes;
    static thread_local Sorted sorted(0, 0);
    if (sorted.room != kRows || int64_t(sorted.count.size()) < a.columns) sorted = Sorted(a.columns, kRows);
    bool valid = true;
    for (int64_t k = 0; k < a.rows; k += kRows) {
        valid = a.sort(column, k, std::min(k + kRows, a.rows), kRowBytes, sorted) && valid;
        for (int64_t t = 0; t < count; ++t) {
            const float* panel = packed + ((tile + t) * a.rows + k) * kWidth;
            for (int64_t r = 0; r < rows; ++r) {
                const Entries entries = sorted.column(r);
                add_rows<V, 1>(&entries, sorted.count[size_t(r)], panel, c + (t * rows + r) * kWidth, k == 0);
            }
        }
    }
    return valid;
}

template <class T>
bool some_tokens(const Source<T>& a, const Operands<T>& op, const TokenTiles& tiles, int threads) {
    const float* packed = pack_all(op, a.rows, tiles, threads);
    const int64_t blocks = (a.cols + a.columns - 1) / a.columns, sets = (tiles.count + kTilesAtOnce - 1) / kTilesAtOnce;
    std::atomic<bool> valid{true};
    parallel_for(blocks * sets, threads, [&](int64_t i) {
        const int64_t column = i % blocks * a.columns, rows = std::min(a.columns, a.cols - column);
        const int64_t tile = i / blocks * kTilesAtOnce, count = std::min(kTilesAtOnce, tiles.count - tile);
        float* c = tile_room(count * rows * tiles.width);
        if (a.rows == 0) std::fill(c, c + count * rows * tiles.width, 0.0f);
        by_vectors(tiles.vectors, [&](auto v) {
            if (!block_sums<decltype(v)::value>(a, packed, tile, count, column, rows, c)) valid = false;
        });
        for (int64_t t = 0; t < count; ++t) deliver(op, c + t * rows * tiles.width, column, rows, (tile + t) * tiles.width, tiles.width);
    });
    return valid;
}

}  // namespace

namespace NM_ISA {

bool spmm_transposed(const SpmmCall& call, int dtype, int n, int m, int threads) {
    check_pattern(n, m);
    bool valid = true;
    by_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        const Source<T> a(call, n, m);
        by_chunks(operands<T>(call, call.cols, call.rows), kMaxVectors, [&](const Operands<T>& op, const TokenTiles& tiles) {
            valid = some_tokens(a, op, tiles, threads) && valid;
        });
    });
    return valid;
}

}  // namespace NM_ISA
}  // namespace nm
