// What simd.h needs of AVX-512 (x86-64-v4). Mask registers hold flags.
#pragma once

#include "simd.h"

namespace nm {
namespace {

// ---- comparisons and choices ----

NM_INLINE Flags nonzero(Uints x) { return _mm512_test_epi32_mask(Register(x), Register(x)); }
NM_INLINE Flags common(Uints a, Uints b) { return _mm512_test_epi32_mask(Register(a), Register(b)); }
NM_INLINE Flags zero(Uints x) { return _mm512_testn_epi32_mask(Register(x), Register(x)); }
NM_INLINE Flags equal(Uints a, Uints b) { return _mm512_cmpeq_epi32_mask(Register(a), Register(b)); }
NM_INLINE Flags equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
NM_INLINE Flags unequal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }
NM_INLINE Flags at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
NM_INLINE Flags below(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
NM_INLINE Flags below(Uints a, Uints b) { return _mm512_cmplt_epu32_mask(Register(a), Register(b)); }
NM_INLINE Flags either(Flags a, Flags b) { return _kor_mask16(a, b); }
NM_INLINE Flags both(Flags a, Flags b) { return _kand_mask16(a, b); }
NM_INLINE Flags without(Flags a, Flags b) { return _kandn_mask16(b, a); }
NM_INLINE Flags differing(Flags a, Flags b) { return _kxor_mask16(a, b); }
NM_INLINE Flags opposite(Flags a) { return _knot_mask16(a); }
NM_INLINE Flags none() { return 0; }
NM_INLINE bool any(Flags b) { return !_kortestz_mask16_u8(b, b); }
NM_INLINE bool all(Flags b) { return _kortestc_mask16_u8(b, b); }
NM_INLINE unsigned lanes_of(Flags b) { return b; }
NM_INLINE Flags flags_of(uint64_t bits) { return Flags(bits); }
NM_INLINE Floats choose(Flags b, Floats yes, Floats no) { return _mm512_mask_blend_ps(b, no, yes); }
NM_INLINE Uints choose(Flags b, Uints yes, Uints no) { return Uints(_mm512_mask_blend_epi32(b, Register(no), Register(yes))); }
NM_INLINE Floats only_where(Flags b, Floats x) { return _mm512_maskz_mov_ps(b, x); }
NM_INLINE Floats only_where_not(Flags b, Floats x) { return _mm512_maskz_mov_ps(_knot_mask16(b), x); }
NM_INLINE Uints one_less(Flags b, Uints x) { return Uints(_mm512_mask_sub_epi32(Register(x), b, Register(x), _mm512_set1_epi32(1))); }
NM_INLINE Uints one_more(Flags b, Uints x) { return Uints(_mm512_mask_add_epi32(Register(x), b, Register(x), _mm512_set1_epi32(1))); }

// Bit by bit: where the first has ones the second, elsewhere the third.
NM_INLINE Uints blended(Uints ones, Uints yes, Uints no) {
    return Uints(_mm512_ternarylogic_epi32(Register(ones), Register(yes), Register(no), 0xca));
}

NM_INLINE Uints only_where(Flags b, Uints ones, Uints yes, Uints no) {
    return Uints(_mm512_maskz_ternarylogic_epi32(b, Register(ones), Register(yes), Register(no), 0xca));
}
// The lower half of each lane from the first, the upper one from the second.
NM_INLINE Uints halves_of(Uints lower, Uints upper) { return blended(splat(0xffff0000u), upper, lower); }

// ---- arithmetic ----

NM_INLINE Uints smaller(Uints a, Uints b) { return Uints(_mm512_min_epu32(Register(a), Register(b))); }
NM_INLINE Uints larger(Uints a, Uints b) { return Uints(_mm512_max_epu32(Register(a), Register(b))); }
// in the order of their bits: every NaN above all numbers
NM_INLINE Floats smaller_magnitude(Floats a, Floats b) { return float_of(smaller(bits_of(a), bits_of(b))); }
NM_INLINE Floats larger_magnitude(Floats a, Floats b) { return float_of(larger(bits_of(a), bits_of(b))); }
// b where either is NaN
NM_INLINE Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }
NM_INLINE Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
NM_INLINE Floats root(Floats x) { return _mm512_sqrt_ps(x); }
NM_INLINE Uints truncated(Floats x) { return Uints(_mm512_cvttps_epi32(x)); }
// a b + c, rounded once
NM_INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
NM_INLINE Doubles fused(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
NM_INLINE Doubles maximum(Doubles a, Doubles b) { return _mm512_max_pd(a, b); }
NM_INLINE float sum_of_lanes(Floats x) { return _mm512_reduce_add_ps(x); }
// of the lower halves of 64-bit lanes
NM_INLINE Longs low_product(Longs a, Longs b) { return Longs(_mm512_mul_epu32(Register(a), Register(b))); }
// a is not needed afterwards: one instruction writes over it
NM_INLINE Longs xor3(Longs a, Longs b, Longs c) {
    return Longs(_mm512_ternarylogic_epi64(Register(a), Register(b), Register(c), 0x96));
}

// ---- conversions ----

NM_INLINE Doubles load_doubles(const float* from) { return _mm512_cvtps_pd(_mm256_loadu_ps(from)); }  // kLongs of them
NM_INLINE Doubles lower_half(Floats x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
NM_INLINE Doubles upper_half(Floats x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }

NM_INLINE __m256i load256(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
NM_INLINE Floats widened(const bf16* from) { return float_of(Uints(_mm512_cvtepu16_epi32(load256(from))) << 16); }
NM_INLINE Floats widened(const fp16* from) { return _mm512_cvtph_ps(load256(from)); }
// fp16 numbers in the lower and in the upper half of each lane
NM_INLINE Floats widened_lower(Uints x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(Register(x))); }
NM_INLINE Floats widened_upper(Uints x) { return widened_lower(x >> 16); }
NM_INLINE Uints narrowed_fp16(Floats x) { return Uints(_mm512_cvtepu16_epi32(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT))); }
NM_INLINE void store_lower_halves(void* to, Uints x) { _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtepi32_epi16(Register(x))); }

// A whole aligned vector past the caches (see stream.h): its line is not read first.
NM_INLINE void stream_store(void* to, Uints x) { _mm512_stream_si512(static_cast<Register*>(to), Register(x)); }

// kLanes indices of Bits bits, each in the low bits of its lane; what is above them does not matter.
template <int Bits>
NM_INLINE Uints low_indices(const uint8_t* indices) {
    if constexpr (Bits == 8) return Uints(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(indices))));
    const Register lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    if constexpr (Bits == 2) return Uints(_mm512_srlv_epi32(_mm512_set1_epi32(int(word_at<uint32_t>(indices))), _mm512_slli_epi32(lane, 1)));
    const Register all = _mm512_set1_epi64(int64_t(word_at<uint64_t>(indices)));
