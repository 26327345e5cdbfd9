// mask and prune: one pass over contiguous groups.
#include "../kernels.h"
#include "../stream.h"
#include "pack.h"
#include "spans.h"

namespace nm {
namespace {

// What becomes of the bits: bools, or the pruned elements themselves. Room for whole words.
template <class T>
void apply(const T*, const uint64_t* bits, int64_t words, uint8_t* out) {
    for (int64_t i = 0; i < words; ++i) flags_of(bits[i], out + 64 * i);
}

template <class T>
void apply(const T* w, const uint64_t* bits, int64_t words, T* out) {
    for (int64_t i = 0; i < words; ++i) pick64(w + 64 * i, bits[i], out + 64 * i);
}

// The last, partial word.
template <class T, class Out>
void apply_rest(const T* w, uint64_t bits, int64_t rest, Out* out) {
    T padded[64] = {};
    Out result[64];
    std::memcpy(static_cast<void*>(padded), w, size_t(rest) * sizeof(T));
    apply(padded, &bits, 1, result);
    std::memcpy(static_cast<void*>(out), result, size_t(rest) * sizeof(Out));
}

template <class T, class Out>
void select_and_apply(const T* w, int64_t numel, int n, int m, Out* out, int threads) {
    SelectFn<T>* const select = NM_ISA::select_fn<T>(n, m);
    const int64_t span = span_of(m);
    const bool streamed = numel * int64_t(sizeof(Out)) >= kStreamBytes;
    parallel_ranges((numel + span - 1) / span, span, threads, [=](int64_t first, int64_t last) {
        uint64_t bits[kMaxSpan / 64];
        alignas(64) Out buffer[kMaxSpan];
        each_span(first, last, span, numel, [&](int64_t at, int64_t count) {
            const int64_t whole = count / 64 * 64;
            select(w + at, count, n, m, bits);
            apply(w + at, bits, whole / 64, streamed ? buffer : out + at);
            if (streamed) stream(out + at, buffer, whole * int64_t(sizeof(Out)));
            if (whole < count) apply_rest(w + at + whole, bits[whole / 64], count - whole, out + at + whole);
        });
        if (streamed) stream_fence();
    });
}

}  // namespace

namespace NM_ISA {

void mask(const void* w, int dtype, int64_t numel, int n, int m, uint8_t* out, int threads) {
    by_dtype(dtype, [&](auto element) { select_and_apply(static_cast<const decltype(element)*>(w), numel, n, m, out, threads); });
}

void prune(const void* w, int dtype, int64_t numel, int n, int m, void* out, int threads) {
    by_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        select_and_apply(static_cast<const T*>(w), numel, n, m, static_cast<T*>(out), threads);
    });
}

}  // namespace NM_ISA
}  // namespace nm
