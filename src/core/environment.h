// SPDX-License-Identifier: Apache-2.0
// The environment variables for users (contract: docs/deployment.md), read once per group, at its creation. An invalid
// value is ignored with a warning; an unknown NCCL_EP_ name is no error.
#pragma once

#include <cstdint>
#include <optional>

namespace crossdock {

struct Environment {
    std::optional<uint64_t> timeout_ns;     // NCCL_EP_TIMEOUT_MS
    std::optional<uint32_t> comm_sms;       // NCCL_EP_COMM_SMS
    std::optional<uint32_t> dispatch_sms;   // NCCL_EP_DISPATCH_SMS
    std::optional<uint32_t> combine_sms;    // NCCL_EP_COMBINE_SMS
    std::optional<uint32_t> lsa_team_size;  // CROSSDOCK_LSA_TEAM_SIZE
    bool is_verbose = false;                // NCCL_EP_ENV_VERBOSE
    bool is_quiet = false;                  // NCCL_EP_QUIET
    bool has_local_dup = false;             // NCCL_EP_HT_EM_LOCAL_DUP
    bool has_nvlink_dup = false;            // NCCL_EP_HT_EM_NVLINK_DUP
    bool is_invariant = false;              // NCCL_EP_INVARIANT
    bool sums_at_sender = false;            // CROSSDOCK_SENDER_SUMS
    std::optional<bool> ll128;              // CROSSDOCK_LL128
    uint64_t first_epoch = 1;               // CROSSDOCK_FIRST_EPOCH, for tests
    std::optional<uint64_t> shared_bytes;   // CROSSDOCK_SHARED_BYTES, for tests

    static Environment read();
};

}  // namespace crossdock
