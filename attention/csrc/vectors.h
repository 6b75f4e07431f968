// Vectors of 32-bit lanes in the widest registers that this translation unit may use, with GCC's
// and Clang's vector extensions; intrinsics only where those have no operation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace stepgraph {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

template <class V>
inline V load(const void* source) {
    V result;
    std::memcpy(&result, source, sizeof(V));
    return result;
}

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits of another size");
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

// The first num_bytes bytes of a vector, at most its size; the rest zero.
template <class V>
inline V load_part(const void* source, std::size_t num_bytes) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const uint64_t mask = num_bytes < 64 ? (uint64_t{1} << num_bytes) - 1 : ~uint64_t{0};
    if constexpr (sizeof(V) == 64) return bits<V>(_mm512_maskz_loadu_epi8(mask, source));
    if constexpr (sizeof(V) == 32) return bits<V>(_mm256_maskz_loadu_epi8(mask, source));
#endif
    V result = V{};
    std::memcpy(&result, source, num_bytes);
    return result;
}

// Half a vector from each source.
template <class V>
inline V load_halves(const void* one, const void* other) {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) {
        const __m512i first = _mm512_castsi256_si512(load<__m256i>(one));
        return bits<V>(_mm512_inserti64x4(first, load<__m256i>(other), 1));
    }
#endif
#if defined(__AVX2__)
    if constexpr (sizeof(V) == 32) {
        const __m256i first = _mm256_castsi128_si256(load<__m128i>(one));
        return bits<V>(_mm256_inserti128_si256(first, load<__m128i>(other), 1));
    }
    if constexpr (sizeof(V) == 16) {
        const __m128i first = _mm_loadl_epi64(static_cast<const __m128i*>(one));
        return bits<V>(
            _mm_unpacklo_epi64(first, _mm_loadl_epi64(static_cast<const __m128i*>(other))));
    }
#endif
    V result;
    std::memcpy(&result, one, sizeof(V) / 2);
    std::memcpy(reinterpret_cast<char*>(&result) + sizeof(V) / 2, other, sizeof(V) / 2);
    return result;
}

template <class V>
inline void store(void* target, V value) {
    std::memcpy(target, &value, sizeof(V));
}

constexpr float kNone = -std::numeric_limits<float>::infinity();

inline Floats splat(float value) { return Floats{} + value; }

inline Ints lane_numbers() {
    Ints numbers;
    for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
    return numbers;
}

// -- 16-bit floats ----------------------------------------------------------------------------

inline Words widen(Halves value) {  // GCC 12 makes four instructions of the conversion
#if defined(__AVX512F__)
    return bits<Words>(_mm512_maskz_cvtepu16_epi32(0xffff, bits<__m256i>(value)));
#else
    return __builtin_convertvector(value, Words);
#endif
}

inline Halves narrow(Words value) {
#if defined(__AVX512F__)
    return bits<Halves>(_mm512_maskz_cvtepi32_epi16(0xffff, bits<__m512i>(value)));
#else
    return __builtin_convertvector(value, Halves);
#endif
}

inline Floats bfloat_to_float(Halves value) { return bits<Floats>(widen(value) << 16); }

inline Floats half_to_float(Halves value) {
#if defined(__AVX512F__)
    return bits<Floats>(_mm512_maskz_cvtph_ps(0xffff, bits<__m256i>(value)));
#elif defined(__F16C__)
    return bits<Floats>(_mm256_cvtph_ps(bits<__m128i>(value)));
#else
    const Words word = __builtin_convertvector(value, Words);
    // The exponent's bias differs by 112; the product also normalizes subnormal numbers.
    Words result = bits<Words>(bits<Floats>((word & 0x7fff) << 13) * 0x1p112f);
    const Words special = (word & 0x7c00) == 0x7c00;
    result |= special & 0x7f800000;
    return bits<Floats>(result | ((word & 0x8000) << 16));
#endif
}

