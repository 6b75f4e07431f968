// Results of items that were split over keys.
#pragma once

#include "call.h"
#include "elements.h"

namespace stepgraph {

constexpr int kReductionWidth = 64;

// Merges the parts of one item that was split over keys.
template <class Element>
void reduce(const Call& call, const Reduction& reduction, const float* partials) {
    const int64_t group = call.num_heads / call.num_kv_heads;
    const int64_t stride = partial_stride(call);
    const int64_t rows = reduction.last_row - reduction.first_row;
    const int64_t part_size = (reduction.last_head - reduction.first_head) * rows * group;
    for (int64_t index = 0; index < part_size; ++index) {
        const int64_t head = reduction.first_head * group + index / (rows * group) * group +
            index % group;
        const int64_t row = reduction.first_row + index % (rows * group) / group;
        auto* target = static_cast<typename Element::Storage*>(call.out) +
            (row * call.num_heads + head) * call.head_dim;
        const float* first = partials + (reduction.partial + index) * stride;
        float highest = kNone;
        for (int part = 0; part < reduction.num_parts; ++part) {
            const float largest = first[part * part_size * stride];
            highest = largest > highest ? largest : highest;
        }
        const float base = highest == kNone ? 0.0f : highest;
        float total = 0;
        float sums[kReductionWidth];
        for (int64_t d0 = 0; d0 < call.head_dim; d0 += kReductionWidth) {
            const int64_t width =
                call.head_dim - d0 < kReductionWidth ? call.head_dim - d0 : kReductionWidth;
            std::memset(sums, 0, sizeof(sums));
            total = 0;
            for (int part = 0; part < reduction.num_parts; ++part) {
                const float* source = first + part * part_size * stride;
                const float factor = exp2_negative<true>(splat(source[0] - base))[0];
                total += source[1] * factor;
                for (int64_t d = 0; d < width; ++d) sums[d] += source[2 + d0 + d] * factor;
            }
            const float inverse = total == 0 ? 0 : 1 / total;
            for (int64_t d = 0; d < width; d += kLanes) {
                store_elements<Element>(
                    target + d0 + d, load<Floats>(sums + d) * inverse, width - d);
            }
        }
    }
}

}  // namespace stepgraph
