// The entry points of LLVM's OpenMP library that nm::Team asks for. A number of threads holds for the next region alone.
#include <cstdarg>

#include "threads.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
constexpr int kHere = 7;
int wanted = 1;
}  // namespace

EXPORT int __kmpc_global_thread_num(void*) { return kHere; }

EXPORT void __kmpc_push_num_threads(void*, int thread, int count) { wanted = thread == kHere ? count : 1; }

EXPORT void __kmpc_fork_call(void*, int count, void (*micro)(int*, int*, void*, void*), ...) {
    va_list given;
    va_start(given, micro);
    void* const work = va_arg(given, void*);
    void* const data = va_arg(given, void*);
    va_end(given);
    const int threads = count == 2 ? wanted : 0;
    wanted = 1;
    on_threads(threads, [&] {
        int thread = 0, team = 0;
        micro(&thread, &team, work, data);
    });
}
