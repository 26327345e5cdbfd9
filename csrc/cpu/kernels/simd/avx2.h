// What simd.h needs of AVX2 (x86-64-v3: with FMA, F16C, BMI2).
#pragma once

#include "lane_flags.h"
#include "simd.h"

namespace nm {
namespace {

// ---- comparisons and choices ----

NM_INLINE unsigned lanes_of(Flags b) { return unsigned(_mm256_movemask_ps(reinterpret_cast<__m256>(b))); }
NM_INLINE bool any(Flags b) { return lanes_of(b) != 0; }
NM_INLINE bool all(Flags b) { return lanes_of(b) == kAllLanes; }
NM_INLINE Floats choose(Flags b, Floats yes, Floats no) { return _mm256_blendv_ps(no, yes, reinterpret_cast<__m256>(b)); }
NM_INLINE Uints choose(Flags b, Uints yes, Uints no) { return bits_of(choose(b, float_of(yes), float_of(no))); }

// The lower half of each lane from the first, the upper one from the second.
NM_INLINE Uints halves_of(Uints lower, Uints upper) { return Uints(_mm256_blend_epi16(Register(lower), Register(upper), 0xaa)); }

// ---- arithmetic ----

NM_INLINE Uints smaller(Uints a, Uints b) { return Uints(_mm256_min_epu32(Register(a), Register(b))); }
NM_INLINE Uints larger(Uints a, Uints b) { return Uints(_mm256_max_epu32(Register(a), Register(b))); }
// in the order of their bits: every NaN above all numbers
NM_INLINE Floats smaller_magnitude(Floats a, Floats b) { return float_of(smaller(bits_of(a), bits_of(b))); }
NM_INLINE Floats larger_magnitude(Floats a, Floats b) { return float_of(larger(bits_of(a), bits_of(b))); }
// b where either is NaN
NM_INLINE Floats minimum(Floats a, Floats b) { return _mm256_min_ps(a, b); }
NM_INLINE Floats maximum(Floats a, Floats b) { return _mm256_max_ps(a, b); }
NM_INLINE Floats root(Floats x) { return _mm256_sqrt_ps(x); }
// a b + c, rounded once
NM_INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
NM_INLINE Doubles fused(Doubles a, Doubles b, Doubles c) { return _mm256_fmadd_pd(a, b, c); }
NM_INLINE Doubles maximum(Doubles a, Doubles b) { return _mm256_max_pd(a, b); }
NM_INLINE float sum_of_lanes(Floats x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)), two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
// of the lower halves of 64-bit lanes
NM_INLINE Longs low_product(Longs a, Longs b) { return Longs(_mm256_mul_epu32(Register(a), Register(b))); }

// ---- conversions ----

NM_INLINE Doubles load_doubles(const float* from) { return _mm256_cvtps_pd(_mm_loadu_ps(from)); }  // kLongs of them
NM_INLINE Doubles lower_half(Floats x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
NM_INLINE Doubles upper_half(Floats x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }

NM_INLINE __m128i load64(const void* from) { return _mm_loadl_epi64(static_cast<const __m128i*>(from)); }
NM_INLINE __m128i load128(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
NM_INLINE Floats widened(const bf16* from) { return float_of(Uints(_mm256_cvtepu16_epi32(load128(from))) << 16); }
NM_INLINE Floats widened(const fp16* from) { return _mm256_cvtph_ps(load128(from)); }
// The lower halves of all lanes, one after another.
NM_INLINE __m128i lower_halves(Uints x) {
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(Register(x), Register(x)), 0x08));
}
// fp16 numbers in the lower and in the upper half of each lane
NM_INLINE Floats widened_lower(Uints x) { return _mm256_cvtph_ps(lower_halves(x & 0xffffu)); }
NM_INLINE Floats widened_upper(Uints x) { return _mm256_cvtph_ps(lower_halves(x >> 16)); }
NM_INLINE Uints narrowed_fp16(Floats x) { return Uints(_mm256_cvtepu16_epi32(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT))); }
NM_INLINE void store_lower_halves(void* to, Uints x) { _mm_storeu_si128(static_cast<__m128i*>(to), lower_halves(x)); }

// A whole aligned vector past the caches (see stream.h): its line is not read first.
NM_INLINE void stream_store(void* to, Uints x) { _mm256_stream_si256(static_cast<Register*>(to), Register(x)); }

