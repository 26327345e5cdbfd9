// Eight floats as an array: the plain form of adamw_avx512.h. Loops of eight are what compilers turn into vectors.
#pragma once

#include "../../../core/adamw.h"

namespace nm {
namespace {

struct Floats {
    static constexpr int width = 8;
    float x[8];

    Floats() = default;
    explicit Floats(float v) {
        for (float& one : x) one = v;
    }
    static Floats load(const float* from) {
        return each([&](int i) { return from[i]; });
    }
    void store(float* to) const {
        for (int i = 0; i < 8; ++i) to[i] = x[i];
    }

    template <class F>
    static Floats each(const F& f) {
        Floats r;
        for (int i = 0; i < 8; ++i) r.x[i] = f(i);
        return r;
    }
};

inline Floats operator+(const Floats& a, const Floats& b) {
    return Floats::each([&](int i) { return a.x[i] + b.x[i]; });
}
inline Floats operator-(const Floats& a, const Floats& b) {
    return Floats::each([&](int i) { return a.x[i] - b.x[i]; });
}
inline Floats operator*(const Floats& a, const Floats& b) {
    return Floats::each([&](int i) { return a.x[i] * b.x[i]; });
}
inline Floats operator/(const Floats& a, const Floats& b) {
    return Floats::each([&](int i) { return a.x[i] / b.x[i]; });
}
inline Floats operator-(const Floats& a) {
    return Floats::each([&](int i) { return -a.x[i]; });
}
inline Floats root(const Floats& a) {
    return Floats::each([&](int i) { return nm::root(a.x[i]); });
}
inline Floats magnitude(const Floats& a) {
    return Floats::each([&](int i) { return nm::magnitude(a.x[i]); });
}
inline Floats clamped(const Floats& a, const Floats& bound) {
    return Floats::each([&](int i) { return nm::clamped(a.x[i], bound.x[i]); });
}
inline Floats larger(const Floats& a, const Floats& b) {
    return Floats::each([&](int i) { return nm::larger(a.x[i], b.x[i]); });
}

// The larger of magnitudes, every NaN above all: the order of their bits.
inline Floats higher(const Floats& a, const Floats& b) {
    return Floats::each([&](int i) { return float_bits(a.x[i]) > float_bits(b.x[i]) ? a.x[i] : b.x[i]; });
}

inline Floats choose(uint32_t lanes, const Floats& yes, const Floats& no) {
    return Floats::each([&](int i) {
        const uint32_t all = 0u - ((lanes >> i) & 1u);
        return bits_float((float_bits(yes.x[i]) & all) | (float_bits(no.x[i]) & ~all));
    });
}

inline Floats kept(uint32_t lanes, const Floats& a) {
    return Floats::each([&](int i) { return kept_or_zero(a.x[i], (lanes >> i) & 1u); });
}

inline uint32_t equal(const Floats& a, const Floats& b) {
    uint32_t lanes = 0;
    for (int i = 0; i < 8; ++i) lanes |= uint32_t(a.x[i] == b.x[i]) << i;
    return lanes;
}

struct Doubles {
    double x[8] = {};

    void store(double* to) const {
        for (int i = 0; i < 8; ++i) to[i] = x[i];
    }
};

template <class F>
void by_eight(const Floats& a, const F& f) {
    Doubles d;
    for (int i = 0; i < 8; ++i) d.x[i] = double(a.x[i]);
    f(d);
}

inline void add(Doubles& sum, const Doubles& a) {
    for (int i = 0; i < 8; ++i) sum.x[i] += a.x[i];
}

// The logarithm of a product: the mantissas' product, and the sum of the exponents.
struct Product {
    double mantissas[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    int64_t exponents[8] = {};

    // times max(a, smallest), a not negative
    void times(const Doubles& a, double smallest) {
        for (int i = 0; i < 8; ++i) {
            const double x = a.x[i] > smallest ? a.x[i] : smallest;
            uint64_t bits;
            memcpy(&bits, &x, sizeof bits);
            exponents[i] += int64_t(bits >> 52);
            bits = (bits & ((uint64_t(1) << 52) - 1)) | uint64_t(1023) << 52;
            double mantissa;
            memcpy(&mantissa, &bits, sizeof bits);
            mantissas[i] *= mantissa;
        }
    }

    void store(double* mantissa, int64_t* exponent) const {
        for (int i = 0; i < 8; ++i) {
            mantissa[i] = mantissas[i];
            exponent[i] = exponents[i];
        }
    }
};

}  // namespace
}  // namespace nm
