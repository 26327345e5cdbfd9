// y = x Wᵀ + b for up to 16 tokens in 16 bits, W at 2:4 in integers of 8 or 4 bits with steps, on sparse tensor cores: bound by reading the
// stored bytes.
//
// x is rounded to 16 bits of the largest of each 128 columns, times a power of two, and multiplied as two digits of 8 bits, so that the
// stored integers need no conversion and no expansion: the instruction takes stored values and canonical indices as they are. The order of
// k is free if all operands have the same one; it is chosen so that the values a thread supplies are those of the 16 bytes that it
// has read. Four bits become eight, times 16. Sums of 128 columns are exact, and become fp32 with the step of their row and the
// power of two of their token.
//
// A stored value costs 3.1 instructions at 8 bits and 3.4 at 4 bits for up to 8 tokens, 5.4 and 4.7 for up to 16, and digits add 0.6 for one
// token, up to 2.5 for more (counted in machine code for sm_90a, 32 rows of a block for one to four tokens, 64 for 8, 128 for 16); at
// 4.1 TB/s an H200 (132 multiprocessors at 1.7 GHz) has 8.7 for the 1.25 bytes of one at 8 bits, and 5.5 for the 0.78 at 4 bits with a step
// for 128 columns. On CUDA cores (linear_few_integers.cu) it costs 7.6 and 14.9 for one and four tokens, unrolled.
//
// A block has 16 warps, each on 16 rows; some share rows and take steps of 128 columns in turn. Digits are made by each block, from
// what it reads of x, in slices that fit shared memory. Sums are added in a fixed order: steps, warps, parts. Where x is not finite,
// or below what powers of two reach, those 128 columns of the token are multiplied as floats.
#include <algorithm>

#include "linear.h"
#include "ptx_bytes.h"

namespace nm::cuda {

namespace {

constexpr int kWarps = 16, kThreads = 32 * kWarps;  // a block fills a multiprocessor
constexpr int kCols = 128;        // of a step
constexpr int kLanes = 8;         // that make its digits
constexpr int kValues = kCols / 2;
constexpr int kSliceSteps = 128;  // of a slice, times tokens
constexpr int kMostAhead = 4;     // steps of a warp in flight
constexpr int kPartSteps = 8;     // the fewest of a part

struct Plan {
    int sharing;     // warps of a row; a block has 16 / sharing tiles of 16 rows
    int slice;       // steps of x in shared memory at a time; unless it is all of a part, a multiple of kMostAhead times sharing
    int splits;      // parts of the columns
    int part;        // steps of a part
    int64_t blocks;  // of a part

    NM_HD int rows() const { return 16 * kWarps / sharing; }
};

Plan plan(int64_t tokens, int64_t rows, int64_t cols, int processors) {
    const int steps = int(cols / kCols);
    Plan p{1, kSliceSteps, 1, steps, 0};
    while (p.slice * tokens > kSliceSteps) p.slice /= 2;
    // digits cost about 9 instructions for each column and token, which more rows share; but three quarters of the GPU should have work
    const int most = std::min(tokens <= 2 ? 16 : tokens <= 4 ? 8 : tokens <= 8 ? 4 : 2, p.slice / kMostAhead);
    while (p.sharing < most && 2 * p.sharing <= steps && 4 * cdiv(rows, p.rows()) < 3 * processors) p.sharing *= 2;
    p.blocks = cdiv(rows, p.rows());
    // a second kernel costs as much as reading about 8 MB, so only if otherwise half of the GPU would idle
    if (2 * p.blocks <= processors && steps >= 2 * kPartSteps) {
        p.part = int(cdiv(steps, std::min<int64_t>(processors / p.blocks, steps / kPartSteps)));
        p.splits = int(cdiv(steps, p.part));
    }
    p.slice = std::min(p.slice, p.part);
    return p;
}

// Arguments of a kernel.
template <class T>
struct Digits {
    const T* x;
    const uint8_t *values, *indices;
    const bf16* steps;
    Sums<T> sums;
    int64_t cols;
    int per_row;        // steps of a row's values
    Divider run;        // of kCols columns, for which one of them is
    Divider by_tokens;
    Plan plan;
};

// A thread's part of a step: 16 values of two rows, 8 apart; the indices of all values of one of them; both rows' steps.
template <int Bits>
struct Chunk {
    static constexpr int kBytes = 2 * Bits, kAhead = Bits == 8 ? 2 : kMostAhead;
    uint32_t values[2][Bits / 2], indices[4];
    bf16 step[2];