#if defined(__AVX512VBMI__)
    return Uints(_mm512_multishift_epi64_epi8(_mm512_slli_epi32(lane, 2), all));
#else
    const Register byte = _mm512_srli_epi32(lane, 1);  // of each lane, brought to its low end
    return Uints(_mm512_srlv_epi32(_mm512_shuffle_epi8(all, byte), _mm512_slli_epi32(_mm512_and_si512(lane, _mm512_set1_epi32(1)), 2)));
#endif
}

// ---- transpositions ----

// Of four registers, as 4 x 4 matrices in each 128 bits.
template <class V>
NM_INLINE void transpose_quads(const V* from, V* to) {
    const Register a = _mm512_unpacklo_epi32(Register(from[0]), Register(from[1])), b = _mm512_unpackhi_epi32(Register(from[0]), Register(from[1]));
    const Register c = _mm512_unpacklo_epi32(Register(from[2]), Register(from[3])), d = _mm512_unpackhi_epi32(Register(from[2]), Register(from[3]));
    to[0] = V(_mm512_unpacklo_epi64(a, c));
    to[1] = V(_mm512_unpackhi_epi64(a, c));
    to[2] = V(_mm512_unpacklo_epi64(b, d));
    to[3] = V(_mm512_unpackhi_epi64(b, d));
}

