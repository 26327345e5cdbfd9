// What the products of a compressed matrix A [rows, cols] with many columns, C = A B, have in common: how B and C are
// cut into tiles, B's tiles packed, C's tiles written, and the inner loop.
//
// B [cols, tokens] is packed into tiles of up to kMaxVectors vectors of tokens, so that a row of a tile is what one
// stored weight multiplies. Columns are taken in blocks whose rows of B stay in the first-level cache; C's tile, a block
// of rows, stays in the second-level cache and is written once, when all columns are done.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "../../core/bitpack.h"
#include "../kernels.h"
#include "simd/spmm_convert.h"
#include "simd/spmm_transpose.h"
#include "simd/spmm_vector.h"

namespace nm {
namespace {

// Measured on AMD Zen 5 (48 KB and 1 MB of first- and second-level cache per core), 2026-11-21; smaller caches lose little.
constexpr int kMaxVectors = 8;             // of a tile: 8 sums in registers, 8 loads for one broadcast
constexpr int64_t kPanelBytes = 40 << 10;  // rows of B that stay in the first-level cache
constexpr int64_t kTileBytes = 256 << 10;  // a tile of C
constexpr int64_t kPackedBytes = 16 << 20; // B packed, or as many of its tokens as fit
constexpr int kStage = 64;                 // numbers of a row converted or transposed at a time

// Memory that a thread keeps for its next product: fresh pages cost more than filling them.
class Scratch {
  public:
    float* at_least(int64_t count) {
        if (count > size_) {
            memory_.reset(static_cast<float*>(::operator new(size_t(count) * sizeof(float), std::align_val_t{64})));
            size_ = count;
        }
        return memory_.get();
    }

  private:
    struct Delete {
        void operator()(float* p) const { ::operator delete(p, std::align_val_t{64}); }
    };
    std::unique_ptr<float, Delete> memory_;
    int64_t size_ = 0;
};

// B and C of one call: element (k, t) of B is b[k * b_row + t * b_col]; one of the strides is 1. C likewise; with a bias
// c_row is.
template <class T>
struct Operands {
    const T* b;
    int64_t b_row, b_col;
    T* c;
    int64_t c_row, c_col;
    const T* bias;  // one per row of C, or null
    int64_t rows, cols, tokens;
};

template <class T>
Operands<T> operands(const SpmmCall& call, int64_t rows, int64_t cols) {
    return {static_cast<const T*>(call.b), call.b_row, call.b_col, static_cast<T*>(call.c), call.c_row, call.c_col,
            static_cast<const T*>(call.bias), rows, cols, call.tokens};
}

// How `tokens` are cut: tiles of equal width, as few as possible.
struct Tiles {
    int vectors;
    int64_t width, count;

    explicit Tiles(int64_t tokens) {
        const int64_t all = (tokens + kLanes - 1) / kLanes;
        count = (all + kMaxVectors - 1) / kMaxVectors;
        vectors = int((all + count - 1) / count);
        width = vectors * kLanes;
    }
};

// f(operands, tiles) for as many tokens at a time as fit into kPackedBytes.
template <class T, class F>
void by_chunks(const Operands<T>& all, const F& f) {
    constexpr int64_t kWidest = kMaxVectors * kLanes;
    const int64_t fit = kPackedBytes / int64_t(sizeof(float)) / kWidest / std::max<int64_t>(all.cols, 1);
    const int64_t chunk = std::max<int64_t>(fit, 1) * kWidest;
    for (int64_t done = 0; done < all.tokens; done += chunk) {
        Operands<T> op = all;
        op.tokens = std::min(chunk, all.tokens - done);
        op.b += done * op.b_col;
        op.c += done * op.c_col;
        f(op, Tiles(op.tokens));
    }
}

// Rows of C in one task: at most a tile's worth, and about four tasks for each thread.
inline int64_t row_block(int64_t rows, const Tiles& tiles, int threads) {
    const int64_t most = kTileBytes / int64_t(sizeof(float)) / tiles.width;
    const int64_t blocks = std::max((rows + most - 1) / most, (4 * threads + tiles.count - 1) / tiles.count);
    return std::max<int64_t>(64, (rows + blocks - 1) / blocks);
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
            for (; j + kLanes <= now; j += kLanes) turn(stage + j, kStage, block + j * width, width);
            for (; j < now; ++j) {
                for (int i = 0; i < kLanes; ++i) block[j * width + i] = stage[i * kStage + j];
            }
        }
    }
}

// All of B's tiles, one after the other, in memory of the calling thread.
template <class T>
const float* pack_all(const Operands<T>& op, const Tiles& tiles, int threads) {
    static thread_local Scratch room;
    float* to = room.at_least(tiles.count * tiles.width * op.cols);
    constexpr int64_t kRows = 256;
    const int64_t pieces = (op.cols + kRows - 1) / kRows;
    parallel_for(tiles.count * pieces, threads, [&](int64_t i) {
        const int64_t tile = i / pieces, begin = i % pieces * kRows, end = std::min(begin + kRows, op.cols);
        pack(op, tile * tiles.width, tiles.width, begin, end, to + (tile * op.cols + begin) * tiles.width);
    });
    return to;
}

// Where the calling thread forms the sums of its task.
inline float* tile_room(int64_t count) {
    static thread_local Scratch room;
    return room.at_least(count);
}

