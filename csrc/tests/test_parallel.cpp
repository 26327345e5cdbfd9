// parallel_for: every chunk once, exceptions, nested and simultaneous callers, forked children; and another library's
// OpenMP threads, found by name.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

#include "../cpu/openmp.h"
#include "check.h"

namespace {

int64_t sum_of(int64_t chunks, int threads) {
    std::atomic<int64_t> sum{0};
    nm::parallel_for(chunks, threads, [&](int64_t i) { sum += i + 1; });
    return sum;
}

TEST(every_chunk_runs_once) {
    for (int threads : {1, 2, 5}) {
        for (int64_t chunks : {0, 1, 2, 7, 1000}) CHECK(sum_of(chunks, threads) == chunks * (chunks + 1) / 2) << chunks << " on " << threads;
    }
}

TEST(an_exception_reaches_the_caller) {
    for (int threads : {1, 4}) {
        bool caught = false;
        try {
            nm::parallel_for(100, threads, [](int64_t i) {
                if (i == 37) throw std::runtime_error("as asked");
            });
        } catch (const std::runtime_error&) {
            caught = true;
        }
        CHECK(caught) << threads << " threads";
        CHECK(sum_of(100, threads) == 5050);
    }
}

TEST(nested_and_simultaneous_callers) {
    std::atomic<int64_t> sum{0};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller) {
        callers.emplace_back([&] {
            for (int round = 0; round < 50; ++round) {
                nm::parallel_for(8, 3, [&](int64_t) { sum += sum_of(4, 2); });
            }
        });
    }
    for (std::thread& one : callers) one.join();
    CHECK(sum == 4 * 50 * 8 * 10) << sum.load();
}

#if !defined(__SANITIZE_THREAD__)
TEST(a_forked_child_works_alone) {
    CHECK(sum_of(100, 3) == 5050);
    const pid_t child = fork();
    if (child == 0) _exit(sum_of(100, 3) == 5050 && nm::threads_in_use() != "its own threads" ? 0 : 1);
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}
#endif

struct Seen {
    std::mutex mutex;
    std::set<std::thread::id> threads;
};

void note(void* data) {
    Seen& seen = *static_cast<Seen*>(data);
    std::lock_guard<std::mutex> lock(seen.mutex);
    seen.threads.insert(std::this_thread::get_id());
}

TEST(openmp_threads_of_a_loaded_library) {
    for (const char* library : {NM_FAKE_GOMP, NM_FAKE_KMPC}) {
        CHECK(!nm::team_of(library)) << library << " is not loaded yet";
        void* handle = dlopen(library, RTLD_NOW);
        CHECK(handle != nullptr) << dlerror();
        const nm::Team team = nm::team_of(library);
        CHECK(bool(team)) << library;
        for (int threads : {3, 1, 2}) {
            Seen seen;
            team(note, &seen, threads);
            CHECK(int(seen.threads.size()) == threads) << library << " used " << seen.threads.size();
            CHECK(seen.threads.count(std::this_thread::get_id()) == 1) << "without the caller";
        }
        dlclose(handle);
    }
    CHECK(nm::threads_in_use() == "its own threads") << nm::threads_in_use();
}

}  // namespace
