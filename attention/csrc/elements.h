// How each dtype is computed with. A "word" is what one 32-bit lane of a product's operand holds:
// a float, or with dot-product instructions a pair of bfloat16.
#pragma once

#include "vectors.h"

namespace stepgraph {

struct FloatElement {
    using Storage = float;
    static constexpr int kPerWord = 1;
    static Words load_words(const Storage* source) { return load<Words>(source); }
    static Storage from_float(float value) { return value; }
};

struct BfloatElement {
    using Storage = uint16_t;
    static constexpr int kPerWord = 1;
    static Words load_words(const Storage* source) {
        return bits<Words>(bfloat_to_float(load<Halves>(source)));
    }
    static Storage from_float(float value) { return float_to_bfloat(value); }
};

struct HalfElement {
    using Storage = uint16_t;
    static constexpr int kPerWord = 1;
    static Words load_words(const Storage* source) {
        return bits<Words>(half_to_float(load<Halves>(source)));
    }
    static Storage from_float(float value) { return float_to_half(value); }
};

// a * b + sum, lane by lane.
struct FloatProduct {
    static Floats add(Words a, Words b, Floats sum) {
        return bits<Floats>(a) * bits<Floats>(b) + sum;
    }
};

#if defined(__AVX512BF16__)
struct BfloatPairElement {
    using Storage = uint16_t;
    static constexpr int kPerWord = 2;
    static Words load_words(const Storage* source) { return load<Words>(source); }
    static Storage from_float(float value) { return float_to_bfloat(value); }
};

struct BfloatPairProduct {
    static Floats add(Words a, Words b, Floats sum) {
        return bits<Floats>(
            _mm512_dpbf16_ps(bits<__m512>(sum), bits<__m512bh>(a), bits<__m512bh>(b)));
    }
};
#endif

template <class Element>
struct ProductOf {
    using Type = FloatProduct;
};
#if defined(__AVX512BF16__)
template <>
struct ProductOf<BfloatPairElement> {
    using Type = BfloatPairProduct;
};
#endif

// Words of up to kLanes * kPerWord elements, the missing ones zero.
template <class Element>
inline Words load_elements(const typename Element::Storage* source, int count) {
    using Storage = typename Element::Storage;
    constexpr int full = kLanes * Element::kPerWord;
    if (count >= full) return Element::load_words(source);
    Storage padded[full] = {};
    std::memcpy(padded, source, count * sizeof(Storage));
    return Element::load_words(padded);
}

constexpr int round_up(int value, int multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

}  // namespace stepgraph
