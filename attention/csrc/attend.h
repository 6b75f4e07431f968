// One item of work: query rows of one sequence against a range of its keys, by online softmax
// (FlashAttention, Dao et al. 2022; split over keys as in Flash-Decoding).
#pragma once

#include <algorithm>

#include "call.h"
#include "decode.h"
#include "pack.h"
#include "products.h"
#include "reduce.h"
#include "scratch.h"

namespace stepgraph {

constexpr int kBlockKeys = 64;

template <class Element>
class Attention {
    using Storage = typename Element::Storage;
    using Product = typename ProductOf<Element>::Type;
    // Weights that are rounded to bfloat16 need no more digits than that has.
    static constexpr bool kExact = Element::kPerWord == 1;

public:
    Attention(const Call& call, const Item& item, Scratch& scratch, float* partials)
        : call_(call), item_(item), partials_(partials) {
        group_ = static_cast<int>(call.num_heads / call.num_kv_heads);
        num_rows_ = (item.last_row - item.first_row) * group_;
        head_dim_ = static_cast<int>(call.head_dim);
        scale_ = static_cast<float>(call.scale * 1.4426950408889634);
        depth_ = (head_dim_ + Element::kPerWord - 1) / Element::kPerWord;
        query_stride_ = round_up(depth_, kLanes);
        value_stride_ = round_up(head_dim_, kLanes * Element::kPerWord);
        few_ = num_rows_ <= kFewRows;
        const std::size_t rows = num_rows_, padded_rows = round_up(num_rows_, kLanes);
        const std::size_t words = rows * (query_stride_ + value_stride_ + kLanes) +
            padded_rows * (2 * kBlockKeys + 3) + (query_stride_ + value_stride_ + 4) * kBlockKeys;
        scratch.reset(words * 4 + 16 * 64);
        offsets_ = scratch.take<int64_t>(kBlockKeys);
        next_offsets_ = scratch.take<int64_t>(kBlockKeys);
        keys_ = scratch.take<uint32_t>(query_stride_ * kBlockKeys);
        values_ = scratch.take<uint32_t>(value_stride_ * kBlockKeys);
        query_ = scratch.take<uint32_t>(rows * query_stride_);
        sums_ = scratch.take<float>(rows * value_stride_);
        scores_ = scratch.take<float>(padded_rows * kBlockKeys);
        weights_ = scratch.take<uint32_t>(padded_rows * kBlockKeys);
        alpha_ = scratch.take<float>(padded_rows);
        bases_ = scratch.take<float>(padded_rows);
        largest_ = scratch.take<float>(padded_rows);
        totals_ = scratch.take<float>(rows * kLanes);
    }

    // Returns false if the block table names a block that is outside the cache: bad_block(). What
    // next_item() returns, null or an item, is likely to be run by this thread after this one.
    template <class NextItem>
    bool run(const NextItem& next_item) {
        const int first_count = block_length(item_, item_.first_key);
        if (!locate(item_, item_.first_key, first_count)) return false;
        rows_ahead(item_.first_head, first_count, 1).advance(1);
        for (head_ = item_.first_head; head_ < item_.last_head; ++head_) {
            load_query();
            clear();
            for (int key = item_.first_key; key < item_.last_key;) {
                const int count = block_length(item_, key);
                std::swap(offsets_, next_offsets_);
                const Range next = next_range(key + count, next_item);
                if (next.count < 0) return false;
                attend(key, count, next);
                key += count;
            }
            if (item_.partial >= 0) {
                store_partials();
            } else {
                store_result();
            }
        }
        return true;
    }

    int64_t bad_block() const { return bad_block_; }

private:
    void load_query() {
        const auto* query = static_cast<const Storage*>(call_.query);
        uint32_t* target = query_;
        for (int row = item_.first_row; row < item_.last_row; ++row) {
            const Storage* source = query + row * call_.query_row_stride +
                head_ * group_ * call_.query_head_stride;
            for (int g = 0; g < group_; ++g, target += query_stride_) {
                for (int d = 0; d < head_dim_; d += kLanes * Element::kPerWord) {
                    store(
                        target + d / Element::kPerWord,
                        load_elements<Element>(
                            source + g * call_.query_head_stride + d, head_dim_ - d));
                }
            }
        }
    }

    void clear() {
        std::memset(sums_, 0, int64_t{num_rows_} * value_stride_ * sizeof(float));
        std::memset(totals_, 0, int64_t{num_rows_} * kLanes * sizeof(float));
        std::fill_n(largest_, round_up(num_rows_, kLanes), kNone);
    }

    static int block_length(const Item& item, int first_key) {
        const int rest = item.last_key - first_key;
        return rest < kBlockKeys ? rest : kBlockKeys;
    }

