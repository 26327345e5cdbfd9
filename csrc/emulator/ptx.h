// The instructions of csrc/cuda/ptx.h as the PTX ISA manual defines them (9.0; sections are named where they matter).
//
// Sums of products are computed in float64 (exact except for the last bits of many terms) and rounded once to float32;
// hardware keeps fewer bits and truncates differently, so kernels that use them are compared within a bound.
#pragma once

#include "../core/types.h"
#include "cuda.h"

namespace nm::emulator {

// st.global of a whole word.
template <class Word>
void st_global(void* to, Word word) {
    if (current().block->has_shared(to, sizeof word)) throw std::runtime_error("st.global: an address in shared memory");
    aligned<Word>(to) = word;
}

// cp.async. The destination is undefined until the wait; it is filled with NaN to detect missing waits and stale reads.
inline void cp_async(void* to, const void* from, int bytes, int filled) {
    Thread& thread = current();
    thread.block->check_shared("cp.async", to, size_t(bytes));
    if (uintptr_t(from) % uintptr_t(bytes)) throw std::runtime_error("cp.async: misaligned address");
    if (filled < 0 || filled > bytes) throw std::runtime_error("cp.async: more bytes to read than to write");
    std::memset(to, 0xff, size_t(bytes));
    thread.copies.push_back({to, from, bytes, filled, thread.copy_group});
}

inline void cp_async_commit() { ++current().copy_group; }

// Completes all but the last `pending` committed groups.
inline void cp_async_wait(int pending) {
    Thread& thread = current();
    for (auto& copies = thread.copies; !copies.empty() && copies.front().group < thread.copy_group - pending; copies.pop_front()) {
        const Copy& copy = copies.front();
        std::memset(copy.to, 0, size_t(copy.bytes));
        if (copy.filled) std::memcpy(copy.to, copy.from, size_t(copy.filled));
    }
}

// Instructions for full warps.
template <class T>
const unsigned char (*of_all_lanes(const char* what, const T& data))[kDeposit] {
    if (current().block->lanes(current()) < kLanes) {
        throw std::logic_error(std::string(what) + ": the last warp of the block has less than 32 lanes");
    }
    return meet(~0u, what, data);
}

// "Warp-level matrix load instruction: ldmatrix". Lanes 8 i to 8 i + 7 hold the addresses of the rows of matrix i; lane l
// gets elements 2 (l % 4) and the next of row l / 4, of the matrix or of its transpose.
template <int Count>
void ldmatrix(uint32_t (&to)[Count], const void* row, bool transposed) {
    const auto rows = of_all_lanes(transposed ? "ldmatrix.trans" : "ldmatrix", row);
    const int group = current().lane() / 4, pair = current().lane() % 4 * 2;
    for (int i = 0; i < Count; ++i) {
        to[i] = 0;
        for (int e = 0; e < 2; ++e) {
            const int r = transposed ? pair + e : group, c = transposed ? group : pair + e;
            const auto* halves = taken<const uint16_t*>(rows, 8 * i + r);
            current().block->check_shared("ldmatrix", halves, 16);
            to[i] |= uint32_t(halves[c]) << (16 * e);
        }
    }
}

// The operands of a warp: element (row, k) of A, which is 16 x 16 or packed to it, and (k, col) of B with 8 columns.
template <int RegistersOfB>
struct Operands {
    uint32_t a[4], b[RegistersOfB], metadata;
};

// d += A B over k, A's element `p` of a row meeting row k(p) of B. "Matrix Fragments for mma.m16n8k16 with floating point
// type": register r of lane 4 g + t holds A[g + 8 (r % 2)][2 t + 8 (r / 2)], B[2 t + 8 r][g], and the next in k.
template <class T, int R, class F>
void multiply(float (&d)[4], const unsigned char (*deposit)[kDeposit], int packed, const F& k_of) {
    const int group = current().lane() / 4, pair = current().lane() % 4 * 2;
    for (int i = 0; i < 4; ++i) {
        const int row = group + 8 * (i / 2), col = pair + i % 2;
        double sum = double(d[i]);
        for (int p = 0; p < packed; ++p) {
            const int k = k_of(row, p);
            const T a{uint16_t(taken<Operands<R>>(deposit, 4 * (row % 8) + p % 8 / 2).a[row / 8 + p / 8 * 2] >> (16 * (p % 2)))};
            const T b{uint16_t(taken<Operands<R>>(deposit, 4 * col + k % 8 / 2).b[k / 8] >> (16 * (k % 2)))};
            sum += double(to_float(a)) * double(to_float(b));
        }
        d[i] = float(sum);
    }
}

template <class T, int RegistersOfA, int R>
void mma(float (&d)[4], const uint32_t (&a)[RegistersOfA], const uint32_t (&b)[R]) {
    Operands<R> mine{};
    for (int i = 0; i < RegistersOfA; ++i) mine.a[i] = a[i];
    for (int i = 0; i < R; ++i) mine.b[i] = b[i];
    multiply<T, R>(d, of_all_lanes("mma", mine), 8 * R, [](int, int p) { return p; });
}

// "Matrix Fragments for sparse mma.m16n8k32 with .f16 and .bf16 types", "Sparse matrix storage": a packed row has two of
// every four, in the fragments of a dense one; B's registers 2 and 3 go on in k. Of the four lanes of a row, the pair
// 2 selector, 2 selector + 1 holds the indices, the first those of k < 16; row g in the low half of the word, g + 8 in the high.
template <class T>
void mma_sp(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[4], uint32_t metadata, int selector, bool ordered) {
    const Operands<4> mine{{a[0], a[1], a[2], a[3]}, {b[0], b[1], b[2], b[3]}, metadata};
    const auto deposit = of_all_lanes(selector ? "mma.sp, selector 1" : "mma.sp, selector 0", mine);
    multiply<T, 4>(d, deposit, 16, [&](int row, int p) {
        const uint32_t word = taken<Operands<4>>(deposit, 4 * (row % 8) + 2 * selector + p / 8).metadata;
        const uint32_t group = word >> (16 * (row / 8) + 4 * (p / 2 % 4)), first = group & 3u, second = group >> 2 & 3u;
        if (ordered ? first >= second : first == second) throw std::runtime_error("mma.sp: metadata that the instruction does not take");
        return p / 2 * 4 + int(p % 2 ? second : first);
    });
}

}  // namespace nm::emulator
