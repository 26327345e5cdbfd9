// What both libraries do: work on so many threads, the caller among them, and wait for them.
#pragma once

#include <thread>
#include <vector>

template <class F>
void on_threads(int count, const F& work) {
    std::vector<std::thread> others;
    for (int i = 1; i < count; ++i) others.emplace_back(work);
    work();
    for (std::thread& one : others) one.join();
}
