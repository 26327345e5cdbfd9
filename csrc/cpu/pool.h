// A small thread pool, for processes that have no OpenMP threads to share.
//
// One job runs at a time; a second caller (another Python thread, or a nested call) works alone. Workers are detached and
// the pool is never destroyed: process exit needs no hand-shake.
#pragma once

namespace nm {

// work(data) on up to `threads` threads, the caller among them; returns when all have left it.
void pool_run(void (*work)(void*), void* data, int threads);

// Workers started so far in this process; for tests.
int pool_workers();

}  // namespace nm
