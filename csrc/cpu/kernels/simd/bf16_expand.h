// Rows of a compressed bf16 matrix as dense ones, a line of 32 columns at a time. With AVX512-VBMI2 the indices of the
// common patterns become bits of columns, and vpexpandw puts the stored values there; else one value after the other.
#pragma once

#include <cstring>
#include <utility>

#include "../../../core/bitpack.h"
#include "../../../core/dispatch.h"

#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace nm {
namespace {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t to) { return ceil_div(a, to) * to; }

constexpr int64_t kLine = 32;     // columns of a line
constexpr int64_t kPiece = 512;   // columns of a row that are expanded at a time

// The compressed operand.
struct StoredBf16 {
    const bf16* values;
    const uint8_t* indices;
    int64_t rows, cols, kept, bytes;
    int n, m, bits;

    StoredBf16(const void* v, const uint8_t* i, int64_t rows_, int64_t cols_, int n_, int m_)
        : values(static_cast<const bf16*>(v)), indices(i), rows(rows_), cols(cols_), n(n_), m(m_), bits(index_bits(m_)) {
        kept = (cols + m - 1) / m * n;
        bytes = index_bytes(kept, bits);
    }
};

#if defined(__AVX512BW__)
using Line = __m512i;
inline Line load_line(const bf16* from) { return _mm512_loadu_si512(from); }
inline void store_line(bf16* to, Line line) { _mm512_storeu_si512(to, line); }

// to[2i] = even[i], to[2i + 1] = odd[i]; the second half to `rest`
inline void store_pairs(bf16* to, bf16* rest, Line even, Line odd) {
    alignas(64) static constexpr uint16_t kPlaces[64] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                         11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
                                                         22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    store_line(to, _mm512_permutex2var_epi16(even, _mm512_load_si512(kPlaces), odd));
    store_line(rest, _mm512_permutex2var_epi16(even, _mm512_load_si512(kPlaces + 32), odd));
}
#else
struct Line {
    bf16 at[kLine];
};
inline Line load_line(const bf16* from) {
    Line line;
    std::memcpy(&line, from, sizeof line);
    return line;
}
inline void store_line(bf16* to, const Line& line) { std::memcpy(to, &line, sizeof line); }

inline void store_pairs(bf16* to, bf16* rest, const Line& even, const Line& odd) {
    for (int i = 0; i < kLine; ++i) {
        bf16* pair = i < kLine / 2 ? to + 2 * i : rest + 2 * i - kLine;
        pair[0] = even.at[i];
        pair[1] = odd.at[i];
    }
}
#endif

// Columns [begin, end) of a row to dense[0] .. and +0.0 up to a whole line. False: an index is not below m. Of two stored values
// of one column the later one counts, as in decompress.
inline bool expand_each(const StoredBf16& a, int64_t row, int64_t begin, int64_t end, bf16* dense) {
    const bf16* values = a.values + row * a.kept;
    const uint8_t* indices = a.indices + row * a.bytes;
    std::memset(static_cast<void*>(dense), 0, size_t((end - begin + kLine - 1) / kLine * kLine) * sizeof(bf16));
    bool valid = true;
    for (int64_t group = begin / a.m; group * a.m < end; ++group) {
        for (int64_t k = group * a.n; k < (group + 1) * a.n; ++k) {
            const int index = get_index(indices, k, a.bits);
            const int64_t column = group * a.m + index;
            valid &= index < a.m;
            if (index < a.m && column >= begin && column < end) dense[column - begin] = values[k];
        }
    }
    return valid;
}

#if defined(__AVX512VBMI2__)

inline uint64_t low_bits(int64_t count) { return _bzhi_u64(~uint64_t(0), uint32_t(count)); }

inline __m512i sixteen(__m128i table) { return _mm512_broadcast_i32x4(table); }

// The bits of the columns that are stored, of up to kPiece columns. get() is false where an index is not below m or does not
// ascend within its group; the bits are of no use then. A group that ends past the row has all its bits.
template <int N, int M>
struct ColumnBits;

