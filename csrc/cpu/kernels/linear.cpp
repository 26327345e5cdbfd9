// y = x Wᵀ + b for few tokens, straight from the compressed form: every stored weight is read once and multiplied with
// the inputs at its column. Sums are in fp32, in blocks, so that their rounding error does not grow with the length.
#include <algorithm>
#include <atomic>
#include <vector>

#include "../../core/bitpack.h"
#include "../kernels.h"

namespace nm {
namespace {

constexpr int kBlock = 128;  // about as many stored weights are summed before they are added to the total

// dst[c * tokens + t] = x[t, c] in fp32: the inputs of one column lie side by side. Zeros follow the last column, as far
// as a damaged index of a whole group can reach.
template <class T>
std::vector<float> by_column(const T* x, int64_t tokens, int64_t cols) {
    std::vector<float> turned(size_t(tokens * (cols + kMaxM)));
    for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t c = 0; c < cols; ++c) turned[size_t(c * tokens + t)] = to_float(x[t * cols + c]);
    }
    return turned;
}

// Columns of the stored weights of `groups` groups, counted from the first of these groups; false where an index is damaged.
template <class P>
bool block_columns(const uint8_t* indices, int64_t first_group, int groups, P p, int32_t* column) {
    const int bits = index_bits(p.m);
    const int64_t first = first_group * p.n;
    int largest = 0;
    for (int g = 0; g < groups; ++g) {
        for (int k = 0; k < p.n; ++k) {
            const int position = get_index(indices, first + g * p.n + k, bits);
            largest = position > largest ? position : largest;
            column[g * p.n + k] = g * p.m + position;
        }
    }
    return largest < p.m;
}

// Sums of one block for `Tokens` tokens; four running sums when there is one token, to hide the adder's latency.
template <int Tokens, class T>
void add_block(const T* values, const int32_t* column, int count, const float* x, float* total) {
    constexpr int kLanes = Tokens == 1 ? 4 : 1;
    float sum[kLanes][Tokens] = {};
    int k = 0;
    for (; k + kLanes <= count; k += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) {
            const float v = to_float(values[k + lane]);
            const float* inputs = x + column[k + lane] * Tokens;
            for (int t = 0; t < Tokens; ++t) sum[lane][t] += v * inputs[t];
        }
    }
    for (; k < count; ++k) {
        for (int t = 0; t < Tokens; ++t) sum[0][t] += to_float(values[k]) * x[column[k] * Tokens + t];
    }
    for (int t = 0; t < Tokens; ++t) {
        float all = sum[0][t];
        if (kLanes == 4) all = (sum[0][t] + sum[1 % kLanes][t]) + (sum[2 % kLanes][t] + sum[3 % kLanes][t]);
        total[t] += all;
    }
}

// Adds the partial last group. What is stored past its end is padding and counts for nothing, even NaN.
template <int Tokens, class T>
void add_tail(const T* values, const int32_t* column, int count, int64_t there, const float* x, float* total) {
    for (int k = 0; k < count; ++k) {
        if (column[k] >= there) continue;
        for (int t = 0; t < Tokens; ++t) total[t] += to_float(values[k]) * x[column[k] * Tokens + t];
    }
}

template <int Tokens, class T, class P>
bool rows_range(const LinearCall& call, P p, const float* x, int64_t begin, int64_t end) {
    const int64_t whole = call.cols / p.m, there = call.cols - whole * p.m;
    const int64_t kept = (whole + (there > 0)) * p.n, bytes = index_bytes(kept, index_bits(p.m));
    const int per_block = p.n < kBlock ? kBlock / p.n : 1;
    int32_t column[kBlock + kMaxM];
    bool valid = true;
    for (int64_t row = begin; row < end; ++row) {
        const T* values = static_cast<const T*>(call.values) + row * kept;
        float total[Tokens] = {};
        for (int64_t g = 0; g < whole; g += per_block) {
            const int now = int(std::min<int64_t>(per_block, whole - g));
            valid = block_columns(call.indices + row * bytes, g, now, p, column) && valid;
            add_block<Tokens>(values + g * p.n, column, now * p.n, x + g * p.m * Tokens, total);
        }
        if (there > 0) {
            valid = block_columns(call.indices + row * bytes, whole, 1, p, column) && valid;
            add_tail<Tokens>(values + whole * p.n, column, p.n, there, x + whole * p.m * Tokens, total);
        }
        const float bias = call.bias ? to_float(static_cast<const T*>(call.bias)[row]) : 0.0f;
        for (int t = 0; t < Tokens; ++t) static_cast<T*>(call.y)[t * call.rows + row] = from_float<T>(call.bias ? total[t] + bias : total[t]);
    }
    return valid;
}

template <int Tokens>
bool some_tokens(const LinearCall& call, int dtype, int n, int m, int threads) {
    std::atomic<bool> valid{true};
    by_dtype_and_pattern(dtype, n, m, [&](auto element, auto p) {
        using T = decltype(element);
        const std::vector<float> x = by_column(static_cast<const T*>(call.x), Tokens, call.cols);
        parallel_ranges(call.rows, call.cols, threads, [&](int64_t begin, int64_t end) {
            if (!rows_range<Tokens, T>(call, p, x.data(), begin, end)) valid = false;
        });
    });
    return valid;
}

}  // namespace

namespace NM_ISA {

bool linear(LinearCall call, int64_t tokens, int dtype, int n, int m, int threads) {
    const size_t size = dtype == kFloat32 ? 4 : 2;
    bool valid = true;
    for (int64_t done = 0; done < tokens;) {
        const int64_t left = tokens - done, step = left >= 4 ? 4 : 1;
        const auto some = step == 4 ? some_tokens<4> : some_tokens<1>;
        valid = some(call, dtype, n, m, threads) && valid;
        call.x = static_cast<const char*>(call.x) + size_t(step * call.cols) * size;
        call.y = static_cast<char*>(call.y) + size_t(step * call.rows) * size;
        done += step;
    }
    return valid;
}

}  // namespace NM_ISA
}  // namespace nm
