// A small thread pool: parallel_for(chunks, threads, fn) calls fn(0) .. fn(chunks - 1), each once, on up to `threads` threads.
//
// One job runs at a time; a second caller (another Python thread, or a nested call) runs its own chunks inline.
// A forked child starts with a fresh, empty pool. The first exception is rethrown in the caller after all threads
// have left the job. Workers run in the caller's floating-point environment, so that results do not depend on who
// computed a chunk. Workers are detached and the pool is never destroyed: process exit needs no hand-shake.
#pragma once

#include <cstdint>
#include <functional>

namespace nm {

void parallel_for(int64_t chunks, int threads, const std::function<void(int64_t)>& fn);

// Workers started so far in this process; for tests.
int pool_workers();

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
