// Products of a small batch against sums in double, with operands that end where their tensors end, and with indices that
// are damaged, of which nothing is asked but to stay inside.
#include <cmath>

#include "../../core/bitpack.h"
#include "emulated.h"

using namespace nm_test;

namespace {

struct Operands {
    Operands(NM p, int dtype, int64_t tokens, int64_t rows, int64_t cols, bool wide)
        : kept((cols + p.m - 1) / p.m * p.n),
          index_row(nm::index_bytes(kept, nm::index_bits(p.m))),
          x(placed(numbers(tokens * cols, dtype, 9, false), wide, size_of(dtype))),
          values(placed(numbers(rows * kept, dtype, 7, false), wide, size_of(dtype))),
          bias(placed(numbers(rows, dtype, 10, false), wide, size_of(dtype))),
          indices(place(rows * index_row, 1, wide)) {}

    int64_t kept, index_row;
    Buffer x, values, bias, indices;
};

// Ascending places that differ from group to group, or any bits.
void fill_indices(Operands& o, NM p, int64_t rows, bool damaged) {
    auto* bytes = o.indices.as<uint8_t>();
    uint32_t state = 12345;
    const auto next = [&] { return (state = state * 1664525u + 1013904223u) >> 16; };
    if (damaged) {
        for (size_t i = 0; i < o.indices.bytes(); ++i) bytes[i] = uint8_t(next());
        return;
    }
    std::memset(bytes, 0, o.indices.bytes());
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t k = 0; k < o.kept; k += p.n) {
            int place = -1;
            for (int i = 0; i < p.n; ++i) {
                const int room = p.m - p.n + i - place;  // places up to the last that leaves one for each value to come
                place += 1 + int(next() % uint32_t(room));
                nm::put_index(bytes + row * o.index_row, k + i, nm::index_bits(p.m), place);
            }
        }
    }
}

double tolerance(int dtype) { return dtype == nm::kFloat32 ? 2e-5 : dtype == nm::kBFloat16 ? 2e-2 : 3e-3; }

// y next to the sums in double precision; weight(row, k) is the value at place k of a row.
template <class W>
void compare(const Operands& o, const Buffer& y, NM p, int dtype, int64_t tokens, int64_t rows, int64_t cols, const std::string& what, const W& weight) {
    for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t row = 0; row < rows; ++row) {
            double sum = number(o.bias, dtype, row), size = std::fabs(sum);
            for (int64_t k = 0; k < o.kept; ++k) {
                const int64_t column = k / p.n * p.m + nm::get_index(o.indices.as<uint8_t>() + row * o.index_row, k, nm::index_bits(p.m));
                if (column >= cols) continue;
                const double term = number(o.x, dtype, t * cols + column) * weight(row, k);
                sum += term;
                size += std::fabs(term);
            }
            CHECK(std::fabs(number(y, dtype, t * rows + row) - sum) <= tolerance(dtype) * (size + 1e-3))
                << label(p, dtype, what) << " " << tokens << "x" << rows << "x" << cols << " at " << t << ", " << row;
        }
    }
}

using Kernel = void (*)(const nm::cuda::LinearCall&, const nm::cuda::Queue&);
using Splits = int (*)(int, int64_t, int64_t, int64_t, int, int, int);

void one(Kernel kernel, Splits splits, NM p, int dtype, int64_t tokens, int64_t rows, int64_t cols, int processors, bool always_wide = false) {
    for (bool wide : {true, false}) {
        if (always_wide && !wide) continue;
        Operands o(p, dtype, tokens, rows, cols, wide);
        for (bool damaged : {true, false}) {
            fill_indices(o, p, rows, damaged);
            const int parts = splits(dtype, tokens, rows, cols, p.n, p.m, processors);
            const Buffer y = place(tokens * rows, size_of(dtype), wide), sums = place(parts > 1 ? parts * tokens * rows : 0, 4, true);
            const nm::cuda::LinearCall call{o.x.data(), o.values.data(), o.indices.as<uint8_t>(), o.bias.data(), y.data(), sums.as<float>(), dtype, 0,
                                            tokens, rows, cols, p.n, p.m, parts, processors};
            kernel(call, kQueue);
            if (damaged) continue;
            compare(o, y, p, dtype, tokens, rows, cols, wide ? "wide" : "", [&](int64_t row, int64_t k) { return number(o.values, dtype, row * o.kept + k); });
        }
    }
}

TEST(emulated_products_of_few_tokens) {
    for (NM p : {NM{2, 4}, NM{1, 4}, NM{2, 8}, NM{1, 8}, NM{1, 16}, NM{1, 32}, NM{3, 5}, NM{100, 256}}) {
        for (int dtype : kDtypes) {
            for (int64_t tokens : {1, 2, 3, 4}) {
                for (int64_t groups : {1, 8, 40, 72}) one(nm::cuda::linear_few, nm::cuda::linear_few_splits, p, dtype, tokens, 17, groups * p.m, 1);
                one(nm::cuda::linear_few, nm::cuda::linear_few_splits, p, dtype, tokens, 1, 24 * p.m - 1, 1);
            }
        }
    }
}

template <int Kilobytes>
int mma_splits(int dtype, int64_t tokens, int64_t rows, int64_t cols, int n, int m, int processors) {
    return nm::cuda::linear_mma_splits(dtype, tokens, rows, cols, n, m, processors, Kilobytes << 10);
}

