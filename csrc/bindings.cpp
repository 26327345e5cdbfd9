// nmkernels._C: the compiled core as Python sees it. Pointers come as integers (Tensor.data_ptr()), dtypes as the
// codes of core/dispatch.h, sizes and strides in elements; the caller has checked shapes, devices and contiguity.
// Nothing here touches Python objects while a kernel runs, so the interpreter lock is released around each.
#include <array>

#include "bindings.h"
#include "core/adamw.h"
#include "core/philox.h"
#include "cpu/isa.h"
#include "cpu/pages.h"
#include "cpu/pool.h"

namespace py = pybind11;

namespace {

// Raised whenever a signature or the meaning of an argument below changes; nmkernels/backends checks it.
constexpr int kAbi = 12;

// Parameters of a step as the caller lists them, kWords integers each: rows, columns, the addresses of the step count and of a held mask (or 0); then,
// for p, gradient, m, v and the maximum of v: address (0: absent), dtype, row stride, column stride.
std::vector<nm::AdamWParam> adamw_params(const std::vector<int64_t>& words) {
    constexpr size_t kWords = 4 + 5 * 4;
    std::vector<nm::AdamWParam> params(words.size() / kWords);
    const int64_t* next = words.data();
    for (nm::AdamWParam& one : params) {
        one.rows = next[0];
        one.cols = next[1];
        one.step = at<float>(Address(next[2]));
        one.mask = at<uint8_t>(Address(next[3]));
        one.index = &one - params.data();
        next += 4;
        for (nm::View* view : {&one.p, &one.grad, &one.avg, &one.sq, &one.top}) {
            *view = {at(Address(next[0])), int(next[1]), next[2], next[3]};
            next += 4;
        }
    }
    return params;
}

std::array<double, 9> masked_adamw(const std::vector<int64_t>& params, const std::array<double, 9>& hyper, int n, int m, bool frozen,
                                   bool eps_inside, bool maximize, bool geometric, bool held, bool fixed, bool stochastic, int64_t seed,
                                   Address grad_scale, Address found_inf, int threads) {
    std::array<double, 9> stats;
    const nm::AdamWCall call{hyper.data(), n, m, frozen, eps_inside, maximize, geometric, held, fixed, stochastic, uint64_t(seed),
                             at<float>(grad_scale), at<float>(found_inf)};
    nm::kernels().masked_adamw(adamw_params(params), call, stats.data(), threads);
    return stats;
}

nm::MvueCall mvue_call(Address g, int64_t outer, int64_t length, int64_t inner, int64_t seed, int64_t offset, bool approx) {
    return {at(g), outer, length, inner, uint64_t(seed), uint64_t(offset), approx};
}

nm::SpmmCall spmm_call(Address values, Address indices, int64_t rows, int64_t cols, int64_t tokens, Address b, int64_t b_row, int64_t b_col,
                       Address bias, Address c, int64_t c_row, int64_t c_col, bool unrounded) {
    return {at(values), at<uint8_t>(indices), at(b), b_row, b_col, at(bias), at(c), c_row, c_col, rows, cols, tokens, unrounded};
}

// Whether GEMMs of this dtype are for the kernels that multiply bf16.
bool bf16_dots(int dtype) { return dtype == nm::kBFloat16 && nm::kernels().bf16_dots; }

// fp32 -> 16 bits -> fp32 by core/types.h, for the tests of its arithmetic.
void round_trip(Address x, int dtype, int64_t count, Address bits, Address back) {
    nm::by_dtype(dtype, [&](auto tag) {
        using T = decltype(tag);
        for (int64_t i = 0; i < count; ++i) {
            at<T>(bits)[i] = nm::from_float<T>(at<float>(x)[i]);
            at<float>(back)[i] = nm::to_float(at<T>(bits)[i]);
        }
    });
}

std::array<uint32_t, 4> philox(const std::array<uint32_t, 4>& counter, uint32_t k0, uint32_t k1) {
    const nm::Words w = nm::philox4x32(nm::Words{{counter[0], counter[1], counter[2], counter[3]}}, k0, k1);
    return {w.w[0], w.w[1], w.w[2], w.w[3]};
}

// Sums a tensor's chunks under any thread count and fails in one chunk if asked, for the tests of parallel_for.
int64_t parallel_probe(int64_t chunks, int threads, int64_t fail_at) {
    std::vector<int64_t> seen(static_cast<size_t>(chunks), 0);
    nm::parallel_for(chunks, threads, [&](int64_t i) {
        if (i == fail_at) throw std::runtime_error("chunk " + std::to_string(i) + " failed, as asked");
        seen[static_cast<size_t>(i)] += i + 1;
    });
    int64_t sum = 0;
    for (int64_t one : seen) sum += one;
    return sum;
}

nm::Integers integers(Address values, Address step, int64_t rows, int64_t kept, int64_t steps, int bits) {
    return {at(values), at<nm::bf16>(step), rows, kept, steps, bits};
}

void bind_integers(py::module_& module) {
    module.def("linear_integers", [](Address x, Address values, Address indices, Address step, Address bias, Address y, int dtype, int y_dtype,
                                     int64_t tokens, int64_t rows, int64_t cols, int64_t kept, int64_t steps, int bits, int n, int m,
                                     int threads) {
        const nm::Integers weight = integers(values, step, rows, kept, steps, bits);
        const nm::IntegersLinearCall call{at(x), weight, at<uint8_t>(indices), at(bias), at(y), cols, tokens, dtype, y_dtype};
        return nm::kernels().linear_integers(call, n, m, threads);
    }, Unlocked());
    module.def("dequantize_values", [](Address values, Address step, int64_t rows, int64_t kept, int64_t steps, int bits, int dtype, Address out,
                                       int threads) {
        nm::kernels().dequantize_values(integers(values, step, rows, kept, steps, bits), dtype, at(out), threads);
    }, Unlocked());
    module.def("quantize_values", [](Address w, int dtype, int64_t rows, int64_t kept, int64_t steps, int bits, Address values, Address step,
                                     int threads) {
        nm::kernels().quantize_values(at(w), dtype, rows, kept, steps, bits, at(values), at<nm::bf16>(step), threads);
    }, Unlocked());
}

void bind_groups(py::module_& module) {
    module.def("mask", [](Address w, int dtype, int64_t numel, int n, int m, Address out, int threads) {
        nm::kernels().mask(at(w), dtype, numel, n, m, at<uint8_t>(out), threads);
    }, Unlocked());
    module.def("prune", [](Address w, int dtype, int64_t numel, int n, int m, Address out, int threads) {
        nm::kernels().prune(at(w), dtype, numel, n, m, at(out), threads);
    }, Unlocked());
    module.def("soft_threshold", [](Address w, int dtype, int64_t numel, int n, int m, Address out, int threads) {
        nm::kernels().soft_threshold(at(w), dtype, numel, n, m, at(out), threads);
    }, Unlocked());
    module.def("soft_threshold_scale", [](Address w, int dtype, int64_t numel, int n, int m, int threads) {
        return nm::kernels().soft_threshold_scale(at(w), dtype, numel, n, m, threads);
    }, Unlocked());
    module.def("transposable_mask", [](Address w, int dtype, int64_t rows, int64_t cols, int n, int m, Address out, int threads) {
        nm::kernels().transposable_mask(at(w), dtype, rows, cols, n, m, at<uint8_t>(out), threads);
    }, Unlocked());
}

void bind_compressed(py::module_& module) {
    module.def("compress", [](Address w, int dtype, int64_t rows, int64_t cols, int n, int m, Address given, Address values, Address indices,
                              int threads) {
        return nm::kernels().compress(at(w), dtype, rows, cols, n, m, at<uint8_t>(given), at(values), at<uint8_t>(indices), threads);
    }, Unlocked());
    module.def("decompress", [](Address values, Address indices, int dtype, int64_t rows, int64_t cols, int n, int m, Address out,
                                int threads) {
        return nm::kernels().decompress(at(values), at<uint8_t>(indices), dtype, rows, cols, n, m, at(out), threads);
    }, Unlocked());
    module.def("linear", [](Address x, Address values, Address indices, Address bias, Address y, int dtype, int64_t tokens, int64_t rows,
                            int64_t cols, int n, int m, int threads) {
        if (bf16_dots(dtype)) {
            return nm::kernels().bf16_spmm(spmm_call(values, indices, rows, cols, tokens, x, 1, cols, bias, y, 1, rows, false), n, m, threads);
        }
        return nm::kernels().linear({at(x), at(values), at<uint8_t>(indices), at(bias), at(y), rows, cols}, tokens, dtype, n, m, threads);
    }, Unlocked());
    py::class_<nm::SpmmCall>(module, "SpmmCall").def(py::init(&spmm_call));
    module.def("spmm", [](const nm::SpmmCall& call, int dtype, int n, int m, int threads) {
        return bf16_dots(dtype) ? nm::kernels().bf16_spmm(call, n, m, threads) : nm::kernels().spmm(call, dtype, n, m, threads);
    }, Unlocked());
    module.def("spmm_transposed", [](const nm::SpmmCall& call, int dtype, int n, int m, int threads) {
        if (bf16_dots(dtype)) return nm::kernels().bf16_spmm_transposed(call, n, m, threads);
        return nm::kernels().spmm_transposed(call, dtype, n, m, threads);
    }, Unlocked());
    module.def("bf16_spmm", [](const nm::SpmmCall& call, int n, int m, int threads) {
        return nm::kernels().bf16_spmm(call, n, m, threads);
    }, Unlocked());
    module.def("bf16_spmm_transposed", [](const nm::SpmmCall& call, int n, int m, int threads) {
        return nm::kernels().bf16_spmm_transposed(call, n, m, threads);
    }, Unlocked());
    module.def("bf16_dots", [] { return nm::kernels().bf16_dots; });
    module.def("mvue", [](const nm::MvueCall& call, int dtype, int n, int m, Address out, int threads) {
        nm::kernels().mvue(call, dtype, n, m, at(out), threads);
    }, Unlocked());
    module.def("mvue_compress", [](const nm::MvueCall& call, int dtype, int n, int m, Address values, Address indices, int threads) {
        nm::kernels().mvue_compress(call, dtype, n, m, at(values), at<uint8_t>(indices), threads);
    }, Unlocked());
}

}  // namespace

