// Products of bfloat16 rows with packed weights, summed in float32.
//
// A packed weight [outputs, inputs] is a row of panels of kPanel outputs each. A panel is an
// array [pairs of inputs, kPanel] of 32-bit words, and word (k, o) holds the weights of inputs
// 2k (low half) and 2k + 1 of output o. So a panel is read from front to back, a word fills one
// lane of a dot product of pairs, and matrix tiles of Intel's AMX can be loaded from it as well.
#pragma once

#include <algorithm>

#include "elements.h"

namespace stepgraph {

constexpr int kPanel = 32;
constexpr int kPanelVectors = kPanel / kLanes;
constexpr int kMaxPanels = 2;  // that one call of multiply takes
constexpr int kSumsStride = kMaxPanels * kPanel;

struct Weight {
    const uint32_t* words;
    int64_t pairs;    // of inputs
    int64_t outputs;  // the last panel's further ones are zero

    int64_t num_panels() const { return (outputs + kPanel - 1) / kPanel; }
    const uint32_t* panel(int64_t index) const { return words + index * pairs * kPanel; }
};

struct Rows {
    const uint16_t* data;  // bfloat16; each row has 2 * pairs elements
    int64_t stride;        // in elements

    Rows from(int64_t row) const { return {data + row * stride, stride}; }
    uint32_t pair(int64_t row, int64_t k) const {
        return load<uint32_t>(data + row * stride + 2 * k);
    }
};

// a * b + sum, for both elements of each word.
struct PairProduct {
#if defined(__AVX512BF16__)
    static Floats add(Words a, Words b, Floats sum) { return BfloatPairProduct::add(a, b, sum); }
#else
    static Floats low(Words pair) { return bits<Floats>(pair << 16); }
    static Floats high(Words pair) { return bits<Floats>(pair & 0xffff0000); }
    static Floats add(Words a, Words b, Floats sum) {
        return high(a) * high(b) + (low(a) * low(b) + sum);
    }
#endif
};

// Most rows of a tile, by its panels. With dot products of pairs the sums fill the registers.
// Without, weights have to be taken apart, which pays when more rows share it, even if sums spill.
#if defined(__AVX512F__)
template <int panels>
constexpr int kTileRows = panels == 1 ? 12 : 6;
#elif defined(__AVX2__)
template <int panels>
constexpr int kTileRows = panels == 1 ? 6 : 1;
#else
template <int panels>
constexpr int kTileRows = panels == 1 ? 4 : 1;
#endif

// sums [R, P * kPanel], row stride kSumsStride, of the first R rows and P panels. Each is summed
// from the first pair to the last, so it is the same whatever rows and panels share the tile.
template <int R, int P>
inline void multiply_tile(const Rows& x, const Weight& weight, int64_t panel, float* sums) {
    constexpr int vectors = P * kPanelVectors;
    Floats sum[R][vectors] = {};
    const uint32_t* words = weight.panel(panel);
    const int64_t panel_stride = weight.pairs * kPanel;
    for (int64_t k = 0; k < weight.pairs; ++k, words += kPanel) {
        Words factors[vectors];
#pragma GCC unroll 16
        for (int v = 0; v < vectors; ++v) {
            factors[v] = load<Words>(
                words + v / kPanelVectors * panel_stride + v % kPanelVectors * kLanes);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Words pair = Words{} + x.pair(r, k);
#pragma GCC unroll 16
            for (int v = 0; v < vectors; ++v) {
                sum[r][v] = PairProduct::add(pair, factors[v], sum[r][v]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
        for (int v = 0; v < vectors; ++v) store(sums + r * kSumsStride + v * kLanes, sum[r][v]);
    }
}

template <int P, int R = kTileRows<P>>
inline void multiply_rows(
    int num_rows, const Rows& x, const Weight& weight, int64_t panel, float* sums) {
    if (num_rows == R) return multiply_tile<R, P>(x, weight, panel, sums);
    if constexpr (R > 1) multiply_rows<P, R - 1>(num_rows, x, weight, panel, sums);
}

template <int P>
inline void multiply_tiles(
    int num_rows, const Rows& x, const Weight& weight, int64_t panel, float* sums) {
    // Tiles of similar heights, rather than full ones and a small rest.
    int num_tiles = (num_rows + kTileRows<P> - 1) / kTileRows<P>;
    for (int row = 0; num_tiles > 0; --num_tiles) {
        const int rows = (num_rows - row + num_tiles - 1) / num_tiles;
        multiply_rows<P>(rows, x.from(row), weight, panel, sums + row * kSumsStride);
        row += rows;
    }
}

// at::native::cpublas::brgemm and brgemm_release, for CPUs with matrix tiles, which no kernel here
// uses. Null elsewhere. Takes rows, columns and depth, the strides of a, b and c, whether to add
// to c, a, b, c, and whether b is packed. Each thread releases what it has used.
struct MatrixKernel {
    void (*multiply)(
        int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const void*, const void*,
        float*, bool);
    void (*release)(bool);
};
inline MatrixKernel matrix_kernel;

inline void release_matrix_kernel() {
    if (matrix_kernel.release) matrix_kernel.release(true);
}

constexpr int kMatrixRows = 32;  // that it is called with, always the same: it compiles per shape

// The sums of one task, [rows, kMaxPanels * kPanel].
struct alignas(64) Sums {
    static constexpr int kMaxRows = 48;
    float values[kMaxRows * kSumsStride];

    const float* row(int index) const { return values + index * kSumsStride; }
};
static_assert(kMatrixRows <= Sums::kMaxRows, "sums have room for the largest block");

// The tasks of one product: blocks of rows by groups of panels. Consecutive tasks share panels.
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
    }

    int num_groups() const { return (num_panels + panels - 1) / panels; }
    int num_blocks() const { return (num_rows + rows - 1) / rows; }
    int num_tasks() const { return num_groups() * num_blocks(); }

    static constexpr int kMinRows = 12;
};

// One task of a grid.
struct Block {
    int first_row, num_rows, first_panel, num_panels;

    Block(const Grid& grid, int task)
        : first_row(task % grid.num_blocks() * grid.rows),
          num_rows(std::min(grid.rows, grid.num_rows - first_row)),
          first_panel(task / grid.num_blocks() * grid.panels),
          num_panels(std::min(grid.panels, grid.num_panels - first_panel)) {}

    // A block's product with the weight's panels from so many after first_panel on.
    void multiply(const Rows& x, const Weight& weight, int64_t panels_on, Sums& sums) const {
        const Rows rows = x.from(first_row);
        const int64_t panel = first_panel + panels_on;
        if (matrix_kernel.multiply && num_rows == kMatrixRows) {
            for (int p = 0; p < num_panels; ++p) {
                matrix_kernel.multiply(
                    kMatrixRows, kPanel, 2 * weight.pairs, x.stride, kPanel, kSumsStride, false,
                    rows.data, weight.panel(panel + p), sums.values + p * kPanel, true);
            }
        } else if (num_panels == 2 && kTileRows<2> > 1) {
            multiply_tiles<2>(num_rows, rows, weight, panel, sums.values);
        } else {
            for (int p = 0; p < num_panels; ++p) {
                multiply_tiles<1>(num_rows, rows, weight, panel + p, sums.values + p * kPanel);
            }
        }
    }
};

}  // namespace stepgraph
