// cuSPARSELt, opened at run time: nothing of it is linked, so that the package loads and builds without it.
#pragma once

#include <atomic>
#include <stdexcept>
#include <string>

#include "abi.h"

namespace nm::cusparselt {

// A call that the library answered with a status.
class Failure : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

struct Entries {
#define NM_CUSPARSELT_ENTRY(name, result, parameters) result(*name) parameters = nullptr;
    NM_CUSPARSELT_ENTRIES(NM_CUSPARSELT_ENTRY)
#undef NM_CUSPARSELT_ENTRY
};

class Library {
  public:
    // Opens a file, or a name that the loader looks for; throws a std::runtime_error that tells what is missing.
    // The file stays open: the driver may hold on to its kernels.
    explicit Library(const std::string& path);

    // Throws a Failure that names the entry and puts the status in words.
    void check(Status status, const char* entry) const;

    Entries call;
    std::string path;
    int version = 0;
    // Whether it works on the CPU's memory, as the library of the tests does, which says so by a symbol of its own.
    bool on_host = false;
    // Whether a plan must be made anew when its bias has another address. Whoever checks results finds out.
    mutable std::atomic<bool> replan{false};

  private:
    int part(int which) const;
};

}  // namespace nm::cusparselt
