// From the run-time dtype code and N:M of a call to a template instance.
#pragma once

#include <stdexcept>
#include <string>

#include "types.h"

namespace nm {

enum DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };

// f(T{}) with T = float, bf16 or fp16.
template <class F>
void by_dtype(int dtype, const F& f) {
    switch (dtype) {
        case kFloat32: return f(float{});
        case kBFloat16: return f(bf16{});
        case kFloat16: return f(fp16{});
        default: throw std::invalid_argument("dtype code " + std::to_string(dtype) + " is not float32, bfloat16 or float16");
    }
}

// N and M as compile-time constants: loops unroll, branches on them disappear.
template <int N, int M>
struct Fixed {
    static constexpr int n = N, m = M, capacity = M;
};

struct Any {
    int n, m;
    static constexpr int capacity = kMaxM;
};

inline void check_pattern(int n, int m) {
    if (n < 1 || n > m || m > kMaxM) {
        throw std::invalid_argument("pattern " + std::to_string(n) + ":" + std::to_string(m) + " is outside 1 <= N <= M <= 256");
    }
}

// Calls f(pattern), with the common patterns specialised.
template <class F>
void by_pattern(int n, int m, const F& f) {
    check_pattern(n, m);
    if (n == 2 && m == 4) return f(Fixed<2, 4>{});
    if (n == 1 && m == 4) return f(Fixed<1, 4>{});
    if (n == 2 && m == 8) return f(Fixed<2, 8>{});
    if (n == 1 && m == 8) return f(Fixed<1, 8>{});
    if (n == 1 && m == 16) return f(Fixed<1, 16>{});
    return f(Any{n, m});
}

template <class F>
void by_dtype_and_pattern(int dtype, int n, int m, const F& f) {
    by_dtype(dtype, [&](auto element) { by_pattern(n, m, [&](auto pattern) { f(element, pattern); }); });
}

}  // namespace nm
