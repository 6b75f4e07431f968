// A product's tasks: blocks of rows by groups of panels.
#pragma once

#include "fixed.h"

namespace stepgraph {

// What a weight is multiplied with: rows of bfloat16, or for weights in int8 what fixed.h makes of
// them where it can.
struct Input {
    Rows rows;
    FixedRows fixed;
};

// How a product is cut into tasks. Consecutive tasks share panels.
struct Grid {
    int num_rows, rows;      // in all, and of a block
    int num_panels, panels;  // in all, and of a group

    Grid(int64_t of_rows, int64_t of_panels, int threads)
        : num_rows(static_cast<int>(of_rows)), num_panels(static_cast<int>(of_panels)) {
        // A tile of one panel has room for few rows' sums, and reads its panel once.
        panels = num_rows <= kTileRows<1> ? 1 : kMaxPanels;
        rows = matrix_kernel.multiply ? kMatrixRows : Sums::kMaxRows;
        if (!matrix_kernel.multiply) {
            while (rows > kMinRows && num_tasks() < 4 * threads) rows /= 2;
        }
        if (panels == kMaxPanels) {
            // Few tasks may not come out even among the threads: then smaller ones do better.
            const int longest = longest_share(threads);
            panels = 1;
            if (20 * longest_share(threads) > 19 * longest) panels = kMaxPanels;
        }
    }

    int num_groups() const { return (num_panels + panels - 1) / panels; }
    int num_blocks() const { return (num_rows + rows - 1) / rows; }
    int num_tasks() const { return num_groups() * num_blocks(); }

    // Panels that the busiest thread goes through.
    int longest_share(int threads) const { return (num_tasks() + threads - 1) / threads * panels; }

    static constexpr int kMinRows = 12;
};

// One task of a grid.
struct Block {
    int first_row, num_rows, first_panel, num_panels;
    bool is_last, has_next_panels;  // of those with its panels; there are further ones

    Block(const Grid& grid, int task)
        : first_row(task % grid.num_blocks() * grid.rows),
          num_rows(std::min(grid.rows, grid.num_rows - first_row)),
          first_panel(task / grid.num_blocks() * grid.panels),
          num_panels(std::min(grid.panels, grid.num_panels - first_panel)),
          is_last(first_row + num_rows == grid.num_rows),
          has_next_panels(first_panel + num_panels < grid.num_panels) {}

    // A block's product with the weight's panels from so many after first_panel on.
    void multiply(const Input& x, const Weight& weight, int64_t panels_on, Sums& sums) const {
        const Rows rows = x.rows.from(first_row);
        const Panels panels{
            weight.panel(first_panel + panels_on), weight.panel_words(), weight.pairs};
        if (kHasFixedRows && weight.scales) {
            multiply_bytes(x.fixed.from(first_row), panels, sums);
        } else if (!weight.scales) {
            multiply_words(rows, panels, false, sums, upcoming(panels));
        } else if (num_rows <= kByteTiles * kTileRows<1>) {
            multiply_panels<BytePanel>(num_rows, num_panels, rows, panels, false, sums.values);
        } else {
            multiply_bytes(rows, panels, sums);
        }
    }

private:
    static constexpr int64_t kExpandedPairs = 256;
    static constexpr int kByteTiles = 2;  // up to which each making its own pairs is faster

    void multiply_bytes(const FixedRows& rows, const Panels& panels, Sums& sums) const {
        const Upcoming next = upcoming(panels);
        if (num_panels == 2) return multiply_fixed<2>(num_rows, rows, panels, sums.values, next);
        multiply_fixed<1>(num_rows, rows, panels, sums.values, next);
    }

    // The next panels, if no further task reads these, and these if no task before did.
    Upcoming upcoming(const Panels& panels) const {
        if (!is_last) return {};
        const auto* next = reinterpret_cast<const char*>(panels.words + num_panels * panels.stride);
        const int64_t num_bytes = num_panels * panels.stride * sizeof(uint32_t);
        const bool is_first = first_row == 0;
        return {next, has_next_panels ? next + num_bytes : next, is_first, panels.stride / kPanel};
    }

    void multiply_words(
        const Rows& rows, const Panels& panels, bool more, Sums& sums,
        const Upcoming& upcoming = {}) const {
        if (!matrix_kernel.multiply || num_rows != kMatrixRows) {
            return multiply_panels<BfloatPanel>(
                num_rows, num_panels, rows, panels, more, sums.values, upcoming);
        }
        for (int p = 0; p < num_panels; ++p) {
            matrix_kernel.multiply(
                kMatrixRows, kPanel, 2 * panels.pairs, rows.stride, kPanel, kSumsStride, more,
                rows.data, panels.words + p * panels.stride, sums.values + p * kPanel, true);
        }
    }

    // Makes some pairs of the panels bfloat16 at a time, for all rows.
    void multiply_bytes(const Rows& rows, const Panels& panels, Sums& sums) const {
        alignas(64) uint32_t expanded[kMaxPanels * kExpandedPairs * kPanel];
        for (int64_t first = 0; first < panels.pairs; first += kExpandedPairs) {
            const int64_t pairs = std::min(kExpandedPairs, panels.pairs - first);
            uint32_t* target = expanded;
            for (int p = 0; p < num_panels; ++p) {
                const uint32_t* words = panels.words + p * panels.stride + first / 2 * kPanel;
                for (int64_t k = 0; k < pairs; ++k, target += kPanel) {
                    for (int v = 0; v < kPanel; v += kLanes) {
                        store(target + v, BytePanel::pairs(words + k / 2 * kPanel + v, k % 2));
                    }
                }
            }
            multiply_words(
                rows.from_pair(first), {expanded, pairs * kPanel, pairs}, first > 0, sums);
        }
    }
};

}  // namespace stepgraph
