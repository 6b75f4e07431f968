// Products of a few query rows with keys and values that go from the pages through registers, and
// not through memory: so few rows would not repay packing.
//
// Scores need sums along a key, so along lanes. Blocks of four words are what a key's place in a
// vector is transposed in: with a query's block repeated, lanes then hold four partial sums of as
// many keys as a vector has blocks, and only those four are left to add across lanes.
//
//     loaded       key 0: a0 a1 a2 a3    key 4: b0 b1 b2 b3    key 8: c0 ..    key 12: d0 ..
//     transposed   a0 b0 c0 d0    a1 b1 c1 d1    a2 b2 c2 d2    a3 b3 c3 d3
#pragma once

#include "ahead.h"
#include "elements.h"

namespace stepgraph {

// Rows whose accumulators fit in registers, beside the operands.
#if defined(__AVX512F__)
constexpr int kFewRows = 8;
#else
constexpr int kFewRows = 4;
#endif

template <class Element>
struct FewArgs {
    const typename Element::Storage* pages;  // of one key/value head
    const int64_t* offsets;                  // the last one repeated up to a multiple of kLanes
    int num_keys, head_dim;
    const uint32_t* a;  // query or weights: [rows, words], row stride a_stride
    int64_t a_stride;
    float* c;  // scores or sums of values: row stride c_stride
    int64_t c_stride;
    const float* alpha;  // [rows]: what sums are multiplied by beforehand
    Ahead* ahead;        // what to fetch meanwhile: a unit per key
};

// Adds the products of half of kLanes keys with elements first up to kLanes words further.
template <class Element, int R, bool whole>
inline void add_scores(
    const FewArgs<Element>& args, const int64_t* offsets, int first, Floats (&sums)[2][R]) {
    Words keys[2][kBlocks];
#pragma GCC unroll 2
    for (int q = 0; q < 2; ++q) {
#pragma GCC unroll 4
        for (int i = 0; i < kBlocks; ++i) {
            const auto* source = args.pages + offsets[q + i * kBlockWords] + first;
            keys[q][i] = whole ? Element::load_words(source)
                               : load_elements<Element>(source, args.head_dim - first);
        }
        transpose_blocks(keys[q]);
    }
    const uint32_t* query = args.a + first / Element::kPerWord;
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; ++i) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Words block = repeat_block(query + r * args.a_stride + i * kBlockWords);
#pragma GCC unroll 2
            for (int q = 0; q < 2; ++q) {
                sums[q][r] = ProductOf<Element>::Type::add(block, keys[q][i], sums[q][r]);
            }
        }
    }
}

// c [R, keys] = query * keys; columns up to a multiple of kLanes past the keys are garbage.
template <class Element, int R>
void few_scores(const FewArgs<Element>& args) {
    constexpr int step = kLanes * Element::kPerWord;
    for (int key = 0; key < args.num_keys; key += kLanes) {
        Floats halves[2][R];
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            args.ahead->advance(kLanes / 2);
            const int64_t* offsets = args.offsets + key + 2 * h;
            Floats sums[2][R] = {};
            int first = 0;
            for (; first + step <= args.head_dim; first += step) {
                add_scores<Element, R, true>(args, offsets, first, sums);
            }
            if (first < args.head_dim) add_scores<Element, R, false>(args, offsets, first, sums);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                halves[h][r] = fold_blocks<1>(sums[0][r], sums[1][r]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            store(
                args.c + r * args.c_stride + key,
                fold_blocks<2>(halves[0][r], halves[1][r]));
        }
    }
}

// kPerWord successive keys' words of V vectors' columns from column on.
template <class Element, int V, bool whole>
inline void load_values(const FewArgs<Element>& args, int key, int column, Words (&values)[V]) {
    const auto words = [&](const typename Element::Storage* source, int from) {
        return whole ? Element::load_words(source + from)
                     : load_elements<Element>(source + from, args.head_dim - from);
    };
    const auto* row = args.pages + args.offsets[key];
    if constexpr (Element::kPerWord == 1) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) values[v] = words(row, column + v * kLanes);
    } else {
        typedef uint16_t Elements __attribute__((vector_size(kLanes * 4)));
        const bool paired = key + 1 < args.num_keys;
        const auto* next = args.pages + args.offsets[paired ? key + 1 : key];
#pragma GCC unroll 2
        for (int v = 0; v < V; v += 2) {
            const int from = column + v * kLanes;
            const auto one = bits<Elements>(words(row, from));
            const auto other = paired ? bits<Elements>(words(next, from)) : Elements{};
            values[v] = bits<Words>(interleave_low(one, other));
            values[v + 1] = bits<Words>(interleave_high(one, other));
        }
    }
}

template <class Element, int R, int V, bool whole>
void few_columns(const FewArgs<Element>& args, int column) {
    constexpr int step = 8;
    Floats sums[R][V];
    float* c = args.c + column;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            sums[r][v] = load<Floats>(c + r * args.c_stride + v * kLanes) * args.alpha[r];
        }
    }
    for (int first = 0; first < args.num_keys; first += step) {
        if (column == 0) args.ahead->advance(step);
        const int last = first + step < args.num_keys ? first + step : args.num_keys;
        for (int key = first; key < last; key += Element::kPerWord) {
            Words values[V];
            load_values<Element, V, whole>(args, key, column, values);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Words weight = Words{} + args.a[r * args.a_stride + key / Element::kPerWord];
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) {
                    sums[r][v] = ProductOf<Element>::Type::add(weight, values[v], sums[r][v]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) store(c + r * args.c_stride + v * kLanes, sums[r][v]);
    }
}

// c [R, head_dim] = c * alpha + weights * values; padded columns become zero.
template <class Element, int R>
void few_sums(const FewArgs<Element>& args) {
    constexpr int wide = R * 4 <= 3 * kFewRows ? 4 : 2, narrow = Element::kPerWord;
    int column = 0;
    for (; column + wide * kLanes <= args.head_dim; column += wide * kLanes) {
        few_columns<Element, R, wide, true>(args, column);
    }
    for (; column + narrow * kLanes <= args.head_dim; column += narrow * kLanes) {
        few_columns<Element, R, narrow, true>(args, column);
    }
    if (column < args.head_dim) few_columns<Element, R, narrow, false>(args, column);
}

// Calls function with the number of rows, 1 to kFewRows, as a constant.
template <int R = kFewRows, class Function>
inline void with_few_rows(int num_rows, const Function& function) {
    if constexpr (R > 1) {
        if (num_rows < R) return with_few_rows<R - 1>(num_rows, function);
    }
    function(std::integral_constant<int, R>{});
}

}  // namespace stepgraph
