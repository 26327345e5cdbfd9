#pragma once

namespace nm::cuda {

// Where kernels run: a stream of a GPU; kernels of one stream run in order.
//
// While it exists, a context of that GPU is current on this thread: the current one if it is of that GPU, otherwise the primary context,
// pushed by the constructor and popped by the destructor. So the driver can be called directly, even on a thread without a CUDA
// context, a call switches only once, and other GPUs are not touched. (Restoring the previous device with cudaSetDevice would
// create a context there.)
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
