// Prints what csrc/cusparselt/abi.h says of the library, one "what,value" per line: constants, sizes and alignments, calls.
// With NM_HEADER it prints what the library's own header says of the same; bench/cusparselt_abi.py compares them.
#include <cstdio>
#include <string>
#include <type_traits>

#if defined(NM_HEADER)
#include <cusparseLt.h>
#endif

#include "../../cusparselt/abi.h"

// A parameter as a call passes it: an address, or a number of so many bytes. That of an enum is that of its int.
template <class T>
std::string passed() {
    if (std::is_pointer<T>::value) {
        const bool reads = std::is_const<std::remove_pointer_t<T>>::value;
        return reads ? "const*" : "*";
    }
    return std::to_string(sizeof(T));
}

template <class Result, class... Parameters>
std::string describe(Result (*)(Parameters...)) {
    std::string text = passed<Result>() + "(";
    ((text += passed<Parameters>() + " "), ...);
    if (text.back() == ' ') text.pop_back();
    return text + ")";
}

int main() {
#if defined(NM_HEADER)
    std::printf("version,%d.%d.%d\n", CUSPARSELT_VER_MAJOR, CUSPARSELT_VER_MINOR, CUSPARSELT_VER_PATCH);
#define CONSTANT(ours, theirs, value) std::printf(#theirs ",%d\n", static_cast<int>(theirs));
#define STRUCT(ours, theirs) std::printf(#theirs ",%zu aligned to %zu\n", sizeof(::theirs), alignof(::theirs));
#define ENTRY(name, result, parameters) std::printf("cusparseLt" #name ",%s\n", describe(static_cast<decltype(&::cusparseLt##name)>(nullptr)).c_str());
#else
#define CONSTANT(ours, theirs, value) std::printf(#theirs ",%d\n", nm::cusparselt::ours);
#define STRUCT(ours, theirs) \
    std::printf(#theirs ",%zu aligned to %zu\n", sizeof(nm::cusparselt::ours), alignof(nm::cusparselt::ours));
#define ENTRY(name, result, parameters) \
    std::printf("cusparseLt" #name ",%s\n", describe(static_cast<result(*) parameters>(nullptr)).c_str());
    using namespace nm::cusparselt;
#endif
    NM_CUSPARSELT_CONSTANTS(CONSTANT)
    NM_CUSPARSELT_STRUCTS(STRUCT)
    NM_CUSPARSELT_ENTRIES(ENTRY)
}
