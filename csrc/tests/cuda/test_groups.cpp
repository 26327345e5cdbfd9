// mask, prune, soft_threshold.
#include "../../core/threshold.h"
#include "emulated.h"

using namespace nm_test;

namespace {

struct Outputs {
    Outputs(int64_t numel, int size, bool wide) : mask(place(numel, 1, wide)), prune(place(numel, size, wide)), shrunk(place(numel, size, wide)) {}
    Buffer mask, prune, shrunk;
};

void by_loops(const Buffer& w, int dtype, int64_t groups, NM p, Outputs& out) {
    nm::by_dtype(dtype, [&](auto tag) {
        using T = decltype(tag);
        const T* x = w.as<T>();
        for (int64_t first = 0; first < groups * p.m; first += p.m) {
            uint32_t keys[nm::kMaxM];
            for (int i = 0; i < p.m; ++i) keys[i] = nm::Key<T>::of(x[first + i]);
            uint8_t* keep = out.mask.as<uint8_t>() + first;
            nm::mask_group(keys, p.n, p.m, nm::Key<T>::bits, keep);
            const float t = p.n < p.m ? nm::Key<T>::value(nm::threshold_key(keys, p.n, p.m, nm::Key<T>::bits)) : 0.0f;
            for (int i = 0; i < p.m; ++i) {
                out.prune.as<T>()[first + i] = nm::kept_or_zero(x[first + i], keep[i]);
                out.shrunk.as<T>()[first + i] = nm::shrink(x[first + i], t);
            }
        }
    });
}

TEST(emulated_group_kernels_agree_with_loops) {
    each_placed_case([](NM p, int dtype, int64_t groups, bool wide) {
        const int64_t numel = groups * p.m;
        const Buffer w = placed(numbers(numel, dtype, uint64_t(numel + p.n), groups % 2 == 1), wide, size_of(dtype));
        Outputs out(numel, size_of(dtype), wide), expected(numel, size_of(dtype), wide);
        by_loops(w, dtype, groups, p, expected);
        nm::cuda::mask(w.data(), dtype, numel, p.n, p.m, out.mask.as<uint8_t>(), kQueue);
        nm::cuda::prune(w.data(), dtype, numel, p.n, p.m, out.prune.data(), kQueue);
        nm::cuda::soft_threshold(w.data(), dtype, numel, p.n, p.m, out.shrunk.data(), kQueue);
        const std::string what = label(p, dtype, wide ? "wide" : "") + ", groups " + std::to_string(groups);
        CHECK(out.mask == expected.mask) << "mask " << what;
        CHECK(out.prune == expected.prune) << "prune " << what;
        CHECK(same_numbers(out.shrunk, expected.shrunk, dtype)) << "soft_threshold " << what;
    });
}

}  // namespace
