// Soft thresholds of 64 elements, each with its own, and their products with the weights; arithmetic as in core/threshold.h.
#pragma once

#include "../../core/threshold.h"
#include "select.h"

namespace nm {
namespace {

#if defined(__AVX2__)

// The larger of d and 0; d where it is NaN.
NM_INLINE Floats positive(Floats d) { return maximum(Floats{}, d); }

// Differences of keys in fp32, rounded to nearest even; the sign bit counts for nothing.
template <class T>
NM_INLINE Register difference(Register keys, Register t);

template <>
NM_INLINE Register difference<float>(Register keys, Register t) {
    return Register(positive(Floats(keys) - Floats(t)));
}

// A bf16 is the upper half of an fp32: elements with even and odd numbers are widened where they lie. Rounding in
// integers turns no NaN into a number here: theirs is 0x7fc10000 or 0xffc00000.
template <>
NM_INLINE Register difference<bf16>(Register keys, Register t) {
    const auto rounded = [](Uints a, Uints b) {
        const Uints d = bits_of(positive(float_of(a) - float_of(b)));
        return d + 0x7fffu + ((d >> 16) & 1u);
    };
    const Uints upper = splat(0xffff0000u), k = Uints(keys), s = Uints(t);
    return Register(halves_of(rounded(k << 16, s << 16) >> 16, rounded(k & upper, s & upper)));
}

template <>
NM_INLINE Register difference<fp16>(Register keys, Register t) {
    const auto half = [&](int i) { return positive(widened_half(keys, i) - widened_half(t, i)); };
    const Uints nan = splat(0x7e007e00u);  // the one of core/types.h for all of them
    return smaller16(narrowed_halves(half(0), half(1)), Register(nan));
}

// Keys are magnitudes, so their difference needs no sign; it comes from the weight, but zeros are +0.0. inf - inf is a
// negative NaN in this arithmetic. Inlined, or keys and thresholds would pass through memory.
template <class T>
NM_INLINE void shrink64(const T* w, const Keys64<T>& keys, const Keys64<T>& t, T* out) {
    const Uints sign = splat(sizeof(T) == 4 ? 0x80000000u : 0x80008000u);
    NM_UNROLL_8 for (int i = 0; i < Keys64<T>::kVectors; ++i) {
        const int at = i * Keys64<T>::kEach;
        const Register d = difference<T>(keys.v[i], t.v[i]);
        const Uints x = load_as<Uints>(w + at);
        if constexpr (sizeof(T) == 4) store_as(out + at, only_where(unequal(Floats(d), Floats{}), sign, x, Uints(d)));
        else store_as(out + at, only_where_nonzero16(d, Register(blended(sign, x, Uints(d)))));
    }
}

#else

// The difference is taken between keys, as there: a NaN has the same bits under every instruction set.
template <class T>
void shrink64(const T* w, const Keys64<T>& keys, const Keys64<T>& t, T* out) {
    for (int i = 0; i < 64; ++i) {
        const float d = Key<T>::value(uint32_t(keys.v[i])) - Key<T>::value(uint32_t(t.v[i]));
        out[i] = from_float<T>(d <= 0.0f ? 0.0f : with_sign(d, to_float(w[i])));
    }
}

#endif

// The sums of w s and of s s: element i goes to lane i % 16. A product of two fp32 numbers is exact in fp64, so that a
// fused multiplication rounds as the separate one does.
class DotSums {
  public:
    template <class T>
    void add64(const T* w, const T* s) {
        alignas(64) float x[64], y[64];
        to_floats(w, 64, x);
        to_floats(s, 64, y);
        add64(x, y);
    }
    void add64(const float* w, const float* s) {
        NM_UNROLL_16 for (int i = 0; i < 64 / kLongs; ++i) {
            const Doubles x = load_doubles(w + i * kLongs), y = load_doubles(s + i * kLongs);
            ws_[i % kRegisters] = fused(x, y, ws_[i % kRegisters]);
            ss_[i % kRegisters] = fused(y, y, ss_[i % kRegisters]);
        }
    }
    void lanes(double* ws, double* ss) const {
        std::memcpy(ws, ws_, sizeof ws_);
        std::memcpy(ss, ss_, sizeof ss_);
    }

  private:
    static constexpr int kRegisters = 16 / kLongs;

    Doubles ws_[kRegisters] = {}, ss_[kRegisters] = {};
};

}  // namespace
}  // namespace nm
