// parallel_for(chunks, threads, fn) calls fn(0) .. fn(chunks - 1), each once, on up to `threads` threads.
//
// They are the OpenMP threads that torch has (openmp.h), so that kernels and torch's ops, called alternately, do not wake
// one team while another still spins. Where torch is not loaded they are those of a small pool of our own (pool.h). In a
// forked child the caller works alone: its parent's threads are lost, and POSIX lets it start none.
//
// A nested call runs its chunks inline. The first exception is rethrown in the caller after all threads have left the
// job. They run in the caller's floating-point environment, so that results do not depend on who computed a chunk.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace nm {

void parallel_for(int64_t chunks, int threads, const std::function<void(int64_t)>& fn);

// Whose threads they are, in words.
std::string threads_in_use();

// How much work one chunk should hold, in elements, so that handing it out is cheap next to doing it.
constexpr int64_t kChunk = 16384;

// parallel_for over [0, count) in ranges: fn(begin, end), with about kChunk elements of work in each.
template <class F>
void parallel_ranges(int64_t count, int64_t elements_each, int threads, const F& fn) {
    const int64_t step = elements_each >= kChunk ? 1 : kChunk / (elements_each > 0 ? elements_each : 1);
    parallel_for((count + step - 1) / step, threads, [&](int64_t chunk) {
        const int64_t begin = chunk * step;
        fn(begin, begin + step < count ? begin + step : count);
    });
}

}  // namespace nm
