// The OpenMP threads of another library in this process, reached through the entry points that compilers use.
//
// They are found at run time, so that this module links to no OpenMP of its own: two of them in one process are two
// teams of threads that fight for the same cores.
#pragma once

#include <string>

namespace nm {

using Work = void(void* data);

class Team {
  public:
    explicit operator bool() const { return gomp_ || fork_call_; }

    // work(data) on each of `threads` threads, the caller among them; inside such a call, on the caller alone.
    void operator()(Work* work, void* data, int threads) const;

    // In words.
    std::string name() const;

  private:
    friend Team team_of(const char* library);

    using Micro = void(int*, int*, ...);
    void (*gomp_)(Work*, void*, unsigned, unsigned) = nullptr;  // GOMP_parallel: GNU's, and in LLVM's and Intel's on Linux
    void (*fork_call_)(void*, int, Micro*, ...) = nullptr;      // __kmpc_fork_call: LLVM's and Intel's
    void (*push_num_threads_)(void*, int, int) = nullptr;
    int (*global_thread_num_)(void*) = nullptr;
};

// The team that `library` uses, by its name or path; none where it is not loaded or uses no OpenMP.
Team team_of(const char* library);

}  // namespace nm
