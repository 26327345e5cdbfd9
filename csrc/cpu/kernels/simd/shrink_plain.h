// Soft thresholds of 64 elements, each with its own, and their products with the weights: the plain form of
// shrink_avx512.h and shrink_avx2.h.
#pragma once

#include "../../../core/threshold.h"
#include "select_plain.h"

namespace nm {
namespace {

// The difference is taken between keys, as there: a NaN has the same bits under every instruction set.
template <class T>
void shrink64(const T* w, const Keys64<T>& keys, const Keys64<T>& t, T* out) {
    for (int i = 0; i < 64; ++i) {
        const float d = Key<T>::value(uint32_t(keys.v[i])) - Key<T>::value(uint32_t(t.v[i]));
        out[i] = from_float<T>(d <= 0.0f ? 0.0f : with_sign(d, to_float(w[i])));
    }
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
