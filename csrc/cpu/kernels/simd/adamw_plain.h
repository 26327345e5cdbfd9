// Sixteen floats as the compiler's own vectors, which it cuts to what the processor has: see adamw_avx512.h.
#pragma once

#include "../../../core/adamw.h"
#include "../select.h"

namespace nm {
namespace {

// A number for every lane.
struct Same {
    float x;

    explicit Same(float v) : x(v) {}
};

struct Floats {
    using Four = float __attribute__((vector_size(16)));
    using Bits = int32_t __attribute__((vector_size(16)));
    static constexpr int width = 16, quarters = 4;
    Four x[quarters];

    Floats() = default;
    explicit Floats(Same v) : Floats(v.x) {}
    explicit Floats(float v) {
        for (Four& four : x) four = Four{v, v, v, v};
    }
    static Floats load(const float* from) {
        Floats r;
        memcpy(&r, from, sizeof r);
        return r;
    }
    void store(float* to) const { memcpy(to, this, sizeof *this); }
};

// f of each quarter
template <class F>
Floats by_four(const F& f) {
    Floats r;
    for (int i = 0; i < Floats::quarters; ++i) r.x[i] = f(i);
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

// One truth value per lane, all bits of it.
struct Flags {
    using Bits = Floats::Bits;
    Bits x[Floats::quarters];

    static Flags of(uint64_t bits) {
        const Bits bit = {1, 2, 4, 8};
        Flags r;
        for (int i = 0; i < Floats::quarters; ++i) {
            const int32_t four = int32_t(bits >> (4 * i));
            r.x[i] = (Bits{four, four, four, four} & bit) == bit;
        }
        return r;
    }
    static Flags of(const Kept64<float>& kept, int i) { return of(kept.word >> (Floats::width * i)); }
};

// f of each quarter
template <class F>
Flags flags_by_four(const F& f) {
    Flags r;
    for (int i = 0; i < Floats::quarters; ++i) r.x[i] = f(i);
    return r;
}

inline Flags operator~(const Flags& a) {
    return flags_by_four([&](int i) { return ~a.x[i]; });
}
inline Flags operator&(const Flags& a, const Flags& b) {
    return flags_by_four([&](int i) { return a.x[i] & b.x[i]; });
}
inline Flags operator^(const Flags& a, const Flags& b) {
    return flags_by_four([&](int i) { return a.x[i] ^ b.x[i]; });
}
inline Flags equal(const Floats& a, const Floats& b) {
    return flags_by_four([&](int i) { return a.x[i] == b.x[i]; });
}
inline Flags unequal(const Floats& a, const Floats& b) {
    return flags_by_four([&](int i) { return a.x[i] != b.x[i]; });
}

inline Floats choose(const Flags& lanes, const Floats& yes, const Floats& no) {
    return by_four([&](int i) { return select(lanes.x[i], yes.x[i], no.x[i]); });
}
inline Floats kept(const Flags& lanes, const Floats& a) {
    return by_four([&](int i) { return Floats::Four(Floats::Bits(a.x[i]) & lanes.x[i]); });
}
inline Floats dropped(const Flags& lanes, const Floats& a) { return kept(~lanes, a); }

// Flags of lanes beaten at least twice, inverted: see adamw_avx512.h.
inline Flags::Bits two_of_four(Floats::Four w) {
    using Bits = Flags::Bits;
    constexpr int32_t n = int32_t(Key<float>::nan);
    const Bits nan = {n, n, n, n}, magnitude = Bits(w) & 0x7fffffff, high = magnitude > nan;
    const Bits key = (nan & high) | (magnitude & ~high);
    const Bits odd = key + Bits{0, -1, 0, -1}, late = key + Bits{0, 0, -1, -1};
    const Bits one = Bits{key[1], key[0], key[3], key[2]} > odd;
    const Bits two = Bits{key[2], key[3], key[0], key[1]} > late;
    const Bits three = Bits{key[3], key[2], key[1], key[0]} > late;
    return ~((one & two) | (three & (one | two)));
}
inline Flags two_of_four(const Floats& w) {
    return flags_by_four([&](int i) { return two_of_four(w.x[i]); });
}

// How many flags were set, in each lane.
struct Count {
    Floats::Bits x = {};

    void add(const Flags& a) { x -= (a.x[0] + a.x[1]) + (a.x[2] + a.x[3]); }
    int64_t total() const { return int64_t(x[0]) + x[1] + x[2] + x[3]; }
};

struct Doubles {
    using Two = double __attribute__((vector_size(16)));
    Two x[4] = {};

    void store(double* to) const { memcpy(to, this, sizeof *this); }
};

inline Doubles widened(const Floats::Four& low, const Floats::Four& high) {
    using Two = Doubles::Two;
    return {{Two{low[0], low[1]}, Two{low[2], low[3]}, Two{high[0], high[1]}, Two{high[2], high[3]}}};
}

template <class F>
void by_eight(const Floats& a, const F& f) {
    f(widened(a.x[0], a.x[1]));
    f(widened(a.x[2], a.x[3]));
}

inline Doubles folded(const Floats& a) { return widened(a.x[0] + a.x[2], a.x[1] + a.x[3]); }

// sum + scale a, rounded once where scale is a power of two: fp64 has more than twice the bits, its own rounding changes nothing.
inline Floats add_scaled(const Floats& sum, float scale, const Floats& a) {
    return by_four([&](int i) {
        Floats::Four r;
        for (int k = 0; k < 4; ++k) r[k] = float(double(sum.x[i][k]) + double(scale) * double(a.x[i][k]));
        return r;
    });
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
