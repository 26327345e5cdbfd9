// The n:m mask of an m x m tile with exactly n kept in every row and every column and the largest total magnitude: a
// b-matching between rows and columns, found by successive shortest augmenting paths (min-cost flow with prices).
//
// Each unit of flow takes one dense Dijkstra over rows and columns, stopped at the first column with room. Above half
// density the m - n elements to drop are sought instead.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "../../core/types.h"

namespace nm {

class Assignment {
  public:
    explicit Assignment(int m) : m_(m), cost_(size_t(m) * m), chosen_(size_t(m) * m), rows_(m), columns_(m), room_(m) {}

    // `a`: magnitudes, row-major. The mask stays in kept() until the next call.
    void solve(const float* a, int n) {
        dropping_ = 2 * n > m_;
        const int units = dropping_ ? m_ - n : n;
        prepare(a, units);
        for (int row = 0; row < m_; ++row) {
            for (int unit = 0; unit < units; ++unit) augment(row);
        }
    }

    bool kept(int row, int column) const { return chosen_[at(row, column)] != dropping_; }

  private:
    static constexpr double kFar = std::numeric_limits<double>::infinity();

    struct Node {
        double price = 0.0, distance = kFar;
        int from = -1;
        bool closed = false;
    };

    size_t at(int row, int column) const { return size_t(row) * m_ + column; }

    // Costs are magnitudes over the largest finite one. Infinity (and NaN) weighs more than all finite ones together
    // can: 2^20 > 256 * 256, which leaves 2^-32 of precision for them.
    void prepare(const float* a, int units) {
        float largest = 0.0f;
        for (size_t i = 0; i < cost_.size(); ++i) largest = is_finite(a[i]) && a[i] > largest ? a[i] : largest;
        const double scale = (dropping_ ? 1.0 : -1.0) / (largest > 0.0f ? double(largest) : 1.0);
        for (size_t i = 0; i < cost_.size(); ++i) {
            cost_[i] = is_finite(a[i]) ? double(a[i]) * scale : (dropping_ ? 1048576.0 : -1048576.0);
            chosen_[i] = false;
        }
        for (int column = 0; column < m_; ++column) {
            // the highest price under which no reduced cost is negative
            double least = cost_[at(0, column)];
            for (int row = 1; row < m_; ++row) least = std::min(least, cost_[at(row, column)]);
            rows_[column].price = 0.0;
            columns_[column].price = least;
            room_[column] = units;
        }
    }

    double reduced(int row, int column) const { return cost_[at(row, column)] - rows_[row].price - columns_[column].price; }

    // A free pair leads from its row to its column at the reduced cost, a chosen pair back at minus that.
    void augment(int source) {
        for (int i = 0; i < m_; ++i) {
            for (Node* node : {&rows_[i], &columns_[i]}) {
                node->distance = kFar;
                node->from = -1;
                node->closed = false;
            }
        }
        rows_[source].distance = 0.0;
        for (;;) {
            const int row = nearest(rows_), column = nearest(columns_);
            if (row >= 0 && (column < 0 || rows_[row].distance <= columns_[column].distance)) {
                leave_row(row);
            } else if (room_[column] > 0) {
                shift_prices(columns_[column].distance);
                flip(source, column);
                return;
            } else {
                leave_column(column);
            }
        }
    }

    int nearest(const std::vector<Node>& nodes) const {
        int best = -1;
        double least = kFar;
        for (int i = 0; i < m_; ++i) {
            if (!nodes[i].closed && nodes[i].distance < least) {
                least = nodes[i].distance;
                best = i;
            }
        }
        return best;
    }

    static void relax(Node& node, double through, int from) {
        if (node.closed || through >= node.distance) return;
        node.distance = through;
        node.from = from;
    }

    // reduced costs that rounding left on the wrong side of zero count as zero
    void leave_row(int row) {
        rows_[row].closed = true;
        for (int column = 0; column < m_; ++column) {
            if (!chosen_[at(row, column)]) relax(columns_[column], rows_[row].distance + std::max(reduced(row, column), 0.0), row);
        }
    }

    void leave_column(int column) {
        columns_[column].closed = true;
        for (int row = 0; row < m_; ++row) {
            if (chosen_[at(row, column)]) relax(rows_[row], columns_[column].distance + std::max(-reduced(row, column), 0.0), column);
        }
    }

    // Keeps the reduced cost of every free pair >= 0 and of every chosen pair <= 0.
    void shift_prices(double reached) {
        for (int i = 0; i < m_; ++i) {
            if (rows_[i].closed) rows_[i].price += reached - rows_[i].distance;
            if (columns_[i].closed) columns_[i].price -= reached - columns_[i].distance;
        }
    }

    void flip(int source, int column) {
        --room_[column];
        for (;;) {
            const int row = columns_[column].from;
            chosen_[at(row, column)] = true;
            if (row == source) return;
            column = rows_[row].from;
            chosen_[at(row, column)] = false;
        }
    }

    int m_;
    bool dropping_ = false;
    std::vector<double> cost_;
    std::vector<char> chosen_;
    std::vector<Node> rows_, columns_;
    std::vector<int> room_;
};

}  // namespace nm
