// The CUDA kernels as Python sees them, as functions of a module: the core's submodule `cuda`, or the emulator's module.
// Pointers come as integers, dtypes as the codes of core/dispatch.h; the last two arguments are the device and its stream.
// The caller has checked shapes, devices and contiguity. The interpreter lock is released around each call.
#include <array>

#include "bindings.h"
#include "core/dispatch.h"
#include "cuda/adamw_pack.h"
#include "cuda/adamw_table.h"
#include "cuda/gemm/stream_k.h"
#include "cuda/kernels.h"

namespace py = pybind11;

namespace {

using nm::cuda::Queue;

// Lives until the call is over, for which its GPU is current.
Queue queue(int device, Address stream) { return Queue(device, at(stream)); }

#if !defined(NM_EMULATED)
void bind_probe(py::module_& module) {
    // (version of the driver, of the runtime, what keeps kernels from running there)
    module.def("probe", [](int device) {
        const nm::cuda::Probe found = [&] {
            const Unlock unlocked;
            return nm::cuda::probe(device);
        }();
        return py::make_tuple(found.driver, found.runtime, found.error);
    });
    module.attr("architectures") = NM_CUDA_ARCHITECTURES;
    // (compute capability, multiprocessors, shared memory of a block, clock, memory's clock and bits)
    module.def("gpu", [](int device) {
        const nm::cuda::Gpu& found = nm::cuda::gpu(device);
        return py::make_tuple(found.capability, found.processors, found.shared, found.clock, found.memory_clock, found.memory_bits);
    });
}
#endif

void bind_groups(py::module_& module) {
    module.def("mask", [](Address w, int dtype, int64_t numel, int n, int m, Address out, int device, Address stream) {
        nm::cuda::mask(at(w), dtype, numel, n, m, at<uint8_t>(out), queue(device, stream));
    }, Unlocked());
    module.def("prune", [](Address w, int dtype, int64_t numel, int n, int m, Address out, int device, Address stream) {
        nm::cuda::prune(at(w), dtype, numel, n, m, at(out), queue(device, stream));
    }, Unlocked());
    module.def("soft_threshold", [](Address w, int dtype, int64_t numel, int n, int m, Address out, int device, Address stream) {
        nm::cuda::soft_threshold(at(w), dtype, numel, n, m, at(out), queue(device, stream));
    }, Unlocked());
}

void bind_tensors(py::module_& module) {
    module.def("soft_threshold_chunks", nm::cuda::soft_threshold_chunks);
    module.def("soft_threshold_scale", [](Address w, int dtype, int64_t numel, int n, int m, Address sums, Address scale, int device, Address stream) {
        nm::cuda::soft_threshold_scale(at(w), dtype, numel, n, m, at(sums), at<float>(scale), queue(device, stream));
    }, Unlocked());
    module.def("transposable_mask", [](Address w, int dtype, int64_t rows, int64_t cols, Address out, int device, Address stream) {
        nm::cuda::transposable_mask(at(w), dtype, rows, cols, at<uint8_t>(out), queue(device, stream));
    }, Unlocked());
}

// compress, decompress, pack
void bind_packed(py::module_& module) {
    // w and mask, scale, overfull; then (values, indices) of rows and of columns, and the dense form, zeros where they are not wanted
    module.def("pack", [](Address w, int dtype, int64_t rows, int64_t cols, int n, int m, int select, Address mask, Address scale,
                          Address overfull, int out_dtype, int layout, Address values, Address indices, Address values_t, Address indices_t,
                          Address dense, int device, Address stream) {
        const nm::cuda::Packed by_row{at(values), at(indices)}, by_column{at(values_t), at(indices_t)};
        return nm::cuda::pack({at(w), at<uint8_t>(mask), at<float>(scale), at<int>(overfull), by_row, by_column, rows, cols, n, m, dtype,
                               out_dtype, select, layout, at(dense)}, queue(device, stream));
    }, Unlocked());
    module.def("decompress", [](Address values, Address indices, int dtype, int64_t rows, int64_t cols, int n, int m, Address out, int device,
                                Address stream) {
        nm::cuda::decompress(at(values), at(indices), dtype, rows, cols, n, m, at(out), queue(device, stream));
    }, Unlocked());
}

// quantize, quantize_pack
void bind_quantize(py::module_& module) {
    module.def("quantize", [](Address x, Address scale, Address values, int64_t rows, int64_t cols, int dtype, int out_dtype, bool by_row,
                              bool transposed, int device, Address stream) {
        nm::cuda::quantize({at(x), at<float>(scale), at(values), rows, cols, dtype, out_dtype, by_row, transposed}, queue(device, stream));
    }, Unlocked());
    module.def("quantize_pack", [](Address w, Address scale, Address values, Address metadata, int64_t rows, int64_t cols, int dtype, int out_dtype,
                                   bool by_row, int device, Address stream) {
        nm::cuda::quantize_pack({at(w), at<float>(scale), at(values), rows, cols, dtype, out_dtype, by_row, false}, at<uint32_t>(metadata),
                                queue(device, stream));
    }, Unlocked());
}

// mvue, mvue_compress
void bind_mvue(py::module_& module) {
    module.def("mvue", [](Address g, int dtype, int64_t outer, int64_t length, int64_t inner, int n, int m, Address seed, bool approx, Address out,
                          int device, Address stream) {
        nm::cuda::mvue(at(g), dtype, outer, length, inner, n, m, at<int64_t>(seed), approx, at(out), queue(device, stream));
    }, Unlocked());
    module.def("mvue_compress", [](Address g, int dtype, int64_t outer, int64_t length, int64_t inner, int n, int m, Address seed, bool approx,
                                   Address values, Address indices, bool ordered, int device, Address stream) {
        return nm::cuda::mvue_compress(at(g), dtype, outer, length, inner, n, m, at<int64_t>(seed), approx, at(values), at<uint8_t>(indices), ordered,
                                       queue(device, stream));
    }, Unlocked());
}

nm::cuda::AdamWPart part(int64_t first, int64_t tiles, int64_t first_block, int64_t blocks) { return {first, tiles, first_block, blocks}; }

void bind_adamw(py::module_& module) {
    // (columns of a piece, pieces of a tile, whether flat params have a launch of their own)
    module.def("adamw_cut", [](int n, int m) {
        const nm::cuda::AdamWCut cut = nm::cuda::adamw_cut(n, m);
        return py::make_tuple(cut.columns, cut.pieces, cut.flat);
    });
    module.def("upload_words", [](const std::vector<int64_t>& words, Address to, int device, Address stream) {
        nm::cuda::upload_words(words, at<int64_t>(to), queue(device, stream));
    }, Unlocked());
    // a part: its first tile, tiles, first block, blocks
    module.def("adamw_owners", [](Address table, int64_t params, int64_t t, int64_t tiles, int64_t b, int64_t blocks, int64_t other_t,
                                  int64_t other_tiles, int64_t other_b, int64_t other_blocks, Address owners, int device, Address stream) {
        nm::cuda::adamw_owners(at<int64_t>(table), params, part(t, tiles, b, blocks), part(other_t, other_tiles, other_b, other_blocks),
                               at<int32_t>(owners), queue(device, stream));
    }, Unlocked());
    module.def("masked_adamw", [](Address table, Address gradients, Address owners, Address scalars, Address partials, Address stats,
                                  int64_t params, int64_t t, int64_t tiles, int64_t b, int64_t blocks, int64_t other_t, int64_t other_tiles,
                                  int64_t other_b, int64_t other_blocks, Address hyper, const std::array<double, 8>& host_hyper, Address counts,
                                  int64_t count, Address scale, Address found, int n, int m, bool frozen, bool eps_inside, bool maximize,
                                  bool geometric, bool top, bool held, bool fixed, bool stochastic, int64_t seed, int state, Address forms, int select,
                                  int layout, int gradient, bool columns, bool dense, int device, Address stream) {
        nm::cuda::AdamWArguments a{at<int64_t>(table), at<int64_t>(gradients), at<int32_t>(owners), at<uint32_t>(scalars), at<double>(partials),
                                   at<double>(stats), params, at<double>(hyper), {}, at<int64_t>(counts), count, n, m};
        for (int i = 0; i < 8; ++i) a.host_hyper[i] = host_hyper[size_t(i)];
        const nm::cuda::AdamWOptions options{at<float>(scale), at<float>(found), frozen, eps_inside, maximize, geometric, top, held, fixed, stochastic, state,
                                               uint64_t(seed)};
        const nm::cuda::AdamWPart other = part(other_t, other_tiles, other_b, other_blocks);
        if (forms) {  // no param is flat
            const nm::cuda::AdamWPack pack{at<nm::cuda::AdamWForms>(forms), select, layout, gradient, columns, dense};
            return nm::cuda::masked_adamw_pack(a, other, options, pack, queue(device, stream));
        }
        nm::cuda::masked_adamw(a, part(t, tiles, b, blocks), other, options, queue(device, stream));
    }, Unlocked());
    module.def("pack_forms", [](Address table, Address owners, int64_t tiles, Address forms, int select, int layout, bool columns, bool dense,
                                int device, Address stream) {
        const nm::cuda::AdamWPack pack{at<nm::cuda::AdamWForms>(forms), select, layout, 0, columns, dense};
        nm::cuda::pack_forms(at<int64_t>(table), at<int32_t>(owners), tiles, pack, queue(device, stream));
    }, Unlocked());
    // the forms as in pack; `changed`: one int
    module.def("renew_changed_forms", [](Address w, int64_t rows, int64_t cols, Address bits, int select, int layout, Address values, Address indices,
                                         Address values_t, Address indices_t, Address dense, Address scale, int strip, Address changed, int mark,
                                         int device, Address stream) {
        const nm::cuda::AdamWForms forms{{at(values), at(indices)}, {at(values_t), at(indices_t)}, at(dense), at<float>(scale)};
        nm::cuda::renew_changed_forms({at<float>(w), at<uint8_t>(bits), forms, rows, cols, select, layout}, strip, at<int>(changed), mark,
                                      queue(device, stream));
    }, Unlocked());
}

// linear
void bind_products(py::module_& module) {
    using nm::cuda::LinearCall;
    module.def("linear_few_splits", &nm::cuda::linear_few_splits);
    module.def("linear_mma_splits", &nm::cuda::linear_mma_splits);
    module.def("linear_expand_splits", &nm::cuda::linear_expand_splits);
    const auto product = [&](const char* name, void (*kernel)(const nm::cuda::LinearCall&, const Queue&)) {
        module.def(name, [kernel](Address x, Address values, Address indices, Address bias, Address residual, Address y, Address parts, int dtype,
                                  int activation, int64_t tokens, int64_t rows, int64_t cols, int n, int m, int splits, int processors, int device, Address stream) {
            kernel({at(x), at(values), at<uint8_t>(indices), at(bias), at(y), at<float>(parts), dtype, activation, tokens, rows, cols, n, m, splits,
                    processors, at(residual)}, queue(device, stream));
        }, Unlocked());
    };
    product("linear_few", nm::cuda::linear_few);
    product("linear_mma", nm::cuda::linear_mma);
    product("linear_expand", nm::cuda::linear_expand);
}

// weights of integers
void bind_integers(py::module_& module) {
    module.def("dequantize", [](Address values, Address step, int64_t rows, int64_t kept, int64_t steps, int bits, int dtype, Address out, int device,
                                Address stream) {
        nm::cuda::dequantize(at(values), at(step), rows, kept, steps, bits, dtype, at(out), queue(device, stream));
    }, Unlocked());
    module.def("linear_few_integers_splits", &nm::cuda::linear_few_integers_splits);
    module.def("linear_integers_splits", &nm::cuda::linear_integers_splits);
    const auto product = [&](const char* name, void (*kernel)(const nm::cuda::LinearCall&, const Queue&)) {
        module.def(name, [kernel](Address x, Address values, Address indices, Address step, Address bias, Address residual, Address y, Address parts,
                                  int dtype, int activation, int64_t tokens, int64_t rows, int64_t cols, int n, int m, int bits, int64_t steps, int splits,
                                  int processors, int device, Address stream) {
            kernel({at(x), at(values), at<uint8_t>(indices), at(bias), at(y), at<float>(parts), dtype, activation, tokens, rows, cols, n, m, splits,
                    processors, at(residual), at(step), steps, bits}, queue(device, stream));
        }, Unlocked());
    };
    product("linear_few_integers", nm::cuda::linear_few_integers);
    product("linear_integers", nm::cuda::linear_integers);
}

// GEMMs on sparse tensor cores, and the metadata that they read
void bind_gemm(py::module_& module) {
    // the GPU as `gpu` gives it
    module.def("gemm_plan", [](int64_t m, int64_t n, int64_t k, bool by_column, int capability, int processors, int shared, int clock,
                               int memory_clock, int memory_bits) {
        return nm::cuda::gemm_plan(m, n, k, by_column, {capability, processors, shared, clock, memory_clock, memory_bits});
    });
    module.def("gemm_wgmma_plan", [](int64_t m, int64_t n, int64_t k, bool by_column, int capability, int processors, int shared, int clock,
                                     int memory_clock, int memory_bits) {
        return nm::cuda::gemm_wgmma_plan(m, n, k, by_column, {capability, processors, shared, clock, memory_clock, memory_bits});
    });
    // (tile, floats of the workspace, estimated time over that of gemm_wgmma_plan)
    module.def("gemm_stream_k_plan", [](int64_t m, int64_t n, int64_t k, bool by_column, int capability, int processors, int shared, int clock,
                                        int memory_clock, int memory_bits) {
        const nm::cuda::StreamKPlan plan = nm::cuda::gemm_stream_k_plan(m, n, k, by_column, {capability, processors, shared, clock, memory_clock, memory_bits});
        return py::make_tuple(plan.tile, plan.floats, plan.time);
    });
    module.def("wgmma_obstacle", nm::cuda::wgmma_obstacle, Unlocked());
    // (three maps as one list, the fourth parameter, tiles or stream-K's parameter, blocks, threads, bytes of shared memory)
    module.def("gemm_wgmma_launch", [](Address values, Address metadata, Address dense, Address bias, Address residual, Address out, Address parts,
                                       int activation, int64_t m, int64_t n, int64_t k, bool by_column, int tile, int splits, bool unrounded,
                                       int processors) {
        std::vector<int64_t> maps;
        std::string parameter;
        const nm::cuda::WgmmaLaunch found = nm::cuda::gemm_wgmma_launch({at(values), at<uint32_t>(metadata), at(dense), at(bias), at(residual), at(out),
                                                                         at<float>(parts), 1, activation, m, n, k, by_column, 4, tile, splits, unrounded},
                                                                        processors, &maps, &parameter);
        const bool streams = splits == nm::cuda::gemm::kStreamK;
        const size_t fourth = parameter.size() - (streams ? sizeof(nm::cuda::gemm::StreamK) : 0);
        const py::object fifth = streams ? py::object(py::bytes(parameter.substr(fourth))) : py::object(py::int_(found.tiles));
        return py::make_tuple(maps, py::bytes(parameter.substr(0, fourth)), fifth, found.blocks, found.threads, found.shared);
    });
    // the end of gemm_wgmma_sp by stream-K, which that calls itself: for tests, in the emulator
    module.def("gemm_stream_k_finish", [](Address bias, Address residual, Address out, Address parts, int dtype, int activation, int64_t m, int64_t n,
                                          int64_t k, bool by_column, int tile, bool unrounded, int processors, int device, Address stream) {
        nm::cuda::gemm_stream_k_finish({nullptr, nullptr, nullptr, at(bias), at(residual), at(out), at<float>(parts), dtype, activation, m, n, k, by_column,
                                        4, tile, 0, unrounded}, processors, queue(device, stream));
    }, Unlocked());
    const auto gemm = [&](const char* name, void (*kernel)(const nm::cuda::GemmCall&, const Queue&)) {
        module.def(name, [kernel](Address values, Address metadata, Address dense, Address bias, Address residual, Address out, Address parts,
                                  int dtype, int activation, int64_t m, int64_t n, int64_t k, bool by_column, int warps, int tile, int splits,
                                  bool unrounded, int device, Address stream) {
            kernel({at(values), at<uint32_t>(metadata), at(dense), at(bias), at(residual), at(out), at<float>(parts), dtype, activation, m, n, k,
                    by_column, warps, tile, splits, unrounded}, queue(device, stream));
        }, Unlocked());
    };
    gemm("gemm_mma_sp", nm::cuda::gemm_mma_sp);
    gemm("gemm_wgmma_sp", nm::cuda::gemm_wgmma_sp);
    // as gemm_wgmma_sp, with: the steps of rows and columns of D and whether they are one for each, the operands' dtypes, promoted sums
    const auto scaled = [](Address values, Address metadata, Address dense, Address row_steps, Address col_steps, Address bias, Address out,
                           Address parts, int dtype, int a, int b, bool by_row, bool by_col, bool promotes, int64_t m, int64_t n, int64_t k,
                           bool by_column, int tile, int splits) {
        return nm::cuda::ScaledCall{{at(values), at<uint32_t>(metadata), at(dense), at(bias), nullptr, at(out), at<float>(parts), dtype, 0, m, n, k,
                                     by_column, 4, tile, splits, dtype == nm::kFloat32}, at<float>(row_steps), at<float>(col_steps), by_row, by_col, a, b, promotes};
    };
    module.def("gemm_wgmma_8bit_has", nm::cuda::gemm_wgmma_8bit_has);
    module.def("gemm_wgmma_8bit_plan", [](int64_t m, int64_t n, int64_t k, bool promotes, int capability, int processors, int shared, int clock,
                                          int memory_clock, int memory_bits) {
        return nm::cuda::gemm_wgmma_8bit_plan(m, n, k, promotes, {capability, processors, shared, clock, memory_clock, memory_bits});
    });
    module.def("gemm_wgmma_8bit_launch", [scaled](Address values, Address metadata, Address dense, Address row_steps, Address col_steps, Address bias,
                                                  Address out, Address parts, int dtype, int a, int b, bool by_row, bool by_col, bool promotes,
                                                  int64_t m, int64_t n, int64_t k, bool by_column, int tile, int splits, int processors) {
        std::vector<int64_t> maps;
        std::string parameter;
        const nm::cuda::WgmmaLaunch found = nm::cuda::gemm_wgmma_8bit_launch(scaled(values, metadata, dense, row_steps, col_steps, bias, out, parts,
            dtype, a, b, by_row, by_col, promotes, m, n, k, by_column, tile, splits), processors, &maps, &parameter);
        return py::make_tuple(maps, py::bytes(parameter), found.tiles, found.blocks, found.threads, found.shared);
    });
    module.def("gemm_wgmma_sp_8bit", [scaled](Address values, Address metadata, Address dense, Address row_steps, Address col_steps, Address bias,
                                              Address out, Address parts, int dtype, int a, int b, bool by_row, bool by_col, bool promotes,
                                              int64_t m, int64_t n, int64_t k, bool by_column, int tile, int splits, int device, Address stream) {
        nm::cuda::gemm_wgmma_sp_8bit(scaled(values, metadata, dense, row_steps, col_steps, bias, out, parts, dtype, a, b, by_row, by_col, promotes,
                                            m, n, k, by_column, tile, splits), queue(device, stream));
    }, Unlocked());
    module.def("metadata", [](Address indices, int64_t rows, int64_t cols, int layout, Address out, int device, Address stream) {
        nm::cuda::metadata(at<uint8_t>(indices), rows, cols, layout, at<uint32_t>(out), queue(device, stream));
    }, Unlocked());
}

}  // namespace

void bind_cuda(py::module_& module) {
#if !defined(NM_EMULATED)
    bind_probe(module);
#endif
    bind_groups(module);
    bind_tensors(module);
    bind_packed(module);
    bind_quantize(module);
    bind_mvue(module);
    bind_adamw(module);
    bind_products(module);
    bind_integers(module);
    bind_gemm(module);
}
