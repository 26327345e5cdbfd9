// Soft thresholds of 64 elements, each with its own, and 64 elements as fp32: the plain form of shrink_avx512.h and shrink_avx2.h.
#pragma once

#include "../../../core/threshold.h"
#include "select_plain.h"

namespace nm {
namespace {

template <class T>
void shrink64(const T* w, const Keys64<T>& t, T* out) {
    for (int i = 0; i < 64; ++i) out[i] = shrink(w[i], Key<T>::value(uint32_t(t.v[i])));
}

template <class T>
void widen64(const T* w, float* out) {
    for (int i = 0; i < 64; ++i) out[i] = to_float(w[i]);
}

// Sums of products of fp32 numbers, exact before they are added: element i goes to lane i % 16.
class Dot {
  public:
    void add64(const float* a, const float* b) {
        for (int i = 0; i < 64; ++i) sum_[i % 16] += double(a[i]) * double(b[i]);
    }
    void lanes(double* out) const {
        for (int i = 0; i < 16; ++i) out[i] = sum_[i];
    }

  private:
    double sum_[16] = {};
};

}  // namespace
}  // namespace nm
