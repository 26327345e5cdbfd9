// AdamW of one element, every operation rounded once in fp32, in the written order. M is the n:m mask of the weight
// before the step, t the step counted from 1:
//
//   g = ±grad / scale;  g = g + (λ p) where not M
//   m = (β1 m) + ((1-β1) g);  v = (β2 v) + ((1-β2) (g g))                  (frozen: v stays)
//   D = (√v / √(1-β2^t)) + ε   or, eps_inside,  D = √((v / (1-β2^t)) + ε)
//   u = (m (1/(1-β1^t))) / D;  u = min(max(u, -clamp), clamp);  p = (p (1 - lr wd)) - (lr u)
//
// Loshchilov, Hutter, ICLR 2019, algorithm 2; λ: Zhou et al., ICLR 2021; frozen v: Lu et al., ICML 2023.
#pragma once

#include "types.h"

namespace nm {

// What a step needs besides the element, each computed in fp64 and rounded to fp32 once.
struct AdamW {
    float b1, omb1, b2, omb2, ibc1, bc2, sbc2, eps, wdf, lr, decay, clamp;
    uint32_t t;
    bool frozen, eps_inside, maximize;
};

NM_HD double power(double base, int64_t exponent) {
    double result = 1.0;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1) result = result * base;
        base = base * base;
    }
    return result;
}

NM_HD float root(float x) {
#if defined(__CUDA_ARCH__)
    return __fsqrt_rn(x);
#else
    return __builtin_sqrtf(x);
#endif
}

NM_HD double root(double x) {
#if defined(__CUDA_ARCH__)
    return __dsqrt_rn(x);
#else
    return __builtin_sqrt(x);
#endif
}

// hyper: lr, beta1, beta2, eps, weight_decay, decay, v_step, clamp. A frozen v takes the bias correction of v_step, none if 0.
NM_HD AdamW adamw_scalars(const double* hyper, int64_t t, bool frozen, bool eps_inside, bool maximize) {
    const double lr = hyper[0], beta1 = hyper[1], beta2 = hyper[2];
    const int64_t v_t = frozen ? int64_t(hyper[6]) : t;
    const double bc2 = frozen && v_t == 0 ? 1.0 : 1.0 - power(beta2, v_t);
    AdamW s;
    s.b1 = float(beta1);
    s.omb1 = float(1.0 - beta1);
    s.b2 = float(beta2);
    s.omb2 = float(1.0 - beta2);
    s.ibc1 = float(1.0 / (1.0 - power(beta1, t)));
    s.bc2 = float(bc2);
    s.sbc2 = float(root(bc2));
    s.eps = float(hyper[3]);
    s.wdf = float(1.0 - lr * hyper[4]);
    s.lr = float(lr);
    s.decay = float(hyper[5]);
    s.clamp = float(hyper[7]);
    s.t = uint32_t(t);
    s.frozen = frozen;
    s.eps_inside = eps_inside;
    s.maximize = maximize;
    return s;
}

// F is float, or a register of them (cpu/kernels/simd/simd.h, included before this file); S is AdamW, or has the
// same numbers in a form that F is made of.
template <class F, class S>
NM_HD F adamw_first(const S& s, F m, F g) {
    return (F(s.b1) * m) + (F(s.omb1) * g);
}

template <class F, class S>
NM_HD F adamw_second(const S& s, F v, F g) {
    return (F(s.b2) * v) + (F(s.omb2) * (g * g));
}

// The larger, or a NaN of either.
NM_HD float larger(float a, float b) { return a > b || is_nan(a) ? a : b; }

template <class F, class S>
NM_HD F adamw_denominator(const S& s, F v) {
    return s.eps_inside ? root((v / F(s.bc2)) + F(s.eps)) : (root(v) / F(s.sbc2)) + F(s.eps);
}

template <class F, class S>
NM_HD F adamw_quotient(const S& s, F m, F denominator) {
    return (m * F(s.ibc1)) / denominator;
}

template <class F, class S>
NM_HD F adamw_update(const S& s, F m, F v) {
    return adamw_quotient(s, m, adamw_denominator(s, v));
}

// min(max(u, -bound), bound); NaN stays
NM_HD float clamped(float u, float bound) { return u < -bound ? -bound : u > bound ? bound : u; }

template <class F, class S>
NM_HD F adamw_apply(const S& s, F p, F u) {
    return (p * F(s.wdf)) - (F(s.lr) * u);
}

// States in bf16, rounded stochastically: x away from zero by 16 random bits r, so that the lower half of the result is zero; NaN stays.
// Element j of the k-th param takes word j & 3 of the block (core/philox.h) at counter j >> 2 and offset adamw_stream(t, k): its lower half
// for m, its upper half for v.
NM_HD float rounded_by(float x, uint32_t r) { return is_nan(x) ? x : bits_float((float_bits(x) + r) & 0xffff0000u); }

NM_HD uint64_t adamw_stream(uint32_t t, int64_t k) { return t | uint64_t(k) << 32; }

}  // namespace nm
