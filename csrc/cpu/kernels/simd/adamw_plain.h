// Eight floats as the compiler's own vectors, which it cuts to what the processor has: see adamw_avx512.h.
#pragma once

#include "../../../core/adamw.h"

namespace nm {
namespace {

struct Floats {
    using Four = float __attribute__((vector_size(16)));
    using Bits = int32_t __attribute__((vector_size(16)));
    static constexpr int width = 8;
    Four x[2];

    Floats() = default;
    explicit Floats(float v) : x{{v, v, v, v}, {v, v, v, v}} {}
    static Floats load(const float* from) {
        Floats r;
        memcpy(&r, from, sizeof r);
        return r;
    }
    void store(float* to) const { memcpy(to, this, sizeof *this); }
};

// f of each half
template <class F>
Floats by_four(const F& f) {
    Floats r;
    r.x[0] = f(0);
    r.x[1] = f(1);
    return r;
}

inline Floats::Four select(Floats::Bits mask, Floats::Four yes, Floats::Four no) {
    return Floats::Four((Floats::Bits(yes) & mask) | (Floats::Bits(no) & ~mask));
}

inline Floats operator+(const Floats& a, const Floats& b) {
    return by_four([&](int i) { return a.x[i] + b.x[i]; });
}
inline Floats operator-(const Floats& a, const Floats& b) {
    return by_four([&](int i) { return a.x[i] - b.x[i]; });
}
inline Floats operator*(const Floats& a, const Floats& b) {
    return by_four([&](int i) { return a.x[i] * b.x[i]; });
}
inline Floats operator/(const Floats& a, const Floats& b) {
    return by_four([&](int i) { return a.x[i] / b.x[i]; });
}
inline Floats operator-(const Floats& a) {
    return by_four([&](int i) { return -a.x[i]; });
}
inline Floats root(const Floats& a) {
    return by_four([&](int i) {
        const Floats::Four x = a.x[i];
        return Floats::Four{nm::root(x[0]), nm::root(x[1]), nm::root(x[2]), nm::root(x[3])};
    });
}
inline Floats magnitude(const Floats& a) {
    return by_four([&](int i) { return Floats::Four(Floats::Bits(a.x[i]) & 0x7fffffff); });
}
inline Floats clamped(const Floats& a, const Floats& bound) {
    return by_four([&](int i) {
        const Floats::Four low = select(a.x[i] < -bound.x[i], -bound.x[i], a.x[i]);
        return select(low > bound.x[i], bound.x[i], low);
    });
}
inline Floats larger(const Floats& a, const Floats& b) {
    return by_four([&](int i) { return select((a.x[i] > b.x[i]) | (a.x[i] != a.x[i]), a.x[i], b.x[i]); });
}

// The larger of magnitudes, every NaN above all: the order of their bits.
inline Floats higher(const Floats& a, const Floats& b) {
    return by_four([&](int i) { return select(Floats::Bits(a.x[i]) > Floats::Bits(b.x[i]), a.x[i], b.x[i]); });
}

inline Floats::Bits lane_mask(uint32_t lanes, int half) {
    const int32_t all = int32_t(lanes >> (4 * half));
    const Floats::Bits bit = {1, 2, 4, 8}, given = {all, all, all, all};
    return (given & bit) == bit;
}

inline Floats choose(uint32_t lanes, const Floats& yes, const Floats& no) {
    return by_four([&](int i) { return select(lane_mask(lanes, i), yes.x[i], no.x[i]); });
}
inline Floats kept(uint32_t lanes, const Floats& a) {
    return by_four([&](int i) { return Floats::Four(Floats::Bits(a.x[i]) & lane_mask(lanes, i)); });
}

inline uint32_t equal(const Floats& a, const Floats& b) {
    const Floats::Bits low = {1, 2, 4, 8}, high = {16, 32, 64, 128};
    const Floats::Bits found = ((a.x[0] == b.x[0]) & low) | ((a.x[1] == b.x[1]) & high);
    return uint32_t(found[0] | found[1] | found[2] | found[3]);
}

struct Doubles {
    using Two = double __attribute__((vector_size(16)));
    Two x[4] = {};

    void store(double* to) const { memcpy(to, this, sizeof *this); }
};

template <class F>
void by_eight(const Floats& a, const F& f) {
    Doubles d;
    for (int i = 0; i < 4; ++i) d.x[i] = Doubles::Two{double(a.x[i / 2][i % 2 * 2]), double(a.x[i / 2][i % 2 * 2 + 1])};
    f(d);
}

inline void add(Doubles& sum, const Doubles& a) {
    for (int i = 0; i < 4; ++i) sum.x[i] += a.x[i];
}

// The logarithm of a product: the mantissas' product, and the sum of the exponents.
struct Product {
    double mantissas[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    int64_t exponents[8] = {};

    // times max(a, smallest), a not negative
    void times(const Doubles& a, double smallest) {
        double x[8];
        a.store(x);
        for (int i = 0; i < 8; ++i) {
            const double factor = x[i] > smallest ? x[i] : smallest;
            uint64_t bits;
            memcpy(&bits, &factor, sizeof bits);
            exponents[i] += int64_t(bits >> 52);
            bits = (bits & ((uint64_t(1) << 52) - 1)) | uint64_t(1023) << 52;
            double mantissa;
            memcpy(&mantissa, &bits, sizeof bits);
            mantissas[i] *= mantissa;
        }
    }

    void store(double* mantissa, int64_t* exponent) const {
        memcpy(mantissa, mantissas, sizeof mantissas);
        memcpy(exponent, exponents, sizeof exponents);
    }
};

}  // namespace
}  // namespace nm
