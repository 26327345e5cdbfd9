// Integers of 8 or 4 bits times their step: the product is exact in fp32, and rounded once to the dtype of the result.
#include "../core/dispatch.h"
#include "kernels.h"
#include "launch.h"
#include "memory.h"

namespace nm::cuda {

namespace {

constexpr int kThreads = 256;

// A thread writes 16 bytes, next to those of the next thread, a few times.
template <class T, int Bits>
struct Chunk {
    static constexpr int kElements = 16 / int(sizeof(T)), kBytes = kElements * Bits / 8, kSteps = 4;
};

template <class T, int Bits>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const uint8_t* values, const bf16* step, T* out, int64_t chunks, Divider run) {
    using C = Chunk<T, Bits>;
    Word<C::kBytes> stored[C::kSteps];
    bf16 steps[C::kSteps];
    const int64_t first = int64_t(blockIdx.x) * C::kSteps * kThreads + threadIdx.x;
    NM_UNROLL
    for (int s = 0; s < C::kSteps; ++s) {
        const int64_t chunk = first + s * kThreads;
        if (chunk >= chunks) continue;
        stored[s] = load_word<C::kBytes>(values + chunk * C::kBytes);
        steps[s] = step[run.quotient(uint32_t(chunk))];
    }
    NM_UNROLL
    for (int s = 0; s < C::kSteps; ++s) {
        const int64_t chunk = first + s * kThreads;
        if (chunk >= chunks) continue;
        uint8_t bytes[C::kBytes];
        memcpy(bytes, &stored[s], C::kBytes);
        const float by = to_float(steps[s]);
        T products[C::kElements];
        NM_UNROLL
        for (int i = 0; i < C::kElements; ++i) {
            const int integer = Bits == 8 ? int(int8_t(bytes[i])) : int8_t(uint8_t(bytes[i / 2] << (i % 2 ? 0 : 4))) >> 4;
            products[i] = from_float<T>(float(integer) * by);
        }
        store_global<C::kElements>(out + chunk * C::kElements, products);
    }
}

// Any sizes and addresses: an element per thread.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dequantize_any_kernel(const uint8_t* values, const bf16* step, T* out, int64_t count, int64_t kept, int64_t steps, int bits) {
    const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (at >= count) return;
    const int64_t row = at / kept, k = at % kept;
    int integer;
    if (bits == 8) {
        integer = int8_t(values[at]);
    } else {
        integer = int8_t(uint8_t(values[row * ((kept + 1) / 2) + k / 2] << (k % 2 ? 0 : 4))) >> 4;
    }
    out[at] = from_float<T>(float(integer) * to_float(step[row * steps + k / (kept / steps)]));
}

template <class T, int Bits>
bool by_chunks(const uint8_t* values, const bf16* step, int64_t count, int64_t run, T* out, const Queue& queue) {
    using C = Chunk<T, Bits>;
    const int64_t chunks = count / C::kElements;
    if (run % C::kElements != 0 || chunks >= int64_t(1) << 31 || uintptr_t(values) % C::kBytes != 0 || !multiples_of_16(out)) return false;
    const Grid grid{cdiv(chunks, C::kSteps * kThreads), kThreads};
    launch("dequantize_kernel", dequantize_kernel<T, Bits>, grid, queue, values, step, out, chunks, Divider(run / C::kElements));
    return true;
}

}  // namespace

void dequantize(const void* values, const void* step, int64_t rows, int64_t kept, int64_t steps, int bits, int dtype, void* out, const Queue& queue) {
    if (rows == 0 || kept == 0) return;
    const auto stored = static_cast<const uint8_t*>(values);
    const auto by = static_cast<const bf16*>(step);
    by_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        T* const to = static_cast<T*>(out);
        const int64_t count = rows * kept, run = kept / steps;
        if (bits == 8 ? by_chunks<T, 8>(stored, by, count, run, to, queue) : by_chunks<T, 4>(stored, by, count, run, to, queue)) return;
        launch("dequantize_any_kernel", dequantize_any_kernel<T>, {cdiv(count, kThreads), kThreads}, queue, stored, by, to, count, kept, steps, bits);
    });
}

}  // namespace nm::cuda
