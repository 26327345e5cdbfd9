// The kernels of y = x Wᵀ + b for 1 to 4 tokens, W packed, on CUDA cores: bound by reading the packed bytes. Values are floating-point
// (linear_few.cu) or integers with steps (linear_few_integers.cu).
//
// A block keeps x in shared memory, once for all its rows, and each of its warps reads rows at its own pace: a thread up to 16
// bytes of values at once and the index bytes that belong to them, some times before it computes. The x that a value
// meets is read from shared memory, where all tokens of a column lie together: one access for each value. The order there
// is [step, group of a thread, thread, place], so that the threads of one turn of the banks find theirs in different banks
// or in the same word. A stored value of 2:4 in bfloat16 costs 6 instructions for one token, 9 for two and 13 for four
// (counted in machine code for sm_90a); at 4.1 TB/s an H200 (132 multiprocessors at 1.7 GHz) has 15 for it.
//
// Sums are added in a fixed order: over the values of a thread, the threads of a row, the warps of a row, the parts.
#pragma once

#include <algorithm>

#include "linear.h"

namespace nm::cuda {

namespace {

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kBlocks = 2;             // of a multiprocessor
constexpr int kFewestSteps = 8;        // of a warp along a row, where there are rows enough
constexpr int kStagedBytes = 88 << 10;  // of x in a block; the smallest GPUs have 99 KB

// How values are stored: kVec of them in the kBytes that a thread reads at once, kAhead times before it uses them.
template <class T>
struct Floats {
    static constexpr int kBytes = 16, kVec = 16 / int(sizeof(T)), kAhead = 4;
    static constexpr bool kSteps = false;

    static NM_DEVICE float of(const uint32_t* words, int i) { return element<T>(words, i); }

    // The value at place k of a row.
    static NM_DEVICE float at(const uint8_t* row, int64_t k, int) { return to_float(reinterpret_cast<const T*>(row)[k]); }
};

// Two's complement, of 8 bits or 4. All kVec have one step.
template <int Bits>
struct Integers {
    static constexpr int kBytes = 2 * Bits, kVec = 16, kAhead = Bits == 8 ? 2 : 3;
    static constexpr bool kSteps = true;

    // With an exponent of 2^23, the integer plus an offset that makes it unsigned is a float.
    static NM_DEVICE float of(const uint32_t* words, int i) {
        if constexpr (Bits == 8) {
            return bits_float(permute_bytes(words[i / 4] ^ 0x80808080u, 0x4b000000u, 0x7540u | uint32_t(i % 4))) - 8388736.0f;
        } else {
            return bits_float((words[i / 8] >> (i % 8 * 4) & 15u) ^ 0x4b000008u) - 8388616.0f;
        }
    }

