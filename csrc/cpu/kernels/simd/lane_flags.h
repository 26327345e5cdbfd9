// Flags that are vectors of 0 and ~0, for avx2.h and portable.h: the compiler's operators do most.
#pragma once

#include "simd.h"

namespace nm {
namespace {

NM_INLINE Flags nonzero(Uints x) { return x != 0; }
NM_INLINE Flags common(Uints a, Uints b) { return (a & b) != 0; }
NM_INLINE Flags zero(Uints x) { return x == 0; }
NM_INLINE Flags equal(Uints a, Uints b) { return a == b; }
NM_INLINE Flags equal(Floats a, Floats b) { return a == b; }
NM_INLINE Flags unequal(Floats a, Floats b) { return a != b; }
NM_INLINE Flags at_least(Floats a, Floats b) { return a >= b; }
NM_INLINE Flags below(Floats a, Floats b) { return a < b; }
NM_INLINE Flags below(Uints a, Uints b) { return a < b; }
NM_INLINE Flags either(Flags a, Flags b) { return a | b; }
NM_INLINE Flags both(Flags a, Flags b) { return a & b; }
NM_INLINE Flags without(Flags a, Flags b) { return a & ~b; }
NM_INLINE Flags differing(Flags a, Flags b) { return a ^ b; }
NM_INLINE Flags opposite(Flags a) { return ~a; }
NM_INLINE Flags none() { return Flags{}; }
NM_INLINE Floats only_where(Flags b, Floats x) { return float_of(bits_of(x) & reinterpret_cast<Uints>(b)); }
NM_INLINE Floats only_where_not(Flags b, Floats x) { return float_of(bits_of(x) & ~reinterpret_cast<Uints>(b)); }
NM_INLINE Uints one_less(Flags b, Uints x) { return x + reinterpret_cast<Uints>(b); }
NM_INLINE Uints one_more(Flags b, Uints x) { return x - reinterpret_cast<Uints>(b); }

// Bit by bit: where the first has ones the second, elsewhere the third.
NM_INLINE Uints blended(Uints ones, Uints yes, Uints no) { return (ones & yes) | (~ones & no); }

NM_INLINE Uints only_where(Flags b, Uints ones, Uints yes, Uints no) { return blended(ones, yes, no) & reinterpret_cast<Uints>(b); }

NM_INLINE Longs xor3(Longs a, Longs b, Longs c) { return a ^ b ^ c; }
NM_INLINE Uints truncated(Floats x) { return reinterpret_cast<Uints>(__builtin_convertvector(x, Ints)); }

}  // namespace
}  // namespace nm
