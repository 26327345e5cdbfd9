// y = x Wᵀ + b for few tokens, W's values being integers of 8 or 4 bits with steps.
//
// x in 16 bits is multiplied with the stored integers as integers (digits.h): their bytes are all that is read, and none is
// converted. What that is not for, which is fp32, tokens that are not finite, other patterns and steps, and indices that do not
// ascend, goes by floats: some rows are decoded to fp32 in the cache and multiplied as linear_few.cpp does.
#include <atomic>
#include <memory>

#include "digits_amx.h"
#include "digits_avx2.h"
#include "integer_values.h"
#include "scratch.h"

namespace nm {
namespace {

constexpr int64_t kDecodedFloats = 1 << 15;  // of rows that are decoded at a time: 128 KB, which the second-level cache has
constexpr int64_t kGrain = 32;               // rows: what a task has whole numbers of
constexpr int64_t kRanges = 8;               // tasks per thread; long ones, so that each thread reads memory in one long stream
constexpr int64_t kWork = 1 << 17;           // stored values that are worth waking a thread for

// f(begin, end) for ranges of rows, on several threads. False: one of them was.
template <class F>
bool by_rows(const IntegersLinearCall& call, int threads, const F& f) {
    std::atomic<bool> valid{true};
    const int64_t rows = call.weight.rows, work = call.weight.kept * (call.tokens + 1) / 2 + 1;
    const int64_t step = std::max(kWork / work, rows / (kRanges * threads)) / kGrain * kGrain + kGrain;
    parallel_for((rows + step - 1) / step, threads, [&](int64_t range) {
        if (!f(range * step, std::min((range + 1) * step, rows))) valid = false;
    });
    return valid;
}

// sums[t * stride + r] + bias as y of rows [row, row + rows) and tokens [token, token + tokens).
inline void put(const IntegersLinearCall& call, int64_t row, int64_t rows, int64_t token, int64_t tokens, const float* sums, int64_t stride) {
    by_dtype(call.dtype, [&](auto x) {
        const auto* bias = static_cast<const decltype(x)*>(call.bias);
        const auto store = [&](auto* y) {
            using Y = std::remove_pointer_t<decltype(y)>;
            constexpr int64_t kLine = 16;
            float line[kLine];
            for (int64_t t = 0; t < tokens; ++t) {
                for (int64_t first = 0; first < rows; first += kLine) {
                    const int64_t count = std::min(kLine, rows - first);
                    const float* from = sums + t * stride + first;
                    for (int64_t r = 0; r < count; ++r) {
                        const float sum = bias ? from[r] + to_float(bias[row + first + r]) : from[r];
                        line[r] = sum == sum ? sum : bits_float(0x7fc00000u);
                    }
                    Y* to = y + (token + t) * call.weight.rows + row + first;
                    if (count == kLine) {
                        for (int l = 0; l < kLine; l += kLanes) store_narrowed(to + l, load(line + l));
                    } else {
                        for (int64_t r = 0; r < count; ++r) to[r] = from_float<Y>(line[r]);
                    }
                }
            }
        };
        if (call.y_dtype == kFloat32) store(static_cast<float*>(call.y));
        else store(static_cast<decltype(x)*>(call.y));
    });
}

// Σ a·b.
inline float product_of(const float* a, const float* b, int64_t count) {
    constexpr int kSums = 4;
    Floats sums[kSums] = {};
    int64_t i = 0;
    for (; i + kSums * kLanes <= count; i += kSums * kLanes) {
        for (int s = 0; s < kSums; ++s) sums[s] = fused(load(a + i + s * kLanes), load(b + i + s * kLanes), sums[s]);
    }
    for (; i < count; i += kLanes) sums[0] = fused(widened(a + i, count - i), widened(b + i, count - i), sums[0]);
    return sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// A weight without zeros, of which there are no indices; x [tokens][cols].
bool dense_by_floats(const IntegersLinearCall& call, const float* x, int64_t token, int64_t tokens, int threads) {
    return by_rows(call, threads, [&](int64_t begin, int64_t end) {
        constexpr int64_t kRows = 64;
        static thread_local Scratch room;
        float* decoded = room.at_least<float>(call.weight.kept);
        float sums[kMostTokens * kRows];
        for (int64_t row = begin; row < end; row += kRows) {
            const int64_t rows = std::min(kRows, end - row);
            for (int64_t r = 0; r < rows; ++r) {
                decode_row(call.weight, row + r, decoded);
                for (int64_t t = 0; t < tokens; ++t) sums[t * kRows + r] = product_of(decoded, x + t * call.cols, call.cols);
            }
            put(call, row, rows, token, tokens, sums, kRows);
        }
        return true;
    });
}

// Tokens [token, token + tokens), all in fp32.
bool by_floats(const IntegersLinearCall& call, int64_t token, int64_t tokens, int n, int m, int threads) {
    std::unique_ptr<float[]> copy;
    const float* x = nullptr;
    by_dtype(call.dtype, [&](auto element) {
        const auto* from = static_cast<const decltype(element)*>(call.x) + token * call.cols;
        if constexpr (std::is_same_v<decltype(element), float>) {
            x = from;
        } else {
            copy.reset(new float[size_t(tokens * call.cols)]);
            to_floats(from, tokens * call.cols, copy.get());
            x = copy.get();
        }
    });
    const Integers& w = call.weight;
    if (m == 1) return dense_by_floats(call, x, token, tokens, threads);
    const int64_t bytes = index_bytes(w.kept, index_bits(m));
    // more rows share what packing x costs
    const int64_t least = tokens > 8 ? 64 : 8, most = std::max(least, kDecodedFloats / (w.kept + 1) / 8 * 8);
    return by_rows(call, threads, [&](int64_t begin, int64_t end) {
        static thread_local Scratch weights, sums;
        float* decoded = weights.at_least<float>(most * w.kept);
        float* products = sums.at_least<float>(most * tokens);
        bool valid = true;
        for (int64_t row = begin; row < end; row += most) {
            const int64_t rows = std::min(most, end - row);
            for (int64_t r = 0; r < rows; ++r) decode_row(w, row + r, decoded + r * w.kept);
            valid &= NM_BASE_ISA::linear({x, decoded, call.indices + row * bytes, nullptr, products, rows, call.cols}, tokens, kFloat32, n, m, 1);
            put(call, row, rows, token, tokens, products, rows);
        }
        return valid;
    });
}

#if defined(NM_DIGITS)

// f(N, M, bits) of a pattern whose digits can be permuted. False: of another.
template <class F>
bool by_choice(int n, int m, int bits, const F& f) {
    const auto with = [&](auto n, auto m) { return bits == 8 ? f(n, m, Int<8>()) : f(n, m, Int<4>()); };
    if (n == 1 && m == 1) return with(Int<1>(), Int<1>());
    if (n == 2 && m == 4) return with(Int<2>(), Int<4>());
    if (n == 1 && m == 4) return with(Int<1>(), Int<4>());
    if (n == 1 && m == 8) return with(Int<1>(), Int<8>());
    if (n == 2 && m == 8) return with(Int<2>(), Int<8>());
    if (n == 4 && m == 8) return with(Int<4>(), Int<8>());
    return false;
}

// Patterns that an expander has.
template <int N, int M>
constexpr bool kExpands = (N == 2 && M == 4) || (N == 1 && (M == 1 || M == 4 || M == 8));

// Whether the columns of a step are whole lines of an expander.
inline bool steps_of_lines(const Integers& w, int n, int m) { return w.steps == 1 || w.kept / w.steps * m / n % 64 == 0; }

bool by_rows_of_digits(const IntegersLinearCall& call, const Digits& x, int64_t token, int64_t tokens, int n, int m, int threads) {
    const Integers& w = call.weight;
    return by_choice(n, m, w.bits, [&](auto n, auto m, auto bits) {
        constexpr int64_t kRows = 64;
        return by_rows(call, threads, [&](int64_t begin, int64_t end) {
            float sums[kMostTokens * kRows];
            bool valid = true;
            for (int64_t row = begin; row < end; row += kRows) {
                const int64_t stop = std::min(row + kRows, end);
                int64_t t = 0;
                for (; t + 2 <= tokens; t += 2) valid &= permuted<n, m, bits, 2>(w, call.indices, x, t, row, stop, sums + t * kRows, kRows);
                if (t < tokens) valid &= permuted<n, m, bits, 1>(w, call.indices, x, t, row, stop, sums + t * kRows, kRows);
                put(call, row, stop - row, token, tokens, sums, kRows);
            }
            return valid;
        });
    });
}

// Whether so many tokens are faster in tiles, side by side. Permuted, a token costs as much as there are stored values; without AMX, in
// tiles as much as there are columns, but rows are opened once for all tokens: 4096 x 4096 at 2:4, int8, takes 2.2 and 2.0 ms for 7 tokens,
// at 1:4 1.7 and 1.8, and 3.5 and 3.2 for 16, at 1:8 3.0 and 3.0 (one thread of a Zen 4, 2026-11-27). Dense, 49152 x 576 takes 8.6 and 6.6 ms
// for 8 (2026-11-30).
inline bool pays_in_tiles(int64_t tokens, int n, int m) {
#if defined(__AMX_BF16__)
    return tokens >= 3;
#else
    return m == 1 ? tokens >= 6 : 2 * tokens * n >= 7 * m;
#endif
}

constexpr int64_t kMostTiledColumns = 1 << 16;  // their sums fit 32 bits

bool by_tiles_of_digits(const IntegersLinearCall& call, const Digits& x, int64_t token, int64_t tokens, int n, int m, int threads) {
    static thread_local Scratch room;
    const Integers& w = call.weight;
    const DigitTiles digits = tiles_of(x, tokens, room.at_least<uint8_t>(x.width * 2 * kMostTokens), threads);
    return by_choice(n, m, w.bits, [&](auto n, auto m, auto bits) {
        if constexpr (!kExpands<n, m>) return false;
        else return by_rows(call, threads, [&](int64_t begin, int64_t end) {
            const auto store = [&](int64_t row, int64_t rows, const float* sums) { put(call, row, rows, token, tokens, sums, kBlockRows); };
            const auto run = [&](auto tiles) {
#if defined(__AMX_BF16__)
                return by_tiles<n, m, bits, tiles>(w, call.indices, x, digits, tokens, begin, end, store);
#else
                return by_lanes<n, m, bits, tiles>(w, call.indices, x, digits, tokens, begin, end, store);
#endif
            };
            return digits.count == 1 ? run(Int<1>()) : run(Int<2>());
        });
    });
}

// False: it is not for this, or indices do not ascend or are not below m; nothing of y counts then.
bool by_digits(const IntegersLinearCall& call, Digits& x, int64_t token, int64_t tokens, int n, int m, int threads) {
    const Integers& w = call.weight;
    const bool known = by_choice(n, m, w.bits, [](auto, auto, auto) { return true; });
    if (!known || !RowSteps::fits(w)) return false;
    const bool expands = by_choice(n, m, w.bits, [](auto n, auto m, auto) { return kExpands<n, m>; });
    const bool tiles = pays_in_tiles(tokens, n, m) && expands && steps_of_lines(w, n, m) && call.cols <= kMostTiledColumns;
    if (tiles) make_digits<true>(call, token, tokens, x, threads);
    else make_digits<false>(call, token, tokens, x, threads);
    for (int64_t t = 0; w.bits == 4 && t < tokens; ++t) x.scale[t] *= 1.0f / 16;  // stored64 is 16 times as large
    return (tiles ? by_tiles_of_digits : by_rows_of_digits)(call, x, token, tokens, n, m, threads);
}

#elif defined(__AVX2__)

// More are faster by floats: 4096 x 4096, int8, four take 3.3 ms here and 3.8 by floats with AVX2, 3.2 and 2.6 with AVX-512 (one core of
// a Sapphire Rapids).
constexpr int64_t kTokensOfPairs = kLanes == 8 ? 4 : 2;

bool by_digits(const IntegersLinearCall& call, Digits& x, int64_t token, int64_t tokens, int n, int m, int threads) {
    const Integers& w = call.weight;
    if (n != 2 || m != 4 || tokens > kTokensOfPairs || !fits_pairs(w)) return false;
    make_pairs(call, token, tokens, x, threads);
    return by_rows(call, threads, [&](int64_t begin, int64_t end) {
        constexpr int64_t kRows = 64;
        float sums[kMostTokens * kRows];
        for (int64_t row = begin; row < end; row += kRows) {
            const int64_t stop = std::min(row + kRows, end);
            pairs_of_rows(w, call.indices, x, tokens, row, stop, sums, kRows);
            put(call, row, stop - row, token, tokens, sums, kRows);
        }
        return true;
    });
}

#else

bool by_digits(const IntegersLinearCall&, Digits&, int64_t, int64_t, int, int, int) { return false; }

#endif

// Up to kMostTokens tokens. False: an index is not below m.
bool some_tokens(const IntegersLinearCall& call, int64_t token, int64_t tokens, int n, int m, int threads) {
    if (call.dtype == kFloat32 || !call.weight.kept) return by_floats(call, token, tokens, n, m, threads);
    static thread_local Scratch room;
    Digits x;
    x.width = (call.cols + kWidth - 1) / kWidth * kWidth;
    x.planes = room.at_least<uint8_t>(tokens * 2 * x.width);
    if (!by_digits(call, x, token, tokens, n, m, threads)) return by_floats(call, token, tokens, n, m, threads);
    bool valid = true;
    for (int64_t t = 0; t < tokens; ++t) valid &= !x.left_out[t] || by_floats(call, token + t, 1, n, m, threads);
    return valid;
}

}  // namespace

namespace NM_ISA {

bool linear_integers(const IntegersLinearCall& call, int n, int m, int threads) {
    check_pattern(n, m);
    bool valid = true;
    for (int64_t token = 0; token < call.tokens; token += kMostTokens) {
        const int64_t tokens = std::min<int64_t>(kMostTokens, call.tokens - token);
        valid &= some_tokens(call, token, tokens, n, m, threads);
    }
    return valid;
}

}  // namespace NM_ISA
}  // namespace nm