    static NM_DEVICE float at(const uint8_t* row, int64_t k, int bits) {
        if (bits == 8) return float(int8_t(row[k]));
        return float(int8_t(uint8_t(row[k / 2] << (k % 2 ? 0 : 4))) >> 4);
    }
};

// The partition of a product with `Tokens` tokens. P is Fixed<N, M>, or Any for the variant that reads value by value.
template <class T, class P, int Tokens>
struct Tile {
    using Staged = std::conditional_t<Tokens == 1, float, T>;
    static constexpr int kEntry = Tokens * int(sizeof(Staged));  // bytes of a column of x in shared memory
};

template <class T, class V, int N, int M, int Tokens>
struct Steps : Tile<T, Fixed<N, M>, Tokens> {
    using Base = Tile<T, Fixed<N, M>, Tokens>;
    using Values = V;
    static constexpr int kVec = V::kVec;   // values of a thread's chunk
    static constexpr int kOwn = kVec / N;  // and its groups
    static constexpr int kBits = M <= 4 ? 2 : 4;
    static constexpr int kIndexBytes = kVec * kBits / 8;
    // per row: as many as there are groups in the 128 bytes that the banks deliver per cycle, but whole sectors
    static constexpr int kLanes = std::clamp(128 / Base::kEntry / M, 2, 8);
    static constexpr int kRows = 32 / kLanes;
    static constexpr int kGroups = kLanes * kOwn;  // of a row in a step
    static constexpr int kStaged = Base::kEntry < 16 ? 4 : 2;  // columns of x that a thread loads at once
    static constexpr int kStepBytes = kGroups * M * Base::kEntry;
    static_assert(kVec % N == 0 && M % 4 == 0 && M <= 16);
};

struct Plan {
    int64_t part;    // groups of a part of the columns; a multiple of a step's
    int splits;      // number of parts
    int sharing;     // warps that share a row
    int64_t rounds;  // iterations of a block over rows
    int64_t blocks;  // of a part
};

// Host-side properties of a warp's tile of rows.
struct Sizes {
    int rows, groups, entry, own, vec;
};

template <class T, class V, class P, int Tokens>
constexpr Sizes sizes() {
    if constexpr (P::capacity == kMaxM) {
        return {1, 1, Tile<T, P, Tokens>::kEntry, 1, 1};
    } else {
        using S = Steps<T, V, P::n, P::m, Tokens>;
        return {S::kRows, S::kGroups, S::kEntry, S::kOwn, S::kVec};
    }
}

Plan plan(const LinearCall& call, const Sizes& tile) {
    const int64_t groups = cdiv(call.cols, call.m), steps = std::max<int64_t>(1, cdiv(groups, tile.groups));
    const int64_t room = std::max<int64_t>(1, kStagedBytes / (int64_t(tile.groups) * call.m * tile.entry));
    Plan p{};
    int64_t part = std::min(steps, room), rounds = 0;
    p.sharing = 1;
    const auto rows_of_round = [&] { return int64_t(kWarps / p.sharing) * tile.rows; };
    const auto per_warp = [&] { return part / p.sharing; };
    if (tile.vec > 1) {
        while (p.sharing < kWarps && per_warp() >= 2 * kFewestSteps) p.sharing *= 2;
        // three quarters of the GPU should have work
        while (p.sharing < kWarps && per_warp() >= 4 && 4 * cdiv(call.rows, rows_of_round()) < 3 * kBlocks * call.processors) p.sharing *= 2;
    }
    rounds = cdiv(call.rows, rows_of_round());
    // a second kernel costs as much as reading about 8 MB, so only if otherwise half of the GPU would idle
    const int64_t fewest = 4 * p.sharing;
    if (2 * rounds <= call.processors && part >= 2 * fewest) {
        part = std::max(fewest, cdiv(part, std::min<int64_t>(16, call.processors / rounds)));
    }
    p.splits = int(cdiv(steps, part));
    p.part = part * tile.groups;
    p.rounds = rounds;
    const int64_t most = std::max<int64_t>(1, kBlocks * call.processors / p.splits);
    p.blocks = cdiv(rounds, cdiv(rounds, most));
    return p;
}

// Arguments of a kernel.
template <class T>
struct Few {
    const T* x;
    const uint8_t* values;
    const uint8_t* indices;
    const bf16* steps;
    Sums<T> sums;
    int64_t cols, groups, kept, value_row, index_row;
    int n, m, bits;
    bool wide;    // x starts at a multiple of 16 bytes
    int per_row;  // steps
    Divider run;  // values that share one, or chunks of a thread
    Plan plan;
};

// Some columns of x, with all tokens of a column together; zeros outside of x.
template <int Columns, int Tokens, class S, class T>
NM_DEVICE void stage(const Few<T>& f, int64_t column, S* to) {
    S entry[Columns * Tokens];
    NM_UNROLL
    for (int t = 0; t < Tokens; ++t) {
        T one[Columns];
        load_some<Columns>(f.x + t * f.cols + column, one, t < f.sums.tokens ? f.cols - column : 0, f.wide);
        NM_UNROLL
        for (int i = 0; i < Columns; ++i) {
            if constexpr (std::is_same_v<S, T>) {
                entry[i * Tokens + t] = one[i];
            } else {
                entry[i * Tokens + t] = to_float(one[i]);
            }
        }
    }
    store_wide<Columns * Tokens>(to, entry);
}

// A thread's part of kAhead steps: its values, and their index bytes and steps.
template <class Tile>
struct Chunks {
    using V = typename Tile::Values;
    static constexpr int kAhead = V::kAhead, kIndexWords = std::max(1, Tile::kIndexBytes / 4);
    uint32_t values[kAhead][V::kBytes / 4], indices[kAhead][kIndexWords];
    bf16 steps[kAhead];

