// Rows in fixed point, for products with weights in int8 where the CPU has dot products of bytes.
//
// A row is a power of two times integers of 16 bits, each 256 * high + low of two signed bytes. Its
// largest value fills them, so bfloat16's 8 digits stay exact down to 1/128 of that, and what
// smaller values lose is below 2 ** -15 of it. Sums are exact until they become floats.
#pragma once

#include "panels.h"
#include "rows.h"

namespace stepgraph {

#if defined(__AVX512VNNI__) && !defined(STEPGRAPH_MATRIX_KERNEL)
constexpr bool kHasFixedRows = true;

// sums + the products of a's unsigned and b's signed bytes, four to a lane.
inline Ints add_bytes(Words a, Words b, Ints sums) {
    return bits<Ints>(
        _mm512_dpbusd_epi32(bits<__m512i>(sums), bits<__m512i>(a), bits<__m512i>(b)));
}
#else
constexpr bool kHasFixedRows = false;

inline Ints add_bytes(Words, Words, Ints sums) { return sums; }  // not called
#endif

typedef int8_t Bytes __attribute__((vector_size(kLanes)));

class FixedRows {
public:
    struct Header {
        float factor;  // of the integers, and 2 ** 24, which the scales of weights lack
        int32_t high_sum, low_sum;
        int32_t unused;
    };

    FixedRows() = default;
    FixedRows(char* data, int64_t inputs) : data_(data), inputs_(inputs) {}

    static std::size_t row_bytes(int64_t inputs) { return sizeof(Header) + 2 * inputs; }

    FixedRows from(int64_t row) const { return {data_ + row * row_bytes(inputs_), inputs_}; }

    // Of the first row.
    Header header() const { return load<Header>(data_); }
    const char* high() const { return data_ + sizeof(Header); }
    const char* low() const { return high() + inputs_; }

    // Writes the first row. An infinity or NaN makes every product with it NaN.
    void set(const uint16_t* source) const {
        uint32_t largest = 0;
        for (int64_t i = 0; i < inputs_; ++i) largest = std::max(largest, source[i] & 0x7fffu);
        const bool is_finite = largest < 0x7f80;
        const uint32_t exponent = std::max(largest >> 7, uint32_t{kDigits + 1});
        const float inverse = bits<float>((254 + kDigits - exponent) << 23);
        char *high = data_ + sizeof(Header), *low = high + inputs_;
        Ints high_sum = {}, low_sum = {};
        for_vectors(inputs_, [&](int64_t i, int lanes) {
            const Floats value = load_bfloats(source + i, lanes) * inverse;
            // Adding 1.5 * 2 ** 23 leaves the nearest integer in the low bits.
            Ints fixed = bits<Ints>(value + 12582912.0f) - 0x4b400000;
            fixed = fixed < kLargest ? fixed : Ints{} + kLargest;
            const Ints high_part = (fixed + 128) >> 8, low_part = fixed - (high_part << 8);
            high_sum += high_part;
            low_sum += low_part;
            const Bytes high_bytes = __builtin_convertvector(high_part, Bytes);
            const Bytes low_bytes = __builtin_convertvector(low_part, Bytes);
            std::memcpy(high + i, &high_bytes, lanes);
            std::memcpy(low + i, &low_bytes, lanes);
        });
        const float scale = bits<float>((exponent - kDigits) << 23);
        store(data_, Header{is_finite ? scale * 0x1p24f : NAN, total(high_sum), total(low_sum), 0});
    }

private:
    static constexpr uint32_t kDigits = 14;  // below the largest value's first one
    static constexpr int kLargest = 127 * 256 + 127;

    static int32_t total(Ints values) {
        int32_t result = 0;
        for (int lane = 0; lane < kLanes; ++lane) result += values[lane];
        return result;
    }

    char* data_ = nullptr;
    int64_t inputs_ = 0;
};

template <int panels>
constexpr int kFixedTileRows = kTileRows<panels> / 2;  // there are two sums for each

// sums [R, P * kPanel], row stride kSumsStride, of the first R rows and P panels.
template <int R, int P, Fetch fetch>
inline void multiply_fixed_tile(
    const FixedRows& x, const Panels& panels, float* sums, Upcoming& upcoming) {
    constexpr int vectors = P * kPanelVectors;
    Ints high[R][vectors] = {}, low[R][vectors] = {};
    const char *high_bytes[R], *low_bytes[R];
    for (int r = 0; r < R; ++r) {
        high_bytes[r] = x.from(r).high();
        low_bytes[r] = x.from(r).low();
    }
    const uint32_t* words = panels.words;
    for (int64_t i = 0; i < 2 * panels.pairs; i += 4, words += kPanel) {
        upcoming.step<fetch, P>(words, panels.stride);
        Words factors[vectors];
#pragma GCC unroll 16
        for (int v = 0; v < vectors; ++v) {
            const int64_t place = v / kPanelVectors * panels.stride;
            // Signed bytes and 128, which is taken off the sums.
            factors[v] = load<Words>(words + place + v % kPanelVectors * kLanes) ^ 0x80808080;
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Words high_quad = Words{} + load<uint32_t>(high_bytes[r] + i);
            const Words low_quad = Words{} + load<uint32_t>(low_bytes[r] + i);
#pragma GCC unroll 16
            for (int v = 0; v < vectors; ++v) {
                high[r][v] = add_bytes(factors[v], high_quad, high[r][v]);
                low[r][v] = add_bytes(factors[v], low_quad, low[r][v]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        const FixedRows::Header header = x.from(r).header();
#pragma GCC unroll 16
        for (int v = 0; v < vectors; ++v) {
            const Ints high_sum = high[r][v] - 128 * header.high_sum;
            const Ints low_sum = low[r][v] - 128 * header.low_sum;
            const Floats value = __builtin_convertvector(high_sum, Floats) * 256.0f +
                __builtin_convertvector(low_sum, Floats);
            store(sums + r * kSumsStride + v * kLanes, value * header.factor);
        }
    }
}

template <int P, int R = kFixedTileRows<P>>
inline void multiply_fixed_rows(
    int num_rows, const FixedRows& x, const Panels& panels, float* sums, Upcoming& upcoming) {
    if (num_rows == R) {
        with_fetch(upcoming.fetch(), [&](auto fetch) {
            multiply_fixed_tile<R, P, fetch>(x, panels, sums, upcoming);
        });
    } else if constexpr (R > 1) {
        multiply_fixed_rows<P, R - 1>(num_rows, x, panels, sums, upcoming);
    }
}

// As multiply_tiles.
template <int P>
inline void multiply_fixed(
    int num_rows, const FixedRows& x, const Panels& panels, float* sums,
    const Upcoming& upcoming) {
    for_tiles(num_rows, kFixedTileRows<P>, upcoming, [&](int row, int rows, Upcoming& fetched) {
        multiply_fixed_rows<P>(rows, x.from(row), panels, sums + row * kSumsStride, fetched);
    });
}

}  // namespace stepgraph
