// The patterns that kernels are specialised for; all others take n at run time, and M outside the list altogether.
#pragma once

#include <type_traits>

namespace nm {
namespace {

template <int Value>
using Int = std::integral_constant<int, Value>;

// fixed(Int<N>, Int<M>) for a common pattern, some(Int<M>) for any other n with M dividing 64, else `none`.
template <class Fn, class Fixed, class Some>
Fn* for_pattern(int n, int m, const Fixed& fixed, const Some& some, Fn* none) {
    if (n == 2 && m == 4) return fixed(Int<2>(), Int<4>());
    if (n == 1 && m == 4) return fixed(Int<1>(), Int<4>());
    if (n == 2 && m == 8) return fixed(Int<2>(), Int<8>());
    if (n == 1 && m == 8) return fixed(Int<1>(), Int<8>());
    if (n == 4 && m == 8) return fixed(Int<4>(), Int<8>());
    if (n == 1 && m == 16) return fixed(Int<1>(), Int<16>());
    if (n == 1 && m == 32) return fixed(Int<1>(), Int<32>());
    switch (m) {
        case 1: return some(Int<1>());
        case 2: return some(Int<2>());
        case 4: return some(Int<4>());
        case 8: return some(Int<8>());
        case 16: return some(Int<16>());
        case 32: return some(Int<32>());
        case 64: return some(Int<64>());
        default: return none;
    }
}

}  // namespace
}  // namespace nm