// kLanes indices of Bits bits, each in the low bits of its lane; what is above them does not matter.
template <int Bits>
NM_INLINE Uints low_indices(const uint8_t* indices) {
    if constexpr (Bits == 8) return Uints(_mm256_cvtepu8_epi32(load64(indices)));
    const Uints word = splat(Bits == 2 ? uint32_t(word_at<uint16_t>(indices)) : word_at<uint32_t>(indices));
    return word >> (Uints{0, 1, 2, 3, 4, 5, 6, 7} * uint32_t(Bits));
}

// ---- transpositions ----

// Of four registers, as 4 x 4 matrices in each 128 bits.
template <class V>
NM_INLINE void transpose_quads(const V* from, V* to) {
    const Register a = _mm256_unpacklo_epi32(Register(from[0]), Register(from[1])), b = _mm256_unpackhi_epi32(Register(from[0]), Register(from[1]));
    const Register c = _mm256_unpacklo_epi32(Register(from[2]), Register(from[3])), d = _mm256_unpackhi_epi32(Register(from[2]), Register(from[3]));
    to[0] = V(_mm256_unpacklo_epi64(a, c));
    to[1] = V(_mm256_unpackhi_epi64(a, c));
    to[2] = V(_mm256_unpacklo_epi64(b, d));
    to[3] = V(_mm256_unpackhi_epi64(b, d));
}

// r[i] lane j <-> r[j] lane i
template <class V>
NM_INLINE void transpose(V* r) {
    for (int k = 0; k < 4; ++k) {
        const Register low = Register(r[k]), high = Register(r[k + 4]);
        r[k] = V(_mm256_permute2x128_si256(low, high, 0x20));
        r[k + 4] = V(_mm256_permute2x128_si256(low, high, 0x31));
    }
    transpose_quads(r, r);
    transpose_quads(r + 4, r + 4);
}

// r[i] lane j = word i of row j, rows `stride` bytes apart. A half loaded to where it belongs costs less than an exchange.
template <class V>
NM_INLINE void load_transposed(const void* rows, int64_t stride, V* r) {
    const auto half = [&](int row, int i) { return load128(static_cast<const char*>(rows) + row * stride + 16 * i); };
    for (int i = 0; i < 2; ++i) {
        for (int k = 0; k < 4; ++k) r[4 * i + k] = V(_mm256_inserti128_si256(_mm256_castsi128_si256(half(k, i)), half(k + 4, i), 1));
        transpose_quads(r + 4 * i, r + 4 * i);
    }
}

// Lanes as transpose_quads leaves rows of 4 x 4 tiles, in the order of the tiles.
NM_INLINE Uints in_tile_order(Uints x) { return Uints(_mm256_permutevar8x32_epi32(Register(x), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))); }

// ---- keys of elements (core/types.h), below 2^31 (2^15): signed comparisons order them and -1 is below them all ----

NM_INLINE Register load256(const void* from) { return _mm256_loadu_si256(static_cast<const Register*>(from)); }

// Each lane takes the lane `Bytes` away in the pair of blocks of that size: an exchange of neighbours, 2 to 16 bytes wide.
template <int Bytes>
NM_INLINE Register exchange(Register v) {
    if constexpr (Bytes == 2) return _mm256_or_si256(_mm256_slli_epi32(v, 16), _mm256_srli_epi32(v, 16));
    if constexpr (Bytes == 4) return _mm256_shuffle_epi32(v, 0xb1);
    if constexpr (Bytes == 8) return _mm256_shuffle_epi32(v, 0x4e);
    if constexpr (Bytes == 16) return _mm256_permute2x128_si256(v, v, 0x01);
}

// Marks are all bits of a lane. Packed to signed bytes, pairs of registers come out interleaved by halves.
NM_INLINE Register packed(Register a, Register b) { return _mm256_packs_epi16(a, b); }
NM_INLINE Register packed(Register a, Register b, Register c, Register d) {
    return _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
}

