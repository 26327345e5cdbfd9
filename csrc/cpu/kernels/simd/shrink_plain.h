// Soft thresholds of 64 elements, each with its own, and their products with the weights: the plain form of
// shrink_avx512.h and shrink_avx2.h.
#pragma once

#include "../../../core/threshold.h"
#include "select_plain.h"

namespace nm {
namespace {

template <class T>
void shrink64(const T* w, const Keys64<T>&, const Keys64<T>& t, T* out) {
    for (int i = 0; i < 64; ++i) out[i] = shrink(w[i], Key<T>::value(uint32_t(t.v[i])));
}

// The sums of w s and of s s: element i goes to lane i % 16. The products are exact.
class Dots {
  public:
    template <class T>
    void add64(const T* w, const T* s) {
        for (int i = 0; i < 64; ++i) {
            const double x = to_float(w[i]), y = to_float(s[i]);
            ws_[i % 16] += x * y;
            ss_[i % 16] += y * y;
        }
    }
    void lanes(double* ws, double* ss) const {
        for (int i = 0; i < 16; ++i) {
            ws[i] = ws_[i];
            ss[i] = ss_[i];
        }
    }

  private:
    double ws_[16] = {}, ss_[16] = {};
};

}  // namespace
}  // namespace nm