    // Offsets of the next keys' elements in the pages, without the head's.
    bool locate(const Item& item, int first_key, int count) {
        const int32_t* table = call_.block_tables + item.sequence * call_.table_stride;
        const int block_size = 1 << call_.block_shift;
        for (int i = 0; i < count;) {
            const int position = first_key + i, within = position & (block_size - 1);
            const int length = std::min(block_size - within, count - i);
            const int64_t block = table[position >> call_.block_shift];
            const int64_t slot = (block << call_.block_shift) + within;
            if (block < 0 || slot + length > call_.num_slots) {
                bad_block_ = block;
                return false;
            }
            for (int j = 0; j < length; ++j) next_offsets_[i + j] = (slot + j) * call_.slot_stride;
            i += length;
        }
        // The last one repeated, so that keys can be read by whole vectors.
        for (int i = count; i % kLanes != 0; ++i) next_offsets_[i] = next_offsets_[count - 1];
        return true;
    }

    // Keys of a head whose offsets are next_offsets_. Less than none: a block is bad.
    struct Range {
        int head, count;
    };

    // What comes after the head's keys before `key`: its further ones, the next head's first ones,
    // or those of the next item.
    template <class NextItem>
    Range next_range(int key, const NextItem& next_item) {
        const Item* item = &item_;
        int head = head_;
        if (key == item->last_key) {
            key = item->first_key;
            ++head;
        }
        if (head == item->last_head) {
            item = next_item();
            if (!item) return {0, 0};
            key = item->first_key;
            head = item->first_head;
        }
        const int count = block_length(*item, key);
        if (locate(*item, key, count)) return {head, count};
        return {0, item == &item_ ? -1 : 0};
    }

    void attend(int first_key, int count, const Range& next) {
        const int num_words = (count + Element::kPerWord - 1) / Element::kPerWord;
        // Larger products take so long that what is fetched beside packing suffices.
        const bool products_fetch = !few_ && num_rows_ <= kProductRows;
        const int units = 2 * count + (products_fetch ? depth_ + num_words : 0);
        Ahead ahead = rows_ahead(next.head, next.count, units);
        if (few_) {
            score_few(count, ahead);
            weigh(first_key, count);
            add_few(count, ahead);
        } else {
            Ahead* products_ahead = products_fetch ? &ahead : nullptr;
            score(count, ahead, products_ahead);
            weigh(first_key, count);
            add_values(count, ahead, products_ahead);
        }
    }

    const Storage* of_head(const void* pages, int head) const {
        return static_cast<const Storage*>(pages) + head * call_.page_head_stride;
    }

    void score(int count, Ahead& ahead, Ahead* products_ahead) {
        pack_keys<Element>(
            of_head(call_.keys, head_), offsets_, count, head_dim_, ahead, keys_, kBlockKeys);
        ProductArgs product;
        product.a = query_;
        product.a_stride = query_stride_;
        product.b = keys_;
        product.b_stride = kBlockKeys;
        product.c = scores_;
        product.c_stride = kBlockKeys;
        product.alpha = nullptr;
        product.depth = depth_;
        product.ahead = products_ahead;
        multiply<Product>(product, num_rows_, (count + kLanes - 1) / kLanes);
    }

    void add_values(int count, Ahead& ahead, Ahead* products_ahead) {
        pack_values<Element>(
            of_head(call_.values, head_), offsets_, count, head_dim_, ahead, values_, value_stride_);
        ProductArgs product;
        product.a = weights_;
        product.a_stride = kBlockKeys / Element::kPerWord;
        product.b = values_;
        product.b_stride = value_stride_;
        product.c = sums_;
        product.c_stride = value_stride_;
        product.alpha = alpha_;
        product.depth = (count + Element::kPerWord - 1) / Element::kPerWord;
        product.ahead = products_ahead;
        multiply<Product>(product, num_rows_, (head_dim_ + kLanes - 1) / kLanes);
    }

    void score_few(int count, Ahead& ahead) {
        FewArgs<Element> args;
        args.pages = of_head(call_.keys, head_);
        args.offsets = offsets_;
        args.num_keys = count;
        args.head_dim = head_dim_;
        args.a = query_;
        args.a_stride = query_stride_;
        args.c = scores_;
        args.c_stride = kBlockKeys;
        args.ahead = &ahead;
        with_few_rows(num_rows_, [&](auto rows) { few_scores<Element, rows>(args); });
    }

    void add_few(int count, Ahead& ahead) {
        FewArgs<Element> args;
        args.pages = of_head(call_.values, head_);
        args.offsets = offsets_;
        args.num_keys = count;
        args.head_dim = head_dim_;
        args.a = weights_;
        args.a_stride = kBlockKeys / Element::kPerWord;
        args.c = sums_;
        args.c_stride = value_stride_;
        args.alpha = alpha_;
        args.ahead = &ahead;
        with_few_rows(num_rows_, [&](auto rows) { few_sums<Element, rows>(args); });
    }

    // A head's next rows, to fetch beside so many units of work.
    Ahead rows_ahead(int head, int count, int units) const {
        Ahead ahead;
        ahead.keys = reinterpret_cast<const char*>(of_head(call_.keys, head));
        ahead.values = reinterpret_cast<const char*>(of_head(call_.values, head));
        ahead.next = next_offsets_;
        ahead.last = next_offsets_ + count;
        ahead.element_bytes = sizeof(Storage);
        ahead.row_bytes = head_dim_ * sizeof(Storage);
        ahead.share = count;
        ahead.total = units;
        return ahead;
    }

