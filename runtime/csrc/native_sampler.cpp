// Draws the next tokens of a step, row by row: the likeliest, or one by its probability.

#include <cmath>
#include <limits>
#include <vector>

#include "threads.h"
#include "vectors.h"

namespace stepgraph {

constexpr int kGroup = 128;  // tokens summed at once; whole vectors
static_assert(kGroup % kLanes == 0, "a group is whole vectors");
typedef double Doubles __attribute__((vector_size(kLanes * 8)));

// Everything is 64 bits wide, since the caller writes it as one array of integers.
struct DrawCall {
    int64_t num_threads, num_rows, vocab, stride;
    const float* logits;       // [num_rows, vocab], rows `stride` elements apart
    const float* temperature;  // [num_rows]; 0: the likeliest token
    const float* uniforms;     // [num_rows], in [0, 1)
    int64_t* token_ids;        // [num_rows]
    float* best_logits;        // [num_rows]; NaN where a logit is
};

// The largest of non-negative whole numbers not above each value.
inline Floats floor(Floats value) {
    const Floats nearest = value + 8388608.0f - 8388608.0f;  // 2 ** 23, above which all are whole
    return value < 8388608.0f ? nearest - (nearest > value ? splat(1.0f) : splat(0.0f)) : value;
}

class Row {
public:
    Row(const float* logits, int64_t vocab) : logits_(logits), vocab_(vocab) {}

    // The first of the largest logits.
    int64_t find_best(float& best) const {
        Floats most = splat(-std::numeric_limits<float>::infinity());
        Ints at = lane_numbers(), index = at;
        Words has_nan = {};
        for (int64_t i = 0; i < vocab_; i += kLanes, index += kLanes) {
            const Floats logits = load_logits(i);
            has_nan |= bits<Words>(logits != logits);
            const auto is_more = logits > most;
            most = is_more ? logits : most;
            at = is_more ? index : at;
        }
        int lane = 0;
        bool found_nan = false;
        for (int other = 0; other < kLanes; ++other) {
            found_nan |= has_nan[other] != 0;
            if (most[other] > most[lane] || (most[other] == most[lane] && at[other] < at[lane])) {
                lane = other;
            }
        }
        best = found_nan ? std::numeric_limits<float>::quiet_NaN() : most[lane];
        return at[lane];
    }

    // A token's weight is floor(2 ** 50 * probability), so that sums are exact. The first token is
    // drawn at which the running sum exceeds floor(uniform * total).
    int64_t draw(float best, float temperature, float uniform, std::vector<float>& scratch) const {
        const int64_t num_groups = (vocab_ + kGroup - 1) / kGroup;
        scratch.resize(num_groups * kGroup);
        float* weights = scratch.data();
        const float scale = 0x1p50f / fill_powers(best, temperature, weights, num_groups * kGroup);
        double total = 0;
        for (int64_t group = 0; group < num_groups; ++group) {
            total += fill_weights(weights + group * kGroup, scale);
        }
        const double target = std::floor(uniform * total);
        double sum = 0;
        for (int64_t group = 0; group < num_groups; ++group) {
            const double end = sum + sum_weights(weights + group * kGroup);
            if (end > target) {
                int64_t token = group * kGroup;
                while ((sum += weights[token]) <= target) ++token;
                return token;
            }
            sum = end;
        }
        return 0;  // of a row that weighs nothing
    }

private:
    Floats load_logits(int64_t first) const {
        if (first + kLanes <= vocab_) return load<Floats>(logits_ + first);
        Floats part = splat(-std::numeric_limits<float>::infinity());
        if (first < vocab_) std::memcpy(&part, logits_ + first, (vocab_ - first) * sizeof(float));
        return part;
    }

    // e ** ((logit - best) / temperature); their sum.
    float fill_powers(float best, float temperature, float* powers, int64_t count) const {
        Floats total = {};
        for (int64_t i = 0; i < count; i += kLanes) {
            const Floats scaled = (load_logits(i) - best) / temperature;
            const Floats power = exp2_negative<true>(scaled * 1.44269504f);
            total += power;
            store(powers + i, power);
        }
        return sum(total);
    }

    static double fill_weights(float* powers, float scale) {
        for (int i = 0; i < kGroup; i += kLanes) {
            store(powers + i, floor(load<Floats>(powers + i) * scale));
        }
        return sum_weights(powers);
    }

    static double sum_weights(const float* weights) {
        Doubles sums = {};
        for (int i = 0; i < kGroup; i += kLanes) {
            sums += __builtin_convertvector(load<Floats>(weights + i), Doubles);
        }
        double total = 0;
        for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
        return total;
    }

    const float* logits_;
    int64_t vocab_;
};

inline void draw(const DrawCall& call, int row) {
    static thread_local std::vector<float> scratch;
    const Row logits(call.logits + row * call.stride, call.vocab);
    float best;
    int64_t token = logits.find_best(best);
    const float temperature = call.temperature[row];
    if (temperature > 0 && std::isfinite(best)) {
        token = logits.draw(best, temperature, call.uniforms[row], scratch);
    }
    call.token_ids[row] = token;
    call.best_logits[row] = best;
}

}  // namespace stepgraph

extern "C" STEPGRAPH_EXPORT void stepgraph_draw(const stepgraph::DrawCall* call) {
    stepgraph::run_team(static_cast<int>(call->num_threads), [call](stepgraph::Worker& worker) {
        worker.share(
            static_cast<int>(call->num_rows), [call](int row) { stepgraph::draw(*call, row); });
    });
}