// r[i] lane j <-> r[j] lane i
template <class V>
NM_INLINE void transpose(V* r) {
    for (int i = 0; i < 16; i += 4) transpose_quads(r + i, r + i);  // then r[i + k], 128-bit part q: column 4q + k of rows i .. i + 3
    V t[16];
    for (int k = 0; k < 4; ++k) {
        const Register low01 = _mm512_shuffle_i32x4(Register(r[k]), Register(r[k + 4]), 0x44);
        const Register high01 = _mm512_shuffle_i32x4(Register(r[k]), Register(r[k + 4]), 0xee);
        const Register low23 = _mm512_shuffle_i32x4(Register(r[k + 8]), Register(r[k + 12]), 0x44);
        const Register high23 = _mm512_shuffle_i32x4(Register(r[k + 8]), Register(r[k + 12]), 0xee);
        t[k] = V(_mm512_shuffle_i32x4(low01, low23, 0x88));
        t[k + 4] = V(_mm512_shuffle_i32x4(low01, low23, 0xdd));
        t[k + 8] = V(_mm512_shuffle_i32x4(high01, high23, 0x88));
        t[k + 12] = V(_mm512_shuffle_i32x4(high01, high23, 0xdd));
    }
    for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// r[i] lane j = word i of row j, rows `stride` bytes apart.
template <class V>
NM_INLINE void load_transposed(const void* rows, int64_t stride, V* r) {
    NM_UNROLL_16 for (int l = 0; l < kLanes; ++l) r[l] = load_as<V>(static_cast<const char*>(rows) + l * stride);
    transpose(r);
}

// Lanes as transpose_quads leaves rows of 4 x 4 tiles, in the order of the tiles.
NM_INLINE Uints in_tile_order(Uints x) {
    return Uints(_mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), Register(x)));
}

// ---- keys of elements (core/types.h), below 2^31 (2^15): signed comparisons order them and -1 is below them all ----

// Each lane takes the lane `Bytes` away in the pair of blocks of that size: an exchange of neighbours, 2 to 32 bytes wide.
template <int Bytes>
NM_INLINE Register exchange(Register v) {
    if constexpr (Bytes == 2) return _mm512_rol_epi32(v, 16);
    if constexpr (Bytes == 4) return _mm512_shuffle_epi32(v, _MM_PERM_CDAB);
    if constexpr (Bytes == 8) return _mm512_shuffle_epi32(v, _MM_PERM_BADC);
    if constexpr (Bytes == 16) return _mm512_permutex_epi64(v, 0x4e);
    if constexpr (Bytes == 32) return _mm512_shuffle_i64x2(v, v, 0x4e);
}

template <class T>
struct KeyLanes {  // bf16 and fp16
    using Lane = int16_t;
    using Marks = __mmask32;
    template <int M>
    static constexpr bool kQuads = false;
    static Register keys(Register w) {
        const Register magnitude = _mm512_and_si512(w, _mm512_set1_epi16(0x7fff));
        return _mm512_min_epi16(magnitude, _mm512_set1_epi16(int16_t(Key<T>::nan)));
    }
    static Marks above(Register a, Register b) { return _mm512_cmpgt_epi16_mask(a, b); }
    static Marks equal(Register a, Register b) { return _mm512_cmpeq_epi16_mask(a, b); }
    static Register max(Register a, Register b) { return _mm512_max_epi16(a, b); }
    static Register min(Register a, Register b) { return _mm512_min_epi16(a, b); }
    static Register plus(Register a, Register b) { return _mm512_add_epi16(a, b); }
    static Register minus(Register a, Register b) { return _mm512_sub_epi16(a, b); }
    static Marks signs(Register v) { return _mm512_movepi16_mask(v); }
    // Pairs of neighbours exchanged within groups of four: 1, 2 or 3 = both.
    template <int By>
    static Register crossed(Register v) {
        constexpr int order = By == 1 ? 0xb1 : By == 2 ? 0x4e : 0x1b;
        return _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(v, order), order);
    }
    static Register without(Register v, uint64_t lanes) { return _mm512_mask_set1_epi16(v, Marks(lanes), -1); }
    static Register permute(Register v, Register from) { return _mm512_permutexvar_epi16(from, v); }
};

