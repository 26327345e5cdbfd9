#include "parallel.h"

#include <pthread.h>

#include <atomic>
#include <cfenv>
#include <exception>

#include "openmp.h"
#include "pool.h"

namespace nm {
namespace {

// Calls of one parallel_for, handed out one by one to the threads that call work().
class Job {
  public:
    Job(const std::function<void(int64_t)>& fn, int64_t chunks) : fn_(fn), chunks_(chunks), caller_(pthread_self()) {
        std::fegetenv(&environment_);
    }

    void work() {
        if (pthread_equal(pthread_self(), caller_)) return take();
        std::fenv_t own;  // of a thread that goes on to work for torch
        std::fegetenv(&own);
        std::fesetenv(&environment_);
        take();
        std::fesetenv(&own);
    }

    void rethrow() const {
        if (error_) std::rethrow_exception(error_);
    }

  private:
    void take() {
        try {
            for (int64_t i; !failed_.load(std::memory_order_relaxed) && (i = next_.fetch_add(1)) < chunks_;) fn_(i);
        } catch (...) {
            if (!failed_.exchange(true)) error_ = std::current_exception();
        }
    }

    const std::function<void(int64_t)>& fn_;
    int64_t chunks_;
    pthread_t caller_;
    std::fenv_t environment_;
    std::atomic<int64_t> next_{0};
    std::atomic<bool> failed_{false};
    std::exception_ptr error_;  // written once, by the thread that sets `failed_`; read after every thread has left
};

// Set in every forked child: OpenMP would wait for threads that are not there, and a new one may get the stack of a
// thread that another was starting at the fork, half set up (glibc then frees its thread-local memory twice).
std::atomic<bool> forked{false};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });

const Team& torch_team() {
    static const Team team = team_of("libtorch_cpu.so");
    return team;
}

}  // namespace

void parallel_for(int64_t chunks, int threads, const std::function<void(int64_t)>& fn) {
    if (chunks > 1 && threads > 1 && !forked) {
        Job job(fn, chunks);
        const auto work = [](void* its) { static_cast<Job*>(its)->work(); };
        // all threads of torch's team, as torch itself asks for them: a smaller team would end those that it has no use for
        if (torch_team()) torch_team()(work, &job, threads);
        else pool_run(work, &job, int(threads < chunks ? threads : chunks));
        return job.rethrow();
    }
    for (int64_t i = 0; i < chunks; ++i) fn(i);
}

std::string threads_in_use() {
    if (forked) return "the calling thread alone, in a forked process";
    return torch_team() ? torch_team().name() : "its own threads";
}

}  // namespace nm
