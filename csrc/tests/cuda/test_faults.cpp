// Faults that end the program: each is made in a child process, and what that says is read.
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "../../cuda/launch.h"
#include "emulated.h"

using namespace nm_test;
using nm::cuda::launch;

namespace {

// The error output of a child that runs f; "lived" when nothing ended it.
std::string last_words(const std::function<void()>& f) {
    int ends[2];
    if (pipe(ends) != 0) return "no pipe";
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        close(ends[0]);
        f();
        _exit(0);
    }
    close(ends[1]);
    std::string text;
    char some[4096];
    for (ssize_t got; (got = read(ends[0], some, sizeof some)) > 0;) text.append(some, size_t(got));
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    return status == 0 ? "lived" : WIFSIGNALED(status) ? text + " signal " + std::to_string(WTERMSIG(status)) : text;
}

int deeper(volatile int* left) {
    volatile char room[1000];
    room[0] = char(*left);
    if (--*left <= 0) return 0;
    return deeper(left) + room[0];
}

__global__ void deep_kernel(int depth) {
    volatile int left = depth;
    __syncthreads();
    deeper(&left);
}

TEST(a_stack_that_overflows_ends_the_program) {
    CHECK(last_words([] { launch("k", deep_kernel, {1, 64}, kQueue, 20); }) == "lived");
    const std::string words = last_words([] { launch("k", deep_kernel, {1, 64}, kQueue, 150); });
    CHECK(words.find("AddressSanitizer") != std::string::npos || words == " signal 11") << words;
}

#if defined(__SANITIZE_ADDRESS__)

bool says(const std::string& words, const char* what) { return words.find(what) != std::string::npos; }

__global__ void write_kernel(float* out, int at) {
    __syncthreads();
    if (threadIdx.x == 7) out[at] = 1.0f;
}

__global__ void write_shared_kernel(int at, int dynamic_at) {
    using Cells = float[10];
    NM_SHARED(Cells, cells);
    NM_DYNAMIC_SHARED(float, more);
    float* const first = cells;
    first[at] = 1.0f;
    __syncthreads();
    more[dynamic_at] = 1.0f;
}

__noinline__ float element(const float* x, int at) { return x[at]; }

__global__ void local_kernel(int at, float* out) {
    float x[8];
    for (int i = 0; i < 8; ++i) x[i] = out[i];
    __syncthreads();
    out[threadIdx.x] = element(x, at);
}

__global__ void out_of_scope_kernel(float* out) {
    float* kept = nullptr;
    {
        float x[8] = {float(threadIdx.x)};
        kept = x;
        __syncthreads();
        out[threadIdx.x] = *kept;
    }
    __syncthreads();
    out[threadIdx.x] = kept[threadIdx.x % 8];
}

TEST(accesses_out_of_bounds_are_found) {
    const Buffer out = place(64, 4, false);
    const auto writes = [&](int at) { return last_words([&] { launch("k", write_kernel, {1, 64}, kQueue, out.as<float>(), at); }); };
    CHECK(writes(63) == "lived");
    CHECK(says(writes(64), "heap-buffer-overflow"));
    CHECK(says(writes(-2), "heap-buffer-overflow"));
    const auto shares = [&](int at, int dynamic_at) {
        return last_words([&] { launch("k", write_shared_kernel, {1, 64, 5 * sizeof(float)}, kQueue, at, dynamic_at); });
    };
    CHECK(shares(9, 4) == "lived");
    CHECK(says(shares(10, 4), "heap-buffer-overflow"));
    CHECK(says(shares(9, 5), "heap-buffer-overflow"));
    const auto reads = [&](int at) { return last_words([&] { launch("k", local_kernel, {1, 64}, kQueue, at, out.as<float>()); }); };
    CHECK(reads(7) == "lived");
    CHECK(says(reads(8), "stack-buffer-overflow")) << reads(8);
}

TEST(what_is_out_of_scope_is_found_after_a_switch) {
    const Buffer out = place(64, 4, false);
    CHECK(says(last_words([&] { launch("k", out_of_scope_kernel, {1, 64}, kQueue, out.as<float>()); }), "stack-use-after-scope"));
}

// Exceptions, after which the sanitizer must know which stack it is on.
__global__ void catching_kernel(int* caught) {
    for (int i = 0; i < 3; ++i) {
        float x[16] = {float(i)};
        try {
            __syncthreads();
            if (threadIdx.x % 2) throw x[0];
        } catch (float thrown) {
            atomicAdd(caught, int(thrown) + 1);
        }
        __syncthreads();
    }
    if (threadIdx.x == 33) throw std::runtime_error("at the end");
    __syncthreads();
}

TEST(exceptions_inside_threads_are_no_fault) {
    int caught = 0;
    for (int i = 0; i < 3; ++i) {
        std::string said;
        try {
            launch("k", catching_kernel, {1, 64}, kQueue, &caught);
        } catch (const std::runtime_error& error) {
            said = error.what();
        }
        CHECK(said == "k: at the end") << said;
    }
    CHECK(caught == 3 * 32 * 6) << caught;
}

#endif

}  // namespace
