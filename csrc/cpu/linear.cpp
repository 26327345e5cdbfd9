// y = x Wᵀ + b for few tokens, straight from the compressed form: every stored weight is read once and multiplied with
// the inputs at its column. Sums are in fp32, in blocks, so that their rounding error does not grow with the length.
#include <algorithm>
#include <atomic>
#include <vector>

#include "../core/bitpack.h"
#include "kernels.h"

namespace nm {
namespace {

constexpr int kBlock = 128;  // stored weights summed before they are added to the total

// dst[c * tokens + t] = x[t, c] in fp32: the inputs of one column lie side by side.
template <class T>
std::vector<float> by_column(const T* x, int64_t tokens, int64_t cols) {
    std::vector<float> turned(size_t(tokens * cols));
    for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t c = 0; c < cols; ++c) turned[size_t(c * tokens + t)] = to_float(x[t * cols + c]);
    }
    return turned;
}

// Columns of one block of stored weights, or -1 where an index is damaged.
template <class P>
bool block_columns(const uint8_t* indices, int64_t first, int count, int64_t cols, P p, int64_t* column) {
    const int bits = index_bits(p.m);
    bool valid = true;
    for (int k = 0; k < count; ++k) {
        const int64_t stored = first + k;
        const int position = get_index(indices, stored, bits);
        column[k] = stored / p.n * p.m + position;
        // a column past the end is padding of a partial last group; its weight counts for nothing
        valid = valid && position < p.m;
        if (position >= p.m || column[k] >= cols) column[k] = -1;
    }
    return valid;
}

// Sums of one block for `Tokens` tokens; four running sums when there is one token, to hide the adder's latency.
template <int Tokens, class T>
void add_block(const T* values, const int64_t* column, int count, const float* x, float* total) {
    constexpr int kLanes = Tokens == 1 ? 4 : 1;
    float sum[kLanes][Tokens] = {};
    for (int k = 0; k < count; ++k) {
        if (column[k] < 0) continue;
        const float v = to_float(values[k]);
        const float* inputs = x + column[k] * Tokens;
        for (int t = 0; t < Tokens; ++t) sum[k % kLanes][t] += v * inputs[t];
    }
    for (int t = 0; t < Tokens; ++t) {
        float all = sum[0][t];
        if (kLanes == 4) all = (sum[0][t] + sum[1 % kLanes][t]) + (sum[2 % kLanes][t] + sum[3 % kLanes][t]);
        total[t] += all;
    }
}

template <int Tokens, class T, class P>
bool rows_range(const LinearCall& call, P p, const float* x, int64_t begin, int64_t end) {
    const int64_t kept = (call.cols + p.m - 1) / p.m * p.n, bytes = index_bytes(kept, index_bits(p.m));
    int64_t column[kBlock];
    bool valid = true;
    for (int64_t row = begin; row < end; ++row) {
        const T* values = static_cast<const T*>(call.values) + row * kept;
        float total[Tokens] = {};
        for (int64_t first = 0; first < kept; first += kBlock) {
            const int count = int(std::min<int64_t>(kBlock, kept - first));
            valid = block_columns(call.indices + row * bytes, first, count, call.cols, p, column) && valid;
            add_block<Tokens>(values + first, column, count, x, total);
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

bool linear(LinearCall call, int64_t tokens, int dtype, int n, int m, int threads) {
    const size_t size = dtype == kFloat32 ? 4 : 2;
    bool valid = true;
    for (int64_t done = 0; done < tokens;) {
        const int64_t left = tokens - done, step = left >= 16 ? 16 : left >= 4 ? 4 : 1;
        if (step == 16) valid = some_tokens<16>(call, dtype, n, m, threads) && valid;
        if (step == 4) valid = some_tokens<4>(call, dtype, n, m, threads) && valid;
        if (step == 1) valid = some_tokens<1>(call, dtype, n, m, threads) && valid;
        call.x = static_cast<const char*>(call.x) + size_t(step * call.cols) * size;
        call.y = static_cast<char*>(call.y) + size_t(step * call.rows) * size;
        done += step;
    }
    return valid;
}

}  // namespace nm
