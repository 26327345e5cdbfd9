// C = A B in bf16 by vdpbf16ps with nothing expanded: what A stores goes in pairs, and what it does not store costs nothing.
//
// vdpbf16ps adds two products in each lane. Two weights that are stored side by side need the two numbers of B that their
// indices name side by side, for 16 tokens. Only a few pairs of columns can be named: 6 in a group of 4, 28 in one of 8, M²
// where N is 1 and a pair is of two groups. B is packed with a row for each of them, and every pair of stored weights is one
// multiply-add with a row from the cache. Dense tiles (bf16_spmm.cpp) take M / N as many.
#include <atomic>
#include <vector>

#include "simd/bf16_expand.h"
#include "spmm.h"

#if defined(__AVX512BF16__)

namespace nm {
namespace {

// A unit is the columns that a pair of stored weights can name: a group, or two of them where each stores one weight.
template <class P>
struct Unit {
    static constexpr int kGroups = P::n == 1 ? 2 : 1, kColumns = kGroups * P::m;
    static constexpr int kStored = kGroups * P::n, kPairs = kStored / 2;
    static constexpr int kRows = P::n == 1 ? P::m * P::m : P::m * (P::m - 1) / 2;  // of B, packed
    static constexpr int kBits = P::m <= 4 ? 2 : 4;                                // of an index
    static constexpr int kVectors = kRows <= 6 ? 4 : 2;                            // of a tile: wider ones have fewer units in the cache