    // The words of four values of a row, as int8; at four bits 16 times as large.
    NM_DEVICE void words(int row, uint32_t (&to)[4]) const {
        if constexpr (Bits == 8) {
            NM_UNROLL
            for (int i = 0; i < 4; ++i) to[i] = values[row][i];
        } else {
            NM_UNROLL
            for (int i = 0; i < 2; ++i) {
                const uint32_t low = values[row][i] << 4 & 0xf0f0f0f0u, high = values[row][i] & 0xf0f0f0f0u;
                to[2 * i] = permute_bytes(low, high, 0x5140);
                to[2 * i + 1] = permute_bytes(low, high, 0x7362);
            }
        }
    }
};

// Of x in shared memory: digits [step][token][upper, lower][instruction of 64 columns][thread of four][words of four columns], in the order
// of the instruction's operand; of every second token the instructions change places, so that two tokens use all the banks. Then the
// powers of two [step][token]: -0.0 where x has no digits.
NM_DEVICE int step_bytes(int tokens) { return tokens * (2 * kCols); }

constexpr uint32_t kUnfit = 0x80000000u;

// Makes digits of steps [first, first + count). Eight threads have the columns of a step, 16 each.
template <class T, int Bits>
NM_DEVICE void stage(const Digits<T>& f, int first, int count, uint8_t* digits, float* scales, bool* unfit) {
    constexpr int kUnits = 32 / kLanes;  // of a step and a token, for a warp
    const int tokens = int(f.sums.tokens), lane = int(threadIdx.x) % 32, piece = lane % kLanes;
    for (int some = int(threadIdx.x) / 32 * kUnits; some < count * tokens; some += kWarps * kUnits) {
        const int unit = some + lane / kLanes;
        const bool there = unit < count * tokens;
        const int step = there ? int(f.by_tokens.quotient(uint32_t(unit))) : 0, token = there ? unit - step * tokens : 0;
        uint32_t x[8];
        load_wide<8>(reinterpret_cast<const uint32_t*>(f.x + token * f.cols + int64_t(first + step) * kCols + piece * 16), x);
        uint32_t even = 0, odd = 0;
        NM_UNROLL
        for (int i = 0; i < 8; ++i) {
            const uint32_t sizes = x[i] & 0x7fff7fffu;
            even = max(even, sizes << 16);
            odd = max(odd, sizes);
        }
        uint32_t top = max(even, odd) >> 16;
        NM_UNROLL
        for (int by = kLanes / 2; by > 0; by /= 2) top = max(top, __shfl_xor_sync(~0u, top, by));
        // the largest becomes at least 2^14 and, with at most 11 bits, at most 32752
        const int exponent = int(float_bits(to_float(T{uint16_t(top)})) >> 23) - 127, up = 14 - exponent;
        const bool fits = exponent >= -100 && exponent < 128;
        const float inverse = fits ? bits_float(uint32_t(127 + up) << 23) : 0.0f;
        if (!there) continue;
        if (piece == 0) {
            scales[unit] = fits ? bits_float(uint32_t(127 - up - (Bits == 4 ? 4 : 0)) << 23) : top == 0 ? 0.0f : bits_float(kUnfit);
            if (!fits && top != 0) *unfit = true;
        }
        // words of four columns are of one thread if they are 8 apart, and 32 columns of 64
        const int half = piece / 4, thread = piece / 2 % 2 * 2, instruction = (piece + token) % 2;
        uint8_t* to = digits + unit * (2 * kCols) + instruction * 64 + thread * 16 + half * 4;
        NM_UNROLL
        for (int four = 0; four < 4; ++four) {
            uint32_t n[4];
            // next to 1.5 * 2^23, whose ulp is 1, the low bits are the nearest integer
            NM_UNROLL
            for (int i = 0; i < 4; ++i) n[i] = float_bits(element<T>(x, 4 * four + i) * inverse + 12582912.0f);
            const uint32_t one = permute_bytes(n[0], n[1], 0x5140), two = permute_bytes(n[2], n[3], 0x5140);
            uint8_t* at = to + four % 2 * 16 + four / 2 * 8;
            store_word<4>(at, permute_bytes(one, two, 0x7632));
            store_word<4>(at + kCols, permute_bytes(one, two, 0x5410));
        }
    }
}

// Adds the products of a step. A thread supplies its 16 values of two rows, 8 to each instruction, which pairs them with columns
// of four threads' words: of the first 16 of each thread's 32 columns, or of the rest. `from` is where the x of the lane's token lies, of
// each 8, and `scales` where the powers of two of its results' do.
template <int Bits, int Tiles>
NM_DEVICE void multiply(const Chunk<Bits>& chunk, const uint8_t* digits, const uint32_t (&from)[Tiles], const float* scales,
                        const uint32_t (&scales_at)[Tiles][2], float (&sums)[Tiles][4]) {
    uint32_t above[4], below[4];
    chunk.words(0, above);
    chunk.words(1, below);
    // the index bytes of the four threads' words 0 or 1, then of their words 2 or 3
    const uint32_t selector = threadIdx.x % 4 < 2 ? 0x6240u : 0x7351u;
    const uint32_t first = permute_bytes(chunk.indices[0], chunk.indices[1], selector);
    const uint32_t second = permute_bytes(chunk.indices[2], chunk.indices[3], selector);
    const uint32_t metadata[2] = {permute_bytes(first, second, 0x5410), permute_bytes(first, second, 0x7632)};
    const float by[2] = {to_float(chunk.step[0]), to_float(chunk.step[1])};
    NM_UNROLL
    for (int tile = 0; tile < Tiles; ++tile) {
        int32_t upper[4] = {}, lower[4] = {};
        NM_UNROLL
        for (int i = 0; i < 2; ++i) {
            const uint32_t a[4] = {above[2 * i], below[2 * i], above[2 * i + 1], below[2 * i + 1]};
            const uint8_t* x = digits + (from[tile] ^ uint32_t(i * 64));
            uint32_t b[2][4];
            load_wide<4>(reinterpret_cast<const uint32_t*>(x), b[0]);
            load_wide<4>(reinterpret_cast<const uint32_t*>(x + kCols), b[1]);
            mma_sp_m16n8k64<true>(upper, a, b[0], metadata[i]);
            mma_sp_m16n8k64<false>(lower, a, b[1], metadata[i]);
        }
        NM_UNROLL
        for (int i = 0; i < 4; ++i) sums[tile][i] += float(upper[i] * 256 + lower[i]) * (scales[scales_at[tile][i % 2]] * by[i / 2]);
    }
}

// A token's product with the stored values of a row in a step, as floats.
template <class T, int Bits>
NM_DEVICE float multiply_as_floats(const Digits<T>& f, int64_t row, int step, int token) {
    const uint8_t* values = f.values + (row * f.cols + int64_t(step) * kCols) / 2 * Bits / 8;
    const uint8_t* indices = f.indices + (row * f.cols + int64_t(step) * kCols) / 8;
    const T* x = f.x + token * f.cols + int64_t(step) * kCols;
    const float by = to_float(f.steps[row * f.per_row + f.run.quotient(uint32_t(step))]);
    float sum = 0.0f;
    NM_ONE_BY_ONE
    for (int k = 0; k < kValues; ++k) {
        const int value = Bits == 8 ? int8_t(values[k]) : int8_t(uint8_t(values[k / 2] << (k % 2 ? 0 : 4))) >> 4;
        sum += to_float(x[k / 2 * 4 + get_index(indices, k, 2)]) * (float(value) * by);
    }
    return sum;
}

// A warp's sums, by row and token; rows lie 17 apart so that threads of different rows use different banks.
template <int Tiles>
using Partial = float[kWarps][8 * Tiles][17];

template <class T, int Bits, int Tiles>
__global__ void __launch_bounds__(kThreads, 1) digits_kernel(Digits<T> f) {
    using Own = Chunk<Bits>;
    using Sum = Partial<Tiles>;
    constexpr int kAhead = Own::kAhead;
    NM_DYNAMIC_SHARED(uint8_t, digits);
    NM_SHARED(Sum, partial);
    NM_SHARED(bool, unfit);
    const int thread = int(threadIdx.x), warp = thread / 32, g = thread % 32 / 4, t = thread % 4, tokens = int(f.sums.tokens);
    float* const scales = reinterpret_cast<float*>(digits + f.plan.slice * step_bytes(tokens));
    const int part = int(blockIdx.x / f.plan.blocks), steps = int(f.cols / kCols), first = part * f.plan.part;
    const int64_t block = blockIdx.x % f.plan.blocks;
    const int last = first + f.plan.part < steps ? first + f.plan.part : steps;
    if (thread == 0) unfit = false;

    // the warps of a row take its steps in turn
    const int sharing = f.plan.sharing, turn = warp % sharing;
    const int64_t row = block * f.plan.rows() + warp / sharing * 16 + g;
    const auto present = [&](int64_t r) { return r < f.sums.rows ? r : f.sums.rows - 1; };
    int next = first + turn;  // the step that is loaded next
    const uint8_t* values[2];
    const bf16* by[2];
    NM_UNROLL
    for (int r = 0; r < 2; ++r) {
        values[r] = f.values + (present(row + 8 * r) * steps + next) * (kValues * Bits / 8) + t * Own::kBytes;
        by[r] = f.steps + present(row + 8 * r) * f.per_row;
    }
    const uint8_t* indices = f.indices + (present(row + t % 2 * 8) * steps + next) * (kCols / 8);
    Own own[kAhead] = {};
    const auto load = [&](Own& chunk) {
        if (next < last) {
            const uint32_t run = f.run.quotient(uint32_t(next));
            NM_UNROLL
            for (int r = 0; r < 2; ++r) {
                load_wide<Bits / 2>(reinterpret_cast<const uint32_t*>(values[r]), chunk.values[r]);
                chunk.step[r] = by[r][run];
            }
            load_wide<4>(reinterpret_cast<const uint32_t*>(indices), chunk.indices);
        }
        next += sharing;
        NM_UNROLL
        for (int r = 0; r < 2; ++r) values[r] += sharing * (kValues * Bits / 8);
        indices += sharing * (kCols / 8);
    };
    NM_UNROLL
    for (int a = 0; a < kAhead; ++a) load(own[a]);

    // tokens past the end are multiplied as the last one, and not stored
    const auto token_of = [&](int token) { return token < tokens ? token : tokens - 1; };
    uint32_t from[Tiles], scales_at[Tiles][2];
    NM_UNROLL
    for (int tile = 0; tile < Tiles; ++tile) {
        const int token = token_of(tile * 8 + g);
        from[tile] = uint32_t(token * (2 * kCols) + (token % 2 * 4 + t) * 16);
        NM_UNROLL
        for (int i = 0; i < 2; ++i) scales_at[tile][i] = uint32_t(token_of(tile * 8 + 2 * t + i));
    }
    float sums[Tiles][4] = {};
    for (int slice = first; slice < last; slice += f.plan.slice) {
        const int end = slice + f.plan.slice < last ? slice + f.plan.slice : last;
        __syncthreads();
        stage<T, Bits>(f, slice, end - slice, digits, scales, &unfit);
        __syncthreads();
        for (int step = turn; step < end - slice;) {
            NM_UNROLL
            for (int a = 0; a < kAhead; ++a, step += sharing) {
                if (step >= end - slice) continue;
                multiply<Bits, Tiles>(own[a], digits + step * step_bytes(tokens), from, scales + step * tokens, scales_at, sums);
                load(own[a]);
            }
        }
        if (!unfit) continue;
        for (int step = turn; step < end - slice; step += sharing) {
            NM_UNROLL
            for (int tile = 0; tile < Tiles; ++tile) {
                NM_UNROLL
                for (int i = 0; i < 4; ++i) {
                    if (float_bits(scales[step * tokens + int(scales_at[tile][i % 2])]) != kUnfit) continue;
                    sums[tile][i] += multiply_as_floats<T, Bits>(f, present(row + i / 2 * 8), slice + step, token_of(tile * 8 + 2 * t + i % 2));
                }
            }
        }
    }

    NM_UNROLL
    for (int tile = 0; tile < Tiles; ++tile) {
        NM_UNROLL
        for (int i = 0; i < 4; ++i) partial[warp][tile * 8 + 2 * t + i % 2][g + 8 * (i / 2)] = sums[tile][i];
    }
    __syncthreads();
    store_shared(f.sums, partial, f.plan.sharing, block, part);
}

// f(element, bits, count of 8 tokens); false: there is no kernel.
template <class F>
bool by_call(const LinearCall& call, const F& f) {
    const int64_t run = call.steps > 0 ? call.cols / call.steps : 0;
    if ((call.dtype != kBFloat16 && call.dtype != kFloat16) || call.n != 2 || call.m != 4 || call.tokens < 1 || call.tokens > 16) return false;
    if (call.cols < kCols || call.cols % kCols != 0 || run % kCols != 0 || run * call.steps != call.cols) return false;
    by_dtype(call.dtype, [&](auto element) {
        if constexpr (sizeof(element) == 2) {
            const auto with = [&](auto bits) {
                if (call.tokens <= 8) return f(element, bits, std::integral_constant<int, 1>{});
                f(element, bits, std::integral_constant<int, 2>{});
            };
            call.bits == 8 ? with(std::integral_constant<int, 8>{}) : with(std::integral_constant<int, 4>{});
        }
    });
    return true;
}

}  // namespace

int linear_integers_splits(int dtype, int64_t tokens, int64_t rows, int64_t cols, int n, int m, int bits, int64_t steps, int processors) {
    const LinearCall call = sizes_of(dtype, tokens, rows, cols, n, m, processors, bits, steps);
    return by_call(call, [](auto, auto, auto) {}) ? plan(tokens, rows, cols, processors).splits : 0;
}

void linear_integers(const LinearCall& call, const Queue& queue) {
    if (call.rows == 0 || call.tokens == 0) return;
    const Plan p = plan(call.tokens, call.rows, call.cols, call.processors);
    by_call(call, [&](auto element, auto bits, auto count) {
        using T = decltype(element);
        const Digits<T> f{static_cast<const T*>(call.x), static_cast<const uint8_t*>(call.values),
                          call.indices, static_cast<const bf16*>(call.step), sums_of<T>(call), call.cols,
                          int(call.steps), Divider(call.cols / call.steps / kCols), Divider(call.tokens), p};
        const Grid grid{p.blocks * p.splits, kThreads, size_t(p.slice * call.tokens) * (2 * kCols + sizeof(float))};
        launch("linear_integers_kernel", digits_kernel<T, decltype(bits)::value, decltype(count)::value>, grid, queue, f);
    });
    if (call.splits > 1) finish_parts(call, queue);
}

}  // namespace nm::cuda
