#pragma once

namespace nm::cuda {

// Where kernels run: a stream of a GPU; kernels of one stream run in order.
//
// As long as it lives, a context of that GPU is current on this thread: the one that is, or else the primary context, pushed here and
// popped at the end. So the driver can be called directly, on a thread too that has done nothing with CUDA yet, all launches of a call
// switch once, and no other GPU is touched. (cudaSetDevice back to the device before would create a context there.)
class Queue {
  public:
    Queue(int device, void* stream);
    ~Queue();
    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;

    const int device;
    void* const stream;

  private:
    bool pushed_ = false;
};

}  // namespace nm::cuda
