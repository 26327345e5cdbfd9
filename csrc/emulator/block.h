// One block of CUDA threads on one CPU thread: a fiber per CUDA thread, scheduled until all have returned.
//
// A thread runs until it waits: at a barrier of the block, or for the other lanes of a warp function. The scheduling order
// separates neighbours and changes from block to block and from turn to turn, so that a missing barrier changes results here
// too. Shared memory is filled with NaN before each block. A deadlock (a barrier that some threads never reach, a mask that
// names a lane that has returned) is an error that says which threads wait where; so are threads at different barriers, and
// lanes at different functions.
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
constexpr int kDeposit = 128;  // most bytes that a lane can exchange
constexpr unsigned kMostThreads = 1024;
constexpr size_t kMostShared = 163 << 10, kDynamicAlignment = 128;  // bytes; the limit of a block of sm_80

// The values that the lanes of one mask exchange; NaN for the others. Two sets of deposits, because a lane may reach the
// next meeting while others still read from this one.
struct Meeting {
    Meeting() { std::memset(deposit, 0xff, sizeof deposit); }
    const char* what = nullptr;
    uint32_t present = 0;
    uint64_t held = 0;  // number of meetings so far
    alignas(16) unsigned char deposit[2][kLanes][kDeposit];
};

// Shared memory: initially NaN, aligned exactly as requested, with its end known to the sanitizer.
struct Memory {
    Memory(size_t bytes, size_t alignment);

    size_t bytes;
    std::shared_ptr<void> owner;
    unsigned char* data;
};

// A pending cp.async.
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
    const char* waits = nullptr;  // the function it waits in, or null
    std::deque<Copy> copies;
    int copy_group = 0;  // the uncommitted one

    int lane() const { return number % kLanes; }
    void prepare(class Block* of, unsigned i, void (*entry)(void*));
    void wait(const char* what);
};

class Block {
  public:
    // Runs body() as every thread of block `number` of `count`. Rethrows a thread's exception.
    void run(unsigned number, unsigned count, unsigned threads, size_t dynamic_bytes, const std::function<void()>& body);

    // The barrier at this line of the source.
    void barrier(Thread& thread, int line);

    // Exchanges `bytes` of data with the lanes of `mask`; returns their deposits.
    const unsigned char (*meet(Thread& thread, uint32_t mask, const char* what, const void* data, size_t bytes))[kDeposit];

    // Shared memory of one declaration, the same for all threads; null for dynamic shared memory.
    void* shared(const void* declaration, size_t bytes, size_t alignment);
    void* dynamic_shared() { return shared(nullptr, 0, kDynamicAlignment); }

    // Whether `bytes` at an address are in shared memory.
    bool has_shared(const void* address, size_t bytes) const;

    // Throws unless they are, and are aligned to `bytes`.
    void check_shared(const char* what, const void* address, size_t bytes) const;

    // Mask of the lanes in a thread's warp; the last warp may have fewer than 32.
    int lanes(const Thread& thread) const;

    // Whether a thread has failed, so that the others must stop waiting.
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

// The CUDA thread that is running on this CPU thread.
Thread& current();

// If set, only that many first and last blocks of every grid run: for tests of very large tensors.
inline unsigned ends = ~0u;

// Runs every block of a grid on NMKERNELS_EMULATOR_THREADS CPU threads (default 1).
void run_grid(const char* name, unsigned blocks, unsigned threads, size_t dynamic_bytes, const std::function<void()>& body);

}  // namespace nm::emulator
