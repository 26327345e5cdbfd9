// What simd.h needs, for any processor: SSE2, NEON or whatever the platform's baseline has, by way of the compiler. Keys and bits
// of 64 elements are arrays.
#pragma once

#include "lane_flags.h"
#include "simd.h"

namespace nm {
namespace {

// ---- comparisons and choices ----

NM_INLINE unsigned lanes_of(Flags b) {
#if defined(__SSE2__)
    return unsigned(_mm_movemask_ps(reinterpret_cast<__m128>(b)));
#else
    unsigned found = 0;
    for (int l = 0; l < kLanes; ++l) found |= unsigned(b[l] & 1) << l;
    return found;
#endif
}
NM_INLINE bool any(Flags b) { return lanes_of(b) != 0; }
NM_INLINE bool all(Flags b) { return lanes_of(b) == kAllLanes; }
NM_INLINE Flags flags_of(uint64_t bits) {
    const Ints bit = {1, 2, 4, 8};
    return ((int32_t(bits) - Ints{}) & bit) == bit;
}
NM_INLINE Uints choose(Flags b, Uints yes, Uints no) { return blended(reinterpret_cast<Uints>(b), yes, no); }
NM_INLINE Floats choose(Flags b, Floats yes, Floats no) { return float_of(choose(b, bits_of(yes), bits_of(no))); }

// ---- arithmetic ----

NM_INLINE Uints smaller(Uints a, Uints b) { return choose(below(a, b), a, b); }
NM_INLINE Uints larger(Uints a, Uints b) { return choose(below(a, b), b, a); }
// in the order of their bits: every NaN above all numbers; magnitudes are positive as signed integers, whose comparison SSE2 has
NM_INLINE Floats smaller_magnitude(Floats a, Floats b) { return choose(reinterpret_cast<Ints>(a) < reinterpret_cast<Ints>(b), a, b); }
NM_INLINE Floats larger_magnitude(Floats a, Floats b) { return choose(reinterpret_cast<Ints>(a) < reinterpret_cast<Ints>(b), b, a); }
// b where either is NaN
NM_INLINE Floats minimum(Floats a, Floats b) { return choose(below(a, b), a, b); }
NM_INLINE Floats maximum(Floats a, Floats b) { return choose(below(b, a), a, b); }
NM_INLINE Floats root(Floats x) { return Floats{__builtin_sqrtf(x[0]), __builtin_sqrtf(x[1]), __builtin_sqrtf(x[2]), __builtin_sqrtf(x[3])}; }
// a b + c; two roundings, where the product of two Doubles is not exact
NM_INLINE Floats fused(Floats a, Floats b, Floats c) { return a * b + c; }
NM_INLINE Doubles fused(Doubles a, Doubles b, Doubles c) { return a * b + c; }
NM_INLINE Doubles maximum(Doubles a, Doubles b) { return Doubles{a[0] > b[0] ? a[0] : b[0], a[1] > b[1] ? a[1] : b[1]}; }
// of the lower halves of 64-bit lanes
NM_INLINE Longs low_product(Longs a, Longs b) {
#if defined(__SSE2__)
    return Longs(_mm_mul_epu32(__m128i(a), __m128i(b)));
#else
    return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// ---- conversions ----

NM_INLINE Doubles load_doubles(const float* from) { return Doubles{from[0], from[1]}; }  // kLongs of them
NM_INLINE Doubles lower_half(Floats x) { return Doubles{x[0], x[1]}; }
NM_INLINE Doubles upper_half(Floats x) { return Doubles{x[2], x[3]}; }

NM_INLINE Floats widened(const bf16* from) {
    typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
    return float_of(__builtin_convertvector(load_as<Halves>(from), Uints) << 16);
}
NM_INLINE Floats widened(const fp16* from) { return Floats{to_float(from[0]), to_float(from[1]), to_float(from[2]), to_float(from[3])}; }
// fp16 numbers in the lower and in the upper half of each lane
NM_INLINE Floats widened_lower(Uints x) {
    const fp16 each[kLanes] = {{uint16_t(x[0])}, {uint16_t(x[1])}, {uint16_t(x[2])}, {uint16_t(x[3])}};
    return widened(each);
}
NM_INLINE Floats widened_upper(Uints x) { return widened_lower(x >> 16); }
NM_INLINE Uints narrowed_fp16(Floats x) {
    return Uints{from_float<fp16>(x[0]).bits, from_float<fp16>(x[1]).bits, from_float<fp16>(x[2]).bits, from_float<fp16>(x[3]).bits};
}
NM_INLINE void store_lower_halves(void* to, Uints x) {
    const uint16_t each[kLanes] = {uint16_t(x[0]), uint16_t(x[1]), uint16_t(x[2]), uint16_t(x[3])};
    std::memcpy(to, each, sizeof each);
}

// A whole aligned vector past the caches (see stream.h): its line is not read first.
NM_INLINE void stream_store(void* to, Uints x) {
#if defined(__SSE2__)
    _mm_stream_si128(static_cast<__m128i*>(to), __m128i(x));
#else
    store_as(to, x);
#endif
}

// The indices of kLanes stored weights, one in each lane: a 16-bit product brings each to the upper end of its lower half.
template <int Bits>
NM_INLINE Uints unpacked_indices(const uint8_t* indices) {
    typedef uint16_t Halves __attribute__((vector_size(4 * kLanes)));
    if constexpr (Bits == 8) {
        return Uints{indices[0], indices[1], indices[2], indices[3]};
    } else {
        const Uints all = splat(Bits == 2 ? uint32_t(indices[0]) : uint32_t(word_at<uint16_t>(indices)));
        constexpr int top = 16 - Bits;
        return Uints(Halves(all) * Halves{1 << top, 0, 1 << (top - Bits), 0, 1 << (top - 2 * Bits), 0, 1 << (top - 3 * Bits), 0}) >> top;
    }
}

// ---- transpositions ----

// Of four registers, as 4 x 4 matrices: r[i] lane j <-> r[j] lane i.
template <class V>
NM_INLINE void transpose_quads(const V* from, V* to) {
    const V a = from[0], b = from[1], c = from[2], d = from[3];
    for (int i = 0; i < 4; ++i) to[i] = V{a[i], b[i], c[i], d[i]};
}
template <class V>
NM_INLINE void transpose(V* r) {
    transpose_quads(r, r);
}

// r[i] lane j = word i of row j, rows `stride` bytes apart.
template <class V>
NM_INLINE void load_transposed(const void* rows, int64_t stride, V* r) {
    for (int l = 0; l < kLanes; ++l) r[l] = load_as<V>(static_cast<const char*>(rows) + l * stride);
    transpose(r);
}

// Lanes as transpose_quads leaves rows of 4 x 4 tiles, in the order of the tiles.
NM_INLINE Uints in_tile_order(Uints x) { return x; }

// Marks the keys that are not among the two largest of their four, ties to the lower index: those that two of the other three beat.
NM_INLINE Flags not_two_of_four(Ints key) {
    const Ints odd = key + Ints{0, -1, 0, -1}, late = key + Ints{0, 0, -1, -1};  // the other has the lower index: it wins ties
    const Flags one = Ints{key[1], key[0], key[3], key[2]} > odd, two = Ints{key[2], key[3], key[0], key[1]} > late;
    const Flags three = Ints{key[3], key[2], key[1], key[0]} > late;
    return (one & two) | (three & (one | two));
}

NM_INLINE void not_two_of_four(const Ints* keys, Flags* dropped) {
    for (int i = 0; i < 4; ++i) dropped[i] = not_two_of_four(keys[i]);
}
using KeyMarks = Flags;
NM_INLINE Ints keys_of(Floats x) { return reinterpret_cast<Ints>(smaller_magnitude(magnitude(x), splat(bits_float(Key<float>::nan)))); }

// ---- 64 elements and 64 bits ----

// Bit i: flags[i] is not 0.
inline uint64_t bits_of(const uint8_t* flags) {
    uint64_t bits = 0;
    for (int i = 0; i < 64; ++i) bits |= uint64_t(flags[i] != 0) << i;
    return bits;
}

// out[i] = w[i] where bit i is set, +0.0 elsewhere.
template <class T>
void pick64(const T* w, uint64_t bits, T* out) {
    for (int i = 0; i < 64; ++i) out[i] = kept_or_zero(w[i], (bits >> i) & 1);
}

// Marks of 64 elements of type T.
template <class T>
struct Marks64 {
    uint64_t word = 0;

    static Marks64 of(uint64_t bits) { return {bits}; }
    void set(int i, Flags marks) { word |= uint64_t(lanes_of(marks)) << (kLanes * i); }
    uint64_t bits() const { return word; }
    int count() const { return __builtin_popcountll(word); }
    // out[i] = whether i has no mark; out[i] = w[i] where it has none, else +0.0; the i-th kLanes without one
    void unmarked(uint8_t* out) const {
        for (int i = 0; i < 64; ++i) out[i] = (~word >> i) & 1;
    }
    void pick_unmarked(const T* w, T* out) const { pick64(w, ~word, out); }
    Flags unmarked(int i) const { return flags_of(~word >> (kLanes * i)); }
};

// The elements of the set bits, one after another; returns where the next go. May write up to 64 in all.
template <class T>
T* gather64(const T* w, uint64_t bits, T* out) {
    for (; bits; bits &= bits - 1) *out++ = w[__builtin_ctzll(bits)];
    return out;
}

// The same where every eight bits have Count set.
constexpr bool kGatherBytes = true;  // faster than gather64 and pack_positions

template <int, class T>
void gather_bytes(const T* w, uint64_t bits, T* out) {
    gather64(w, bits, out);
}

// The inverse: out[i] = the next value where bit i is set, +0.0 elsewhere. Returns the value after them.
template <class T>
const T* scatter64(const T* values, uint64_t bits, T* out) {
    std::memset(static_cast<void*>(out), 0, 64 * sizeof(T));
    for (; bits; bits &= bits - 1) out[__builtin_ctzll(bits)] = *values++;
    return values;
}

}  // namespace
}  // namespace nm