// All round to the nearest, ties to even.
inline uint16_t float_to_bfloat(float value) {
    const uint32_t word = bits<uint32_t>(value);
    if ((word & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((word >> 16) | 0x40);
    return static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

inline Halves float_to_bfloat(Floats value) {
#if defined(__AVX512BF16__)  // which makes subnormal numbers zero, as its products do
    return bits<Halves>(_mm512_maskz_cvtneps_pbh(0xffff, bits<__m512>(value)));
#else
    const Words word = bits<Words>(value);
    const Words is_nan = bits<Words>((word & 0x7fffffff) > 0x7f800000);
    const Words nearest = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    const Words quiet_nan = (word >> 16) | 0x40;
    return narrow((is_nan & quiet_nan) | (~is_nan & nearest));
#endif
}

inline uint16_t float_to_half(float value) {
    uint32_t word = bits<uint32_t>(value);
    const uint32_t sign = (word >> 16) & 0x8000;
    word &= 0x7fffffff;
    if (word > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (word >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
    if (word < 0x38800000) {
        // Adding 0.5 shifts a subnormal result to the mantissa's end, rounded.
        const float shifted = bits<float>(word) + 0.5f;
        return static_cast<uint16_t>(sign | (bits<uint32_t>(shifted) - 0x3f000000));
    }
    word += 0xc8000fff + ((word >> 13) & 1);
    return static_cast<uint16_t>(sign | (word >> 13));
}

inline Halves float_to_half(Floats value) {
#if defined(__AVX512F__)
    return bits<Halves>(_mm512_maskz_cvtps_ph(0xffff, bits<__m512>(value), 0));
#elif defined(__F16C__)
    return bits<Halves>(_mm256_cvtps_ph(bits<__m256>(value), 0));
#else
    Halves result;
    for (int lane = 0; lane < kLanes; ++lane) result[lane] = float_to_half(value[lane]);
    return result;
#endif
}

// -- Shuffles ---------------------------------------------------------------------------------

#if defined(__clang__)
#define STEPGRAPH_SHUFFLE(V, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define STEPGRAPH_SHUFFLE(V, a, b, ...) __builtin_shuffle(a, b, V{__VA_ARGS__})
#endif

// First + 0, other + First, First + 1, ...: half of two vectors' elements, alternating.
template <int First, class V, std::size_t... I>
inline V interleave_from(V one, V other, std::index_sequence<I...>) {
    constexpr int count = sizeof...(I);
    return STEPGRAPH_SHUFFLE(V, one, other, (First + int(I) / 2 + (I % 2 ? count : 0))...);
}

template <class V>
constexpr int kElements = sizeof(V) / sizeof(std::declval<V>()[0]);

template <class V>
inline V interleave_low(V one, V other) {
    return interleave_from<0>(one, other, std::make_index_sequence<kElements<V>>{});
}

template <class V>
inline V interleave_high(V one, V other) {
    constexpr int count = kElements<V>;
    return interleave_from<count / 2>(one, other, std::make_index_sequence<count>{});
}

// Blocks of four words, whose order is cheaper to change than that of words.
constexpr int kBlockWords = 4, kBlocks = kLanes / kBlockWords;

// One block in all of a vector's.
inline Words repeat_block(const uint32_t* source) {
#if defined(__AVX512F__)
    return bits<Words>(_mm512_broadcast_i32x4(load<__m128i>(source)));
#elif defined(__AVX2__)
    return bits<Words>(_mm256_broadcastsi128_si256(load<__m128i>(source)));
#else
    return load<Words>(source);
#endif
}

// Every other block of two vectors in a row, from block First on.
template <int First, std::size_t... I>
inline Words alternate_blocks(Words one, Words other, std::index_sequence<I...>) {
    return STEPGRAPH_SHUFFLE(
        Words, one, other,
        (int(I) / kBlockWords * 2 * kBlockWords + First * kBlockWords + int(I) % kBlockWords)...);
}

// Blocks First + 0 of one vector, First + 0 of the other, First + 1, ...: undoes the above.
template <int First, std::size_t... I>
inline Words interleave_blocks(Words one, Words other, std::index_sequence<I...>) {
    constexpr int pair = 2 * kBlockWords;
    return STEPGRAPH_SHUFFLE(
        Words, one, other,
        (int(I) / pair * kBlockWords + First * kBlockWords + int(I) % kBlockWords +
         int(I) % pair / kBlockWords * kLanes)...);
}

// The half of one vector that lane First begins, then the same half of the other.
template <int First, std::size_t... I>
inline Words join_halves(Words one, Words other, std::index_sequence<I...>) {
    return STEPGRAPH_SHUFFLE(
        Words, one, other, (int(I) % (kLanes / 2) + First + int(I) / (kLanes / 2) * kLanes)...);
}

// Transposes a matrix of 2 by 2 or 4 by 4 blocks. halves[i][0] holds the first halves of rows 2 i
// and 2 i + 1, halves[i][1] the others: loading them so spares the first round of shuffles.
inline void transpose_halves(
    const Words (&halves)[(kBlocks + 1) / 2][2], Words (&result)[kBlocks]) {
    constexpr auto lanes = std::make_index_sequence<kLanes>{};
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        if constexpr (kBlocks == 4) {
            result[2 * i] = alternate_blocks<0>(halves[0][i], halves[1][i], lanes);
            result[2 * i + 1] = alternate_blocks<1>(halves[0][i], halves[1][i], lanes);
        } else {
            result[i] = halves[0][i];
        }
    }
}

// In each block, from its element First on: one's element, other's, one's next, ...
template <int First, class V, std::size_t... I>
inline V interleave_in_blocks(V one, V other, std::index_sequence<I...>) {
    constexpr int count = sizeof...(I), block = count / kBlocks;
    return STEPGRAPH_SHUFFLE(
        V, one, other,
        (int(I) / block * block + First + int(I) % block / 2 + (I % 2 ? count : 0))...);
}

template <class V>
inline V interleave_in_blocks_low(V one, V other) {
    return interleave_in_blocks<0>(one, other, std::make_index_sequence<kElements<V>>{});
}

template <class V>
inline V interleave_in_blocks_high(V one, V other) {
    constexpr int count = kElements<V>;
    return interleave_in_blocks<count / kBlocks / 2>(one, other, std::make_index_sequence<count>{});
}

// Adds both halves of each block, and interleaves the sums of one and other by units of Unit.
template <class Unit>
inline Floats fold_blocks(Floats one, Floats other) {
    typedef Unit Units __attribute__((vector_size(sizeof(Floats))));
    return bits<Floats>(interleave_in_blocks_low(bits<Units>(one), bits<Units>(other))) +
        bits<Floats>(interleave_in_blocks_high(bits<Units>(one), bits<Units>(other)));
}

// Interleaving row i with row i + n / 2, log2(n) times, transposes an n by n matrix.
inline void transpose(Words (&rows)[kLanes]) {
#pragma GCC unroll 8
    for (int stage = 1; stage < kLanes; stage *= 2) {
        Words next[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes / 2; ++i) {
            next[2 * i] = interleave_low(rows[i], rows[i + kLanes / 2]);
            next[2 * i + 1] = interleave_high(rows[i], rows[i + kLanes / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
    }
}

// -- Functions --------------------------------------------------------------------------------

// The larger of two; the second if one is NaN.
inline Floats larger(Floats one, Floats other) {
#if defined(__AVX512F__)
    return bits<Floats>(_mm512_max_ps(bits<__m512>(one), bits<__m512>(other)));
#elif defined(__AVX2__)
    return bits<Floats>(_mm256_max_ps(bits<__m256>(one), bits<__m256>(other)));
#else
    return one > other ? one : other;
#endif
}

// 2 ** x for x <= 0, within 1.1e-4 of it or, if exact, 1e-7; 0 from -127 down, NaN for NaN.
template <bool exact>
inline Floats exp2_negative(Floats x) {
    const Floats clamped = larger(splat(-127.0f), x);
    const Floats shifted = clamped + 12582912.0f;  // 1.5 * 2 ** 23 leaves the nearest integer
    const Floats rest = clamped - (shifted - 12582912.0f);
    // Minimax polynomials of 2 ** rest on [-0.5, 0.5], 1 at 0.
    Floats power;
    if constexpr (exact) {
        power = splat(1.5353362e-4f);
        power = power * rest + 1.3398874e-3f;
        power = power * rest + 9.6184373e-3f;
        power = power * rest + 5.5503324e-2f;
        power = power * rest + 2.4022648e-1f;
        power = power * rest + 6.9314720e-1f;
    } else {
        power = splat(5.50085679e-02f);
        power = power * rest + 2.42210963e-01f;
        power = power * rest + 6.93282967e-01f;
    }
    power = power * rest + 1.0f;
    // The integer's low bits, moved to the exponent.
    return bits<Floats>(bits<Words>(power) + (bits<Words>(shifted) << 23));
}

template <int By, std::size_t... I>
inline Floats rotate(Floats value, std::index_sequence<I...>) {
    return bits<Floats>(STEPGRAPH_SHUFFLE(
        Words, bits<Words>(value), bits<Words>(value), ((int(I) + By) % kLanes)...));
}

// Both combine all lanes. NaN is passed over by the first, and kept by the second.
template <int Half = kLanes / 2>
inline float largest(Floats value) {
    if constexpr (Half == 0) {
        return value[0];
    } else {
        const Floats other = rotate<Half>(value, std::make_index_sequence<kLanes>{});
        return largest<Half / 2>(larger(other, value));
    }
}

template <int Half = kLanes / 2>
inline float sum(Floats value) {
    if constexpr (Half == 0) {
        return value[0];
    } else {
        return sum<Half / 2>(value + rotate<Half>(value, std::make_index_sequence<kLanes>{}));
    }
}

}  // namespace stepgraph
