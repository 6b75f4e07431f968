// Products of bfloat16 rows with packed weights, summed in float32.
//
// A packed weight [outputs, inputs] is a row of panels of kPanel outputs each. A panel is an
// array [pairs of inputs, kPanel] of 32-bit words, and word (k, o) holds the weights of inputs
// 2k (low half) and 2k + 1 of output o. So a panel is read from front to back, a word fills one
// lane of a dot product of pairs, and matrix tiles of Intel's AMX can be loaded from it as well.
//
// A weight in int8 has panels [quads of inputs, kPanel], a word holding the bytes of inputs 4k to
// 4k + 3, and a factor for each output. fixed.h multiplies with them as they are. Where the CPU has
// no instruction for that, words are made pairs of bfloat16, which hold any byte exactly, on their
// way into the registers or, where many rows share them, in a buffer.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "elements.h"

namespace stepgraph {

constexpr int kPanel = 32;
constexpr int kPanelVectors = kPanel / kLanes;
constexpr int kMaxPanels = 2;  // that one call of multiply takes
constexpr int kSumsStride = kMaxPanels * kPanel;

struct Weight {
    const uint32_t* words;
    const float* scales;  // [whole panels of outputs]; null: the words are bfloat16
    int64_t pairs;        // of inputs; even with scales
    int64_t outputs;      // the last panel's further ones are zero

    int64_t num_panels() const { return (outputs + kPanel - 1) / kPanel; }
    int64_t panel_words() const { return (scales ? pairs / 2 : pairs) * kPanel; }
    const uint32_t* panel(int64_t index) const { return words + index * panel_words(); }
};

struct Rows {
    const uint16_t* data;  // bfloat16; each row has 2 * pairs elements
    int64_t stride;        // in elements

    Rows from(int64_t row) const { return {data + row * stride, stride}; }
    Rows from_pair(int64_t k) const { return {data + 2 * k, stride}; }
    uint32_t pair(int64_t row, int64_t k) const {
        return load<uint32_t>(data + row * stride + 2 * k);
    }
};

// a * b + sum, for both elements of each word.
struct PairProduct {
#if defined(__AVX512BF16__)
    static Floats add(Words a, Words b, Floats sum) { return BfloatPairProduct::add(a, b, sum); }
#else
    static Floats low(Words pair) { return bits<Floats>(pair << 16); }
    static Floats high(Words pair) { return bits<Floats>(pair & 0xffff0000); }
    static Floats add(Words a, Words b, Floats sum) {
        return high(a) * high(b) + (low(a) * low(b) + sum);
    }
#endif
};

// Where a tile's pairs come from: words as they are...
struct BfloatPanel {
    static constexpr int kPairsPerWord = 1;
    static Words pairs(const uint32_t* words, int) { return load<Words>(words); }
};

// ...or bytes, made 2 ** 24 times what they are: that is what the top byte of a word is worth.
struct BytePanel {
    static constexpr int kPairsPerWord = 2;
    static Words pairs(const uint32_t* words, int half) {
        const Words quads = load<Words>(words);
        const Words low = half ? quads << 8 & 0xff000000 : quads << 24;
        const Words high = half ? quads & 0xff000000 : quads << 16 & 0xff000000;
        // The lower half of each float is zero.
        return bits<Words>(to_floats(high)) | bits<Words>(to_floats(low)) >> 16;
    }
    static Floats to_floats(Words value) {
        return __builtin_convertvector(bits<Ints>(value), Floats);
    }
};

// Part of the panels that a tile multiplies with: they lie `stride` words apart.
struct Panels {
    const uint32_t* words;
    int64_t stride, pairs;
};

// Most rows of a tile, by its panels. With dot products of pairs the sums fill the registers.
// Without, weights have to be taken apart, which pays when more rows share it, even if sums spill.
#if defined(__AVX512F__)
template <int panels>
constexpr int kTileRows = panels == 1 ? 12 : 6;
#elif defined(__AVX2__)
template <int panels>
constexpr int kTileRows = panels == 1 ? 6 : 1;
#else
template <int panels>
constexpr int kTileRows = panels == 1 ? 4 : 1;
#endif

// What a tile brings into the cache beside its work.
enum class Fetch { kNothing, kOwnPanels, kNextPanels };

constexpr int64_t kLineBytes = 64;

struct Upcoming {
    const char *next = nullptr, *end = nullptr;  // the next panels
    bool own = false;  // whether the first tile's own panels come from memory too
    int64_t tile_steps = 0;
    int64_t pace = 2 * kLineBytes;  // to fetch of the next panels beside a step

    // Fetches them beside so many tiles as evenly as it goes.
    void spread(int num_tiles) {
        if (end - next <= kLineBytes * tile_steps * num_tiles) pace = kLineBytes;
    }

    Fetch fetch() const {
        if (next < end) return Fetch::kNextPanels;
        return own ? Fetch::kOwnPanels : Fetch::kNothing;
    }

