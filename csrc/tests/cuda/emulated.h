// What the tests of CUDA kernels share. They run in the emulator under the address and undefined-behaviour sanitizers
// (make sanitize), so that an index past a tensor or past shared memory, a misaligned access or an output that nobody wrote
// is found. What is right is settled by python_tests against the reference; here each kernel is compared with plain loops
// over csrc/core.
//
// To add a family: a file test_<family>.cpp beside this one, which CMake finds by itself (touch nothing else).
//
//   #include "emulated.h"
//   using namespace nm_test;
//   TEST(family_does_this) {
//       each_placed_case([](NM p, int dtype, int64_t groups, bool wide) {
//           const Buffer w = placed(numbers(groups * p.m, dtype, 1, true), wide, size_of(dtype));  // ends where the tensor ends
//           Buffer out = place(groups * p.m, size_of(dtype), wide), expected(groups * p.m, size_of(dtype));
//           nm::cuda::family(w.data(), dtype, groups * p.m, p.n, p.m, out.data(), kQueue);
//           ... a plain loop fills `expected` ...
//           CHECK(out == expected) << label(p, dtype, "");
//       });
//   }
//
// Build and run one of them:
//   cmake -S csrc -B build/emulator -G Ninja -DNMKERNELS_SANITIZE=address,undefined -DNMKERNELS_EMULATOR=ON -DNMKERNELS_CUDA=off
//   cmake --build build/emulator --target emulator_tests && build/emulator/emulator_tests family
#pragma once

#include "../../core/dispatch.h"
#include "../../cuda/kernels.h"
#include "../check.h"

namespace nm_test {

const nm::cuda::Queue kQueue(0, nullptr);

// Memory for a tensor: at a multiple of 16 bytes, as torch allocates, or where only an element's alignment holds, as a
// view may begin. Both end with the tensor. Filled with 0x5a, which no kernel should leave.
inline Buffer place(int64_t count, int size, bool wide) { return Buffer(count, size, wide ? 0 : size); }

// The same bytes in such a place.
inline Buffer placed(const Buffer& from, bool wide, int size) {
    Buffer to(int64_t(from.bytes()) / size, size, wide ? 0 : size);
    std::memcpy(to.data(), from.data(), from.bytes());
    return to;
}

// Numbers of groups: fewer than a thread has, than a warp has, ragged at the end of a block, several blocks.
inline std::vector<int64_t> group_counts() { return {1, 2, 3, 7, 31, 513, 1027}; }

// f(pattern, dtype, groups, wide)
template <class F>
void each_placed_case(const F& f) {
    for (NM p : patterns()) {
        for (int dtype : kDtypes) {
            for (int64_t groups : group_counts()) {
                if (groups * p.m > 20000) continue;
                for (bool wide : {false, true}) f(p, dtype, groups, wide);
            }
        }
    }
}

}  // namespace nm_test
