// What the products of a compressed matrix A [rows, cols] with many columns, C = A B, have in common: how B and C are
// cut into tiles, B's tiles packed, C's tiles written, and the inner loop.
//
// B [cols, tokens] is packed into tiles of up to kMaxVectors vectors of tokens, so that a row of a tile is what one
// stored weight multiplies. Columns are taken in blocks whose rows of B stay in the first-level cache; C's tile, a block
// of rows, stays in the second-level cache and is written once, when all columns are done.
#pragma once

#include <algorithm>
#include <memory>

#include "../caches.h"
#include "../kernels.h"
#include "scratch.h"
#include "simd/simd.h"

namespace nm {
namespace {

// Vectors in a row of a tile: as many sums in registers, as many loads for one broadcast weight. AVX2 has 16 registers and
// its loads bind, AVX-512 gains nothing beyond 8.
constexpr int kMaxVectors = kLanes == 8 ? 12 : 8;
constexpr int kStage = 64;                  // numbers of a row converted or transposed at a time

// Rows of B that stay in the first-level cache, with room for what A and C move through it.
inline int64_t panel_bytes() { return caches().first * 3 / 4; }

// A tile of C, which stays in the second-level cache.
inline int64_t tile_bytes() { return caches().second / 2; }

// B and C of one call: element (k, t) of B is b[k * b_row + t * b_col]; one of the strides is 1. C likewise; with a bias
// c_row is. C is fp32 if it is not rounded.
template <class T>
struct Operands {
    const T* b;
    int64_t b_row, b_col;
    void* c;
    int64_t c_row, c_col;
    const T* bias;  // one per row of C, or null
    int64_t rows, cols, tokens;
    bool unrounded;

    // Elements of C from `at` on.
    void write(const float* from, int64_t count, int64_t at) const {
        if (unrounded) std::memcpy(static_cast<float*>(c) + at, from, size_t(count) * sizeof(float));
        else from_floats(from, count, static_cast<T*>(c) + at);
    }

    // The tokens from `first` on, `count` of them.
    Operands at_tokens(int64_t first, int64_t count) const {
        Operands op = *this;
        op.tokens = count;
        op.b += first * b_col;
        op.c = static_cast<char*>(c) + first * c_col * int64_t(unrounded ? sizeof(float) : sizeof(T));
        return op;
    }
};

template <class T>
Operands<T> operands(const SpmmCall& call, int64_t rows, int64_t cols) {
    return {static_cast<const T*>(call.b), call.b_row, call.b_col, call.c, call.c_row, call.c_col,
            static_cast<const T*>(call.bias), rows, cols, call.tokens, call.unrounded};
}

// How `tokens` are cut: tiles of equal width, as few as possible, of at most `widest` vectors.
struct TokenTiles {
    int vectors;
    int64_t width, count;