    // Turns scores into weights relative to the largest score so far.
    void weigh(int first_key, int count) {
        const int num_vectors = (count + kLanes - 1) / kLanes;
        if (!all_see(first_key, count)) {
            for (int row = 0; row < num_rows_; ++row) hide(row, first_key, count);
        }
        for (int row = 0; row < num_rows_; ++row) {
            const float* scores = scores_ + row * kBlockKeys;
            Floats highest = splat(kNone);
            for (int v = 0; v < num_vectors; ++v) {
                highest = larger(load<Floats>(scores + v * kLanes), highest);
            }
            bases_[row] = largest(highest);
        }
        for (int row = 0; row < num_rows_; row += kLanes) {  // arrays are padded to whole vectors
            const Floats before = load<Floats>(largest_ + row);
            const Floats now = larger(load<Floats>(bases_ + row) * scale_, before);
            const Floats base = now == kNone ? Floats{} : now;  // no key seen: weights are zero
            store(alpha_ + row, exp2_negative<kExact>(before - base));
            store(bases_ + row, base);
            store(largest_ + row, now);
        }
        for (int row = 0; row < num_rows_; ++row) {
            const float* scores = scores_ + row * kBlockKeys;
            float* totals = totals_ + row * kLanes;
            const Floats base = splat(bases_[row]);
            Floats total = load<Floats>(totals) * alpha_[row];
            for (int v = 0; v < num_vectors; ++v) {
                const Floats weight =
                    exp2_negative<kExact>(load<Floats>(scores + v * kLanes) * scale_ - base);
                total += weight;
                store_weights(row, v, weight);
            }
            store(totals, total);
        }
    }

    // Whether all rows see all of these keys, which fill whole vectors.
    bool all_see(int first_key, int count) const {
        const int first = item_.first_row + item_.position_offset;
        const int last = item_.last_row - 1 + item_.position_offset;
        return count % kLanes == 0 && first_key + count <= first + 1 &&
            (!call_.window || last + 1 - call_.window <= first_key);
    }

    // Makes the scores of keys that a row doesn't see -inf.
    void hide(int row, int first_key, int count) {
        const int position =
            item_.first_row + row / group_ + item_.position_offset;
        const int last = std::min(position + 1 - first_key, count);
        const int first =
            call_.window ? position + 1 - static_cast<int>(call_.window) - first_key : 0;
        float* scores = scores_ + row * kBlockKeys;
        for (int v = 0; v < count; v += kLanes) {
            if (first <= v && v + kLanes <= last) continue;
            const Ints key = lane_numbers() + v;
            const Floats score = load<Floats>(scores + v);
            store(scores + v, (key >= first) & (key < last) ? score : splat(kNone));
        }
    }

    void store_weights(int row, int v, Floats weight) {
        uint32_t* target = weights_ + row * (kBlockKeys / Element::kPerWord);
        if constexpr (Element::kPerWord == 1) {
            store(target + v * kLanes, weight);
        } else {
#if defined(__AVX512BF16__)
            store(target + v * (kLanes / 2), _mm512_cvtneps_pbh(bits<__m512>(weight)));
#endif
        }
    }

    void store_partials() {
        const int64_t first = item_.partial + int64_t{head_ - item_.first_head} * num_rows_;
        float* target = partials_ + first * partial_stride(call_);
        for (int64_t row = 0; row < num_rows_; ++row, target += partial_stride(call_)) {
            target[0] = largest_[row];
            target[1] = sum(load<Floats>(totals_ + row * kLanes));
            std::memcpy(
                target + 2, sums_ + row * value_stride_, head_dim_ * sizeof(float));
        }
    }

    void store_result() {
        int64_t state = 0;
        for (int row = item_.first_row; row < item_.last_row; ++row) {
            auto* target = static_cast<Storage*>(call_.out) +
                (row * call_.num_heads + head_ * group_) * call_.head_dim;
            for (int g = 0; g < group_; ++g, ++state, target += head_dim_) {
                const float total = sum(load<Floats>(totals_ + state * kLanes));
                const float inverse = total == 0 ? 0 : 1 / total;
                const float* sums = sums_ + state * value_stride_;
                for (int d = 0; d < head_dim_; d += kLanes) {
                    store_elements<Element>(
                        target + d, load<Floats>(sums + d) * inverse, head_dim_ - d);
                }
            }
        }
    }

    const Call& call_;
    const Item& item_;
    float* partials_;
    int64_t bad_block_ = 0;
    float scale_;  // of scores whose power of 2 is taken
    int group_, num_rows_, head_dim_;
    int head_ = 0;  // key/value head that is attended
    bool few_;      // rows
    int depth_;         // words of a head
    int query_stride_;  // words
    int value_stride_;  // words or floats
    int64_t *offsets_, *next_offsets_;
    uint32_t *keys_, *values_, *query_, *weights_;
    float *sums_, *scores_, *alpha_, *bases_, *largest_, *totals_;
};

}  // namespace stepgraph