template <>
struct KeyLanes<float> {
    using Lane = int32_t;
    using Marks = __mmask16;
    template <int M>
    static constexpr bool kQuads = true;
    static Register keys(Register w) {
        const Register magnitude = _mm512_and_si512(w, _mm512_set1_epi32(0x7fffffff));
        return _mm512_min_epi32(magnitude, _mm512_set1_epi32(int32_t(Key<float>::nan)));
    }
    static Marks above(Register a, Register b) { return _mm512_cmpgt_epi32_mask(a, b); }
    static Marks equal(Register a, Register b) { return _mm512_cmpeq_epi32_mask(a, b); }
    static Register max(Register a, Register b) { return _mm512_max_epi32(a, b); }
    static Register min(Register a, Register b) { return _mm512_min_epi32(a, b); }
    static Register plus(Register a, Register b) { return _mm512_add_epi32(a, b); }
    static Register minus(Register a, Register b) { return _mm512_sub_epi32(a, b); }
    static Marks signs(Register v) { return _mm512_movepi32_mask(v); }
    template <int By>
    static Register crossed(Register v) {
        return _mm512_shuffle_epi32(v, _MM_PERM_ENUM(By == 1 ? 0xb1 : By == 2 ? 0x4e : 0x1b));
    }
    static void transpose(const Register* v, Register* to) { transpose_quads(v, to); }
    // Lane I of every four in all of them.
    template <int I>
    static Register broadcast(Register v) {
        return _mm512_shuffle_epi32(v, _MM_PERM_ENUM(0x55 * I));
    }
    static Register without(Register v, uint64_t lanes) { return _mm512_mask_set1_epi32(v, Marks(lanes), -1); }
    static Register permute(Register v, Register from) { return _mm512_permutexvar_epi32(from, v); }
};

// Each lane takes the lane `By` further on in its group of M, past its end from its start again.
template <class T, int M, int By>
NM_INLINE Register rotated(Register v) {
    if constexpr (M * sizeof(T) == 16) return _mm512_alignr_epi8(v, v, By * int(sizeof(T)));
    static constexpr auto from = [](int i) { return i / M * M + (i + By) % M; };
    static constexpr Table<typename KeyLanes<T>::Lane, decltype(from)> rotation(from);
    return KeyLanes<T>::permute(v, rotation.template as<Register>());
}

// The lanes that are not among the two largest of their four, ties to the lower index: those that two of the other three beat.
// Where the other has the lower index it wins ties, this one is handicapped by 1. The sign of a difference says who wins, and one
// ternary operation who wins twice: without comparisons to masks, which few ports handle.
template <class T>
NM_INLINE typename KeyLanes<T>::Marks not_two_of_four(Register v) {
    using L = KeyLanes<T>;
    static constexpr auto odd = [](int i) { return i % 2 ? -1 : 0; };
    static constexpr auto late = [](int i) { return i % 4 > 1 ? -1 : 0; };
    static constexpr Table<typename L::Lane, decltype(odd)> if_odd(odd);
    static constexpr Table<typename L::Lane, decltype(late)> if_late(late);
    const Register later = L::plus(v, if_late.template as<Register>());
    const Register one = L::minus(L::plus(v, if_odd.template as<Register>()), L::template crossed<1>(v));  // negative: beaten
    const Register two = L::minus(later, L::template crossed<2>(v)), three = L::minus(later, L::template crossed<3>(v));
    return L::signs(_mm512_ternarylogic_epi32(one, two, three, 0xe8));
}