    TokenTiles(int64_t tokens, int widest) {
        const int64_t all = (tokens + kLanes - 1) / kLanes;
        count = (all + widest - 1) / widest;
        vectors = int((all + count - 1) / count);
        width = vectors * kLanes;
    }
};

// f(operands, tiles) for as many tokens at a time as fit into kPackedBytes.
template <class T, class F>
void by_chunks(const Operands<T>& all, int widest, const F& f) {
    constexpr int64_t kWidest = kMaxVectors * kLanes;
    const int64_t fit = kPackedBytes / int64_t(sizeof(float)) / kWidest / std::max<int64_t>(all.cols, 1);
    const int64_t chunk = std::max<int64_t>(fit, 1) * kWidest;
    for (int64_t done = 0; done < all.tokens; done += chunk) {
        const Operands<T> op = all.at_tokens(done, std::min(chunk, all.tokens - done));
        f(op, TokenTiles(op.tokens, widest));
    }
}

// Rows of C in one task: at most a tile's worth, and about four tasks for each thread. Whole eights, so that which rows are
// summed together, and with it their bits, does not depend on the number of threads.
inline int64_t row_block(int64_t rows, const TokenTiles& tiles, int threads) {
    const int64_t most = tile_bytes() / int64_t(sizeof(float)) / tiles.width;
    const int64_t blocks = std::max((rows + most - 1) / most, (4 * threads + tiles.count - 1) / tiles.count);
    return std::max<int64_t>(64, ((rows + blocks - 1) / blocks + 7) / 8 * 8);
}

// Rows [begin, end) of B at tokens [token, token + width), packed; zeros after the last token.
template <class T>
void pack(const Operands<T>& op, int64_t token, int64_t width, int64_t begin, int64_t end, float* to) {
    const int64_t there = std::min(width, op.tokens - token);
    if (op.b_col == 1) {
        for (int64_t k = begin; k < end; ++k, to += width) {
            to_floats(op.b + k * op.b_row + token, there, to);
            std::fill(to + there, to + width, 0.0f);
        }
        return;
    }
    alignas(64) float stage[kLanes * kStage] = {};
    for (int64_t k = begin; k < end; k += kStage) {
        const int64_t now = std::min<int64_t>(kStage, end - k);
        for (int64_t t = 0; t < width; t += kLanes) {
            for (int i = 0; i < kLanes; ++i) {
                if (t + i < there) to_floats(op.b + k + (token + t + i) * op.b_col, now, stage + i * kStage);
                else std::fill(stage + i * kStage, stage + (i + 1) * kStage, 0.0f);
            }
            float* block = to + (k - begin) * width + t;
            int64_t j = 0;
            for (; j + kLanes <= now; j += kLanes) transpose(stage + j, kStage, block + j * width, width);
            for (; j < now; ++j) {
                for (int i = 0; i < kLanes; ++i) block[j * width + i] = stage[i * kStage + j];
            }
        }
    }
}

// All of B's tiles, one after the other, `depth` rows in each, in memory of the calling thread; zeros after B's last row.
template <class T>
const float* pack_all(const Operands<T>& op, int64_t depth, const TokenTiles& tiles, int threads) {
    static thread_local Scratch room;
    float* to = room.at_least<float>(tiles.count * tiles.width * depth);
    constexpr int64_t kRows = 256;
    const int64_t pieces = (depth + kRows - 1) / kRows;
    parallel_for(tiles.count * pieces, threads, [&](int64_t i) {
        const int64_t tile = i / pieces, begin = i % pieces * kRows, end = std::min(begin + kRows, depth), there = std::min(end, op.cols);
        float* piece = to + (tile * depth + begin) * tiles.width;
        if (begin < there) pack(op, tile * tiles.width, tiles.width, begin, there, piece);
        const int64_t filled = std::max<int64_t>(there - begin, 0);
        std::fill(piece + filled * tiles.width, piece + (end - begin) * tiles.width, 0.0f);
    });
    return to;
}

// Where the calling thread forms the sums of its task.
inline float* tile_room(int64_t count) {
    static thread_local Scratch room;
    return room.at_least<float>(count);
}

// Writes a tile of C, `rows` rows from `row` on, with the bias.
template <class T>
void deliver(const Operands<T>& op, const float* tile, int64_t row, int64_t rows, int64_t token, int64_t width) {
    const int64_t there = std::min(width, op.tokens - token);
    if (op.c_row != 1) {  // then c_col is, and there is no bias
        for (int64_t r = 0; r < rows; ++r) op.write(tile + r * width, there, (row + r) * op.c_row + token);
        return;
    }
    alignas(64) float stage[kLanes * kStage], bias[kStage];
    for (int64_t r = 0; r < rows; r += kStage) {
        const int64_t now = std::min<int64_t>(kStage, rows - r);
        if (op.bias) to_floats(op.bias + row + r, now, bias);
        for (int64_t t = 0; t < there; t += kLanes) {
            const float* block = tile + r * width + t;
            int64_t j = 0;
            for (; j + kLanes <= now; j += kLanes) transpose(block + j * width, width, stage + j, kStage);
            for (; j < now; ++j) {
                for (int i = 0; i < kLanes; ++i) stage[i * kStage + j] = block[j * width + i];
            }
            for (int64_t i = 0; i < std::min<int64_t>(kLanes, there - t); ++i) {
                float* line = stage + i * kStage;
                if (op.bias) {
                    for (int64_t r2 = 0; r2 < now; ++r2) line[r2] += bias[r2];
                }
                op.write(line, now, (token + t + i) * op.c_col + row + r);
            }
        }
    }
}

constexpr int kMaxEntries = 1024;  // that are decoded at a time

// offsets[k] = first[k] + (index k) * row_bytes, first being where the group of entry k begins; both have room for whole
// vectors. Returns the larger of `so_far` and the indices, lane by lane; one that is not below m counts as m - 1. Whole
// vectors are read where that many bytes are `readable`: what comes after a row are other rows' indices.
template <int Bits>
inline Uints decode(const uint8_t* indices, int64_t readable, int count, int m, const uint32_t* first, uint32_t row_bytes,
                    uint32_t* offsets, Uints so_far) {
    constexpr int kBytes = kLanes * Bits / 8;
    const int vectors = (count + kLanes - 1) / kLanes;
    uint8_t copy[kMaxEntries * Bits / 8 + kBytes];
    if (readable < vectors * kBytes) {
        std::memset(copy, 0, size_t(vectors * kBytes));
        std::memcpy(copy, indices, size_t(readable));
        indices = copy;
    }
    for (int i = 0; i < vectors; ++i) {
        const Uints p = unpacked_indices<Bits>(indices + i * kBytes);
        so_far = larger(so_far, p);
        store(offsets + i * kLanes, load(first + i * kLanes) + smaller(p, splat(uint32_t(m - 1))) * row_bytes);
    }
    return so_far;
}

// f(std::integral_constant<int, Bits>) for indices of so many bits.
template <class F>
void by_bits(int bits, const F& f) {
    if (bits == 2) return f(std::integral_constant<int, 2>{});
    if (bits == 4) return f(std::integral_constant<int, 4>{});
    return f(std::integral_constant<int, 8>{});
}

// Values in fp32: where they are, or converted into `room`.
inline const float* as_floats(const float* values, int, float*) { return values; }

template <class T>
const float* as_floats(const T* values, int count, float* room) {
    to_floats(values, count, room);
    return room;
}

// Stored weights of one row, and where their rows of B begin, in bytes from the panel's first.
struct Entries {
    const float* values;
    const uint32_t* offsets;
};

// So many products are summed at a time; such sums are added to the total, so that rounding errors do not grow with the length.
constexpr int kChain = 64;

// For each of R rows the sum of values[k] * row of B over `count` entries; added to c, or c itself when `fresh`. Few and
// narrow rows sum every second (fourth, eighth) weight apart, because a multiply-add waits four cycles for the one before.
template <int V, int R>
void add_rows(const Entries* rows, int count, const float* panel, float* c, bool fresh) {
    constexpr int kApart = V * R > 4 ? 1 : V * R > 2 ? 2 : V * R == 2 ? 4 : 8;
    const char* first = reinterpret_cast<const char*>(panel);
    for (int begin = 0; begin < count || fresh; begin += kChain, fresh = false) {
        const int end = std::min(begin + kChain, count);
        Floats sum[kApart * R * V];
        each<kApart * R * V>([&](auto i) { sum[i] = Floats{}; });
        const auto multiply = [&](int k, auto apart) {
            each<R>([&](auto r) {
                const Floats weight = splat(rows[r].values[k]);
                const float* row = reinterpret_cast<const float*>(first + rows[r].offsets[k]);
                each<V>([&](auto v) {
                    Floats& its = sum[(apart * R + r) * V + v];
                    its = fused(weight, load(row + v * kLanes), its);
                });
            });
        };
        int k = begin;
#pragma GCC unroll 4
        for (; k + kApart <= end; k += kApart) each<kApart>([&](auto i) { multiply(k + i, i); });
        for (; kApart > 1 && k < end; ++k) multiply(k, std::integral_constant<int, 0>{});
        each<R * V>([&](auto i) {
            each<kApart - 1>([&](auto j) { sum[i] += sum[(j + 1) * R * V + i]; });
            store(c + i * kLanes, fresh ? sum[i] : load(c + i * kLanes) + sum[i]);
        });
    }
}

// Rows that are summed side by side: a multiply-add waits four cycles for the one before, and two begin in each.
constexpr int rows_at_once(int vectors) { return vectors > 6 ? 1 : vectors > 2 ? 2 : 4; }

// f(std::integral_constant<int, V>) for a width of V vectors.
template <class F>
void by_vectors(int vectors, const F& f) {
    each<kMaxVectors>([&](auto i) {
        if (vectors == i + 1) f(std::integral_constant<int, i + 1>{});
    });
}

}  // namespace
}  // namespace nm
