// The entry point of GNU's OpenMP library that nm::Team asks for.
#include "threads.h"

extern "C" __attribute__((visibility("default"))) void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned) {
    on_threads(int(threads), [&] { work(data); });
}
