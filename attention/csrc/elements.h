// How each dtype is computed with. A "word" is what one 32-bit lane of a product's operand holds:
// a float, or with dot-product instructions a pair of bfloat16. Stored is a vector of words as it
// lies in memory.
#pragma once

#include "vectors.h"

namespace stepgraph {

struct FloatElement {
    using Storage = float;
    static constexpr int kPerWord = 1;
    using Stored = Words;
    static Words words(Stored value) { return value; }
    static Floats from_floats(Floats values) { return values; }
};

struct BfloatElement {
    using Storage = uint16_t;
    static constexpr int kPerWord = 1;
    using Stored = Halves;
    static Words words(Stored value) { return bits<Words>(bfloat_to_float(value)); }
    static Halves from_floats(Floats values) { return float_to_bfloat(values); }
};

struct HalfElement {
    using Storage = uint16_t;
    static constexpr int kPerWord = 1;
    using Stored = Halves;
    static Words words(Stored value) { return bits<Words>(half_to_float(value)); }
    static Halves from_floats(Floats values) { return float_to_half(values); }
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
    using Stored = Words;
    static Words words(Stored value) { return value; }
    static Halves from_floats(Floats values) { return float_to_bfloat(values); }
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

template <class Element>
inline Words load_words(const typename Element::Storage* source) {
    return Element::words(load<typename Element::Stored>(source));
}

// Words of up to kLanes * kPerWord elements, the missing ones zero.
template <class Element>
inline Words load_elements(const typename Element::Storage* source, int count) {
    if (count >= kLanes * Element::kPerWord) return load_words<Element>(source);
    return Element::words(
        load_part<typename Element::Stored>(source, count * sizeof(typename Element::Storage)));
}

// Rounds up to kLanes floats to elements; sources are whole vectors, and count elements are stored.
template <class Element>
inline void store_elements(typename Element::Storage* target, Floats values, int count) {
    const auto elements = Element::from_floats(values);
    if (count >= kLanes) return store(target, elements);
    std::memcpy(target, &elements, count * sizeof(*target));
}

constexpr int round_up(int value, int multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

}  // namespace stepgraph