template <class T>
struct KeyLanes {  // bf16 and fp16
    using Lane = int16_t;
    using Marks = Register;
    template <int M>
    static constexpr bool kQuads = M >= 8;
    static Register keys(Register w) {
        return _mm256_min_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x7fff)), _mm256_set1_epi16(int16_t(Key<T>::nan)));
    }
    static Marks above(Register a, Register b) { return _mm256_cmpgt_epi16(a, b); }
    static Marks equal(Register a, Register b) { return _mm256_cmpeq_epi16(a, b); }
    static Register max(Register a, Register b) { return _mm256_max_epi16(a, b); }
    static Register min(Register a, Register b) { return _mm256_min_epi16(a, b); }
    static Register plus(Register a, Register b) { return _mm256_add_epi16(a, b); }
    static Register bytes(const Register* v, int half) { return packed(v[2 * half], v[2 * half + 1]); }
    static Register in_order(Register bytes) { return _mm256_permute4x64_epi64(bytes, 0xd8); }
    // Of four registers: lanes 0 .. 3 of the first hold the first lane of each, lanes 4 .. 7 the second, and so on in
    // every 16 bytes.
    static void transpose(const Register* v, Register* to) {
        const Register a = _mm256_unpacklo_epi16(v[0], v[1]), b = _mm256_unpackhi_epi16(v[0], v[1]);
        const Register c = _mm256_unpacklo_epi16(v[2], v[3]), d = _mm256_unpackhi_epi16(v[2], v[3]);
        to[0] = _mm256_unpacklo_epi32(a, c);
        to[1] = _mm256_unpackhi_epi32(a, c);
        to[2] = _mm256_unpacklo_epi32(b, d);
        to[3] = _mm256_unpackhi_epi32(b, d);
    }
    // Lane I of 16 bytes in all of them.
    template <int I>
    static Register broadcast(Register v) {
        return _mm256_shuffle_epi8(v, _mm256_set1_epi16(0x0100 + 0x0202 * I));
    }
    // Pairs of neighbours exchanged within groups of four: 1, 2 or 3 = both.
    template <int By>
    static Register crossed(Register v) {
        constexpr int order = By == 1 ? 0xb1 : By == 2 ? 0x4e : 0x1b;
        return _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(v, order), order);
    }
    static Marks spread(uint64_t bits) {  // marks lane i where bit i is set
        const Register one = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, int16_t(0x8000));
        return _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16(int16_t(bits)), one), one);
    }
    static Register without(Register v, uint64_t lanes) { return _mm256_or_si256(v, spread(lanes)); }
};

template <>
struct KeyLanes<float> {
    using Lane = int32_t;
    using Marks = Register;
    template <int M>
    static constexpr bool kQuads = M >= 4;
    static Register keys(Register w) {
        return _mm256_min_epi32(_mm256_and_si256(w, _mm256_set1_epi32(0x7fffffff)), _mm256_set1_epi32(int32_t(Key<float>::nan)));
    }
    static Marks above(Register a, Register b) { return _mm256_cmpgt_epi32(a, b); }
    static Marks equal(Register a, Register b) { return _mm256_cmpeq_epi32(a, b); }
    static Register max(Register a, Register b) { return _mm256_max_epi32(a, b); }
    static Register min(Register a, Register b) { return _mm256_min_epi32(a, b); }
    static Register plus(Register a, Register b) { return _mm256_add_epi32(a, b); }
    static Register bytes(const Register* v, int half) { return packed(v[4 * half], v[4 * half + 1], v[4 * half + 2], v[4 * half + 3]); }
    static Register in_order(Register bytes) { return Register(in_tile_order(Uints(bytes))); }
    static void transpose(const Register* v, Register* to) { transpose_quads(v, to); }
    template <int I>
    static Register broadcast(Register v) {
        return _mm256_shuffle_epi32(v, 0x55 * I);
    }
    template <int By>
    static Register crossed(Register v) {
        return _mm256_shuffle_epi32(v, By == 1 ? 0xb1 : By == 2 ? 0x4e : 0x1b);
    }
    static Marks spread(uint64_t bits) {
        const Register one = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int32_t(bits)), one), one);
    }
    static Register without(Register v, uint64_t lanes) { return _mm256_or_si256(v, spread(lanes)); }
};

NM_INLINE Flags flags_of(uint64_t bits) { return Flags(KeyLanes<float>::spread(bits)); }

// Each lane takes the lane `By` further on in its group of M, past its end from its start again.
template <class T, int M, int By>
NM_INLINE Register rotated(Register v) {
    if constexpr (M * sizeof(T) == 16) {
        return _mm256_alignr_epi8(v, v, By * int(sizeof(T)));
    } else if constexpr (M * sizeof(T) < 16) {
        static constexpr auto from = [](int b) {
            const int i = b % 16 / int(sizeof(T));
            return (i / M * M + (i + By) % M) * int(sizeof(T)) + b % int(sizeof(T));
        };
        static constexpr Table<int8_t, decltype(from)> bytes(from);
        return _mm256_shuffle_epi8(v, bytes.template as<Register>());
    } else {
        static constexpr auto from = [](int i) { return (i + By) % M; };
        static constexpr Table<int32_t, decltype(from)> lanes(from);
        return _mm256_permutevar8x32_epi32(v, lanes.template as<Register>());
    }
}

