// SPDX-License-Identifier: Apache-2.0
// Routing counts: arrays are as long as the struct says, numbers nearly right or wrong in ways that ask for no longer
// ones.
#include <deque>

#include "api/routing.h"
#include "fuzz/session.h"

namespace crossdock::fuzz {
namespace {

// Arrays of one call, each with an end that AddressSanitizer sees.
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

void Session::use_routing() {
    const uint32_t tokens = input_.below(40), topk = input_.below(5);
    const uint32_t ranks = 1 + input_.below(4), rank_experts = 1 + input_.below(4), experts = ranks * rank_experts;
    Arrays arrays;
    auto* const ids = arrays.make<int64_t>(size_t{tokens} * topk);
    for (uint32_t i = 0; i < tokens * topk; ++i)
        ids[i] = input_.rarely() ? input_.or_edge(0) : input_.below(experts + 1);

    Padded<crossdockRoutingCounts_t> counts;
    counts.whole.device = input_.rarely() ? static_cast<int>(input_.or_edge(0)) | 1 << 30 : -1;
    // Ids take 8 bytes, whatever their type.
    counts.whole.id_type = input_.rarely()        ? static_cast<ncclDataType_t>(input_.byte())
                           : input_.below(2) == 0 ? ncclInt64
                                                  : ncclInt32;
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
}

}  // namespace crossdock::fuzz
