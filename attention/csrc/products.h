// Small matrix products, C = [C * alpha] + A B, with the accumulators in registers.
#pragma once

#include "ahead.h"
#include "elements.h"

namespace stepgraph {

// Rows and vectors of accumulators: as many as leave registers for the operands.
#if defined(__AVX512F__)
constexpr int kProductRows = 6, kProductVectors = 4;
#else
constexpr int kProductRows = 4, kProductVectors = 2;
#endif

struct ProductArgs {
    const uint32_t* a;  // [rows, depth] words, row stride a_stride
    int64_t a_stride;
    const uint32_t* b;  // [depth, columns] words, row stride b_stride
    int64_t b_stride;
    float* c;  // [rows, columns], row stride c_stride
    int64_t c_stride;
    const float* alpha;  // [rows]: what C is multiplied by beforehand; null: C is overwritten
    int depth;
    Ahead* ahead;  // what to fetch meanwhile, a unit per row of B; null: nothing
};

template <class Product, int R, int V, bool fetch>
inline void product_block(const ProductArgs& args, int row, int column) {
    Floats sums[R][V];
    float* c = args.c + row * args.c_stride + column;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            sums[r][v] = args.alpha
                ? load<Floats>(c + r * args.c_stride + v * kLanes) * args.alpha[row + r]
                : Floats{};
        }
    }
    const uint32_t* a = args.a + row * args.a_stride;
    const uint32_t* b = args.b + column;
    for (int k = 0; k < args.depth; ++k) {
        if constexpr (fetch) args.ahead->advance(1);
        Words operand[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) operand[v] = load<Words>(b + v * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Words factor = Words{} + a[r * args.a_stride + k];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
                sums[r][v] = Product::add(factor, operand[v], sums[r][v]);
            }
        }
        b += args.b_stride;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store(c + r * args.c_stride + v * kLanes, sums[r][v]);
    }
}

template <class Product, int R, int V>
inline void product_columns(const ProductArgs& args, int row, int column) {
    if (args.ahead && column == 0) return product_block<Product, R, V, true>(args, row, column);
    product_block<Product, R, V, false>(args, row, column);
}

template <class Product, int R>
inline void product_rows(const ProductArgs& args, int row, int num_vectors) {
    int v = 0;
    for (; v + kProductVectors <= num_vectors; v += kProductVectors) {
        product_columns<Product, R, kProductVectors>(args, row, v * kLanes);
    }
    for (; v + 2 <= num_vectors; v += 2) product_columns<Product, R, 2>(args, row, v * kLanes);
    if (v < num_vectors) product_columns<Product, R, 1>(args, row, v * kLanes);
}

template <class Product, int R = kProductRows>
inline void product_remaining_rows(const ProductArgs& args, int row, int count, int num_vectors) {
    if constexpr (R > 0) {
        if (count == R) return product_rows<Product, R>(args, row, num_vectors);
        product_remaining_rows<Product, R - 1>(args, row, count, num_vectors);
    }
}

// columns is num_vectors * kLanes.
template <class Product>
void multiply(const ProductArgs& args, int num_rows, int num_vectors) {
    int row = 0;
    for (; row + kProductRows <= num_rows; row += kProductRows) {
        product_rows<Product, kProductRows>(args, row, num_vectors);
    }
    product_remaining_rows<Product>(args, row, num_rows - row, num_vectors);
}

}  // namespace stepgraph
