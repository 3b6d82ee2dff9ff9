// SPDX-License-Identifier: Apache-2.0
// Routing counts, and packed routing there and back: arrays are as long as the structs say, numbers nearly right or
// wrong in ways that ask for no longer ones.
#include <deque>

#include "fuzz/session.h"

namespace crossdock::fuzz {
namespace {

// Arrays of one chain of calls, each with an end that AddressSanitizer sees.
class Arrays {
  public:
    template <typename T>
    T* make(size_t count, uint8_t fill = 0) {
        std::vector<uint8_t>& made = arrays_.emplace_back(count * sizeof(T), fill);
        return made.empty() ? nullptr : reinterpret_cast<T*>(made.data());
    }

  private:
    std::deque<std::vector<uint8_t>> arrays_;
};

}  // namespace

// What is common to the structs: rarely a wrong device or type of expert numbers; those take 8 bytes.
template <class Struct>
void Session::choose_place(Struct& whole) {
    whole.device = input_.rarely() ? static_cast<int>(input_.or_edge(0)) | 1 << 30 : -1;
    whole.id_type = input_.rarely()        ? static_cast<ncclDataType_t>(input_.byte())
                    : input_.below(2) == 0 ? ncclInt64
                                           : ncclInt32;
}

void Session::use_routing() {
    const uint32_t tokens = input_.below(40), topk = input_.below(5), scales = input_.below(4);
    const uint32_t ranks = 1 + input_.below(4), rank_experts = 1 + input_.below(4), experts = ranks * rank_experts;
    const bool has_weights = input_.below(2) == 0;
    Arrays arrays;
    auto* const ids = arrays.make<int64_t>(size_t{tokens} * topk);
    for (uint32_t i = 0; i < tokens * topk; ++i)
        ids[i] = input_.rarely() ? input_.or_edge(0) : input_.below(experts + 1);

    Padded<crossdockRoutingCounts_t> counts;
    choose_place(counts.whole);
    counts.whole.topk_idx = ids;
    counts.whole.token_stride = topk;
    counts.whole.choice_stride = 1;
    counts.whole.num_tokens = tokens;
    counts.whole.num_topk = topk;
    counts.whole.num_experts = input_.rarely() ? experts - 1 : experts;
    counts.whole.num_ranks = ranks;
    counts.whole.node_ranks = input_.rarely() ? input_.below(8) : ranks;
    counts.whole.per_rank = input_.rarely() ? nullptr : arrays.make<int32_t>(ranks);
    counts.whole.per_node = input_.below(2) == 0 ? nullptr : arrays.make<int32_t>(ranks);
    counts.whole.per_expert = arrays.make<int32_t>(experts);
    counts.whole.is_in_rank = arrays.make<uint8_t>(size_t{tokens} * ranks);
    expect(crossdockCountRouting(break_struct(counts), nullptr), "crossdockCountRouting");

    const uint32_t words = 1 + topk * (has_weights ? 2 : 1) + scales + input_.below(3);
    const bool by_rank = input_.below(2) == 0;
    Padded<crossdockRoutingSent_t> sent;
    choose_place(sent.whole);
    sent.whole.topk_idx = ids;
    sent.whole.token_stride = topk;
    sent.whole.choice_stride = 1;
    sent.whole.num_tokens = tokens;
    sent.whole.num_topk = topk;
    sent.whole.num_scales = scales;
    sent.whole.weights = has_weights ? arrays.make<float>(size_t{tokens} * topk + 1) : nullptr;
    sent.whole.weight_strides[0] = topk;
    sent.whole.weight_strides[1] = 1;
    sent.whole.scales = scales == 0 ? nullptr : arrays.make<uint32_t>(size_t{tokens} * scales);
    sent.whole.scale_strides[0] = 1;
    sent.whole.scale_strides[1] = tokens;
    sent.whole.first_number = static_cast<int32_t>(input_.or_edge(0));
    sent.whole.num_words = input_.rarely() ? input_.below(words) : words;
    sent.whole.words = arrays.make<uint32_t>(size_t{tokens} * words);
    sent.whole.num_targets = by_rank ? ranks : topk;
    sent.whole.targets = input_.rarely() ? nullptr : arrays.make<int32_t>(size_t{tokens} * sent.whole.num_targets);
    sent.whole.rank_experts = input_.rarely() ? 0 : rank_experts;
    sent.whole.is_in_rank = by_rank ? counts.whole.is_in_rank : nullptr;
    sent.whole.num_ranks = ranks;
    sent.whole.num_zeros = rank_experts + 1;
    sent.whole.zeros = arrays.make<int32_t>(rank_experts + 1, 0xee);
    const ncclResult_t result = crossdockPackRouting(break_struct(sent), nullptr);
    expect(result, "crossdockPackRouting");
    if (result == ncclSuccess) unpack_routing(sent.whole, words, rank_experts);
}

void Session::unpack_routing(const crossdockRoutingSent_t& sent, uint32_t words, uint32_t rank_experts) {
    Arrays arrays;
    const uint64_t rows = sent.num_tokens;
    const uint64_t pairs = rows * sent.num_topk;
    Padded<crossdockRoutingReceived_t> routing;
    choose_place(routing.whole);
    routing.whole.words = sent.words;
    routing.whole.num_rows = rows;
    routing.whole.num_received = input_.or_edge(static_cast<uint32_t>(rows));
    // Rows are as many words apart as they were packed with.
    routing.whole.num_words = sent.num_words <= words ? sent.num_words : words;
    routing.whole.num_topk = sent.num_topk;
    routing.whole.num_scales = sent.num_scales;
    routing.whole.has_weights = sent.weights != nullptr ? 1 : 0;
    routing.whole.first_expert = input_.or_edge(input_.below(4) * rank_experts);
    routing.whole.rank_experts = rank_experts;
    routing.whole.ids = arrays.make<int64_t>(pairs);
    routing.whole.more_ids = input_.below(2) == 0 ? nullptr : arrays.make<int64_t>(pairs);
    routing.whole.weights = input_.below(2) == 0 ? nullptr : arrays.make<float>(pairs);
    routing.whole.zero_foreign_weights = static_cast<int>(input_.or_edge(input_.below(2)));
    routing.whole.numbers = arrays.make<int32_t>(rows);
    routing.whole.sources = input_.below(2) == 0 ? nullptr : arrays.make<int32_t>(pairs + 2 * rows);
    routing.whole.scales = arrays.make<uint32_t>(rows * sent.num_scales);
    routing.whole.scale_strides[0] = sent.num_scales;
    routing.whole.scale_strides[1] = 1;
    routing.whole.counts = arrays.make<int32_t>(rank_experts + 1);
    routing.whole.ends = input_.rarely() ? nullptr : arrays.make<int32_t>(rank_experts);
    routing.whole.ends_of_rows = static_cast<int>(input_.below(2));
    routing.whole.alignment = input_.rarely() ? input_.or_edge(1) : 1 + input_.below(8);
    int32_t received = static_cast<int32_t>(input_.or_edge(static_cast<uint32_t>(rows)));
    routing.whole.received = input_.below(2) == 0 ? nullptr : &received;
    routing.whole.num_ranks = 1 + input_.below(4);
    routing.whole.rank_ends = input_.below(2) == 0 ? nullptr : arrays.make<int32_t>(routing.whole.num_ranks);
    routing.whole.rank_numbers = input_.or_edge(1 + input_.below(8));
    expect(crossdockUnpackRouting(break_struct(routing), nullptr), "crossdockUnpackRouting");
}

}  // namespace crossdock::fuzz
