#include "pool.h"

#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace nm {
namespace {

constexpr int kMaxWorkers = 1023;

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

struct PoolJob {
    void (*work)(void*);
    void* data;
};

class Pool {
  public:
    // False when another job has the pool; the caller then works alone.
    bool run(const PoolJob& job, int helpers) {
        if (busy_.exchange(true, std::memory_order_acquire)) return false;
        grow(helpers);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = &job;
            open_ = helpers < workers_ ? helpers : workers_.load();
        }
        wake_.notify_all();
        job.work(job.data);
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
        for (;;) {
            wake_.wait(lock, [this] { return open_ > 0; });
            --open_;
            ++inside_;
            const PoolJob* job = job_;
            lock.unlock();
            job->work(job->data);
            lock.lock();
            if (--inside_ == 0) idle_.notify_one();
        }
    }

    std::atomic<bool> busy_{false};
    std::mutex mutex_;
    std::condition_variable wake_, idle_;
    const PoolJob* job_ = nullptr;
    int open_ = 0;    // how many workers may still join the current job
    int inside_ = 0;  // workers in it
    std::atomic<int> workers_{0};
};

Pool& pool() {
    static Pool* const only = new Pool;
    return *only;
}

}  // namespace

void pool_run(void (*work)(void*), void* data, int threads) {
    const PoolJob job{work, data};
    if (threads < 2 || !pool().run(job, threads - 1)) work(data);
}

int pool_workers() { return pool().workers(); }

}  // namespace nm