template <>
struct ColumnBits<2, 4> {
    static bool get(const uint8_t* indices, int64_t columns, uint32_t* bits) {
        const __m512i table = sixteen(_mm_setr_epi8(0, 0, 0, 0, 3, 0, 0, 0, 5, 6, 0, 0, 9, 10, 12, 0));  // 0: not ascending
        const int64_t groups = (columns + 3) / 4;
        const __m512i low = _mm512_set1_epi8(15), packed = _mm512_maskz_loadu_epi8(low_bits((groups + 1) / 2), indices);
        const __m512i even = _mm512_shuffle_epi8(table, _mm512_and_si512(packed, low));
        const __m512i odd = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(packed, 4), low));
        _mm512_store_si512(bits, _mm512_or_si512(even, _mm512_slli_epi16(odd, 4)));
        const uint64_t bad_even = _mm512_testn_epi8_mask(even, even) & low_bits((groups + 1) / 2);
        return (bad_even | (_mm512_testn_epi8_mask(odd, odd) & low_bits(groups / 2))) == 0;
    }
};

// A byte for each half of up to 32 bytes.
inline __m512i halves(const uint8_t* indices, int64_t bytes) {
    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(__mmask32(low_bits(bytes)), indices));
    return _mm512_and_si512(_mm512_or_si512(wide, _mm512_slli_epi16(wide, 4)), _mm512_set1_epi8(15));
}

template <>
struct ColumnBits<1, 4> {
    static bool get(const uint8_t* indices, int64_t columns, uint32_t* bits) {
        const __m512i table = sixteen(_mm_setr_epi8(0x11, 0x12, 0x14, 0x18, 0x21, 0x22, 0x24, 0x28, 0x41, 0x42, 0x44, 0x48, char(0x81), char(0x82),
                                                   char(0x84), char(0x88)));
        _mm512_store_si512(bits, _mm512_shuffle_epi8(table, halves(indices, (columns + 15) / 16)));
        return true;
    }
};

inline __m512i one_bit() { return sixteen(_mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, char(128), 0, 0, 0, 0, 0, 0, 0, 0)); }

template <>
struct ColumnBits<1, 8> {
    static bool get(const uint8_t* indices, int64_t columns, uint32_t* bits) {
        const int64_t groups = (columns + 7) / 8;
        const __m512i index = halves(indices, (groups + 1) / 2);
        _mm512_store_si512(bits, _mm512_shuffle_epi8(one_bit(), index));
        return (_mm512_movepi8_mask(_mm512_slli_epi16(index, 4)) & low_bits(groups)) == 0;
    }
};

// Two bits for the two indices of each byte; `bad` are the bytes whose indices do not ascend or are not below 8.
inline __m512i two_bits(__m512i packed, uint64_t& bad) {
    const __m512i low = _mm512_set1_epi8(15), table = one_bit();
    const __m512i even = _mm512_and_si512(packed, low), odd = _mm512_and_si512(_mm512_srli_epi16(packed, 4), low);
    bad = _mm512_cmpge_epu8_mask(even, odd) | _mm512_movepi8_mask(packed);
    return _mm512_or_si512(_mm512_shuffle_epi8(table, even), _mm512_shuffle_epi8(table, odd));
}

template <>
struct ColumnBits<2, 8> {
    static bool get(const uint8_t* indices, int64_t columns, uint32_t* bits) {
        const uint64_t groups = low_bits((columns + 7) / 8);
        uint64_t bad;
        _mm512_store_si512(bits, two_bits(_mm512_maskz_loadu_epi8(groups, indices), bad));
        return (bad & groups) == 0;
    }
};

template <>
struct ColumnBits<4, 8> {
    static bool get(const uint8_t* indices, int64_t columns, uint32_t* bits) {
        const __m512i low = _mm512_set1_epi16(15);
        bool good = true;
        for (int64_t half = 0; half < 2; ++half) {
            const int64_t groups = (columns + 7) / 8 - 32 * half, bytes = groups > 32 ? 64 : groups > 0 ? 2 * groups : 0;
            const __m512i packed = _mm512_maskz_loadu_epi8(low_bits(bytes), indices + 64 * half);
            uint64_t bad;
            const __m512i two = two_bits(packed, bad), four = _mm512_or_si512(two, _mm512_srli_epi16(two, 8));
            const __m512i second = _mm512_and_si512(_mm512_srli_epi16(packed, 4), low);
            const __m512i third = _mm512_and_si512(_mm512_srli_epi16(packed, 8), low);
            _mm256_store_si256(reinterpret_cast<__m256i*>(bits + 8 * half), _mm512_cvtepi16_epi8(four));
            good &= (bad & low_bits(bytes)) == 0 && (_mm512_cmpge_epu16_mask(second, third) & low_bits(bytes / 2)) == 0;
        }
        return good;
    }
};