// Writes a tile of C, `rows` rows from `row` on, with the bias.
template <class T>
void deliver(const Operands<T>& op, const float* tile, int64_t row, int64_t rows, int64_t token, int64_t width) {
    const int64_t there = std::min(width, op.tokens - token);
    if (op.c_row != 1) {  // then c_col is, and there is no bias
        for (int64_t r = 0; r < rows; ++r) from_floats(tile + r * width, there, op.c + (row + r) * op.c_row + token);
        return;
    }
    alignas(64) float stage[kLanes * kStage], bias[kStage];
    for (int64_t r = 0; r < rows; r += kStage) {
        const int64_t now = std::min<int64_t>(kStage, rows - r);
        if (op.bias) to_floats(op.bias + row + r, now, bias);
        for (int64_t t = 0; t < there; t += kLanes) {
            const float* block = tile + r * width + t;
            int64_t j = 0;
            for (; j + kLanes <= now; j += kLanes) turn(block + j * width, width, stage + j, kStage);
            for (; j < now; ++j) {
                for (int i = 0; i < kLanes; ++i) stage[i * kStage + j] = block[j * width + i];
            }
            for (int64_t i = 0; i < std::min<int64_t>(kLanes, there - t); ++i) {
                float* line = stage + i * kStage;
                if (op.bias) {
                    for (int64_t r2 = 0; r2 < now; ++r2) line[r2] += bias[r2];
                }
                from_floats(line, now, op.c + (token + t + i) * op.c_col + row + r);
            }
        }
    }
}

// offsets[k] = first[k] + (index k) * row_bytes, first being where the group of entry k begins. Returns the largest
// index; one that is not below m counts as m - 1.
template <int Bits>
int decode(const uint8_t* indices, int count, int m, const uint32_t* first, uint32_t row_bytes, uint32_t* offsets) {
    constexpr int kEach = 32 / Bits;
    constexpr uint32_t kMask = (1u << Bits) - 1;
    uint32_t largest = 0, last = uint32_t(m - 1);
    const auto some = [&](int k, int now, int bytes) {
        uint32_t word = 0;
        std::memcpy(&word, indices + k * Bits / 8, size_t(bytes));
        for (int j = 0; j < now; ++j) {
            const uint32_t index = (word >> (j * Bits)) & kMask;
            largest = std::max(largest, index);
            offsets[k + j] = first[k + j] + std::min(index, last) * row_bytes;
        }
    };
    int k = 0;
    for (; k + kEach <= count; k += kEach) some(k, kEach, 4);
    if (k < count) some(k, count - k, ((count - k) * Bits + 7) / 8);
    return int(largest);
}

inline int decode(int bits, const uint8_t* indices, int count, int m, const uint32_t* first, uint32_t row_bytes, uint32_t* offsets) {
    if (bits == 2) return decode<2>(indices, count, m, first, row_bytes, offsets);
    if (bits == 4) return decode<4>(indices, count, m, first, row_bytes, offsets);
    return decode<8>(indices, count, m, first, row_bytes, offsets);
}

// Values in fp32: where they are, or converted into `room`.
inline const float* as_floats(const float* values, int, float*) { return values; }

template <class T>
const float* as_floats(const T* values, int count, float* room) {
    to_floats(values, count, room);
    return room;
}

// f(0), f(1), .. f(Count - 1), written out: arrays indexed by what it passes stay in registers.
template <class F, int... I>
inline __attribute__((always_inline)) void each(const F& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}
template <int Count, class F>
inline __attribute__((always_inline)) void each(const F& f) {
    each(f, std::make_integer_sequence<int, Count>{});
}

// Stored weights and where their rows of B begin, in bytes from the panel's first.
struct Entries {
    const float* values;
    const uint32_t* offsets;
    int count;
};

// sum = sum of values[k] * row of B; added to c, or c itself when `fresh`. One block's sum is formed apart from the
// total, so that rounding errors do not grow with the length. Narrow tiles sum every second (fourth, eighth) weight
// apart, because a multiply-add waits four cycles for the one before.
template <int V>
void add_row(const Entries& e, const float* panel, float* c, bool fresh) {
    constexpr int kChains = V == 8 ? 1 : V > 2 ? 2 : V == 2 ? 4 : 8;
    const char* rows = reinterpret_cast<const char*>(panel);
    Vec sum[kChains * V];
    each<kChains * V>([&](auto i) { sum[i] = vec_all(0.0f); });
    const auto multiply = [&](int k, auto chain) {
        const Vec weight = vec_all(e.values[k]);
        const float* row = reinterpret_cast<const float*>(rows + e.offsets[k]);
        each<V>([&](auto v) { sum[chain * V + v] = vec_fma(weight, vec_load(row + v * kLanes), sum[chain * V + v]); });
    };
    int k = 0;
    for (; k + kChains <= e.count; k += kChains) each<kChains>([&](auto i) { multiply(k + i, i); });
    for (; k < e.count; ++k) multiply(k, std::integral_constant<int, 0>{});
    each<V>([&](auto v) {
        each<kChains - 1>([&](auto i) { sum[v] = vec_add(sum[v], sum[(i + 1) * V + v]); });
    });
    if (fresh) each<V>([&](auto v) { vec_store(c + v * kLanes, sum[v]); });
    else each<V>([&](auto v) { vec_store(c + v * kLanes, vec_add(vec_load(c + v * kLanes), sum[v])); });
}

// f(std::integral_constant<int, V>) for a width of V vectors.
template <class F>
void by_vectors(int vectors, const F& f) {
    switch (vectors) {
        case 1: return f(std::integral_constant<int, 1>{});
        case 2: return f(std::integral_constant<int, 2>{});
        case 3: return f(std::integral_constant<int, 3>{});
        case 4: return f(std::integral_constant<int, 4>{});
        case 5: return f(std::integral_constant<int, 5>{});
        case 6: return f(std::integral_constant<int, 6>{});
        case 7: return f(std::integral_constant<int, 7>{});
        default: return f(std::integral_constant<int, 8>{});
    }
}

}  // namespace
}  // namespace nm
