// One product as a phase of a team's work, and what becomes of its sums.
#pragma once

#include <vector>

#include "blocks.h"
#include "threads.h"

namespace stepgraph {

constexpr int kRowsPerTask = 4;
constexpr int kRowsAlone = 4;

// Whether each thread prepares all rows for itself, which takes less time than waiting.
inline bool prepares_alone(int64_t num_rows) { return num_rows <= kRowsAlone; }

// A phase that calls function(row) for each row.
template <class Function>
void share_rows(Worker& worker, int64_t num_rows, const Function& function) {
    const int num_tasks = static_cast<int>((num_rows + kRowsPerTask - 1) / kRowsPerTask);
    worker.share(num_tasks, [=](int task) {
        const int64_t first = int64_t{task} * kRowsPerTask;
        const int64_t last = std::min(first + kRowsPerTask, num_rows);
        for (int64_t row = first; row < last; ++row) function(row);
    });
}

struct Product {
    Input x;
    Weight weight;
    const uint16_t* bias;  // [weight.outputs]; null: none
    int64_t num_rows;
    int num_threads;

    // Calls function with what makes a vector of outputs, not yet rounded, of their sums. Mostly
    // it just loads them, and should not ask for each whether there is more to do.
    template <class Function>
    void with_values(const Function& function) const {
        if (!weight.scales && !bias) {
            return function([](const float* sums, int64_t, int) { return load<Floats>(sums); });
        }
        function([this](const float* sums, int64_t output, int lanes) {
            Floats sum = load<Floats>(sums);
            if (weight.scales) sum *= load<Floats>(weight.scales + output);
            return bias ? sum + load_bfloats(bias + output, lanes) : sum;
        });
    }
};

// Memory for rows in fixed point: one copy, or one of each thread.
class FixedMemory {
public:
    // Makes room for rows of so many inputs, if the weights are in int8.
    void reserve(int64_t num_rows, int64_t inputs, int64_t num_threads, bool is_int8) {
        if (!kHasFixedRows || !is_int8) return;
        const int64_t copies = prepares_alone(num_rows) ? num_threads : 1;
        copy_bytes_ = num_rows * FixedRows::row_bytes(inputs);
        if (memory_.size() < copies * copy_bytes_) memory_.resize(copies * copy_bytes_);
    }

    // The product, its rows rounded if its weight wants that: by each thread, or in a phase.
    Product prepared(Worker& worker, Product product) {
        if (!kHasFixedRows || !product.weight.scales) return product;
        const int64_t inputs = 2 * product.weight.pairs, num_rows = product.num_rows;
        const bool alone = prepares_alone(num_rows);
        // A thread that comes late may still write its copy when others are at later products.
        const FixedRows fixed(memory_.data() + (alone ? worker.index() * copy_bytes_ : 0), inputs);
        const Rows rows = product.x.rows;
        const auto round = [=](int64_t row) { fixed.from(row).set(rows.from(row).data); };
        if (alone) {
            for (int64_t row = 0; row < num_rows; ++row) round(row);
        } else {
            share_rows(worker, num_rows, round);
        }
        product.x.fixed = fixed;
        return product;
    }

private:
    std::vector<char> memory_;
    std::size_t copy_bytes_ = 0;
};

// A phase that calls use(row, output, value, lanes) for each vector of outputs.
template <class Use>
void multiply(Worker& worker, const Product& product, const Use& use) {
    const Weight& weight = product.weight;
    const Grid grid(product.num_rows, weight.num_panels(), product.num_threads);
    worker.share(grid.num_tasks(), [&](int task) {
        const Block block(grid, task);
        Sums sums;
        block.multiply(product.x, product.weight, 0, sums);
        const int64_t output = int64_t{block.first_panel} * kPanel;
        const int64_t count =
            std::min<int64_t>(block.num_panels * kPanel, product.weight.outputs - output);
        product.with_values([&](const auto& value) {
            for (int row = 0; row < block.num_rows; ++row) {
                for_vectors(count, [&](int64_t i, int lanes) {
                    const Floats result = value(sums.row(row) + i, output + i, lanes);
                    use(block.first_row + row, output + i, result, lanes);
                });
            }
        });
    });
}

// Everything is 64 bits wide, since the caller writes it as one array of integers.
struct LinearCall {
    int64_t num_threads, num_rows, inputs, outputs, x_stride;
    const uint16_t* x;       // [num_rows, inputs], inputs even, with scales a multiple of 4
    const uint32_t* weight;  // packed
    const float* scales;     // of a weight in int8; null: it is in bfloat16
    const uint16_t* bias;
    uint16_t* out;     // [num_rows, outputs], contiguous; null: out_float is there
    float* out_float;  // likewise, of values rounded to bfloat16
};

inline void run_linear(const LinearCall& call) {
    const Product product{
        {{call.x, call.x_stride}, {}},
        {call.weight, call.scales, call.inputs / 2, call.outputs},
        call.bias, call.num_rows, static_cast<int>(call.num_threads)};
    uint16_t* out = call.out;
    float* out_float = call.out_float;
    const int64_t stride = call.outputs;
    const auto use = [=](int64_t row, int64_t output, Floats value, int lanes) {
        const int64_t place = row * stride + output;
        if (out) return store_bfloats(out + place, value, lanes);
        const Floats result = rounded(value);
        std::memcpy(out_float + place, &result, lanes * sizeof(float));
    };
    static thread_local FixedMemory memory;
    FixedMemory& fixed = memory;
    fixed.reserve(call.num_rows, call.inputs, call.num_threads, call.scales);
    run_team(product.num_threads, [&](Worker& worker) {
        multiply(worker, fixed.prepared(worker, product), use);
        release_matrix_kernel();
    });
}

}  // namespace stepgraph
