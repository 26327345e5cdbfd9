// C = A B (+ bias) for many tokens, A compressed: every stored weight is multiplied with a row of B, absent ones with
// nothing. fprop takes B = xᵀ and C = yᵀ, wgrad B = x and C = dW.
#include "spmm.h"

#include <atomic>
#include <numeric>
#include <vector>

namespace nm {
namespace {

// Rows of a block of columns are far apart in memory, and half a line of fp32 values costs as much to fetch as a whole one: so
// many groups have whole lines.
inline int64_t groups_in_lines(int n) { return 16 / std::gcd(n, 16); }

// Vectors of a tile: the fewer, the more rows of B stay in the first-level cache. As many as leave room for a block of whole
// lines, unless they were so few that loading the weights took longer than that saves.
inline int widest_tile(int n, int m) {
    constexpr int kFewest = 4;
    const int64_t fit = caches().first / (groups_in_lines(n) * m * kLanes * int64_t(sizeof(float)));
    return fit < kFewest ? kMaxVectors : int(std::min<int64_t>(fit, kMaxVectors));
}

// The compressed operand, and how its columns are cut into blocks.
template <class T>
struct Stored {
    const T* values;
    const uint8_t *indices, *end;
    int n, m, bits;
    int64_t cols, groups, kept, bytes, groups_each;

    Stored(const SpmmCall& call, int n, int m, int64_t row_bytes)
        : values(static_cast<const T*>(call.values)), indices(call.indices), n(n), m(m), bits(index_bits(m)), cols(call.cols) {
        groups = (cols + m - 1) / m;
        kept = groups * n;
        bytes = index_bytes(kept, bits);
        end = indices + call.rows * bytes;
        const int64_t fit = std::max<int64_t>(panel_bytes() / row_bytes / m, 1), most = std::max(kMaxEntries / n, 1);
        // a block begins at a whole line where it can, even if its rows of B fill the cache then, and always at a whole byte of indices
        const int64_t line = groups_in_lines(n), byte = 8 / std::gcd(n * bits, 8), lines = (fit + line - 1) / line * line;
        groups_each = lines <= most && lines * m * row_bytes <= caches().first ? lines : std::min(fit, most);
        groups_each = groups_each >= line ? groups_each / line * line : (groups_each + byte - 1) / byte * byte;
    }
};

// What is stored past the last column is padding and counts for nothing, even NaN: it is 0 now, and so is its row of B.
inline void drop_padding(const float*& values, int count, const uint32_t* offsets, uint32_t end, float* room) {
    for (int k = 0; k < count; ++k) room[k] = offsets[k] < end ? values[k] : 0.0f;
    values = room;
}

template <class T>
void prefetch(const T* values, int count, const uint8_t* indices, int bits) {
    const char* from = reinterpret_cast<const char*>(values);
    for (int64_t i = 0; i < count * int64_t(sizeof(T)); i += 64) __builtin_prefetch(from + i);
    for (int i = 0; i < count * bits / 8; i += 64) __builtin_prefetch(indices + i);
}

// Some rows of one block of columns, decoded.
struct Decoded {
    static constexpr int kRows = 8;
    alignas(64) uint32_t offsets[kRows][kMaxEntries + kLanes];
    alignas(64) float floats[kRows][kMaxEntries + kLanes];
    Entries entries[kRows];
    Uints most = {};  // of all indices so far
};

// Which entries of a row one block of columns has, and how many of its columns there are: fewer than entries speak of where
// the last group is padded.
struct ColumnBlock {
    int64_t begin;
    int count;
    int64_t columns;
    bool padded;
};

// Decodes rows [row, row + rows) of a block.
template <int Bits, class T>
void decode_rows(const Stored<T>& a, const ColumnBlock& block, int64_t row, int rows, const uint32_t* first, uint32_t row_bytes, Decoded& to) {
    for (int i = 0; i < rows; ++i) {
        const T* values = a.values + (row + i) * a.kept + block.begin;
        const uint8_t* indices = a.indices + (row + i) * a.bytes + block.begin * Bits / 8;
        // a row of a block is short and the next one far away: no processor fetches it by itself. Past the end does no harm
        prefetch(values + Decoded::kRows * a.kept, block.count, indices + Decoded::kRows * a.bytes, Bits);
        to.most = decode<Bits>(indices, a.end - indices, block.count, a.m, first, row_bytes, to.offsets[i], to.most);
        const float* floats = as_floats(values, block.count, to.floats[i]);
        if (block.padded) drop_padding(floats, block.count, to.offsets[i], uint32_t(block.columns) * row_bytes, to.floats[i]);
        to.entries[i] = {floats, to.offsets[i]};
    }
}

// One tile of C: rows [row, row + rows), all columns.
template <int V, class T>
bool tile_sums(const Stored<T>& a, const uint32_t* first, const float* b, int64_t row, int64_t rows, float* c) {
    constexpr int64_t kWidth = V * kLanes;
    constexpr int kTogether = rows_at_once(V);
    static thread_local Decoded room;
    Decoded& decoded = room;
    decoded.most = Uints{};
    for (int64_t g = 0; g < a.groups; g += a.groups_each) {
        const int count = int(std::min(a.groups_each, a.groups - g)) * a.n;
        const int64_t columns = a.cols - g * a.m;
        const ColumnBlock block{g * a.n, count, columns, columns < count / a.n * a.m};
        const float* panel = b + g * a.m * kWidth;
        for (int64_t r = 0; r < rows; r += Decoded::kRows) {
            const int some = int(std::min<int64_t>(Decoded::kRows, rows - r));
            by_bits(a.bits, [&](auto bits) {
                decode_rows<decltype(bits)::value>(a, block, row + r, some, first, kWidth * sizeof(float), decoded);
            });
            float* sums = c + r * kWidth;
            int i = 0;
            for (; i + kTogether <= some; i += kTogether) add_rows<V, kTogether>(decoded.entries + i, count, panel, sums + i * kWidth, g == 0);
            for (; i < some; ++i) add_rows<V, 1>(decoded.entries + i, count, panel, sums + i * kWidth, g == 0);
        }
    }
    return largest_lane(decoded.most) < uint32_t(a.m);
}

template <class T>
bool some_tokens(const Stored<T>& a, const Operands<T>& op, const TokenTiles& tiles, int threads) {
    const int64_t depth = a.groups * a.m;
    const float* packed = pack_all(op, depth, tiles, threads);
    std::vector<uint32_t> first(size_t(a.groups_each * a.n + kLanes), 0);
    for (int64_t k = 0; k < a.groups_each * a.n; ++k) first[size_t(k)] = uint32_t(k / a.n * a.m * tiles.width * int64_t(sizeof(float)));
    const int64_t block = row_block(op.rows, tiles, threads), blocks = (op.rows + block - 1) / block;
    std::atomic<bool> valid{true};
    parallel_for(blocks * tiles.count, threads, [&](int64_t i) {
        const int64_t tile = i % tiles.count, row = i / tiles.count * block, rows = std::min(block, op.rows - row);
        float* c = tile_room(block * tiles.width);
        const float* b = packed + tile * depth * tiles.width;
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
    check_pattern(n, m);
    bool valid = true;
    by_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        by_chunks(operands<T>(call, call.rows, call.cols), widest_tile(n, m), [&](const Operands<T>& op, const TokenTiles& tiles) {
            const Stored<T> a(call, n, m, tiles.width * int64_t(sizeof(float)));
            valid = some_tokens(a, op, tiles, threads) && valid;
        });
    });
    return valid;
}

}  // namespace NM_ISA
}  // namespace nm
