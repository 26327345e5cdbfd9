// Fresh memory for large outputs. The first touch of each page costs a fault, more than all that a kernel does with it;
// pages of 2 MB cost 512 times fewer. A hint: where the system has no such pages nothing changes.
#pragma once

#include <cstdint>

namespace nm {

void want_huge_pages(void* memory, int64_t bytes);

}  // namespace nm