    // The first row of pairs whose second index is `second`; the first index counts on from there.
    static constexpr int first_row(int second) { return P::n == 1 ? second * P::m : second * (second - 1) / 2; }
};

constexpr int64_t kMostRows = 512, kMostTokens = 256;  // of a task: its sums and what it decodes stay in the second-level cache
constexpr int64_t kPanels = 4;                         // for which A is decoded at once: its rows are far apart

// The rows of B for up to 16 pairs of stored weights, counted from the first of their unit; `bad` are pairs whose indices are not
// below m, or do not ascend within a group.
template <class P>
__m512i rows_of_pairs(const uint8_t* indices, int pairs, __mmask16& bad) {
    using U = Unit<P>;
    __m128i bytes = _mm_maskz_loadu_epi8(__mmask16(low_bits((pairs * 2 * U::kBits + 7) / 8)), indices);
    if constexpr (U::kBits == 2) {
        const __m128i low = _mm_set1_epi8(15);
        bytes = _mm_unpacklo_epi8(_mm_and_si128(bytes, low), _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
    }
    const __m512i both = _mm512_cvtepu8_epi32(bytes), m = _mm512_set1_epi32(P::m);
    const __m512i first = _mm512_and_si512(both, _mm512_set1_epi32((1 << U::kBits) - 1)), second = _mm512_srli_epi32(both, U::kBits);
    bad = _mm512_cmpge_epu32_mask(second, m) | _mm512_cmpge_epu32_mask(first, P::n == 1 ? m : second);
    bad &= __mmask16(low_bits(pairs));
    const __m256i table = _mm256_setr_epi32(U::first_row(0), U::first_row(1), U::first_row(2), U::first_row(3), U::first_row(4),
                                            U::first_row(5), U::first_row(6), U::first_row(7));
    return _mm512_add_epi32(_mm512_permutexvar_epi32(second, _mm512_castsi256_si512(table)), first);
}

// A's stored pairs in one block of columns, for the rows of a task: weights, and where their rows of B begin, in bytes.
struct PairBlock {
    uint32_t *weights, *offsets;
    int64_t stride;  // from row to row
    int count;
};

template <class P>
bool decode_pairs(const StoredBf16& a, int64_t row, int64_t rows, int64_t unit, int64_t units, const uint32_t* first, uint32_t row_bytes,
                  const PairBlock& to) {
    using U = Unit<P>;
    const int64_t begin = unit * U::kStored, end = std::min((unit + units) * U::kStored, a.kept);  // of what a row stores
    __mmask16 wrong = 0;
    for (int64_t r = 0; r < rows; ++r) {
        const bf16* values = a.values + (row + r) * a.kept;
        const uint8_t* indices = a.indices + (row + r) * a.bytes;
        uint32_t *weights = to.weights + r * to.stride, *offsets = to.offsets + r * to.stride;
        for (int64_t k = begin; k < end; k += 32) _mm_prefetch(reinterpret_cast<const char*>(values + 8 * a.kept + k), _MM_HINT_T1);
        _mm_prefetch(reinterpret_cast<const char*>(indices + 8 * a.bytes + begin * U::kBits / 8), _MM_HINT_T1);
        for (int64_t k = begin, i = 0; k < end; k += 32, i += 16) {
            const int left = int(std::min<int64_t>(end - k, 32));
            __mmask16 bad;
            const Uints rows_of_b = Uints(rows_of_pairs<P>(indices + k * U::kBits / 8, (left + 1) / 2, bad));
            wrong |= bad;
            _mm512_storeu_si512(weights + i, _mm512_maskz_loadu_epi16(__mmask32(low_bits(left)), values + k));
            store(offsets + i, load(first + i) + smaller(rows_of_b, splat(uint32_t(U::kRows - 1))) * row_bytes);
        }
        // what is stored past the last column is padding and counts for nothing, even NaN
        for (int64_t k = std::max(begin, a.cols / P::m * P::n); a.cols % P::m != 0 && k < end; ++k) {
            if (k / P::n * P::m + get_index(indices, k, U::kBits) < a.cols) continue;
            weights[(k - begin) / 2] &= (k - begin) % 2 == 0 ? 0xffff0000u : 0xffffu;
        }
    }
    return wrong == 0;
}

// For each of R rows the sum of its pairs; added to c, or c itself when `fresh`.
template <int V, int R>
void add_pairs(const PairBlock& block, int64_t row, const char* panel, float* c, bool fresh) {
    const uint32_t *weights = block.weights + row * block.stride, *offsets = block.offsets + row * block.stride;
    __m512 sum[R * V];
    each<R * V>([&](auto i) { sum[i] = _mm512_setzero_ps(); });
#pragma GCC unroll 4
    for (int k = 0; k < block.count; ++k) {
        each<R>([&](auto r) {
            const __m512i weight = _mm512_set1_epi32(int(weights[r * block.stride + k]));
            const char* inputs = panel + offsets[r * block.stride + k];
            each<V>([&](auto v) {
                __m512& its = sum[r * V + v];
                its = _mm512_dpbf16_ps(its, __m512bh(weight), __m512bh(_mm512_load_si512(inputs + v * 64)));
            });
        });
    }
    each<R * V>([&](auto i) {
        float* to = c + i * 16;
        _mm512_store_ps(to, fresh ? sum[i] : _mm512_add_ps(_mm512_load_ps(to), sum[i]));
    });
}

// B at 16 tokens and 32 columns, as words of two columns: to[i] has columns 2i and 2i + 1; zeros outside of B.
inline void words_of(const Operands<bf16>& op, int64_t token, int64_t column, __m512i (&to)[16]) {
    const int64_t tokens = std::clamp<int64_t>(op.tokens - token, 0, 16), columns = std::clamp<int64_t>(op.cols - column, 0, 32);
    const bf16* b = op.b + column * op.b_row + token * op.b_col;
    if (op.b_col == 1) {
        const __mmask16 there = __mmask16(low_bits(tokens));
        const auto numbers = [&](int64_t k) {
            return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(k < columns ? there : __mmask16(0), b + std::min(k, columns) * op.b_row));
        };
        for (int i = 0; i < 16; ++i) to[i] = _mm512_or_si512(numbers(2 * i), _mm512_slli_epi32(numbers(2 * i + 1), 16));
        return;
    }
    alignas(64) float rows[16 * 16];
    for (int64_t t = 0; t < 16; ++t) {
        const __mmask32 there = t < tokens ? __mmask32(low_bits(columns)) : 0;
        _mm512_store_si512(rows + t * 16, _mm512_maskz_loadu_epi16(there, b + std::min(t, tokens) * op.b_col));
    }
    transpose(rows, 16, reinterpret_cast<float*>(to), 16);
}

// Units [begin, end) of B for 16 tokens: 64 bytes of each row, rows being row_bytes apart. `begin` is where 32 columns begin.
template <class P>
void pack_pairs(const Operands<bf16>& op, int64_t token, int64_t begin, int64_t end, int64_t row_bytes, char* to) {
    using U = Unit<P>;
    constexpr int kUnits = 32 / U::kColumns;
    for (int64_t unit = begin; unit < end; unit += kUnits) {
        alignas(64) __m512i words[16];
        words_of(op, token, unit * U::kColumns, words);
        for (int64_t u = 0; u < std::min<int64_t>(kUnits, end - unit); ++u, to += U::kRows * row_bytes) {
            __m512i low[U::kColumns], high[U::kColumns];
            each<U::kColumns / 2>([&](auto i) {
                const __m512i word = words[u * U::kColumns / 2 + i];
                low[2 * i] = _mm512_and_si512(word, _mm512_set1_epi32(0xffff));
                low[2 * i + 1] = _mm512_srli_epi32(word, 16);
                high[2 * i] = _mm512_slli_epi32(word, 16);
                high[2 * i + 1] = _mm512_and_si512(word, _mm512_set1_epi32(int(0xffff0000)));
            });
            for (int second = 0; second < P::m; ++second) {
                char* row = to + U::first_row(second) * row_bytes;
                for (int first = 0; first < (P::n == 1 ? P::m : second); ++first, row += row_bytes) {
                    _mm512_store_si512(row, _mm512_or_si512(low[first], high[U::kColumns - P::m + second]));
                }
            }
        }
    }
}

// Rows of C side by side: a multiply-add waits some cycles for the one before.
constexpr int pair_rows(int vectors) { return vectors >= 4 ? 1 : vectors == 3 ? 2 : vectors == 2 ? 4 : 8; }

// Some tokens, cut into tiles of V vectors. False: an index is not below m or does not ascend, and C is not right.
template <class P, int V>
bool some_pair_products(const StoredBf16& a, const Operands<bf16>& op, int threads) {
    using U = Unit<P>;
    constexpr int64_t kRowBytes = V * 64, kWidth = V * 16, kUnitBytes = U::kRows * kRowBytes;
    constexpr int kTogether = pair_rows(V);
    const int64_t units = ceil_div(a.cols, U::kColumns), tiles = ceil_div(op.tokens, kWidth);
    // a panel of B is what the first-level cache holds; where that is few units, more of them in the second are faster
    const int64_t deep = panel_bytes() / kUnitBytes, units_each = round_up(deep >= 8 ? deep : 12, 32 / U::kColumns);
    static thread_local Scratch b_room;
    char* b = b_room.at_least<char>(tiles * units * kUnitBytes);
    const int64_t pieces = ceil_div(units, units_each);
    parallel_for(tiles * V * pieces, threads, [&](int64_t i) {
        const int64_t vector = i % V, piece = i / V % pieces, tile = i / V / pieces;
        const int64_t begin = piece * units_each, end = std::min(begin + units_each, units);
        pack_pairs<P>(op, tile * kWidth + vector * 16, begin, end, kRowBytes, b + (tile * units + begin) * kUnitBytes + vector * 64);
    });
    const int64_t decoded_each = kPanels * units_each, stride = round_up(decoded_each * U::kPairs, 16);
    std::vector<uint32_t> first(size_t(stride), 0);
    for (int64_t i = 0; i < decoded_each * U::kPairs; ++i) first[size_t(i)] = uint32_t(i / U::kPairs % units_each * kUnitBytes);
    const int64_t rows_each = std::clamp<int64_t>(round_up(ceil_div(op.rows, 4 * threads), 8), 32, kMostRows);
    const int64_t blocks = ceil_div(op.rows, rows_each);
    const int64_t tiles_each = ceil_div(tiles, std::min(tiles, ceil_div(4 * threads, blocks))), ranges = ceil_div(tiles, tiles_each);
    std::atomic<bool> valid{true};
    parallel_for(blocks * ranges, threads, [&](int64_t i) {
        static thread_local Scratch a_room;
        const int64_t row = i / ranges * rows_each, rows = std::min(rows_each, op.rows - row);
        const int64_t tile = i % ranges * tiles_each, last = std::min(tile + tiles_each, tiles);
        float* sums = tile_room((last - tile) * rows * kWidth);
        uint32_t *weights = a_room.at_least<uint32_t>(2 * rows_each * stride), *offsets = weights + rows_each * stride;
        for (int64_t unit = 0; unit < units; unit += units_each) {
            const int64_t there = std::min(units_each, units - unit), decoded = unit % decoded_each;
            if (decoded == 0) {
                const int64_t some = std::min(decoded_each, units - unit);
                if (!decode_pairs<P>(a, row, rows, unit, some, first.data(), kRowBytes, {weights, offsets, stride, 0})) valid = false;
            }
            const PairBlock block{weights + decoded * U::kPairs, offsets + decoded * U::kPairs, stride, int(there * U::kPairs)};
            for (int64_t t = tile; t < last; ++t) {
                const char* panel = b + (t * units + unit) * kUnitBytes;
                const char* next = t + 1 < last ? panel + units * kUnitBytes : b + (tile * units + unit + there) * kUnitBytes;
                const int64_t lines = ceil_div(there * kUnitBytes / 64 * kTogether, rows);
                float* c = sums + (t - tile) * rows * kWidth;
                int64_t r = 0;
                for (; r + kTogether <= rows; r += kTogether) {  // which rows of a panel come when, no processor foresees: it is fetched
                    for (int64_t line = 0; line < lines; ++line, next += 64) _mm_prefetch(next, _MM_HINT_T1);
                    add_pairs<V, kTogether>(block, r, panel, c + r * kWidth, unit == 0);
                }
                for (; r < rows; ++r) add_pairs<V, 1>(block, r, panel, c + r * kWidth, unit == 0);
            }
        }
        for (int64_t t = tile; t < last; ++t) deliver(op, sums + (t - tile) * rows * kWidth, row, rows, t * kWidth, kWidth);
    });
    return valid;
}

template <class P>
bool pair_products(const SpmmCall& call, P, int threads) {
    const StoredBf16 a(call.values, call.indices, call.rows, call.cols, P::n, P::m);
    const Operands<bf16> all = operands<bf16>(call, call.rows, call.cols);
    using U = Unit<P>;
    const int64_t fit = kPackedBytes / (ceil_div(a.cols, U::kColumns) * U::kRows * int64_t(sizeof(uint32_t))) / 64 * 64;
    const int64_t chunk = std::clamp<int64_t>(fit, 64, kMostTokens);
    bool valid = true;
    for (int64_t done = 0; valid && done < all.tokens; done += chunk) {
        const Operands<bf16> op = all.at_tokens(done, std::min(chunk, all.tokens - done));
        const int64_t vectors = ceil_div(op.tokens, 16), tiles = ceil_div(vectors, U::kVectors);
        each<U::kVectors>([&](auto i) {
            if (ceil_div(vectors, tiles) == i + 1) valid = some_pair_products<P, i + 1>(a, op, threads);
        });
    }
    return valid;
}

}  // namespace

namespace NM_ISA {

bool bf16_pairs(const SpmmCall& call, int n, int m, int threads) {
    bool done = false;
    by_expansion(n, m, [&](auto p) {
        // of 4:8, half as sparse as its panels are large, dense tiles are faster
        if constexpr (kExpands<decltype(p)> && (p.m == 4 || 4 * p.n <= p.m)) done = call.cols > 0 && pair_products(call, p, threads);
    });
    return done;
}

}  // namespace NM_ISA
}  // namespace nm

#endif
