#pragma once

namespace nm::cuda {

// Where a kernel runs. The device becomes the current one for the launch; kernels of one stream run in order.
struct Queue {
    int device;
    void* stream;
};

}  // namespace nm::cuda