// The same for sixteen keys of fp32 numbers.
NM_INLINE void not_two_of_four(const Register* keys, __mmask16* dropped) { dropped[0] = not_two_of_four<float>(keys[0]); }
using KeyMarks = __mmask16;
NM_INLINE Register keys_of(Floats x) { return KeyLanes<float>::keys(Register(x)); }

// ---- 64 elements and 64 bits ----

// Bit i: flags[i] is not 0.
inline uint64_t bits_of(const uint8_t* flags) {
    const Register x = _mm512_loadu_si512(flags);
    return _mm512_test_epi8_mask(x, x);
}

// out[i] = w[i] where bit i is set, +0.0 elsewhere.
inline void pick64(const float* w, uint64_t bits, float* out) {
    for (int i = 0; i < 64; i += 16) _mm512_storeu_ps(out + i, _mm512_maskz_loadu_ps(__mmask16(bits >> i), w + i));
}

template <class T>
void pick64(const T* w, uint64_t bits, T* out) {
    for (int i = 0; i < 64; i += 32) _mm512_storeu_si512(out + i, _mm512_maskz_loadu_epi16(__mmask32(bits >> i), w + i));
}

// Marks of 64 elements of type T: of their kLanes (16 bits: twice as many) i-th ones at a time.
template <class T>
struct Marks64 {
    uint64_t word = 0;

    static Marks64 of(uint64_t bits) { return {bits}; }
    NM_INLINE void set(int i, typename KeyLanes<T>::Marks marks) { word |= uint64_t(marks) << (i * (64 / int(sizeof(T)))); }
    uint64_t bits() const { return word; }
    int count() const { return __builtin_popcountll(word); }
    // out[i] = whether i has no mark; out[i] = w[i] where it has none, else +0.0; the i-th kLanes without one
    void unmarked(uint8_t* out) const { _mm512_storeu_si512(out, _mm512_maskz_set1_epi8(~word, 1)); }
    void pick_unmarked(const T* w, T* out) const { pick64(w, ~word, out); }
    NM_INLINE Flags unmarked(int i) const { return flags_of(~word >> (kLanes * i)); }
};

#if defined(__AVX512VBMI2__)

// Sixteen (fp32) or 32 of 64 elements in registers, by number.
struct Pool32 {
    Register v[4];
    explicit Pool32(const float* w) {
        for (int i = 0; i < 4; ++i) v[i] = _mm512_loadu_si512(w + 16 * i);
    }
    Register at(const uint8_t* numbers, uint64_t lanes) const {
        const Register from = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
        const __mmask16 upper = _mm512_test_epi32_mask(from, _mm512_set1_epi32(32));
        const Register low = _mm512_permutex2var_epi32(v[0], from, v[1]);
        return _mm512_maskz_mov_epi32(__mmask16(lanes), _mm512_mask_mov_epi32(low, upper, _mm512_permutex2var_epi32(v[2], from, v[3])));
    }
};

struct Pool16 {
    Register v[2];
    template <class T>
    explicit Pool16(const T* w) : v{_mm512_loadu_si512(w), _mm512_loadu_si512(w + 32)} {}
    Register at(const uint8_t* numbers, uint64_t lanes) const {
        const Register from = _mm512_cvtepu8_epi16(load256(numbers));
        return _mm512_maskz_permutex2var_epi16(__mmask32(lanes), v[0], from, v[1]);
    }
};

template <class T>
using Pool = std::conditional_t<sizeof(T) == 4, Pool32, Pool16>;

inline Register numbers_0_to_63() {
    static constexpr auto number = [](int i) { return i; };
    static constexpr Table<uint8_t, decltype(number)> numbers(number);
    return numbers.as<Register>();
}

