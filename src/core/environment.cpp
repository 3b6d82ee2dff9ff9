// SPDX-License-Identifier: Apache-2.0
#include "core/environment.h"

#include "core/environment_value.h"
#include "core/log.h"
#include "device/tagged_word.h"

namespace crossdock {
namespace {

std::optional<uint32_t> number_of_sms(const char* name) {
    const auto number = environment_number(name, 65535, warn);
    return number ? std::optional(static_cast<uint32_t>(*number)) : std::nullopt;
}

std::optional<uint32_t> read_lsa_team_size() {
    const auto ranks = environment_number("CROSSDOCK_LSA_TEAM_SIZE", INT32_MAX, warn);
    return ranks ? std::optional(static_cast<uint32_t>(*ranks)) : std::nullopt;
}

bool flag(const char* name) { return environment_flag(name, warn).value_or(false); }

}  // namespace

Environment Environment::read() {
    Environment environment;
    environment.timeout_ns = environment_timeout_ns("NCCL_EP_TIMEOUT_MS", warn);
    environment.comm_sms = number_of_sms("NCCL_EP_COMM_SMS");
    environment.dispatch_sms = number_of_sms("NCCL_EP_DISPATCH_SMS");
    environment.combine_sms = number_of_sms("NCCL_EP_COMBINE_SMS");
    environment.lsa_team_size = read_lsa_team_size();
    environment.is_verbose = flag("NCCL_EP_ENV_VERBOSE");
    environment.is_quiet = flag("NCCL_EP_QUIET");
    environment.has_local_dup = flag("NCCL_EP_HT_EM_LOCAL_DUP");
    environment.has_nvlink_dup = flag("NCCL_EP_HT_EM_NVLINK_DUP");
    environment.is_invariant = flag("NCCL_EP_INVARIANT");
    environment.sums_at_sender = flag("CROSSDOCK_SENDER_SUMS");
    environment.ll128 = environment_flag("CROSSDOCK_LL128", warn);
    environment.first_epoch = environment_number("CROSSDOCK_FIRST_EPOCH", kLastEpoch, warn).value_or(1);
    environment.shared_bytes = environment_number("CROSSDOCK_SHARED_BYTES", INT32_MAX, warn);
    return environment;
}

}  // namespace crossdock
