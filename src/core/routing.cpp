// SPDX-License-Identifier: Apache-2.0
#include "core/routing.h"

#include <cstddef>
#include <cstdint>

#include "core/structs.h"
#include "kernels/routing/launch.h"

namespace crossdock {
namespace {

constexpr unsigned int kMostTopk = 1U << 16;
// A block counts in shared memory; every supported device has this much.
constexpr unsigned int kMostCounters = 32768;

void expect_device(int device) {
    require(device >= -1, ncclInvalidArgument, "device is {}, allowed: a GPU's number, or -1 for the host", device);
    require(device == -1 || kIsBuiltForGpus, ncclInvalidArgument,
            "device is {}, allowed in this library, which was built without CUDA: -1, the host", device);
}

void expect_id_type(ncclDataType_t type) {
    require(type == ncclInt32 || type == ncclInt64, ncclInvalidArgument,
            "id_type is {}, allowed: ncclInt32 ({}), ncclInt64 ({})", static_cast<int>(type),
            static_cast<int>(ncclInt32), static_cast<int>(ncclInt64));
}

void expect_array(const void* array, bool is_needed, const char* name) {
    require(array != nullptr || !is_needed, ncclInvalidArgument, "{} is NULL, expected an array", name);
}

// Checks an array of expert ids.
void expect_ids(const void* array, ncclDataType_t type, bool is_needed, const char* name) {
    expect_array(array, is_needed, name);
    const size_t element = type == ncclInt64 ? sizeof(int64_t) : sizeof(int32_t);
    require(reinterpret_cast<uintptr_t>(array) % element == 0, ncclInvalidArgument,
            "{} is at address {}, expected a multiple of {}", name, array, element);
}

void expect_within(uint64_t value, uint64_t least, uint64_t most, const char* name) {
    require(value >= least && value <= most, ncclInvalidArgument, "{} is {}, allowed: {}..{}", name, value, least,
            most);
}

}  // namespace

void count_routing(const crossdockRoutingCounts_t* caller, cudaStream_t stream) {
    const auto c = mandatory_struct(caller, offsetof(crossdockRoutingCounts_t, distinct), "counts");
    expect_device(c.device);
    expect_id_type(c.id_type);
    expect_within(c.num_topk, 0, kMostTopk, "num_topk");
    expect_within(c.num_ranks, 1, kMostCounters, "num_ranks");
    require(c.num_experts > 0 && c.num_experts % c.num_ranks == 0, ncclInvalidArgument,
            "num_experts is {}, allowed: positive multiples of num_ranks ({})", c.num_experts, c.num_ranks);
    expect_within(c.num_experts / c.num_ranks, 1, kMostCounters, "num_experts per rank");
    require(c.node_ranks > 0 && c.num_ranks % c.node_ranks == 0, ncclInvalidArgument,
            "node_ranks is {}, allowed: divisors of num_ranks ({})", c.node_ranks, c.num_ranks);
    expect_ids(c.topk_idx, c.id_type, c.num_tokens > 0 && c.num_topk > 0, "topk_idx");
    expect_array(c.per_rank, true, "per_rank");
    expect_array(c.per_expert, true, "per_expert");
    expect_array(c.is_in_rank, c.num_tokens > 0, "is_in_rank");
    expect_within(static_cast<unsigned int>(c.distinct), 0, 1, "distinct");
    launch<CountRouting>(c, stream);
}

}  // namespace crossdock