// The elements of the set bits, one after another; returns where the next go. May write up to 64 in all. One compression
// of the elements' numbers, then shuffles: compressing the elements themselves takes twice as long (Zen 5, 2026-11-21).
template <class T>
T* gather64(const T* w, uint64_t bits, T* out) {
    const int count = int(_mm_popcnt_u64(bits));
    const Register chosen = _mm512_maskz_compress_epi8(bits, numbers_0_to_63());
    constexpr int lanes = 64 / sizeof(T);
    const Pool<T> pool(w);
    alignas(64) uint8_t numbers[64];
    _mm512_store_si512(numbers, chosen);
    for (int i = 0; i < count; i += lanes) _mm512_storeu_si512(out + i, pool.at(numbers + i, ~uint64_t(0)));
    return out + count;
}

inline uint8_t* gather64(const uint8_t* w, uint64_t bits, uint8_t* out) {
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi8(bits, _mm512_loadu_si512(w)));
    return out + _mm_popcnt_u64(bits);
}

// The inverse: out[i] = the next value where bit i is set, +0.0 elsewhere. Returns the value after them.
// Reads up to 64 values past the last.
template <class T>
const T* scatter64(const T* values, uint64_t bits, T* out) {
    constexpr int lanes = 64 / sizeof(T);
    const Pool<T> pool(values);
    alignas(64) uint8_t numbers[64];
    _mm512_store_si512(numbers, _mm512_maskz_expand_epi8(bits, numbers_0_to_63()));
    for (int i = 0; i < 64; i += lanes) _mm512_storeu_si512(out + i, pool.at(numbers + i, bits >> i));
    return values + _mm_popcnt_u64(bits);
}

#else

// Sixteen elements, whatever they are, as 32-bit lanes: in registers they are compressed and expanded, straight to memory that is
// microcoded on Zen 4 and 5.
template <class T>
Register load16(const T* w) {
    if constexpr (sizeof(T) == 4) return _mm512_loadu_si512(w);
    if constexpr (sizeof(T) == 2) return _mm512_cvtepu16_epi32(load256(w));
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
}

template <class T>
void store16(Register x, T* out) {
    if constexpr (sizeof(T) == 4) _mm512_storeu_si512(out, x);
    else if constexpr (sizeof(T) == 2) store_lower_halves(out, Uints(x));
    else _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(x));
}

// The elements of the set bits, one after another; returns where the next go. May write up to 64 in all.
template <class T>
T* gather64(const T* w, uint64_t bits, T* out) {
    for (int i = 0; i < 64; i += 16) {
        const __mmask16 lanes = __mmask16(bits >> i);
        store16(_mm512_maskz_compress_epi32(lanes, load16(w + i)), out);
        out += _mm_popcnt_u32(lanes);
    }
    return out;
}

// The inverse: out[i] = the next value where bit i is set, +0.0 elsewhere. Returns the value after them.
// Reads up to 64 values past the last.
template <class T>
const T* scatter64(const T* values, uint64_t bits, T* out) {
    for (int i = 0; i < 64; i += 16) {
        const __mmask16 lanes = __mmask16(bits >> i);
        store16(_mm512_maskz_expand_epi32(lanes, load16(values)), out + i);
        values += _mm_popcnt_u32(lanes);
    }
    return values;
}

#endif

// gather64 where every eight bits have Count set.
constexpr bool kGatherBytes = false;  // faster than gather64 and pack_positions

template <int, class T>
void gather_bytes(const T* w, uint64_t bits, T* out) {
    gather64(w, bits, out);
}

// ---- 16-bit lanes ----

// A register of fp16 numbers as floats, half after half, and back.
NM_INLINE Floats widened_half(Register x, int half) { return _mm512_cvtph_ps(half ? _mm512_extracti64x4_epi64(x, 1) : _mm512_castsi512_si256(x)); }
NM_INLINE Register narrowed_halves(Floats low, Floats high) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(low, kNearest)), _mm512_cvtps_ph(high, kNearest), 1);
}
NM_INLINE Register smaller16(Register a, Register b) { return _mm512_min_epu16(a, b); }
NM_INLINE Register only_where_nonzero16(Register tested, Register x) { return _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(tested, tested), x); }

}  // namespace
}  // namespace nm
