// soft_threshold_scale and transposable_mask.
#include <cmath>

#include "../../core/registers.h"
#include "../../core/threshold.h"
#include "../../core/transposable.h"
#include "emulated.h"

using namespace nm_test;

namespace {

// <w, S> / <S, S> in one loop.
template <class T>
double scale_by_loops(const T* w, int64_t groups, NM p) {
    double ws = 0.0, ss = 0.0;
    for (int64_t first = 0; first < groups * p.m; first += p.m) {
        uint32_t keys[nm::kMaxM];
        for (int i = 0; i < p.m; ++i) keys[i] = nm::Key<T>::of(w[first + i]);
        const float t = p.n < p.m ? nm::Key<T>::value(nm::threshold_key(keys, p.n, p.m, nm::Key<T>::bits)) : 0.0f;
        for (int i = 0; i < p.m; ++i) {
            const double x = nm::to_float(w[first + i]), s = nm::to_float(nm::shrink(w[first + i], t));
            ws += x * s;
            ss += s * s;
        }
    }
    return ss == 0.0 ? 0.0 : ws / ss;
}

TEST(emulated_scale_agrees_with_loops) {
    each_placed_case([](NM p, int dtype, int64_t groups, bool wide) {
        const int64_t numel = groups * p.m;
        const Buffer w = placed(numbers(numel, dtype, uint64_t(numel + p.n), false), wide, size_of(dtype));
        Buffer scale = place(1, 4, wide), sums(2 * nm::cuda::soft_threshold_chunks(numel, p.n, p.m), 8, 0);
        nm::cuda::soft_threshold_scale(w.data(), dtype, numel, p.n, p.m, sums.data(), scale.as<float>(), kQueue);
        double expected = 0.0;
        nm::by_dtype(dtype, [&](auto tag) { expected = scale_by_loops(w.as<decltype(tag)>(), groups, p); });
        CHECK(std::abs(double(*scale.as<float>()) - expected) <= 1e-6 * std::abs(expected))
            << label(p, dtype, wide ? "wide" : "") << ", groups " << groups << ": " << *scale.as<float>() << ", should be " << expected;
    });
}

TEST(emulated_transposable_masks_agree_with_loops) {
    for (int dtype : kDtypes) {
        for (Size size : {Size{1, 1}, Size{3, 1}, Size{70, 2}, Size{1, 3}, Size{2, 257}, Size{1, 518}}) {
            for (bool wide : {false, true}) {
                const int64_t rows = 4 * size.rows, cols = 4 * size.groups;
                const Buffer w = placed(numbers(rows * cols, dtype, uint64_t(cols), true), wide, size_of(dtype));
                Buffer out = place(rows * cols, 1, wide), expected = place(rows * cols, 1, wide);
                nm::cuda::transposable_mask(w.data(), dtype, rows, cols, out.as<uint8_t>(), kQueue);
                for (int64_t at = 0; at < rows * cols; ++at) {
                    const int64_t row = at / cols, col = at % cols;
                    float tile[16];
                    nm::by_dtype(dtype, [&](auto tag) {
                        const auto* corner = w.as<decltype(tag)>() + row / 4 * 4 * cols + col / 4 * 4;
                        for (int i = 0; i < 16; ++i) tile[i] = nm::to_float(corner[i / 4 * cols + i % 4]);
                    });
                    expected.as<uint8_t>()[at] = uint8_t(nm::transposable_2_4(tile) >> (4 * (row % 4) + col % 4) & 1u);
                }
                CHECK(out == expected) << size.rows << " x " << size.groups << " tiles, dtype " << dtype << (wide ? ", wide" : "");
            }
        }
    }
}

// Groups in registers give what the loops give.
template <int N, int M, int Bits>
void check_registers(const uint32_t* keys, const std::string& what) {
    uint8_t keep[M], expected[M];
    nm::mask_group<N, M, Bits>(keys, keep);
    nm::mask_group(keys, N, M, Bits, expected);
    CHECK(std::memcmp(keep, expected, M) == 0) << "mask " << N << ":" << M << what;
    CHECK((nm::threshold_key<N, M>(keys)) == nm::threshold_key(keys, N, M, Bits)) << "threshold " << N << ":" << M << what;
}

template <int Bits>
void check_registers(const uint32_t* keys, const std::string& what) {
    check_registers<2, 4, Bits>(keys, what);
    check_registers<1, 4, Bits>(keys, what);
    check_registers<3, 4, Bits>(keys, what);
    check_registers<2, 8, Bits>(keys, what);
    check_registers<1, 8, Bits>(keys, what);
    check_registers<1, 16, Bits>(keys, what);
}

TEST(groups_in_registers_agree) {
    for (int64_t at = 0; at < 3000; ++at) {
        const Buffer w = numbers(16, nm::kFloat32, uint64_t(at), at % 2 == 0), h = numbers(16, nm::kBFloat16, uint64_t(at), at % 2 == 0);
        uint32_t keys[16], short_keys[16];
        for (int i = 0; i < 16; ++i) {
            keys[i] = nm::Key<float>::of(w.as<float>()[i]) >> (at % 5 * 6);  // the fewer bits, the more ties
            short_keys[i] = nm::Key<nm::bf16>::of(h.as<nm::bf16>()[i]) >> (at % 5 * 3);
        }
        check_registers<31>(keys, " long, " + std::to_string(at));
        check_registers<15>(short_keys, " short, " + std::to_string(at));
    }
}

}  // namespace
