#include "pool.h"

#include <pthread.h>
#include <signal.h>
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace nm {
namespace {

constexpr int kMaxWorkers = 1023;

struct Job {
    const std::function<void(int64_t)>& fn;
    int64_t chunks;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error;  // written once, by whoever sets `failed`; read after every thread has left
    std::fenv_t environment;

    Job(const std::function<void(int64_t)>& f, int64_t count) : fn(f), chunks(count) { std::fegetenv(&environment); }

    void work() {
        try {
            for (int64_t i; !failed.load(std::memory_order_relaxed) && (i = next.fetch_add(1)) < chunks;) fn(i);
        } catch (...) {
            if (!failed.exchange(true)) error = std::current_exception();
        }
    }
};

// Signals belong to Python's main thread: a worker is started with all of them blocked.
class SignalsBlocked {
  public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  private:
    sigset_t before_;
};

// Keeps workers off the core of the thread that calls them.
//
// The system likes to wake a thread on the core of whoever wakes it. Elsewhere that is soon mended, but not while every
// other core is busy spinning, as OpenMP's threads do for milliseconds after each parallel region of torch: the caller
// goes on to compute on its core, and the worker does not run before the job is over (linear 1x1024x4096 after a torch
// call, 2 threads: 2.1 ms, with workers kept off 1.2; AMD EPYC, 2026-11-21). Other cores' schedulers share fairly.
class Placement {
  public:
#if defined(__linux__)
    void add_this_thread() { threads_.push_back(pid_t(syscall(SYS_gettid))); }

    // Workers may run where this thread may, but for where it is now; everywhere it may if that is the only place.
    void around_this_thread() {
        const int core = sched_getcpu();
        cpu_set_t allowed;
        if (core < 0 || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;  // more cores than the set has room for
        if (CPU_ISSET(core, &allowed) && CPU_COUNT(&allowed) > 1) CPU_CLR(core, &allowed);
        if (placed_ == threads_.size() && CPU_EQUAL(&allowed, &now_)) return;
        for (const pid_t thread : threads_) sched_setaffinity(thread, sizeof allowed, &allowed);
        placed_ = threads_.size();
        now_ = allowed;
    }

  private:
    std::vector<pid_t> threads_;
    size_t placed_ = 0;  // how many of them `now_` holds for
    cpu_set_t now_{};
#else
    void add_this_thread() {}
    void around_this_thread() {}
#endif
};

class Pool {
  public:
    // False when another job has the pool; the caller then works alone.
    bool run(Job& job, int helpers) {
        if (busy_.exchange(true, std::memory_order_acquire)) return false;
        grow(helpers);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            placement_.around_this_thread();
            job_ = &job;
            open_ = helpers < workers_ ? helpers : workers_.load();
        }
        wake_.notify_all();
        job.work();
        {
            // no chunk is left: late sleepers must not join, those inside are waited for
            std::unique_lock<std::mutex> lock(mutex_);
            open_ = 0;
            idle_.wait(lock, [this] { return inside_ == 0; });
            job_ = nullptr;
        }
        busy_.store(false, std::memory_order_release);
        return true;
    }

    int workers() const { return workers_; }

  private:
    void grow(int wanted) {
        if (wanted > kMaxWorkers) wanted = kMaxWorkers;
        if (workers_ >= wanted) return;
        const SignalsBlocked guard;
        try {
            for (; workers_ < wanted; ++workers_) std::thread(&Pool::serve, this).detach();
        } catch (const std::system_error&) {
            // a process at its thread limit goes on with the workers it has
        }
    }

    [[noreturn]] void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        placement_.add_this_thread();
        for (;;) {
            wake_.wait(lock, [this] { return open_ > 0; });
            --open_;
            ++inside_;
            Job* job = job_;
            lock.unlock();
            std::fesetenv(&job->environment);
            job->work();
            lock.lock();
            if (--inside_ == 0) idle_.notify_one();
        }
    }

    std::atomic<bool> busy_{false};
    std::mutex mutex_;
    std::condition_variable wake_, idle_;
    Placement placement_;  // under the mutex
    Job* job_ = nullptr;
    int open_ = 0;    // places left in the current job
    int inside_ = 0;  // workers in it
    std::atomic<int> workers_{0};
};

std::atomic<Pool*> current{nullptr};

// The parent's workers do not exist in the child and its locks may be held: the child forgets the whole pool.
void forget_in_child() { current.store(nullptr); }

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, forget_in_child);

Pool& pool() {
    Pool* found = current.load(std::memory_order_acquire);
    if (found) return *found;
    Pool* fresh = new Pool;
    if (current.compare_exchange_strong(found, fresh)) return *fresh;
    delete fresh;
    return *found;
}

}  // namespace

void parallel_for(int64_t chunks, int threads, const std::function<void(int64_t)>& fn) {
    if (chunks <= 0) return;
    const int64_t helpers = (threads < chunks ? threads : chunks) - 1;
    if (helpers > 0) {
        Job job(fn, chunks);
        if (pool().run(job, static_cast<int>(helpers))) {
            if (job.error) std::rethrow_exception(job.error);
            return;
        }
    }
    for (int64_t i = 0; i < chunks; ++i) fn(i);
}

int pool_workers() {
    const Pool* found = current.load();
    return found ? found->workers() : 0;
}

}  // namespace nm
