// What a decoder does to rows of bfloat16 besides products, each value rounded where PyTorch's
// operators round it.
#pragma once

#include <cmath>

#include "vectors.h"

namespace stepgraph {

inline Floats load_bfloats(const uint16_t* source, int lanes = kLanes) {
    return bfloat_to_float(
        lanes == kLanes ? load<Halves>(source) : load_part<Halves>(source, lanes * 2));
}

inline void store_bfloats(uint16_t* target, Floats value, int lanes = kLanes) {
    const Halves halves = float_to_bfloat(value);
    std::memcpy(target, &halves, lanes * 2);
}

inline Floats rounded(Floats value) { return bfloat_to_float(float_to_bfloat(value)); }

// Calls function(first, lanes) for vectors of count elements; the last one may be partly filled.
template <class Function>
inline void for_vectors(int64_t count, const Function& function) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) function(i, kLanes);
    if (i < count) function(i, static_cast<int>(count - i));
}

// RMSNorm of one row; the target may be the source.
inline void normalize(
    const uint16_t* source, const uint16_t* weight, int64_t count, float eps, uint16_t* target) {
    Floats squares = {};
    for_vectors(count, [&](int64_t i, int lanes) {
        const Floats x = load_bfloats(source + i, lanes);
        squares = x * x + squares;
    });
    const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(count) + eps);
    for_vectors(count, [&](int64_t i, int lanes) {
        const Floats x = rounded(load_bfloats(source + i, lanes) * scale);
        store_bfloats(target + i, x * load_bfloats(weight + i, lanes), lanes);
    });
}

inline Floats silu(Floats x) {
    const Floats size = x < 0.0f ? -x : x;
    const Floats power = exp2_negative<true>(size * -1.44269504f);  // e ** -size
    return x * (x < 0.0f ? power : splat(1.0f)) / (1.0f + power);
}

// The rotary embedding of one head in place: element i turns with element i + half. sin has the
// sign of each element's term.
inline void rotate(uint16_t* head, const uint16_t* cos, const uint16_t* sin, int64_t half) {
    for_vectors(half, [&](int64_t i, int lanes) {
        const Floats low = load_bfloats(head + i, lanes);
        const Floats high = load_bfloats(head + half + i, lanes);
        const auto turn = [&](const Floats& one, const Floats& other, int64_t at) {
            store_bfloats(
                head + at,
                rounded(one * load_bfloats(cos + at, lanes)) +
                    rounded(other * load_bfloats(sin + at, lanes)),
                lanes);
        };
        turn(low, high, i);
        turn(high, low, half + i);
    });
}

}  // namespace stepgraph
