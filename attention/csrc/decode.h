// Products of a few query rows with keys and values that go from the pages through registers, and
// not through memory: so few rows would not repay packing.
//
// A score is a sum along a key, so across lanes. Blocks of four words are transposed first, so that
// each block's place in a vector belongs to one key. Products with a repeated block of the query
// then leave four partial sums a key to add across lanes, not a vector of them.
//
//     loaded       key 0: a0 a1 a2 a3    key 4: b0 b1 b2 b3    key 8: c0 ..    key 12: d0 ..
//     transposed   a0 b0 c0 d0    a1 b1 c1 d1    a2 b2 c2 d2    a3 b3 c3 d3
//
// Four such vectors of keys, 0 4 8 12, 1 5 9 13, ..., give the scores of kLanes keys in order.
#pragma once

#include <type_traits>

#include "ahead.h"
#include "elements.h"

namespace stepgraph {

// The most rows, and vectors of scores' and of values' sums that fit in registers beside operands.
#if defined(__AVX512F__)
constexpr int kFewRows = 8, kFewScores = 16, kFewSums = 24;
#else
constexpr int kFewRows = 4, kFewScores = 4, kFewSums = 8;
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

// One vector's keys, transposed: kLanes words of each from element first on.
template <class Element, bool whole>
inline void load_keys(
    const FewArgs<Element>& args, const int64_t* offsets, int first, Words (&keys)[kBlocks]) {
    const auto* pages = args.pages + first;
    const int rest = args.head_dim - first;
    if constexpr (kBlocks == 1) {
        keys[0] = load_elements<Element>(pages + offsets[0], rest);
    } else {
        constexpr int half = kLanes / 2 * Element::kPerWord;
        constexpr auto lanes = std::make_index_sequence<kLanes>{};
        Words halves[(kBlocks + 1) / 2][2];
#pragma GCC unroll 2
        for (int i = 0; i < kBlocks / 2; ++i) {
            const auto* one = pages + offsets[2 * i * kBlockWords];
            const auto* other = pages + offsets[(2 * i + 1) * kBlockWords];
            if constexpr (whole) {
                using Stored = typename Element::Stored;
                halves[i][0] = Element::words(load_halves<Stored>(one, other));
                halves[i][1] = Element::words(load_halves<Stored>(one + half, other + half));
            } else {
                const Words first_key = load_elements<Element>(one, rest);
                const Words other_key = load_elements<Element>(other, rest);
                halves[i][0] = join_halves<0>(first_key, other_key, lanes);
                halves[i][1] = join_halves<kLanes / 2>(first_key, other_key, lanes);
            }
        }
        transpose_halves(halves, keys);
    }
}

// Adds the products of Q vectors' keys with kLanes words from element first on.
template <class Element, int R, int Q, bool whole>
inline void add_scores(
    const FewArgs<Element>& args, const int64_t* offsets, int first, Floats (&sums)[Q][R]) {
    Words keys[Q][kBlocks];
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q) load_keys<Element, whole>(args, offsets + q, first, keys[q]);
    const uint32_t* query = args.a + first / Element::kPerWord;
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; ++i) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Words block = repeat_block(query + r * args.a_stride + i * kBlockWords);
#pragma GCC unroll 4
            for (int q = 0; q < Q; ++q) {
                sums[q][r] = ProductOf<Element>::Type::add(block, keys[q][i], sums[q][r]);
            }
        }
    }
}

