// The first two levels of data cache of one core; the block sizes of the GEMMs depend on them.
#pragma once

#include <cstdint>

namespace nm {

struct Caches {
    int64_t first, second;  // bytes
};

// As the system reports them; where it does not, 32 KB and 512 KB, which nearly every processor has.
const Caches& caches();

}  // namespace nm
