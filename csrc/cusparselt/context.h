// Products by cuSPARSELt: a handle of one thread on one device, and the plans that were made with it.
#pragma once

#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "library.h"

namespace nm::cusparselt {

// The sparse operand as it lies: by rows, 2:4 along its columns; or transposed, so that it is stored (cols, rows) and
// 2:4 along the first of these.
struct Form {
    int64_t rows, cols;
    int dtype;
    bool transposed;

    bool operator<(const Form& other) const {
        return std::tie(rows, cols, dtype, transposed) < std::tie(other.rows, other.cols, other.dtype, other.transposed);
    }
};

// D (rows, width) = f(alpha A (rows, cols) B (cols, width) + beta C + bias), A sparse. All lie by rows; with `by_token`
// B is stored (width, cols), C and D are stored (width, rows), as the inputs and outputs of a layer are.
struct Gemm {
    Form sparse;
    int64_t width;
    int out;
    bool by_token;
    int activation;  // -1, kRelu or kGelu
    int algorithm;   // -1: the library's own choice
    int splits;      // 1: none
    int mode;        // of the split; 0: the library's own choice
};

// The addresses of one call.
struct Operands {
    const void *sparse, *dense, *residual;
    void* out;
    const void* bias;
    void* workspace;
};

// Whatever the library has made in a struct of ours, which it is asked to take back. Never moved.
template <class T, Status (*Entries::*kDestroy)(const T*)>
class Made {
  public:
    explicit Made(const Library& library) : library_(library) {}
    Made(const Made&) = delete;
    Made& operator=(const Made&) = delete;
    ~Made() { destroy(); }

    void destroy() {
        if (made_) (library_.call.*kDestroy)(&data);
        made_ = false;
    }
    // Of the call that makes it.
    void made(Status status, const char* entry) {
        library_.check(status, entry);
        made_ = true;
    }

    T data{};

  private:
    const Library& library_;
    bool made_ = false;
};

// One thread at a time, with its device current: the caller sees to both.
class Context {
  public:
    explicit Context(std::shared_ptr<const Library> library);
    ~Context();
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    // Bytes of a compressed operand, and of the scratch memory that compressing takes.
    std::pair<size_t, size_t> compressed_size(const Form& form);
    void compress(const Form& form, const void* dense, void* compressed, void* buffer, Stream stream);

    // Makes a plan and returns its number. Where the GEMM has a bias, an address of one.
    int plan(const Gemm& gemm, const void* bias);
    void drop(int plan);
    size_t workspace(int plan) const;
    // Algorithms have ids below this.
    int limit(int plan) const;
    void run(int plan, const Operands& operands, float alpha, float beta, Stream stream);

  private:
    struct Entry;
    using MadeMatrix = Made<Matrix, &Entries::MatDescriptorDestroy>;

    MadeMatrix& structured(const Form& form);
    void set_bias(Entry& entry, const void* bias);
    void init_plan(Entry& entry);
    Entry& at(int plan) const;

    std::shared_ptr<const Library> library_;
    Handle handle_{};
    std::map<Form, std::unique_ptr<MadeMatrix>> forms_;
    std::vector<std::unique_ptr<Entry>> entries_;
};

}  // namespace nm::cusparselt
