// One block of CUDA threads on one CPU thread: a fiber per CUDA thread, run in turn until all have returned.
//
// A thread goes on until it waits: at a barrier of the block, or for the other lanes that a warp function names. Threads
// are taken up in an order that mixes neighbours and turns round from block to block and from turn to turn, so that code
// without a barrier that it needs gives other results here too. Shared memory is filled with NaN before each block. What
// cannot go on (a barrier that some threads never reach, a lane that a mask names and that has returned) is an error that
// says who waits where; so are threads that meet at different barriers, and lanes at different functions.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "fiber.h"

namespace nm::emulator {

struct Index { unsigned x = 0, y = 0, z = 0; };

constexpr int kLanes = 32;
constexpr int kDeposit = 128;  // bytes that a lane can hand over
constexpr unsigned kMostThreads = 1024;
constexpr size_t kMostShared = 163 << 10, kDynamicAlignment = 128;  // bytes; what a block of sm_80 can have

// What the lanes of one mask hand each other; NaN from the others. Two sets of deposits: a lane may be at the next meeting
// while others still read from this one, but not further.
struct Meeting {
    Meeting() { std::memset(deposit, 0xff, sizeof deposit); }
    const char* what = nullptr;
    uint32_t present = 0;
    uint64_t held = 0;  // how many meetings there have been
    alignas(16) unsigned char deposit[2][kLanes][kDeposit];
};

// Shared memory: NaN at first, aligned as asked and no better, and the sanitizer knows where it ends.
struct Memory {
    Memory(size_t bytes, size_t alignment);

    size_t bytes;
    std::shared_ptr<void> owner;
    unsigned char* data;
};

// A cp.async that has not been waited for.
struct Copy {
    void* to;
    const void* from;
    int bytes, filled, group;
};

struct Thread {
    Fiber fiber;
    class Block* block = nullptr;
    Index index;
    int number = 0;
    bool done = true;
    const char* waits = nullptr;  // for what, or null
    std::deque<Copy> copies;
    int copy_group = 0;  // the one that is not committed

    int lane() const { return number % kLanes; }
    void prepare(class Block* of, unsigned i, void (*entry)(void*));
    void wait(const char* what);
};

class Block {
  public:
    // Calls body() as every thread of block `number` of `count`. Throws what a thread throws.
    void run(unsigned number, unsigned count, unsigned threads, size_t dynamic_bytes, const std::function<void()>& body);

    // The barrier in this line of the source.
    void barrier(Thread& thread, int line);

    // Leaves `bytes` of data for the lanes of `mask` and waits for theirs: deposit[lane].
    const unsigned char (*meet(Thread& thread, uint32_t mask, const char* what, const void* data, size_t bytes))[kDeposit];

    // Shared memory of one declaration, the same for all threads; what the launch asked for has none.
    void* shared(const void* declaration, size_t bytes, size_t alignment);
    void* dynamic_shared() { return shared(nullptr, 0, kDynamicAlignment); }

    // Whether shared memory has `bytes` there.
    bool has_shared(const void* address, size_t bytes) const;

    // Throws unless it has, at a multiple of them.
    void check_shared(const char* what, const void* address, size_t bytes) const;

    // Lanes of the warp of a thread; the last warp may have fewer than 32.
    int lanes(const Thread& thread) const;

    // Whether a thread has failed, so that the others must not wait any longer.
    bool abandoned() const { return error_ != nullptr; }

    Index index, count, size;

  private:
    static void enter(void* thread);
    void release_barrier();
    std::exception_ptr deadlock() const;

    std::vector<std::unique_ptr<Thread>> threads_;
    std::vector<std::map<uint32_t, Meeting>> warps_;
    std::map<const void*, Memory> shared_;
    const std::function<void()>* body_ = nullptr;
    std::exception_ptr error_;
    unsigned alive_ = 0, at_barrier_ = 0;
    int barrier_line_ = 0;
};

// The CUDA thread that runs now on this CPU thread.
Thread& current();

// Of every grid only the first and the last so many blocks run: for tests of tensors too large to go through.
inline unsigned ends = ~0u;

// Every block of a grid, on as many CPU threads as NMKERNELS_EMULATOR_THREADS says (1).
void run_grid(const char* name, unsigned blocks, unsigned threads, size_t dynamic_bytes, const std::function<void()>& body);

}  // namespace nm::emulator
