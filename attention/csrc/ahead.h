// Fetching memory before it is needed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stepgraph {

// Rows of pages to fetch ahead of their use, evenly over the work until then. Pages lie scattered,
// so the hardware can't foresee where a sequence goes on; and a burst would only wait for itself.
struct Ahead {
    const char *keys, *values;
    const int64_t* offsets;  // in elements
    std::size_t element_bytes, row_bytes;
    int row = 0, last = 0;  // keys' and values' rows alternate
    int share = 0;          // rows to fetch in all
    int total = 1;          // units of work to fetch them beside
    int credit = 0;         // towards the next row, in 1 / total of a row

    // Fetches what is due after so many more units of work.
    void advance(int units) {
        credit += units * share;
        for (; credit >= total && row < last; ++row, credit -= total) {
            const char* line = (row % 2 ? values : keys) + offsets[row / 2] * element_bytes;
            for (std::size_t i = 0; i < row_bytes; i += 64) __builtin_prefetch(line + i, 0, 2);
        }
    }
};

}  // namespace stepgraph
