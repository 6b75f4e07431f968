// A decoder's work between two attention calls: the rest of one layer, then the next one's
// projections. A team of threads does it all, in phases.
#pragma once

#include <vector>

#include "linear.h"

namespace stepgraph {

// Everything is 64 bits wide, since the caller writes it as one array of integers. Tensors are
// bfloat16, and contiguous except for attended's rows; weights are packed, and in int8 if they
// have scales; a bias may be null.
struct RegionCall {
    int64_t num_threads, num_rows, hidden, inner;
    int64_t attended_width, attended_stride, qkv_width, head_dim, num_rotated_heads;
    double eps;
    const uint16_t* attended;  // [num_rows, attended_width]; null: there is no layer to finish
    const uint16_t* residual;  // [num_rows, hidden]
    const uint32_t* o_weight;
    const float* o_scales;
    const uint16_t *o_bias, *post_norm;
    const uint32_t* gate_up_weight;  // gate, then up
    const float* gate_up_scales;
    const uint16_t* gate_up_bias;
    const uint32_t* down_weight;
    const float* down_scales;
    const uint16_t *down_bias, *norm;
    const uint32_t* qkv_weight;          // null: the result is the normalized rows
    const float* qkv_scales;
    const uint16_t *qkv_bias, *qk_norm;  // qk_norm: [num_rotated_heads, head_dim], or null
    const uint16_t *cos, *sin;           // [num_rows or positions, head_dim]
    int64_t rotary_stride;               // of both
    const int64_t* positions;            // [num_rows]: whose cos and sin; null: each row has its own
    uint16_t* new_residual;  // [num_rows, hidden]; not written if there is no layer to finish
    uint16_t* out;           // [num_rows, qkv_width or hidden]
};

// What regions keep while they run.
struct RegionScratch {
    void reserve(const RegionCall& call) {
        const int64_t copies = prepares_alone(call.num_rows) ? call.num_threads : 1;
        const std::size_t needed = call.num_rows * (call.hidden * copies + call.inner);
        if (rows.size() < needed) rows.resize(needed);
        const int64_t widest = std::max({call.hidden, call.inner, call.attended_width});
        const bool is_int8 = call.qkv_weight ? call.qkv_scales : call.o_scales;
        fixed.reserve(call.num_rows, widest, call.num_threads, is_int8);
    }

    std::vector<uint16_t> rows;
    FixedMemory fixed;
};

class Region {
public:
    // scratch has room for this call.
    Region(const RegionCall& call, RegionScratch& scratch)
        : call_(call),
          activated_(scratch.rows.data()),
          normed_(activated_ + call.num_rows * call.inner),
          fixed_(scratch.fixed) {}

    // What each thread of a team does; returns when everything is done.
    void work(Worker& worker) const {
        if (call_.attended) finish(worker);
        const uint16_t* residual = call_.attended ? call_.new_residual : call_.residual;
        if (call_.qkv_weight) {
            project(worker, normalized(worker, residual, call_.norm));
        } else {
            norm_together(worker, residual, call_.norm, call_.out);
        }
    }

private:
    Product product(
        const uint16_t* x, int64_t inputs, int64_t stride, const uint32_t* weight,
        const float* scales, int64_t outputs, const uint16_t* bias) const {
        return {
            {{x, stride}, {}}, {weight, scales, inputs / 2, outputs}, bias, call_.num_rows,
            static_cast<int>(call_.num_threads)};
    }

    void finish(Worker& worker) const {
        const RegionCall& call = call_;
        add_to_residual(
            worker,
            product(
                call.attended, call.attended_width, call.attended_stride, call.o_weight,
                call.o_scales, call.hidden, call.o_bias),
            call.residual);
        const uint16_t* normed = normalized(worker, call.new_residual, call.post_norm);
        activate(
            worker,
            product(
                normed, call.hidden, call.hidden, call.gate_up_weight, call.gate_up_scales,
                2 * call.inner, call.gate_up_bias));
        add_to_residual(
            worker,
            product(
                activated_, call.inner, call.inner, call.down_weight, call.down_scales,
                call.hidden, call.down_bias),
            call.new_residual);
    }