// c [R, keys] = query * keys; columns up to a multiple of kLanes get the last key's.
template <class Element, int R>
void few_scores(const FewArgs<Element>& args) {
    constexpr int step = kLanes * Element::kPerWord;
    constexpr int Q = R * kBlockWords <= kFewScores ? 4 : 2;
    for (int key = 0; key < args.num_keys; key += kLanes) {
        Floats halves[2][R];
#pragma GCC unroll 2
        for (int q0 = 0; q0 < kBlockWords; q0 += Q) {
            args.ahead->advance(kLanes * Q / kBlockWords);
            const int64_t* offsets = args.offsets + key + q0;
            Floats sums[Q][R] = {};
            int first = 0;
            for (; first + step <= args.head_dim; first += step) {
                add_scores<Element, R, Q, true>(args, offsets, first, sums);
            }
            if (first < args.head_dim) {
                add_scores<Element, R, Q, false>(args, offsets, first, sums);
            }
#pragma GCC unroll 2
            for (int q = 0; q < Q; q += 2) {
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    halves[(q0 + q) / 2][r] = fold_blocks<uint32_t>(sums[q][r], sums[q + 1][r]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            store(
                args.c + r * args.c_stride + key,
                fold_blocks<uint64_t>(halves[0][r], halves[1][r]));
        }
    }
}

// Words of V vectors' columns from column on, of one key or, where words hold two, of another too.
template <class Element, int V, bool whole>
inline void load_values(
    const FewArgs<Element>& args, const typename Element::Storage* row,
    const typename Element::Storage* next, int column, Words (&values)[V]) {
    constexpr int full = kLanes * Element::kPerWord;
    const auto words = [&](const typename Element::Storage* source, int from) {
        return load_elements<Element>(source + from, whole ? full : args.head_dim - from);
    };
    if constexpr (Element::kPerWord == 1) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) values[v] = words(row, column + v * kLanes);
    } else {
        typedef uint16_t Elements __attribute__((vector_size(kLanes * 4)));
#pragma GCC unroll 2
        for (int v = 0; v < V; v += 2) {
            const int from = column + v * kLanes;
            const auto one = bits<Elements>(words(row, from));
            const auto other = next ? bits<Elements>(words(next, from)) : Elements{};
            values[v] = bits<Words>(interleave_in_blocks_low(one, other));
            values[v + 1] = bits<Words>(interleave_in_blocks_high(one, other));
        }
    }
}

// Changes a row's columns between their order in memory and the one that load_values leaves.
template <class Element, bool to_memory, int V>
inline void reorder(Floats (&sums)[V]) {
    if constexpr (Element::kPerWord == 2) {
        constexpr auto lanes = std::make_index_sequence<kLanes>{};
#pragma GCC unroll 2
        for (int v = 0; v < V; v += 2) {
            const Words one = bits<Words>(sums[v]), other = bits<Words>(sums[v + 1]);
            sums[v] = bits<Floats>(
                to_memory ? interleave_blocks<0>(one, other, lanes)
                          : alternate_blocks<0>(one, other, lanes));
            sums[v + 1] = bits<Floats>(
                to_memory ? interleave_blocks<kBlocks / 2>(one, other, lanes)
                          : alternate_blocks<1>(one, other, lanes));
        }
    }
}

template <class Element, int R, int V, bool whole>
void few_columns(const FewArgs<Element>& args, int column) {
    using Storage = typename Element::Storage;
    Floats sums[R][V];
    float* c = args.c + column;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            sums[r][v] = load<Floats>(c + r * args.c_stride + v * kLanes) * args.alpha[r];
        }
        reorder<Element, false>(sums[r]);
    }
    const uint32_t* weights = args.a;
    const int64_t stride = args.a_stride;
    const auto add = [&](const Storage* row, const Storage* next) {
        Words values[V];
        load_values<Element, V, whole>(args, row, next, column, values);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Words weight = Words{} + weights[r * stride];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                sums[r][v] = ProductOf<Element>::Type::add(weight, values[v], sums[r][v]);
            }
        }
        ++weights;
    };
    const Storage* pages = args.pages;
    const int64_t *offsets = args.offsets, *last = offsets + args.num_keys;
    constexpr int step = 8;
    for (; last - offsets >= step; offsets += step) {
        if (column == 0) args.ahead->advance(step);
#pragma GCC unroll 4
        for (int i = 0; i < step; i += Element::kPerWord) {
            add(pages + offsets[i], pages + offsets[i + Element::kPerWord - 1]);
        }
    }
    for (; last - offsets >= Element::kPerWord; offsets += Element::kPerWord) {
        add(pages + offsets[0], pages + offsets[Element::kPerWord - 1]);
    }
    if (offsets < last) add(pages + offsets[0], nullptr);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        reorder<Element, true>(sums[r]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) store(c + r * args.c_stride + v * kLanes, sums[r][v]);
    }
}

// c [R, head_dim] = c * alpha + weights * values; padded columns become zero.
template <class Element, int R>
void few_sums(const FewArgs<Element>& args) {
    constexpr int wide = R * 4 <= kFewSums ? 4 : 2, narrow = Element::kPerWord;
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
