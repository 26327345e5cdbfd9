#include "library.h"

#include <vector>

#if !defined(_WIN32)
#include <dlfcn.h>
#endif

namespace nm::cusparselt {

namespace {

#if defined(_WIN32)
void* open(const std::string&) { throw std::runtime_error("cuSPARSELt is opened on Linux only"); }
void* find(void*, const char*) { return nullptr; }
#else
void* open(const std::string& path) {
    void* found = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!found) throw std::runtime_error(std::string("it cannot be opened: ") + dlerror());
    return found;
}
void* find(void* library, const char* name) { return dlsym(library, name); }
#endif

}  // namespace

Library::Library(const std::string& path) : path(path) {
    void* library = open(path);
    std::string missing;
    const auto resolve = [&](const char* name, auto& entry) {
        entry = reinterpret_cast<std::decay_t<decltype(entry)>>(find(library, name));
        if (!entry) missing += std::string(missing.empty() ? "" : ", ") + name;
    };
#define NM_CUSPARSELT_ENTRY(name, result, parameters) resolve("cusparseLt" #name, call.name);
    NM_CUSPARSELT_ENTRIES(NM_CUSPARSELT_ENTRY)
#undef NM_CUSPARSELT_ENTRY
    // first: that an old library lacks entries is the lesser news
    if (call.GetProperty) version = part(kMajor) * 1000000 + part(kMinor) * 100 + part(kPatch);
    if (version && version < kOldest) return;
    if (!missing.empty()) throw std::runtime_error("it has no " + missing);
    on_host = find(library, "nm_cusparselt_on_host") != nullptr;
}

int Library::part(int which) const {
    int value = 0;
    if (const Status status = call.GetProperty(which, &value)) {
        throw Failure("cusparseLtGetProperty failed with status " + std::to_string(status));
    }
    return value;
}

void Library::check(Status status, const char* entry) const {
    if (status == kSuccess) return;
    throw Failure(std::string("cusparseLt") + entry + " failed: " + call.GetErrorName(status) + " (" + std::to_string(status) + "), " +
                  call.GetErrorString(status));
}

}  // namespace nm::cusparselt