// Marks the 16-bit lanes that are not among the two largest of their four, ties to the lower index. The larger of its pair is dropped if
// the smaller of the other pair is larger still, the smaller of its pair if the larger of the other is. Handicaps decide ties.
template <class T>
NM_INLINE Register not_two_of_four(Register v) {
    using L = KeyLanes<T>;
    static constexpr auto odd = [](int i) { return i % 2 ? -1 : 0; };  // the other has the lower index: it wins ties
    static constexpr auto late = [](int i) { return i % 4 > 1 ? -1 : 0; };
    static constexpr Table<typename L::Lane, decltype(odd)> if_odd(odd);
    static constexpr Table<typename L::Lane, decltype(late)> if_late(late);
    const Register other = L::template crossed<1>(v), smaller = L::above(other, L::plus(v, if_odd.template as<Register>()));
    const Register low = L::template crossed<2>(L::min(v, other)), high = L::template crossed<2>(L::max(v, other));
    return L::above(_mm256_blendv_epi8(low, high, smaller), L::plus(v, if_late.template as<Register>()));
}

// The same for sixteen keys of fp32 numbers. One register gets the first elements of all pairs, another the second ones; four lanes
// are then the pairs 0 and 1 of a group of either half. The smaller of a pair is dropped unless it beats the larger of the other
// pair, which is then dropped instead. The lower index wins ties.
NM_INLINE void not_two_of_four(const Register* keys, Register* dropped) {
    const auto choose = [](Register where, Register yes, Register no) {  // as floats: of bytes, g++ 12 compares `where` with zero first
        return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(no), _mm256_castsi256_ps(yes), _mm256_castsi256_ps(where)));
    };
    const __m256 a = _mm256_castsi256_ps(keys[0]), b = _mm256_castsi256_ps(keys[1]);
    const Register first = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)), second = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd));
    const Register rising = _mm256_cmpgt_epi32(second, first);  // the second element is the larger
    const Register rival = _mm256_shuffle_epi32(_mm256_max_epi32(first, second), 0xb1);
    const Register bar = _mm256_add_epi32(_mm256_min_epi32(first, second), _mm256_set1_epi64x(-(int64_t(1) << 32)));
    const Register smaller = _mm256_cmpgt_epi32(rival, bar);
    const Register larger = _mm256_xor_si256(_mm256_shuffle_epi32(smaller, 0xb1), _mm256_set1_epi32(-1));
    const Register one = choose(rising, smaller, larger), two = choose(rising, larger, smaller);
    dropped[0] = _mm256_unpacklo_epi32(one, two);
    dropped[1] = _mm256_unpackhi_epi32(one, two);
}
using KeyMarks = Register;
NM_INLINE Register keys_of(Floats x) { return KeyLanes<float>::keys(Register(x)); }

// ---- 64 elements and 64 bits: eight bits at a time are the index of a table of shuffles ----

inline uint64_t byte_bits(Register low, Register high) {
    return uint64_t(uint32_t(_mm256_movemask_epi8(high))) << 32 | uint32_t(_mm256_movemask_epi8(low));
}

// Bit i: flags[i] is not 0.
inline uint64_t bits_of(const uint8_t* flags) {
    const Register zero = _mm256_setzero_si256();
    return ~byte_bits(_mm256_cmpeq_epi8(load256(flags), zero), _mm256_cmpeq_epi8(load256(flags + 32), zero));
}

// Marks of 64 elements of type T, register by register.
template <class T>
struct Marks64 {
    using L = KeyLanes<T>;
    static constexpr int kEach = 32 / sizeof(T), kVectors = 2 * sizeof(T);
    Register lanes[kVectors];

    static Marks64 of(uint64_t bits) {
        Marks64 marks;
        for (int i = 0; i < kVectors; ++i) marks.lanes[i] = L::spread(bits >> (i * kEach));
        return marks;
    }
    NM_INLINE void set(int i, Register marks) { lanes[i] = marks; }
    uint64_t bits() const { return byte_bits(L::in_order(L::bytes(lanes, 0)), L::in_order(L::bytes(lanes, 1))); }
    int count() const { return __builtin_popcountll(byte_bits(L::bytes(lanes, 0), L::bytes(lanes, 1))); }
    // out[i] = whether i has no mark; out[i] = w[i] where it has none, else +0.0; the i-th kLanes without one
    void unmarked(uint8_t* out) const {
        for (int i = 0; i < 2; ++i) store_as(out + 32 * i, _mm256_andnot_si256(L::in_order(L::bytes(lanes, i)), _mm256_set1_epi8(1)));
    }
    void pick_unmarked(const T* w, T* out) const {
        for (int i = 0; i < kVectors; ++i) store_as(out + i * kEach, _mm256_andnot_si256(lanes[i], load256(w + i * kEach)));
    }
    NM_INLINE Flags unmarked(int i) const { return ~Flags(lanes[i]); }
};