    // What is due beside a step of a tile, which is at `words` of P panels.
    template <Fetch fetch, int P>
    void step(const uint32_t* words, int64_t stride) {
        if constexpr (fetch == Fetch::kNextPanels) {
            // At the slower pace the second line is the next step's first. Into L1, since fetches
            // into L2 alone are dropped where many are under way.
            __builtin_prefetch(next, 0, 3);
            __builtin_prefetch(next + kLineBytes, 0, 3);
            next += pace;
        }
        // The processor does so by itself, but only to the end of a page of 4 KB, and few rows'
        // products get to the next one before its memory does.
        if constexpr (fetch == Fetch::kOwnPanels) {
            constexpr int64_t line = 16, ahead = 2048;  // words
#pragma GCC unroll 4
            for (int64_t i = 0; i < P * kPanel; i += line) {
                __builtin_prefetch(words + i / kPanel * stride + i % kPanel + ahead, 0, 3);
            }
        }
    }
};

// Calls function with what is to be fetched as a constant.
template <class Function>
inline void with_fetch(Fetch fetch, const Function& function) {
    if (fetch == Fetch::kNextPanels) {
        function(std::integral_constant<Fetch, Fetch::kNextPanels>{});
    } else if (fetch == Fetch::kOwnPanels) {
        function(std::integral_constant<Fetch, Fetch::kOwnPanels>{});
    } else {
        function(std::integral_constant<Fetch, Fetch::kNothing>{});
    }
}

// sums [R, P * kPanel], row stride kSumsStride, of the first R rows and P panels; with `more`
// added to what is there. Each is summed from the first pair to the last, so it is the same
// whatever rows and panels share the tile, and however the pairs are divided between calls.
template <class Source, int R, int P, Fetch fetch>
inline void multiply_tile(
    const Rows& x, const Panels& panels, bool more, float* sums, Upcoming& upcoming) {
    constexpr int vectors = P * kPanelVectors;
    Floats sum[R][vectors] = {};
    if (more) {
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < vectors; ++v) {
                sum[r][v] = load<Floats>(sums + r * kSumsStride + v * kLanes);
            }
        }
    }
    const uint32_t* words = panels.words;
    for (int64_t k = 0; k < panels.pairs; words += kPanel) {
        upcoming.step<fetch, P>(words, panels.stride);
#pragma GCC unroll 2
        for (int half = 0; half < Source::kPairsPerWord; ++half, ++k) {
            Words factors[vectors];
#pragma GCC unroll 16
            for (int v = 0; v < vectors; ++v) {
                const int64_t place = v / kPanelVectors * panels.stride;
                factors[v] = Source::pairs(words + place + v % kPanelVectors * kLanes, half);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Words pair = Words{} + x.pair(r, k);
#pragma GCC unroll 16
                for (int v = 0; v < vectors; ++v) {
                    sum[r][v] = PairProduct::add(pair, factors[v], sum[r][v]);
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
        for (int v = 0; v < vectors; ++v) store(sums + r * kSumsStride + v * kLanes, sum[r][v]);
    }
}

template <class Source, int P, int R = kTileRows<P>>
inline void multiply_rows(
    int num_rows, const Rows& x, const Panels& panels, bool more, float* sums,
    Upcoming& upcoming) {
    if (num_rows == R) {
        with_fetch(upcoming.fetch(), [&](auto fetch) {
            multiply_tile<Source, R, P, fetch>(x, panels, more, sums, upcoming);
        });
    } else if constexpr (R > 1) {
        multiply_rows<Source, P, R - 1>(num_rows, x, panels, more, sums, upcoming);
    }
}

// Calls tile(first row, rows, what to fetch) for tiles of similar heights, rather than full ones
// and a small rest. The first waits for the panels' way from memory. The others find them in the
// cache, and fetch the next ones.
template <class Tile>
inline void for_tiles(int num_rows, int most_rows, Upcoming upcoming, const Tile& tile) {
    Upcoming first;
    first.own = std::exchange(upcoming.own, false);
    int num_tiles = (num_rows + most_rows - 1) / most_rows;
    upcoming.spread(num_tiles - 1);
    for (int row = 0; num_tiles > 0; --num_tiles) {
        const int rows = (num_rows - row + num_tiles - 1) / num_tiles;
        tile(row, rows, row == 0 ? first : upcoming);
        row += rows;
    }
}

template <class Source, int P>
inline void multiply_tiles(
    int num_rows, const Rows& x, const Panels& panels, bool more, float* sums,
    const Upcoming& upcoming) {
    for_tiles(num_rows, kTileRows<P>, upcoming, [&](int row, int rows, Upcoming& fetched) {
        multiply_rows<Source, P>(
            rows, x.from(row), panels, more, sums + row * kSumsStride, fetched);
    });
}

template <class Source>
inline void multiply_panels(
    int num_rows, int num_panels, const Rows& x, const Panels& panels, bool more, float* sums,
    const Upcoming& upcoming = {}) {
    if (num_panels == 2 && kTileRows<2> > 1) {
        return multiply_tiles<Source, 2>(num_rows, x, panels, more, sums, upcoming);
    }
    for (int p = 0; p < num_panels; ++p) {
        const Panels one{panels.words + p * panels.stride, panels.stride, panels.pairs};
        multiply_tiles<Source, 1>(num_rows, x, one, more, sums + p * kPanel, upcoming);
    }
}

// at::native::cpublas::brgemm and brgemm_release, for CPUs with matrix tiles, which no kernel here
// uses. Null elsewhere. Takes rows, columns and depth, the strides of a, b and c, whether to add
// to c, a, b, c, and whether b is packed. Each thread releases what it has used.
struct MatrixKernel {
    void (*multiply)(
        int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const void*, const void*,
        float*, bool);
    void (*release)(bool);
};
inline MatrixKernel matrix_kernel;

inline void release_matrix_kernel() {
    if (matrix_kernel.release) matrix_kernel.release(true);
}

constexpr int kMatrixRows = 32;  // that it is called with, always the same: it compiles per shape

// The sums of one task, [rows, kMaxPanels * kPanel].
struct alignas(64) Sums {
    static constexpr int kMaxRows = 48;
    float values[kMaxRows * kSumsStride];

    const float* row(int index) const { return values + index * kSumsStride; }
};
static_assert(kMatrixRows <= Sums::kMaxRows, "sums have room for the largest block");

}  // namespace stepgraph
