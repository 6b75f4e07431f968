// Fetching memory before it is needed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stepgraph {

// Rows of pages to fetch ahead of their use, evenly over the work until then. Pages lie scattered,
// so the hardware can't foresee where a sequence goes on; and a burst would only wait for itself.
// Into L1, since fetches into L2 alone are dropped where many are under way.
struct Ahead {
    const char *keys, *values;
    const int64_t *next, *last;  // offsets of rows in elements
    std::size_t element_bytes, row_bytes;
    int share = 0;   // rows to fetch in all
    int total = 1;   // units of work to fetch them beside
    int credit = 0;  // towards the next row, in 1 / total of a row

    // Fetches what is due after so many more units of work.
    void advance(int units) {
        credit += units * share;
        for (; credit >= total && next < last; ++next, credit -= total) {
            const char* key = keys + *next * element_bytes;
            const char* value = values + *next * element_bytes;
#pragma GCC unroll 2
            for (std::size_t i = 0; i < row_bytes; i += 64) {
                __builtin_prefetch(key + i, 0, 3);
                __builtin_prefetch(value + i, 0, 3);
            }
        }
    }
};

}  // namespace stepgraph