// What is stored of a whole line, in the low words.
template <int Count>
__m512i stored_of_line(const bf16* values) {
    if (Count == 16) return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)));
    if (Count == 8) return _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
    return _mm512_castsi128_si512(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(values)));
}

template <class P>
constexpr bool kExpands = P::capacity != kMaxM;

// Four lines from the first-th on.
template <class P, class Emit, int... I>
inline __attribute__((always_inline)) void four_lines(const bf16* values, const uint32_t* bits, int64_t first, const Emit& emit,
                                                      std::integer_sequence<int, I...>) {
    constexpr int kStored = kLine * P::n / P::m;
    (emit(std::integral_constant<int, I>(), first + I,
          _mm512_maskz_expand_epi16(bits[first + I], stored_of_line<kStored>(values + (first + I) * kStored))),
     ...);
}

#else

template <class P>
constexpr bool kExpands = false;

#endif

// emit(i % 4, i, line i) for the lines of columns [begin, end) of a row, `begin` a multiple of kLine and at most kPiece columns; the
// first argument is a constant, and 0 where there are fewer. False: an index is not below m.
template <class P, class Emit>
inline __attribute__((always_inline)) bool expand_lines(const StoredBf16& a, P, int64_t row, int64_t begin, int64_t end, const Emit& emit) {
    constexpr std::integral_constant<int, 0> kFirst{};
#if defined(__AVX512VBMI2__)
    if constexpr (kExpands<P>) {
        constexpr int kStored = kLine * P::n / P::m;
        alignas(64) uint32_t bits[kPiece / kLine];
        const bf16* values = a.values + row * a.kept + begin / P::m * P::n;
        const uint8_t* indices = a.indices + row * a.bytes + begin / P::m * P::n * index_bits(P::m) / 8;
        if (__builtin_expect(ColumnBits<P::n, P::m>::get(indices, end - begin, bits), true)) {
            const int64_t lines = (end - begin) / kLine, rest = (end - begin) % kLine;
            // through memory: words of a register come out by the port that vpexpandw needs
            asm volatile("" : "+m"(bits));
            int64_t i = 0;
#pragma GCC unroll 1
            for (; i + 4 <= lines; i += 4) four_lines<P>(values, bits, i, emit, std::make_integer_sequence<int, 4>{});
#pragma GCC unroll 1
            for (; i < lines; ++i) emit(kFirst, i, _mm512_maskz_expand_epi16(bits[i], stored_of_line<kStored>(values + i * kStored)));
            if (rest == 0) return true;
            const int64_t left = (rest + P::m - 1) / P::m * P::n;
            const __m256i last = _mm256_maskz_loadu_epi16(__mmask16(low_bits(left)), values + lines * kStored);
            emit(kFirst, lines, _mm512_maskz_expand_epi16(bits[lines] & uint32_t(low_bits(rest)), _mm512_castsi256_si512(last)));
            return true;
        }
    }
#endif
    alignas(64) bf16 dense[kPiece];
    const bool valid = expand_each(a, row, begin, end, dense);
#pragma GCC unroll 1
    for (int64_t i = 0; i * kLine < end - begin; ++i) emit(kFirst, i, load_line(dense + i * kLine));
    return valid;
}

// f(pattern): as Fixed<N, M> those that are expanded in registers, else as Any.
template <class F>
void by_expansion(int n, int m, const F& f) {
    check_pattern(n, m);
#if defined(__AVX512VBMI2__)
    if (n == 2 && m == 4) return f(Fixed<2, 4>{});
    if (n == 1 && m == 4) return f(Fixed<1, 4>{});
    if (n == 2 && m == 8) return f(Fixed<2, 8>{});
    if (n == 1 && m == 8) return f(Fixed<1, 8>{});
    if (n == 4 && m == 8) return f(Fixed<4, 8>{});
#endif
    f(Any{n, m});
}

}  // namespace
}  // namespace nm
