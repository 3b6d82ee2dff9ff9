// SPDX-License-Identifier: Apache-2.0
#include "core/labels.h"

#include <cstdint>

#include "core/structs.h"
#include "kernels/labels/launch.h"

namespace crossdock {
namespace {

constexpr unsigned int kMostTopk = 1U << 16;
constexpr unsigned int kMostWords = 1U << 20;  // of a label
// A block counts in shared memory, of which every device that this library knows has so much.
constexpr unsigned int kMostCounters = 32768;

void expect_device(int device) {
#if defined(CROSSDOCK_WITH_CUDA)
    require(device >= -1, ncclInvalidArgument, "device is {}, allowed: a GPU's number, or -1 for the host", device);
#else
    require(device == -1, ncclInvalidArgument,
            "device is {}, allowed in this library, which was built without CUDA: -1, the host", device);
#endif
}

void expect_id_type(ncclDataType_t type) {
    require(type == ncclInt32 || type == ncclInt64, ncclInvalidArgument,
            "id_type is {}, allowed: ncclInt32 ({}), ncclInt64 ({})", static_cast<int>(type),
            static_cast<int>(ncclInt32), static_cast<int>(ncclInt64));
}

void expect_array(const void* array, bool is_needed, const char* name) {
    require(array != nullptr || !is_needed, ncclInvalidArgument, "{} is NULL, expected an array", name);
}

void expect_within(uint64_t value, uint64_t least, uint64_t most, const char* name) {
    require(value >= least && value <= most, ncclInvalidArgument, "{} is {}, allowed: {}..{}", name, value, least,
            most);
}

void expect_words(unsigned int num_words, uint64_t least) { expect_within(num_words, least, kMostWords, "num_words"); }

}  // namespace

void count_routing(const crossdockRoutingCounts_t* caller, cudaStream_t stream) {
    const auto c = mandatory_struct(caller, sizeof(crossdockRoutingCounts_t), "counts");
    expect_device(c.device);
    expect_id_type(c.id_type);
    expect_within(c.num_topk, 0, kMostTopk, "num_topk");
    expect_within(c.num_ranks, 1, kMostCounters, "num_ranks");
    require(c.num_experts > 0 && c.num_experts % c.num_ranks == 0, ncclInvalidArgument,
            "num_experts is {}, allowed: positive multiples of num_ranks ({})", c.num_experts, c.num_ranks);
    expect_within(c.num_experts / c.num_ranks, 1, kMostCounters, "num_experts a rank");
    require(c.node_ranks > 0 && c.num_ranks % c.node_ranks == 0, ncclInvalidArgument,
            "node_ranks is {}, allowed: divisors of num_ranks ({})", c.node_ranks, c.num_ranks);
    expect_array(c.topk_idx, c.num_tokens > 0 && c.num_topk > 0, "topk_idx");
    expect_array(c.per_rank, true, "per_rank");
    expect_array(c.per_expert, true, "per_expert");
    expect_array(c.is_in_rank, c.num_tokens > 0, "is_in_rank");
    launch_count_routing(c, stream);
}

void pack_labels(const crossdockLabelsSent_t* caller, cudaStream_t stream) {
    const auto l = mandatory_struct(caller, sizeof(crossdockLabelsSent_t), "labels");
    expect_device(l.device);
    expect_id_type(l.id_type);
    expect_within(l.num_topk, 0, kMostTopk, "num_topk");
    expect_words(l.num_words, 1 + uint64_t{l.num_topk} * (l.weights == nullptr ? 1 : 2) + l.num_scales);
    const bool are_tokens = l.num_tokens > 0;
    expect_array(l.topk_idx, are_tokens && l.num_topk > 0, "topk_idx");
    expect_array(l.scales, are_tokens && l.num_scales > 0, "scales");
    expect_array(l.words, are_tokens, "words");
    expect_array(l.zeros, l.num_zeros > 0, "zeros");
    if (l.targets != nullptr && l.is_in_rank == nullptr) {
        expect_within(l.rank_experts, 1, UINT32_MAX, "rank_experts");
        expect_within(l.num_targets, l.num_topk, l.num_topk, "num_targets");
    }
    launch_pack_labels(l, stream);
}

void unpack_labels(const crossdockLabelsReceived_t* caller, cudaStream_t stream) {
    const auto l = mandatory_struct(caller, sizeof(crossdockLabelsReceived_t), "labels");
    expect_device(l.device);
    expect_id_type(l.id_type);
    expect_within(l.num_topk, 0, kMostTopk, "num_topk");
    expect_words(l.num_words, 1 + uint64_t{l.num_topk} * (l.has_weights == 0 ? 1 : 2) + l.num_scales);
    expect_array(l.words, l.num_rows > 0, "words");
    require(l.weights == nullptr || l.has_weights != 0, ncclInvalidArgument,
            "weights is an array and has_weights 0, expected NULL: the labels have no weights");
    if (l.counts != nullptr) {
        expect_within(l.rank_experts, 1, kMostCounters, "rank_experts");
        expect_within(l.alignment, 1, INT32_MAX, "alignment");
        expect_array(l.ends, true, "ends");
    }
    launch_unpack_labels(l, stream);
}

}  // namespace crossdock
