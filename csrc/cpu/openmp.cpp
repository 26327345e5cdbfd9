#include "openmp.h"

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#endif

namespace nm {
namespace {

#if defined(RTLD_NOLOAD)
template <class Fn>
void find(void* library, const char* name, Fn*& fn) {
    fn = reinterpret_cast<Fn*>(dlsym(library, name));  // there, or in what it depends on
}
#endif

// ident_t of LLVM's runtime: where in a source file a parallel region begins.
struct Place {
    int reserved = 0, flags = 2, more[2] = {0, 0};
    const char* source = ";nmkernels;parallel_for;0;0;;";
};

// What each thread of LLVM's runtime calls: two numbers of its own, then the addresses passed to fork_call.
void work_of(int*, int*, Work* work, void* data) { work(data); }

}  // namespace

Team team_of([[maybe_unused]] const char* library) {
    Team team;
#if defined(RTLD_NOLOAD)
    void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) return team;
    find(handle, "GOMP_parallel", team.gomp_);
    find(handle, "__kmpc_push_num_threads", team.push_num_threads_);
    find(handle, "__kmpc_global_thread_num", team.global_thread_num_);
    if (team.push_num_threads_ && team.global_thread_num_) find(handle, "__kmpc_fork_call", team.fork_call_);
    dlclose(handle);  // whoever loaded it keeps it
#endif
    return team;
}

void Team::operator()(Work* work, void* data, int threads) const {
    if (gomp_) return gomp_(work, data, unsigned(threads), 0);
    static Place place;
    push_num_threads_(&place, global_thread_num_(&place), threads);
    fork_call_(&place, 2, reinterpret_cast<Micro*>(work_of), work, data);
}

std::string Team::name() const { return std::string("torch's OpenMP threads, by ") + (gomp_ ? "GOMP_parallel" : "__kmpc_fork_call"); }

}  // namespace nm
