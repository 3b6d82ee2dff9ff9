// SPDX-License-Identifier: Apache-2.0
// A group's settings: the caller's config after checks, with environment and defaults applied.
#pragma once

#include <vector>

#include "core/environment.h"
#include "crossdock.h"
#include "fabric/communicator.h"
#include "nccl_ep.h"

namespace crossdock {

// The timeout of a wait: the environment's value, the caller's (0: none), or 100 s.
uint64_t resolve_timeout_ns(const Environment& environment, uint64_t given_ns);

// Ranks of an LSA team: CROSSDOCK_LSA_TEAM_SIZE, the option (0: none), or the communicator's. A team is never larger
// than the communicator's.
uint32_t resolve_lsa_team_size(const Communicator& communicator, const Environment& environment, int option,
                               const char* option_name);

struct GroupConfig {
    ncclEpAlgorithm_t algorithm = NCCL_EP_ALGO_LOW_LATENCY;
    unsigned int api_version = 0;  // the caller's
    uint32_t num_ranks = 0;
    uint32_t lsa_team_size = 0;  // consecutive ranks that load and store each other's memory
    uint32_t num_experts = 0;
    uint32_t max_tokens = 0;
    uint32_t max_recv_tokens = 0;
    uint32_t max_token_bytes = 0;
    uint64_t rdma_buffer_size = 0;  // 0: the library decides
    uint32_t num_topk = 0;          // 0: not given
    uint32_t dispatch_sms = 0;      // at most this many blocks per operation
    uint32_t combine_sms = 0;
    uint32_t flat_dispatch_sms = 0;  // HT, of flat handles
    uint32_t flat_combine_sms = 0;
    uint32_t mxfp8_combine_sms = 0;
    uint32_t update_sms = 0;
    uint32_t most_dispatch_sms = 0;  // HT, what a handle may ask for
    uint32_t most_combine_sms = 0;
    bool in_host_memory = false;  // symmetric memory is
    ncclEpAllocConfig_t alloc{};
    bool masking = false;
    uint64_t timeout_ns = 0;
    ncclEpZeroCopyMode_t zero_copy = NCCL_EP_ZERO_COPY_AUTO;
    ncclEpOverflowPolicy_t overflow_policy = NCCL_EP_OVERFLOW_AUTO;
    bool invariant = false;  // combines add up the rows of choices in their order
    bool is_invariant_by_environment = false;
    bool sums_at_sender = false;
    std::optional<bool> ll128;  // whether LL rows may be LL128 rows; not given: where lines are stored whole
    uint64_t first_epoch = 1;   // zeroed words belong to no operation

    uint32_t experts_per_rank() const { return num_experts / num_ranks; }
    // An invariant group combines no rows that callers have summed.
    void expect_rows_to_sum(bool are_by_expert) const;
    bool has_several_teams() const { return lsa_team_size < num_ranks; }

    // Checks what a rank can check alone. options may be null.
    static GroupConfig resolve(Communicator& communicator, const ncclEpGroupConfig_t* caller,
                               const crossdockGroupOptions_t* options, const Environment& environment);

    // What all ranks must give alike.
    struct Field {
        const char* name;
        uint64_t value;
    };
    std::vector<Field> fields() const;

    // Collective. If a value differs, throws on every rank an Error that names the field and two ranks that differ.
    // what: the call, for errors.
    void expect_equal_on_all_ranks(Communicator& communicator, const std::vector<Field>& given, const char* what) const;
};

}  // namespace crossdock
