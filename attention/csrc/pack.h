// From pages to operands of products: transposed keys, and values with words along the keys.
#pragma once

#include "ahead.h"
#include "elements.h"

namespace stepgraph {

// target [words of a head, stride] gets keys as columns; columns up to a multiple of kLanes past
// count are zero.
template <class Element>
void pack_keys(
    const typename Element::Storage* pages, const int64_t* offsets, int count, int head_dim,
    Ahead& ahead, uint32_t* target, int stride) {
    constexpr int step = kLanes * Element::kPerWord;
    for (int first = 0; first < count; first += kLanes) {
        const int columns = count - first < kLanes ? count - first : kLanes;
        ahead.advance(columns);
        for (int element = 0; element < head_dim; element += step) {
            Words rows[kLanes];
            if (columns == kLanes && element + step <= head_dim) {
#pragma GCC unroll 16
                for (int i = 0; i < kLanes; ++i) {
                    rows[i] = load_words<Element>(pages + offsets[first + i] + element);
                }
            } else {
                for (int i = 0; i < kLanes; ++i) {
                    rows[i] = i < columns ? load_elements<Element>(
                                                pages + offsets[first + i] + element,
                                                head_dim - element)
                                          : Words{};
                }
            }
            transpose(rows);
            uint32_t* column = target + element / Element::kPerWord * stride + first;
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) store(column + i * stride, rows[i]);
        }
    }
}

// target [keys / kPerWord, stride]: word d of row n holds element d of kPerWord successive keys.
// An odd last key is paired with zeros.
template <class Element>
void pack_values(
    const typename Element::Storage* pages, const int64_t* offsets, int count, int head_dim,
    Ahead& ahead, uint32_t* target, int stride) {
    if constexpr (Element::kPerWord == 1) {
        for (int key = 0; key < count; ++key) {
            const auto* row = pages + offsets[key];
            ahead.advance(1);
            for (int d = 0; d < head_dim; d += kLanes) {
                store(target + key * stride + d, load_elements<Element>(row + d, head_dim - d));
            }
        }
    } else {
        typedef uint16_t Elements __attribute__((vector_size(kLanes * 4)));
        for (int key = 0; key < count; key += 2) {
            const auto* even = pages + offsets[key];
            const auto* odd = key + 1 < count ? pages + offsets[key + 1] : nullptr;
            uint32_t* row = target + key / 2 * stride;
            ahead.advance(odd ? 2 : 1);
            for (int d = 0; d < head_dim; d += 2 * kLanes) {
                const int rest = head_dim - d;
                const auto one = bits<Elements>(load_elements<Element>(even + d, rest));
                const auto other =
                    odd ? bits<Elements>(load_elements<Element>(odd + d, rest)) : Elements{};
                store(row + d, interleave_low(one, other));
                store(row + d + kLanes, interleave_high(one, other));
            }
        }
    }
}

}  // namespace stepgraph