    // Loads steps of which the thread has `count` chunks, `number` the first in its row; zeros after the last.
    template <bool Whole, class T>
    NM_DEVICE void load(const Few<T>& f, const uint8_t* values_at, const uint8_t* indices_at, const bf16* steps_at, int number, int count) {
        NM_UNROLL
        for (int a = 0; a < kAhead; ++a) {
            const bool there = Whole || a < count;
            constexpr int words = V::kBytes / 4;
            load_some<words>(reinterpret_cast<const uint32_t*>(values_at + a * (V::kBytes * Tile::kLanes)), values[a], there ? words : 0, true);
            const uint8_t* of_indices = indices_at + a * (Tile::kIndexBytes * Tile::kLanes);
            if constexpr (Tile::kIndexBytes < 4) {
                indices[a][0] = there ? load_word<Tile::kIndexBytes>(of_indices) : 0u;
            } else {
                load_some<kIndexWords>(reinterpret_cast<const uint32_t*>(of_indices), indices[a], there ? kIndexWords : 0, true);
            }
            if constexpr (V::kSteps) steps[a] = there ? steps_at[f.run.quotient(uint32_t(number + a * Tile::kLanes))] : bf16{0};
        }
    }

    // Adds the products of chunk `a`. `place` is the offset of the x of the thread's first group.
    template <int N, int M, int Tokens>
    NM_DEVICE void add_products(const uint8_t* x, uint32_t place, int a, float (&sums)[Tokens]) const {
        float own[Tokens] = {};
        NM_UNROLL
        for (int i = 0; i < Tile::kVec; ++i) {
            constexpr int in_word = 32 / Tile::kBits;
            // the offset of a group is a multiple of its size, so that the place inside only fills its low bits
            const uint32_t at = place | ((indices[a][i / in_word] >> (i % in_word * Tile::kBits) & uint32_t(M - 1)) * Tile::kEntry);
            uint32_t entry[Tile::kEntry / 4];
            load_wide<Tile::kEntry / 4>(reinterpret_cast<const uint32_t*>(x + (i / N) * (Tile::kLanes * M * Tile::kEntry) + at), entry);
            const float w = V::of(values[a], i);
            NM_UNROLL
            for (int t = 0; t < Tokens; ++t) (V::kSteps ? own : sums)[t] += w * element<typename Tile::Staged>(entry, t);
        }
        if constexpr (V::kSteps) {
            NM_UNROLL
            for (int t = 0; t < Tokens; ++t) sums[t] += own[t] * to_float(steps[a]);
        }
    }
};

// Each warp's sums, double-buffered: those of a round are added during the next one.
template <int Rows, int Tokens>
using Partial = float[2][kWarps][Rows][Tokens];

template <int Rows, int Tokens, class T>
NM_DEVICE void store_round(const Few<T>& f, const float (*partial)[Rows][Tokens], int64_t round, int part) {
    const int sharing = f.plan.sharing, rows = kWarps / sharing * Rows;
    for (int e = int(threadIdx.x); e < rows * Tokens; e += kThreads) {
        const int token = e / rows, r = e % rows;
        const int64_t row = round * rows + r;
        if (row >= f.sums.rows || token >= f.sums.tokens) continue;
        float sum = 0.0f;
        for (int k = 0; k < sharing; ++k) sum += partial[r / Rows * sharing + k][r % Rows][token];
        f.sums.store(sum, token, row, part);
    }
}

template <class T, class V, int N, int M, int Tokens>
__global__ void __launch_bounds__(kThreads, kBlocks) few_kernel(Few<T> f) {
    using Tile = Steps<T, V, N, M, Tokens>;
    constexpr int kAhead = V::kAhead;
    using Sum = Partial<Tile::kRows, Tokens>;
    NM_DYNAMIC_SHARED(unsigned char, x);
    NM_SHARED(Sum, partial);
    const int part = int(blockIdx.x / f.plan.blocks), thread = int(threadIdx.x);
    const int64_t first = part * f.plan.part, left = f.groups - first;
    const int groups = int(left < f.plan.part ? left : f.plan.part);
    const int steps = (groups + Tile::kGroups - 1) / Tile::kGroups;

    const int warp = thread / 32, lane = thread % 32 % Tile::kLanes, row_of_warp = thread % 32 / Tile::kLanes;
    const int sharing = f.plan.sharing, share = (steps + sharing - 1) / sharing;
    const int begin = warp % sharing * share, end = begin + share < steps ? begin + share : steps;
    // in the last step some threads of a row may have no chunk
    const int whole = groups / Tile::kGroups, own_end = groups / Tile::kOwn - whole * Tile::kLanes > lane ? whole + 1 : whole;
    const int limit = own_end < end ? own_end : end;
    const uint8_t *values, *indices;
    const bf16* steps_at = nullptr;
    int number = 0;  // of the thread's next chunk, in its row
    Chunks<Tile> own;
    const auto seek = [&](int64_t round) {
        const int64_t row = (round * (kWarps / sharing) + warp / sharing) * Tile::kRows + row_of_warp, present = row < f.sums.rows ? row : f.sums.rows - 1;
        const int64_t in_row = first / Tile::kOwn + begin * Tile::kLanes + lane, chunk = present * (f.kept / Tile::kVec) + in_row;
        values = f.values + chunk * V::kBytes;
        indices = f.indices + chunk * Tile::kIndexBytes;
        if constexpr (V::kSteps) {
            steps_at = f.steps + present * f.per_row;
            number = int(in_row);
        }
    };
    const auto load = [&](int step) {
        if (step + kAhead <= (whole < end ? whole : end)) {
            own.template load<true>(f, values, indices, steps_at, number, kAhead);
        } else {
            own.template load<false>(f, values, indices, steps_at, number, limit - step);
        }
        values += kAhead * Tile::kLanes * V::kBytes;
        indices += kAhead * Tile::kLanes * Tile::kIndexBytes;
        if constexpr (V::kSteps) number += kAhead * Tile::kLanes;
    };

    // the first bytes of a round are loaded while x is staged, and while the sums of the previous round are added
    int64_t round = blockIdx.x % f.plan.blocks;
    seek(round);
    load(begin);
    constexpr int kColumns = Tile::kStaged, kPieces = M / kColumns;
    for (int q = thread; q < steps * Tile::kGroups * kPieces; q += kThreads) {
        const int group = q / kPieces, step = group / Tile::kGroups, slot = group % Tile::kGroups;
        const int of_row = step * Tile::kGroups + slot % Tile::kLanes * Tile::kOwn + slot / Tile::kLanes;
        auto* to = reinterpret_cast<typename Tile::Staged*>(x + q * (kColumns * Tile::kEntry));
        stage<kColumns, Tokens>(f, (first + of_row) * M + q % kPieces * kColumns, to);
    }
    __syncthreads();
    for (int buffer = 0; round < f.plan.rounds; round += f.plan.blocks, buffer ^= 1) {
        uint32_t place = uint32_t(begin * Tile::kStepBytes + lane * (M * Tile::kEntry));
        float sums[Tokens] = {};
        const auto add = [&](int count) {
            NM_UNROLL
            for (int a = 0; a < kAhead; ++a) {
                if (a < count) own.template add_products<N, M>(x + a * Tile::kStepBytes, place, a, sums);
            }
        };
        for (int step = begin; step < end;) {
            // two copies of the code, one without branches; of integers, whose code is twice as long and less used, one
            if (!V::kSteps && step + kAhead <= end) {
                add(kAhead);
            } else {
                add(end - step);
            }
            place += kAhead * Tile::kStepBytes;
            step += kAhead;
            if (step < end) load(step);
        }
        if (round + f.plan.blocks < f.plan.rounds) {
            seek(round + f.plan.blocks);
            load(begin);
        }
        NM_UNROLL
        for (int t = 0; t < Tokens; ++t) {
            NM_UNROLL
            for (int by = Tile::kLanes / 2; by > 0; by /= 2) sums[t] += __shfl_xor_sync(~0u, sums[t], by);
            if (lane == 0) partial[buffer][warp][row_of_warp][t] = sums[t];
        }
        __syncthreads();
        store_round<Tile::kRows, Tokens>(f, partial[buffer], round, part);
    }
}

// Generic variant for every pattern, size and alignment: a warp processes a row, a thread every 32nd value. A value whose column
// does not exist adds nothing.
template <class T, class V, int Tokens>
__global__ void __launch_bounds__(kThreads, kBlocks) few_any_kernel(Few<T> f) {
    using Staged = typename Tile<T, Any, Tokens>::Staged;
    using Sum = Partial<1, Tokens>;
    NM_DYNAMIC_SHARED(Staged, x);
    NM_SHARED(Sum, partial);
    const int part = int(blockIdx.x / f.plan.blocks), thread = int(threadIdx.x);
    const int64_t first = part * f.plan.part, left = f.groups - first;
    const int groups = int(left < f.plan.part ? left : f.plan.part);
    const int64_t column = first * f.m;
    const int cols = int(f.cols - column < groups * f.m ? f.cols - column : groups * f.m);
    for (int e = thread; e < cols * Tokens; e += kThreads) {
        const int c = e / Tokens, t = e % Tokens;
        Staged value{};
        if (t < f.sums.tokens) {
            if constexpr (std::is_same_v<Staged, T>) {
                value = f.x[t * f.cols + column + c];
            } else {
                value = to_float(f.x[t * f.cols + column + c]);
            }
        }
        x[e] = value;
    }
    __syncthreads();

    const int warp = thread / 32, lane = thread % 32, bits = index_bits(f.m);
    const int count = groups * f.n, group_step = 32 / f.n, rest = 32 % f.n;
    int buffer = 0;
    for (int64_t round = blockIdx.x % f.plan.blocks; round < f.plan.rounds; round += f.plan.blocks, buffer ^= 1) {
        const int64_t row = round * kWarps + warp, own = row < f.sums.rows ? row : f.sums.rows - 1;
        const uint8_t* values = f.values + own * f.value_row;
        const uint8_t* indices = f.indices + own * f.index_row;
        float sums[Tokens] = {};
        int group = lane / f.n, in_group = lane % f.n;
        for (int k = lane; k < count; k += 32) {
            const int place = get_index(indices, first * f.n + k, bits), c = group * f.m + place;
            if (place < f.m && c < cols) {
                float w = V::at(values, first * f.n + k, f.bits);
                if constexpr (V::kSteps) w *= to_float(f.steps[own * f.per_row + f.run.quotient(uint32_t(first * f.n + k))]);
                Staged entry[Tokens];
                load_wide<Tokens>(x + c * Tokens, entry);
                NM_UNROLL
                for (int t = 0; t < Tokens; ++t) sums[t] += w * to_float(entry[t]);
            }
            group += group_step;
            in_group += rest;
            if (in_group >= f.n) {
                in_group -= f.n;
                ++group;
            }
        }
        NM_UNROLL
        for (int t = 0; t < Tokens; ++t) {
            NM_UNROLL
            for (int by = 16; by > 0; by /= 2) sums[t] += __shfl_xor_sync(~0u, sums[t], by);
            if (lane == 0) partial[buffer][warp][0][t] = sums[t];
        }
        __syncthreads();
        store_round<1, Tokens>(f, partial[buffer], round, part);
    }
}

// Starts the kernel for a pattern, or where addresses do not allow it the generic variant, and adds parts.
template <class T, class V, class P, int Tokens>
void run(const LinearCall& call, const Queue& queue) {
    Plan p = plan(call, sizes<T, V, P, Tokens>());
    const int64_t groups = cdiv(call.cols, call.m), kept = groups * call.n;
    const int64_t value_row = !V::kSteps ? kept * int64_t(sizeof(T)) : call.bits == 8 ? kept : cdiv(kept, 2);
    Few<T> f{static_cast<const T*>(call.x), static_cast<const uint8_t*>(call.values), call.indices, static_cast<const bf16*>(call.step), sums_of<T>(call),
             call.cols, groups, kept, value_row, index_bytes(kept, index_bits(call.m)), call.n, call.m, call.bits, multiples_of_16(call.x),
             int(call.steps), Divider(std::max<int64_t>(1, V::kSteps ? kept / call.steps : kept)), p};
    const auto start = [&](const char* name, void (*kernel)(Few<T>)) {
        f.plan = p;
        launch(name, kernel, {p.blocks * p.splits, kThreads, size_t(p.part * call.m * Tile<T, P, Tokens>::kEntry)}, queue, f);
    };
    if constexpr (P::capacity != kMaxM) {
        using S = Steps<T, V, P::n, P::m, Tokens>;
        if (uintptr_t(call.values) % V::kBytes == 0 && uintptr_t(call.indices) % S::kIndexBytes == 0) {
            if constexpr (V::kSteps) f.run = Divider(std::max<int64_t>(1, kept / call.steps / V::kVec));
            return start("linear_few_kernel", few_kernel<T, V, P::n, P::m, Tokens>);
        }
        // the generic variant has the same parts, but one warp per row
        p.sharing = 1;
        p.rounds = cdiv(call.rows, kWarps);
        p.blocks = std::min(p.rounds, std::max<int64_t>(1, kBlocks * call.processors / p.splits));
    }
    start("linear_few_any_kernel", few_any_kernel<T, V, Tokens>);
}

}  // namespace

}  // namespace nm::cuda