    void add_to_residual(Worker& worker, const Product& product, const uint16_t* residual) const {
        uint16_t* target = call_.new_residual;
        const int64_t stride = call_.hidden;
        const auto add = [=](int64_t row, int64_t i, Floats value, int lanes) {
            const int64_t at = row * stride + i;
            store_bfloats(
                target + at, load_bfloats(residual + at, lanes) + rounded(value), lanes);
        };
        multiply(worker, fixed_.prepared(worker, product), add);
    }

    // The normalized rows, for this thread.
    const uint16_t* normalized(
        Worker& worker, const uint16_t* source, const uint16_t* weight) const {
        if (!prepares_alone(call_.num_rows)) {
            norm_together(worker, source, weight, normed_);
            return normed_;
        }
        uint16_t* target = normed_ + worker.index() * call_.num_rows * call_.hidden;
        for (int64_t row = 0; row < call_.num_rows; ++row) norm(row, source, weight, target);
        return target;
    }

    void norm_together(
        Worker& worker, const uint16_t* source, const uint16_t* weight, uint16_t* target) const {
        share_rows(worker, call_.num_rows, [=](int64_t row) { norm(row, source, weight, target); });
    }

    void norm(
        int64_t row, const uint16_t* source, const uint16_t* weight, uint16_t* target) const {
        const int64_t at = row * call_.hidden;
        normalize(source + at, weight, call_.hidden, static_cast<float>(call_.eps), target + at);
    }

    // silu(gate) * up, of the same columns in one task.
    void activate(Worker& worker, const Product& of) const {
        const Product product = fixed_.prepared(worker, of);
        const int64_t panels = call_.inner / kPanel;
        const Grid grid(product.num_rows, panels, product.num_threads);
        worker.share(grid.num_tasks(), [&](int task) {
            const Block block(grid, task);
            Sums gates, ups;
            block.multiply(product.x, product.weight, 0, gates);
            block.multiply(product.x, product.weight, panels, ups);
            const int64_t output = int64_t{block.first_panel} * kPanel;
            product.with_values([&](const auto& value) {
                for (int row = 0; row < block.num_rows; ++row) {
                    uint16_t* target = activated_ + (block.first_row + row) * call_.inner + output;
                    for_vectors(block.num_panels * kPanel, [&](int64_t i, int lanes) {
                        const Floats gate = value(gates.row(row) + i, output + i, lanes);
                        const Floats up = value(ups.row(row) + i, call_.inner + output + i, lanes);
                        store_bfloats(target + i, rounded(silu(rounded(gate))) * rounded(up));
                    });
                }
            });
        });
    }

    void project(Worker& worker, const uint16_t* normed) const {
        uint16_t* out = call_.out;
        const int64_t stride = call_.qkv_width;
        const Product projection = product(
            normed, call_.hidden, call_.hidden, call_.qkv_weight, call_.qkv_scales, stride,
            call_.qkv_bias);
        multiply(
            worker, fixed_.prepared(worker, projection),
            [=](int64_t row, int64_t i, Floats value, int lanes) {
                store_bfloats(out + row * stride + i, value, lanes);
            });
        share_rows(worker, call_.num_rows, [this](int64_t row) {
            const int64_t size = call_.head_dim;
            const int64_t position = call_.positions ? call_.positions[row] : row;
            const int64_t turn = position * call_.rotary_stride;
            uint16_t* head = call_.out + row * call_.qkv_width;
            for (int64_t index = 0; index < call_.num_rotated_heads; ++index, head += size) {
                if (call_.qk_norm) {
                    const uint16_t* weight = call_.qk_norm + index * size;
                    normalize(head, weight, size, static_cast<float>(call_.eps), head);
                }
                rotate(head, call_.cos + turn, call_.sin + turn, size / 2);
            }
        });
    }

    const RegionCall call_;
    uint16_t* const activated_;  // [num_rows, inner]
    uint16_t* const normed_;     // [num_rows, hidden], of each thread if it prepares alone
    FixedMemory& fixed_;
};

}  // namespace stepgraph