// out[i] = w[i] where bit i is set, +0.0 elsewhere.
template <class T>
void pick64(const T* w, uint64_t bits, T* out) {
    Marks64<T>::of(~bits).pick_unmarked(w, out);
}

// For each byte: the positions of its set bits (the rest 0), and for each bit how many set ones are below it.
struct ByteTables {
    uint8_t set[256][8], below[256][8];
    constexpr ByteTables() : set(), below() {
        for (int byte = 0; byte < 256; ++byte) {
            int count = 0;
            for (int i = 0; i < 8; ++i) {
                below[byte][i] = uint8_t(count);
                if ((byte >> i) & 1) set[byte][count++] = uint8_t(i);
            }
        }
    }
};

constexpr ByteTables kByteTables;

// The same as bytes of 16-bit elements: one load for four instructions.
struct PairTable {
    alignas(16) uint8_t set[256][16];
    constexpr PairTable() : set() {
        for (int byte = 0; byte < 256; ++byte) {
            for (int i = 0; i < 16; ++i) set[byte][i] = uint8_t(2 * kByteTables.set[byte][i / 2] + i % 2);
        }
    }
};

constexpr PairTable kPairTable;

// One element per chosen lane: eight elements by the lane numbers in the low eight bytes of `from`.
template <class T>
NM_INLINE void shuffle8(const T* w, __m128i from, T* out) {
    if constexpr (sizeof(T) == 4) {
        store_as(out, _mm256_permutevar8x32_epi32(load256(w), _mm256_cvtepu8_epi32(from)));
    } else if constexpr (sizeof(T) == 2) {
        const __m128i even = _mm_add_epi8(from, from), pairs = _mm_unpacklo_epi8(even, _mm_add_epi8(even, _mm_set1_epi8(1)));
        store_as(out, _mm_shuffle_epi8(load128(w), pairs));
    } else {
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_shuffle_epi8(load64(w), from));
    }
}

// The elements of the set bits, one after another; returns where the next go. May write up to 64 in all.
template <class T>
T* gather64(const T* w, uint64_t bits, T* out) {
    for (int i = 0; i < 64; i += 8) {
        const unsigned byte = (bits >> i) & 0xff;
        shuffle8(w + i, load64(kByteTables.set[byte]), out);
        out += _mm_popcnt_u32(byte);
    }
    return out;
}

// The same where every eight bits have Count set.
constexpr bool kGatherBytes = true;  // faster than gather64 and pack_positions

template <int Count, class T>
void gather_bytes(const T* w, uint64_t bits, T* out) {
    for (int i = 0; i < 8; ++i) {
        const unsigned byte = bits >> (8 * i) & 0xff;
        if constexpr (sizeof(T) == 4) shuffle8(w + 8 * i, load64(kByteTables.set[byte]), out + Count * i);
        else store_as(out + Count * i, _mm_shuffle_epi8(load128(w + 8 * i), load128(kPairTable.set[byte])));
    }
}

// The inverse: out[i] = the next value where bit i is set, +0.0 elsewhere. Returns the value after them.
// Reads up to 64 values past the last.
template <class T>
const T* scatter64(const T* values, uint64_t bits, T* out) {
    for (int i = 0; i < 64; i += 8) {
        const unsigned byte = (bits >> i) & 0xff;
        shuffle8(values, load64(kByteTables.below[byte]), out + i);
        if constexpr (sizeof(T) == 4) {
            store_as(out + i, _mm256_and_si256(load256(out + i), KeyLanes<float>::spread(byte)));
        } else {
            store_as(out + i, _mm_and_si128(load128(out + i), _mm256_castsi256_si128(KeyLanes<T>::spread(byte))));
        }
        values += _mm_popcnt_u32(byte);
    }
    return values;
}

// ---- 16-bit lanes ----

// A register of fp16 numbers as floats, half after half, and back.
NM_INLINE Floats widened_half(Register x, int half) { return _mm256_cvtph_ps(half ? _mm256_extracti128_si256(x, 1) : _mm256_castsi256_si128(x)); }
NM_INLINE Register narrowed_halves(Floats low, Floats high) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return _mm256_set_m128i(_mm256_cvtps_ph(high, kNearest), _mm256_cvtps_ph(low, kNearest));
}
NM_INLINE Register smaller16(Register a, Register b) { return _mm256_min_epu16(a, b); }
NM_INLINE Register only_where_nonzero16(Register tested, Register x) {
    return _mm256_andnot_si256(_mm256_cmpeq_epi16(tested, _mm256_setzero_si256()), x);
}

}  // namespace
}  // namespace nm