// Operands of the tensor cores begin at multiples of 16 bytes: only the results may not.
TEST(emulated_products_on_tensor_cores) {
    for (NM p : {NM{2, 4}, NM{1, 4}, NM{2, 8}, NM{1, 8}, NM{1, 16}}) {
        for (int64_t tokens : {1, 8, 11, 16}) {
            const int dtype = tokens == 11 ? nm::kFloat16 : nm::kBFloat16;
            one(nm::cuda::linear_mma, mma_splits<163>, p, dtype, tokens, 33, 8 * p.m, 1, true);
            one(nm::cuda::linear_mma, mma_splits<163>, p, dtype, tokens, 1, 136 * p.m, 64, true);
        }
    }
    one(nm::cuda::linear_mma, mma_splits<163>, {2, 4}, nm::kBFloat16, 16, 20, 8256, 64, true);
    one(nm::cuda::linear_mma, mma_splits<99>, {2, 4}, nm::kBFloat16, 12, 320, 4160, 2, true);
}

TEST(emulated_products_of_any_pattern_on_tensor_cores) {
    for (NM p : {NM{4, 8}, NM{1, 2}, NM{3, 5}, NM{1, 32}, NM{100, 256}, NM{256, 256}}) {
        for (int64_t tokens : {1, 9, 16}) {
            const int dtype = tokens == 9 ? nm::kFloat16 : nm::kBFloat16;
            one(nm::cuda::linear_expand, nm::cuda::linear_expand_splits, p, dtype, tokens, 33, 8 * p.m, 1);
            one(nm::cuda::linear_expand, nm::cuda::linear_expand_splits, p, dtype, tokens, 1, 9 * p.m - (p.m > p.n), 64);
        }
    }
    one(nm::cuda::linear_expand, nm::cuda::linear_expand_splits, {3, 5}, nm::kBFloat16, 5, 2, 2222, 64);
}

TEST(emulated_products_in_parts) {
    for (NM p : {NM{2, 4}, NM{3, 5}}) {
        one(nm::cuda::linear_few, nm::cuda::linear_few_splits, p, nm::kBFloat16, 1, 3, 4800 * p.m, 32);
        one(nm::cuda::linear_few, nm::cuda::linear_few_splits, p, nm::kFloat32, 3, 2, 1600 * p.m, 1);
    }
}

// Integers of `bits` bits, any of them; kept / steps of a row have one step.
void of_integers(Kernel kernel, int (*splits)(int, int64_t, int64_t, int64_t, int, int, int, int64_t, int), NM p, int dtype, int64_t tokens, int64_t rows,
                 int64_t cols, int bits, int64_t steps, int processors, bool ordered) {
    for (bool wide : {true, false}) {
        if (ordered && !wide) continue;
        Operands o(p, dtype, tokens, rows, cols, wide);
        const int64_t row_bytes = bits == 8 ? o.kept : (o.kept + 1) / 2;
        const Buffer values = place(rows * row_bytes, 1, wide), step = placed(numbers(rows * steps, nm::kBFloat16, 5, false), false, 2);
        for (size_t i = 0; i < values.bytes(); ++i) values.as<uint8_t>()[i] = uint8_t(i * 37 + i / 11);
        for (bool damaged : {true, false}) {
            if (ordered && damaged) continue;  // tensor cores take ascending indices alone
            fill_indices(o, p, rows, damaged);
            const int parts = splits(dtype, tokens, rows, cols, p.n, p.m, bits, steps, processors);
            CHECK(parts > 0);
            const Buffer y = place(tokens * rows, size_of(dtype), wide), sums = place(parts > 1 ? parts * tokens * rows : 0, 4, true);
            kernel({o.x.data(), values.data(), o.indices.as<uint8_t>(), o.bias.data(), y.data(), sums.as<float>(), dtype, 0, tokens, rows, cols, p.n, p.m,
                    parts, processors, nullptr, step.data(), steps, bits}, kQueue);
            if (damaged) continue;
            compare(o, y, p, dtype, tokens, rows, cols, "integers", [&](int64_t row, int64_t k) {
                const uint8_t* of_row = values.as<uint8_t>() + row * row_bytes;
                const int value = bits == 8 ? int8_t(of_row[k]) : (of_row[k / 2] >> (k % 2 * 4) & 7) - (of_row[k / 2] >> (k % 2 * 4) & 8);
                return value * number(step, nm::kBFloat16, row * steps + k / (o.kept / steps));
            });
        }
    }
}

TEST(emulated_products_with_integers) {
    for (int bits : {8, 4}) {
        for (NM p : {NM{2, 4}, NM{1, 4}, NM{1, 8}, NM{3, 5}, NM{100, 256}}) {
            for (int dtype : kDtypes) {
                for (int64_t tokens : {1, 2, 3}) {
                    const auto few = [&](int64_t rows, int64_t cols, int64_t steps) {
                        of_integers(nm::cuda::linear_few_integers, nm::cuda::linear_few_integers_splits, p, dtype, tokens, rows, cols, bits, steps, 1, false);
                    };
                    few(17, 64 * p.m, 2);
                    few(1, 9 * p.m - 1, 1);
                }
            }
        }
        for (int64_t tokens : {1, 8, 11}) {
            const int dtype = tokens == 11 ? nm::kFloat16 : nm::kBFloat16;
            of_integers(nm::cuda::linear_integers, nm::cuda::linear_integers_splits, {2, 4}, dtype, tokens, 33, 512, bits, 2, 1, true);
            of_integers(nm::cuda::linear_integers, nm::cuda::linear_integers_splits, {2, 4}, dtype, tokens, 3, 2176, bits, 17, 64, true);
        }
    }
}

}  // namespace
