// y = x Wᵀ + b for few tokens, straight from the compressed form: what is stored is all that is read, once, and the inputs
// it chooses are permuted in registers: eight rows side by side (few_rows.h) or blocks of 16 stored values of a row
// (few_block.h) where the pattern has that; the rest of a row, and every other pattern, one stored value at a time.
//
// Inputs are in fp32, and so are the sums. Nothing that a row computes depends on the number of threads.
#include <algorithm>
#include <atomic>
#include <memory>
#include <type_traits>

#include "../kernels.h"
#include "few_block.h"
#include "few_rows.h"
#include "patterns.h"

namespace nm {
namespace {

constexpr int kRows = 4;         // rows that share the inputs they load
constexpr int kTokens = 4;       // tokens that share the indices they decode
constexpr int kLoneAhead = 8192;  // bytes: how far ahead a lone row's values are prefetched
constexpr int kGrain = 8;        // rows: what a range has whole numbers of
constexpr int kRanges = 8;       // per thread; long ones, so that each thread reads memory in one long stream
constexpr int64_t kWork = 1 << 17;  // elements that are worth waking a thread for: 5 us

struct NoBlock {};

#if defined(__AVX512F__)
template <int N, int M>
using FewRows = NoBlock;
#elif defined(__AVX2__)
template <int N, int M>
using FewRows = std::conditional_t<M <= 16, EightRows<N, M>, NoBlock>;
#endif

// f(FewBlock<N, M>, EightRows<N, M>) where this instruction set has them, else f with NoBlock in their place.
template <class F>
bool by_block([[maybe_unused]] int n, [[maybe_unused]] int m, const F& f) {
#if defined(__AVX2__)
    if (n == 2 && m == 4) return f(FewBlock<2, 4>{}, FewRows<2, 4>{});
    if (n == 1 && m == 4) return f(FewBlock<1, 4>{}, FewRows<1, 4>{});
    if (n == 2 && m == 8) return f(FewBlock<2, 8>{}, FewRows<2, 8>{});
    if (n == 1 && m == 8) return f(FewBlock<1, 8>{}, FewRows<1, 8>{});
    if (n == 4 && m == 8) return f(FewBlock<4, 8>{}, FewRows<4, 8>{});
    if (n == 1 && m == 16) return f(FewBlock<1, 16>{}, FewRows<1, 16>{});
    if (n == 1 && m == 32) return f(FewBlock<1, 32>{}, FewRows<1, 32>{});
#endif
    return f(NoBlock{}, NoBlock{});
}

// One call, its operands typed.
template <class T>
struct FewGemm {
    const float* x;  // [tokens, cols]
    const T *values, *bias;
    const uint8_t* indices;
    T* y;
    int64_t tokens, rows, cols;
    int n, m;
    int64_t whole = cols / m, there = cols - whole * m;  // whole groups, and columns after them
    int64_t kept = (whole + (there > 0)) * n, bytes = index_bytes(kept, index_bits(m));
};

// Adds `blocks` blocks from the start of each of `Rows` rows. False: an index is not below m.
template <class Block, int Rows, int Tokens, class T>
bool add_blocks(const FewGemm<T>& p, int64_t row, int64_t token, int64_t blocks, float (&total)[Rows][Tokens]) {
    constexpr bool kLone = Rows == 1 && Tokens == 1;
    constexpr int kSums = kLone ? 2 : 1, kRegisters = Block::kRegisters;  // alternating: a single sum would wait for the adder
    const T* values = p.values + row * p.kept;
    const uint8_t* indices = p.indices + row * p.bytes;
    const float* x = p.x + token * p.cols;
    Floats sum[kSums][Rows][Tokens][kRegisters] = {};
    uint64_t damage = 0;
    const auto add = [&](int64_t b, auto& sums) __attribute__((always_inline)) {
        for (int r = 0; r < Rows; ++r) {
            const uint8_t* packed = indices + r * p.bytes + b * Block::kIndexBytes;
            if constexpr (Rows > 1) {  // so many short streams are not fetched ahead by themselves: the same place in the rows that follow
                __builtin_prefetch(values + (r + Rows) * p.kept + b * Block::kStored);
                if (b * Block::kIndexBytes % 64 == 0) __builtin_prefetch(packed + Rows * p.bytes);
            }
            damage |= Block::damage(packed);
            each<kRegisters>([&](auto i) __attribute__((always_inline)) {
                const Uints places = Block::template places<i>(packed);
                const Floats v = widened(values + r * p.kept + b * Block::kStored + i * kLanes);
                const float* inputs = x + b * Block::kInputs + i * Block::kRegisterInputs;
                for (int t = 0; t < Tokens; ++t) sums[r][t][i] = fused(v, Block::inputs(places, inputs + t * p.cols), sums[r][t][i]);
            });
        }
    };
    int64_t b = 0;
    for (; b + kSums <= blocks; b += kSums) {
        each<kSums>([&](auto i) __attribute__((always_inline)) {
            if (kLone) __builtin_prefetch(reinterpret_cast<const char*>(values + (b + i) * Block::kStored) + kLoneAhead);
            add(b + i, sum[i]);
        });
        if (kLone) __builtin_prefetch(indices + b * Block::kIndexBytes + kLoneAhead * Block::kIndexBytes / int(Block::kStored * sizeof(T)));
    }
    if (b < blocks) add(b, sum[0]);
    for (int r = 0; r < Rows; ++r) {
        for (int t = 0; t < Tokens; ++t) {
            Floats(&all)[kRegisters] = sum[0][r][t];
            each<kRegisters>([&](auto i) {
                if (kLone) all[i] += sum[kSums - 1][r][t][i];
                if (i > 0) all[0] += all[i];
            });
            total[r][t] += sum_of_lanes(all[0]);
        }
    }
    return damage == 0;
}

// Stored values of consecutive groups in fp32, and the columns of their inputs, counted from the first of these groups.
struct StoredInputs {
    static constexpr int kRoom = 256;
    float value[kRoom];
    int32_t column[kRoom];
    int count = 0;
};

// Groups from `group` on, as many as there is room for, to `chosen`; returns the group after them. Left out is what counts for
// nothing, even NaN: padding, whose column is past the end, and what has a damaged index, which clears `valid`.
template <int Bits, class T>
int64_t choose(const FewGemm<T>& p, int64_t row, int64_t group, StoredInputs& chosen, bool& valid) {
    const T* values = p.values + row * p.kept;
    const uint8_t* indices = p.indices + row * p.bytes;
    const int64_t first = group, end = std::min<int64_t>(group + StoredInputs::kRoom / p.n, p.kept / p.n);
    int count = 0;
    for (; group < end; ++group) {
        for (int64_t k = group * p.n; k < (group + 1) * p.n; ++k) {
            const int position = get_index(indices, k, Bits);
            chosen.value[count] = to_float(values[k]);
            chosen.column[count] = int32_t(group - first) * p.m + position;
            valid &= position < p.m;
            count += (position < p.m) & (group * p.m + position < p.cols);
        }
    }
    chosen.count = count;
    return group;
}

// Adds the products of what was chosen; four running sums, to hide the adder's latency.
template <int Tokens>
void add_products(const StoredInputs& chosen, const float* x, int64_t cols, float (&total)[Tokens]) {
    constexpr int kSums = 4;
    float sum[kSums][Tokens] = {};
    int k = 0;
    for (; k + kSums <= chosen.count; k += kSums) {
        for (int i = 0; i < kSums; ++i) {
            const float* inputs = x + chosen.column[k + i];
            for (int t = 0; t < Tokens; ++t) sum[i][t] += chosen.value[k + i] * inputs[t * cols];
        }
    }
    for (; k < chosen.count; ++k) {
        for (int t = 0; t < Tokens; ++t) sum[0][t] += chosen.value[k] * x[t * cols + chosen.column[k]];
    }
    for (int t = 0; t < Tokens; ++t) total[t] += (sum[0][t] + sum[1][t]) + (sum[2][t] + sum[3][t]);
}

// Adds the groups of one row from `group` on, one stored value at a time. False: an index is not below m.
template <int Tokens, class T>
bool add_rest(const FewGemm<T>& p, int64_t row, int64_t token, int64_t group, float (&total)[Tokens]) {
    const int bits = index_bits(p.m);
    const auto some_groups = bits == 2 ? choose<2, T> : bits == 4 ? choose<4, T> : choose<8, T>;
    bool valid = true;
    StoredInputs chosen;
    while (group * p.n < p.kept) {
        const float* x = p.x + token * p.cols + group * p.m;
        group = some_groups(p, row, group, chosen, valid);
        add_products(chosen, x, p.cols, total);
    }
    return valid;
}

// A row's part of the outputs of some tokens.
template <int Tokens, class T>
void put(const FewGemm<T>& p, int64_t row, int64_t token, const float (&total)[Tokens]) {
    for (int t = 0; t < Tokens; ++t) {
        const float y = p.bias ? total[t] + to_float(p.bias[row]) : total[t];
        p.y[(token + t) * p.rows + row] = from_float<T>(y);
    }
}

template <class Block, int Rows, int Tokens, class T>
bool some(const FewGemm<T>& p, int64_t row, int64_t token) {
    float total[Rows][Tokens] = {};
    int64_t stored = 0;
    bool valid = true;
    if constexpr (!std::is_same_v<Block, NoBlock>) {
        const int64_t blocks = p.whole * p.m / Block::kInputs;
        stored = blocks * Block::kStored;
        valid = add_blocks<Block>(p, row, token, blocks, total);
    }
    for (int r = 0; r < Rows; ++r) {
        if (stored < p.kept) valid &= add_rest(p, row + r, token, stored / p.n, total[r]);
        put(p, row + r, token, total[r]);
    }
    return valid;
}

// Rows side by side: the blocks of each in its lane, then the rest of each.
template <class Side, int Tokens, class T>
bool side_by_side(const FewGemm<T>& p, int64_t row, int64_t token) {
    const int64_t blocks = p.whole * p.m / Side::kInputs;
    float sums[Tokens][Side::kRows];
    bool valid = Side::sums(p.values + row * p.kept, p.kept, p.indices + row * p.bytes, p.bytes, p.x + token * p.cols, p.cols, blocks, sums);
    for (int r = 0; r < Side::kRows; ++r) {
        float total[Tokens];
        for (int t = 0; t < Tokens; ++t) total[t] = sums[t][r];
        if (blocks * Side::kEntries < p.kept) valid &= add_rest(p, row + r, token, blocks * Side::kEntries / p.n, total);
        put(p, row + r, token, total);
    }
    return valid;
}

// f(Int<count>, token) for as many tokens at a time as go together, at most `Most`.
template <int Most, class F>
bool by_tokens(int64_t tokens, const F& f) {
    bool valid = true;
    int64_t token = 0;
    if constexpr (Most >= 8) {
        for (; token + 8 <= tokens; token += 8) valid &= f(Int<8>(), token);
    }
    for (; token + 4 <= tokens; token += 4) valid &= f(Int<4>(), token);
    for (; token + 2 <= tokens; token += 2) valid &= f(Int<2>(), token);
    if (token < tokens) valid &= f(Int<1>(), token);
    return valid;
}

template <class Block, int Rows, class T>
bool every_token(const FewGemm<T>& p, int64_t row) {
    return by_tokens<kTokens>(p.tokens, [&](auto count, int64_t token) { return some<Block, Rows, count>(p, row, token); });
}

// Rows in lanes where the instruction set has that, but for one token of a pattern whose inputs fit few registers: that
// goes row by row, a single stream from memory. Other tokens and patterns take four rows at a time, which share the inputs they
// load: 1:4 of 4096 x 4096 in fp32 and one token takes 1.2 ms so on one core of a Zen 4, row by row 1.45.
template <class Block, class Side, class T>
bool every_row(const FewGemm<T>& p, int threads) {
    std::atomic<bool> valid{true};
    constexpr bool kBlocks = !std::is_same_v<Block, NoBlock>, kSide = !std::is_same_v<Side, NoBlock>;
    const bool lone = p.tokens == 1 && p.m <= 2 * p.n, fours = kBlocks && !lone;
    const int64_t work = (p.kept + p.cols / 4) * (p.tokens + 1) / 2 + 1;
    const int64_t step = std::max(kWork / work, p.rows / (kRanges * threads)) / kGrain * kGrain + kGrain;
    parallel_for((p.rows + step - 1) / step, threads, [&](int64_t range) {
        const int64_t end = std::min((range + 1) * step, p.rows);
        int64_t row = range * step;
        bool good = true;
        if constexpr (kSide) {
            for (; !lone && row + Side::kRows <= end; row += Side::kRows) {
                good &= by_tokens<8>(p.tokens, [&](auto count, int64_t token) { return side_by_side<Side, count>(p, row, token); });
            }
        }
        for (; fours && row + kRows <= end; row += kRows) good &= every_token<Block, kRows>(p, row);
        for (; row < end; ++row) good &= every_token<Block, 1>(p, row);
        if (!good) valid = false;
    });
    return valid;
}

// Up to how many tokens this is faster than spmm.cpp, which does a vector of them in the time of one: more than one where
// rows go side by side, or where a block takes few permutes. Of 4096 x 4096, one core of a Zen 4: 1:8 of six tokens takes 2.0 ms
// here and 2.2 there, of eight 2.7 here; 1:16 of three 1.06 here and 1.12 there, of four 1.6 here.
inline int few_tokens(int n, int m) {
    if (!by_block(n, m, [](auto block, auto) { return !std::is_same_v<decltype(block), NoBlock>; })) return 1;
#if defined(__AVX512F__)
    return std::clamp(48 * n / m, 1, 8);  // a token takes M / (2 N) permutes of each block
#else
    return m <= 16 ? 8 : 1;
#endif
}

// x in fp32: the tensor itself, or a converted copy that `copy` owns.
inline const float* in_fp32(const float* x, int64_t, std::unique_ptr<float[]>&) { return x; }

template <class T>
const float* in_fp32(const T* x, int64_t count, std::unique_ptr<float[]>& copy) {
    copy.reset(new float[size_t(count)]);
    to_floats(x, count, copy.get());
    return copy.get();
}

}  // namespace

namespace NM_ISA {

bool linear(LinearCall call, int64_t tokens, int dtype, int n, int m, int threads) {
    check_pattern(n, m);
    if (tokens > few_tokens(n, m)) {
        const SpmmCall many{call.values, call.indices, call.x, 1, call.cols, call.bias, call.y, 1, call.rows, call.rows, call.cols, tokens};
        return spmm(many, dtype, n, m, threads);
    }
    bool valid = true;
    by_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        std::unique_ptr<float[]> copy;
        const float* x = in_fp32(static_cast<const T*>(call.x), tokens * call.cols, copy);
        const FewGemm<T> p{x, static_cast<const T*>(call.values), static_cast<const T*>(call.bias), call.indices, static_cast<T*>(call.y),
                        tokens, call.rows, call.cols, n, m};
        valid = by_block(n, m, [&](auto block, auto side) { return every_row<decltype(block), decltype(side)>(p, threads); });
    });
    return valid;
}

}  // namespace NM_ISA
}  // namespace nm
