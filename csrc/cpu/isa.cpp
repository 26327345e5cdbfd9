#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nm {

namespace portable {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx512_bf16 {
extern const Kernels kernels;
}
namespace amx {
extern const Kernels kernels;
}

namespace {

struct Isa {
    const char* name;
    const Kernels* kernels;
    bool (*runs)();
};

[[maybe_unused]] bool always() { return true; }

// in a build for one instruction set, each still asks for those before it
#if defined(__x86_64__)
[[maybe_unused]] bool has_v3() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt") &&
           __builtin_cpu_supports("popcnt");
}

[[maybe_unused]] bool has_v4() {
    return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

[[maybe_unused]] bool has_bf16() {
    return has_v4() && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512bf16");
}
#endif

#if defined(NM_HAS_amx)
// The tiles are 8 KB of state, which a process has to request once for all of its threads.
bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
    return false;
#endif
}

bool has_amx() {
    static const bool found = has_bf16() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                              __builtin_cpu_supports("amx-int8") && may_use_tiles();
    return found;
}
#endif

// the best last
const Isa kIsas[] = {
#if defined(NM_HAS_portable)
    {"portable", &portable::kernels, always},
#endif
#if defined(NM_HAS_avx2)
    {"avx2", &avx2::kernels, has_v3},
#endif
#if defined(NM_HAS_avx512)
    {"avx512", &avx512::kernels, has_v4},
#endif
#if defined(NM_HAS_avx512_bf16)
    {"avx512_bf16", &avx512_bf16::kernels, has_bf16},
#endif
#if defined(NM_HAS_amx)
    {"amx", &amx::kernels, has_amx},
#endif
};

const Isa& named(const std::string& name) {
    std::string known;
    for (const Isa& one : kIsas) {
        if (name == one.name && one.runs()) return one;
        if (name == one.name) throw std::invalid_argument("this processor does not run the instruction set " + name + "; unset NMKERNELS_ISA");
        known += (known.empty() ? "" : ", ") + std::string(one.name);
    }
    throw std::invalid_argument("instruction set '" + name + "' is unknown or not in this build; NMKERNELS_ISA may be one of " + known);
}

const Isa& first_choice() {
    const char* name = std::getenv("NMKERNELS_ISA");
    if (name && *name) return named(name);
    const Isa* best = nullptr;
    for (const Isa& one : kIsas) best = one.runs() ? &one : best;
    if (!best) throw std::invalid_argument("the compiled core is for another processor; run `make build` again on this one");
    return *best;
}

std::atomic<const Isa*> in_use{nullptr};

const Isa& active() {
    const Isa* found = in_use.load(std::memory_order_acquire);
    if (!found) in_use.store(found = &first_choice(), std::memory_order_release);
    return *found;
}

}  // namespace

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const Isa& one : kIsas) {
        if (one.runs()) names.push_back(one.name);
    }
    return names;
}

std::string isa() { return active().name; }

void use_isa(const std::string& name) { in_use.store(&named(name), std::memory_order_release); }

const Kernels& kernels() { return *active().kernels; }

}  // namespace nm