PYBIND11_MODULE(_C, module, py::mod_gil_not_used()) {
    module.doc() = "The compiled core of nmkernels; use nmkernels.ops.";
    module.attr("abi") = kAbi;
#if defined(NM_CUDA)
    py::module_ cuda = module.def_submodule("cuda", "The CUDA kernels.");
    bind_cuda(cuda);
#endif
    py::module_ cusparselt = module.def_submodule("cusparselt", "cuSPARSELt, opened at run time.");
    bind_cusparselt(cusparselt);

    py::class_<nm::MvueCall>(module, "MvueCall").def(py::init(&mvue_call));
    module.def("masked_adamw", &masked_adamw, Unlocked());
    module.def("fingerprint", [](Address data, int64_t bytes, int threads) {
        return nm::kernels().fingerprint(at(data), bytes, threads);
    }, Unlocked());
    bind_groups(module);
    bind_compressed(module);
    bind_integers(module);

    module.def("isa", &nm::isa);
    module.def("isas", &nm::isas);
    module.def("use_isa", &nm::use_isa);

    module.def("round_trip", &round_trip, Unlocked());
    module.def("philox", &philox);
    module.def("parallel_probe", &parallel_probe, Unlocked());
    module.def("threads_in_use", &nm::threads_in_use);
    module.def("pool_workers", &nm::pool_workers);
    module.def("want_huge_pages", [](Address memory, int64_t bytes) { nm::want_huge_pages(at(memory), bytes); });
}
