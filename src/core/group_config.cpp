// SPDX-License-Identifier: Apache-2.0
#include "core/group_config.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "core/structs.h"
#include "kernels/ll/arguments.h"
#include "runtime/runtime.h"

namespace crossdock {
namespace {

constexpr unsigned int kOptionsV1Bytes = offsetof(crossdockGroupOptions_t, lsa_team_size);

constexpr uint64_t kDefaultTimeoutNs = 100'000'000'000;
constexpr uint64_t kLongestTimeoutNs = uint64_t{1}
                                       << 48;  // three days; deadlines are sums of a clock and this times ranks

// HT's defaults.
constexpr uint32_t kHtSms = 64;       // expert-major: rows are copied to their experts' places, and summed from there
constexpr uint32_t kHtMxfp8Sms = 96;  // of an expert-major combine that quantises what it sends
constexpr uint32_t kHtFlatSms = 24;   // of dispatch, and of combine; docs/performance.md has the curves
// Expert-major with more than kFewRanks ranks, where a row has fewer copies and rings of more blocks take more memory;
// and where more blocks make the rings of all operations shorter.
constexpr uint32_t kHtSmsOfManyRanks = 32;
constexpr uint32_t kFewRanks = 8;
constexpr uint32_t kHtUpdateSms = 64;
// In the host's memory a few SMs fill PCIe, and reads of one line, such as what ranks wait for, appear to take turns: 8
// to 32 SMs differ by 8 %, and with 64 an operation takes five times as long (docs/performance.md).
constexpr uint32_t kHtHostSms = 16;
constexpr uint32_t kMostHtHostSms = 32;
constexpr uint32_t kHtHostUpdateSms = 8;

// So that products of these numbers fit into 64 bits. Far larger than any model needs.
constexpr uint32_t kMostExperts = 1u << 20;
constexpr uint32_t kMostTokenBytes = 1u << 30;

// The first that is set: the operation's variable, NCCL_EP_COMM_SMS, the operation's field, max_num_sms, the mode's
// default.
uint32_t resolve_sms(const std::optional<uint32_t>& operation_variable, const std::optional<uint32_t>& variable,
                     uint32_t field, uint32_t max_num_sms, uint32_t mode_sms, uint32_t device_sms) {
    const uint32_t wanted = operation_variable.value_or(variable.value_or(field != 0 ? field : max_num_sms));
    return std::min(wanted == 0 ? mode_sms : wanted, device_sms);
}

void expect_sms(const char* field, uint32_t value, uint32_t device_sms) {
    require(value <= device_sms, ncclInvalidUsage, "config->{} is {}, the device has {} SMs", field, value, device_sms);
}

std::string divisors_of(uint32_t number) {
    std::string list;
    for (uint32_t divisor = 1; divisor <= number; ++divisor) {
        if (number % divisor == 0) list += fmt::format("{}{}", list.empty() ? "" : ", ", divisor);
    }
    return list;
}

}  // namespace

uint64_t resolve_timeout_ns(const Environment& environment, uint64_t given_ns) {
    const uint64_t wanted = environment.timeout_ns.value_or(given_ns != 0 ? given_ns : kDefaultTimeoutNs);
    return std::min(wanted, kLongestTimeoutNs);
}

uint32_t resolve_lsa_team_size(const Communicator& communicator, const Environment& environment, int option,
                               const char* option_name) {
    require(option >= 0, ncclInvalidArgument, "{} is {}, allowed: 0 (the communicator's) or more", option_name, option);
    const uint32_t largest = static_cast<uint32_t>(communicator.lsa_team_size());
    const uint32_t wanted = environment.lsa_team_size.value_or(static_cast<uint32_t>(option));
    if (wanted == 0) return largest;
    require(
        wanted <= largest && largest % wanted == 0, ncclInvalidArgument,
        "{} is {}, allowed: {}, the divisors of the {} ranks in each of the communicator's LSA teams ({} ranks in all)",
        environment.lsa_team_size ? "CROSSDOCK_LSA_TEAM_SIZE" : option_name, wanted, divisors_of(largest), largest,
        communicator.num_ranks());
    require(wanted == largest || !communicator.shares_host_memory(), ncclInvalidUsage,
            "{} is {}, and the {} ranks share the host's memory as one LSA team: for smaller teams, which need NCCL's "
            "network for kernels, set CROSSDOCK_HOST_MEMORY=0 on all ranks",
            option_name, wanted, largest);
    return wanted;
}

GroupConfig GroupConfig::resolve(Communicator& communicator, const ncclEpGroupConfig_t* caller,
                                 const crossdockGroupOptions_t* caller_options, const Environment& environment) {
    require(caller != nullptr, ncclInvalidArgument, "config is NULL");
    const auto given = copy_struct<ncclEpGroupConfig_t>(caller, NCCL_EP_GROUP_CONFIG_V1_SIZE, "config");
    const auto options = optional_struct(caller_options, kOptionsV1Bytes, "options");
    const unsigned int algorithm = enum_bits(given.algorithm);
    const uint32_t num_ranks = static_cast<uint32_t>(communicator.num_ranks());
    const bool is_ht = algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT;

    // What the device lacks comes first, as in core/device_support.h.
    const uint32_t device_sms = static_cast<uint32_t>(communicator.runtime().num_sms());
    if (communicator.backend().blocks == 0) {  // blocks run on SMs
        expect_sms("max_num_sms", given.max_num_sms, device_sms);
        expect_sms("dispatch_num_sms", given.dispatch_num_sms, device_sms);
        expect_sms("combine_num_sms", given.combine_num_sms, device_sms);
    }
    require(algorithm <= NCCL_EP_ALGO_HIGH_THROUGHPUT, ncclInvalidArgument,
            "config->algorithm is {}, allowed: 0 (low latency), 1 (high throughput)", algorithm);
    require(options.ht_masks == 0 || options.ht_masks == 1, ncclInvalidArgument,
            "options->ht_masks is {}, allowed: 0 (off), 1 (on)", options.ht_masks);
    require(options.invariant == 0 || options.invariant == 1, ncclInvalidArgument,
            "options->invariant is {}, allowed: 0 (off), 1 (on)", options.invariant);
    require(options.ht_masks == 0 || is_ht, ncclInvalidUsage,
            "options->ht_masks is 1, allowed for algorithm 1 (high throughput): set config->enable_mask");
    require(given.num_experts > 0 && given.num_experts % num_ranks == 0, ncclInvalidArgument,
            "config->num_experts is {}, allowed: positive multiples of the {} ranks", given.num_experts, num_ranks);
    require(given.num_experts <= kMostExperts, ncclInvalidArgument, "config->num_experts is {}, allowed: at most {}",
            given.num_experts, kMostExperts);
    // Kernels find an expert's rank by a product whose upper bits must fit.
    const uint32_t experts_per_rank = given.num_experts / num_ranks;
    constexpr uint64_t kMaxProduct = (uint64_t{1} << kRankOfExpertShift) - 1;
    require(is_ht || uint64_t{given.num_experts} * experts_per_rank <= kMaxProduct, ncclInvalidArgument,
            "config->num_experts is {}, allowed in LL mode: at most {} with {} experts per rank", given.num_experts,
            kMaxProduct / experts_per_rank, experts_per_rank);
    require(given.max_dispatch_tokens_per_rank > 0, ncclInvalidArgument,
            "config->max_dispatch_tokens_per_rank is 0, allowed: 1 and more");
    require(given.max_token_bytes > 0, ncclInvalidArgument, "config->max_token_bytes is 0, allowed: 1 and more");
    require(given.max_token_bytes <= kMostTokenBytes, ncclInvalidArgument,
            "config->max_token_bytes is {}, allowed: at most {}", given.max_token_bytes, kMostTokenBytes);
    require(!is_ht || given.max_token_bytes % 16 == 0, ncclInvalidArgument,
            "config->max_token_bytes is {}, allowed in HT mode: multiples of 16", given.max_token_bytes);
    require(!is_ht || given.max_recv_tokens_per_rank == 0 ||
                given.max_recv_tokens_per_rank >= given.max_dispatch_tokens_per_rank,
            ncclInvalidArgument,
            "config->max_recv_tokens_per_rank is {}, allowed in HT mode: 0 (eager) or at least "
            "max_dispatch_tokens_per_rank ({})",
            given.max_recv_tokens_per_rank, given.max_dispatch_tokens_per_rank);
    require(!is_ht || given.max_recv_tokens_per_rank != 0 || given.version != 1, ncclInvalidArgument,
            "config->max_recv_tokens_per_rank is 0 (eager), allowed for callers of API version 1: at least "
            "max_dispatch_tokens_per_rank ({})",
            given.max_dispatch_tokens_per_rank);
    require(given.num_topk <= given.num_experts, ncclInvalidArgument,
            "config->num_topk is {}, allowed: at most num_experts ({})", given.num_topk, given.num_experts);
    const unsigned int zero_copy = enum_bits(given.zero_copy);
    const unsigned int overflow = enum_bits(given.overflow_policy);
    require(zero_copy <= NCCL_EP_ZERO_COPY_ON, ncclInvalidArgument,
            "config->zero_copy is {}, allowed: 0 (auto), 1 (off), 2 (on)", zero_copy);
    require(overflow <= NCCL_EP_OVERFLOW_DROP, ncclInvalidArgument,
            "config->overflow_policy is {}, allowed: 0 (auto), 1 (trap), 2 (drop)", overflow);
    require((given.alloc.alloc_fn == nullptr) == (given.alloc.free_fn == nullptr), ncclInvalidUsage,
            "config->alloc has only {}: set both hooks or none",
            given.alloc.alloc_fn == nullptr ? "free_fn" : "alloc_fn");
    require(!(is_ht && overflow == NCCL_EP_OVERFLOW_DROP && given.max_recv_tokens_per_rank == 0), ncclInvalidUsage,
            "config->overflow_policy drop needs a budget: set max_recv_tokens_per_rank");
    require(!(environment.has_local_dup && environment.has_nvlink_dup), ncclInvalidUsage,
            "NCCL_EP_HT_EM_LOCAL_DUP and NCCL_EP_HT_EM_NVLINK_DUP are both on: they exclude each other");
    // Row numbers are 32-bit; the number of tokens, and that of a packet in its ring, of which a token has one at most,
    // are payloads.
    const uint64_t most_ht_tokens = std::min<uint64_t>(INT32_MAX / num_ranks, kMaxPayload);
    require(!is_ht || given.max_dispatch_tokens_per_rank <= most_ht_tokens, ncclInvalidArgument,
            "config->max_dispatch_tokens_per_rank is {}, allowed: at most {} with {} ranks",
            given.max_dispatch_tokens_per_rank, most_ht_tokens, num_ranks);
    const uint64_t eager_rows = uint64_t{given.max_dispatch_tokens_per_rank} * num_ranks * std::max(1u, given.num_topk);
    require(!is_ht || given.max_recv_tokens_per_rank != 0 || eager_rows <= INT32_MAX, ncclInvalidUsage,
            "config->max_recv_tokens_per_rank is 0 (eager): {} rows may come, allowed: at most {}", eager_rows,
            INT32_MAX);
    // Row numbers of one operation are 32-bit, a source's counts travel in 24 bits. Token numbers have more bits.
    static_assert(kMaxPayload / kMaxTopk <= kMaxTokensOfRank && kMaxPayload <= kMaxChoicesOfRank);
    const uint64_t slots = uint64_t{given.max_dispatch_tokens_per_rank} * num_ranks;
    require(is_ht || (slots <= INT32_MAX && uint64_t{given.max_dispatch_tokens_per_rank} * kMaxTopk <= kMaxPayload),
            ncclInvalidArgument,
            "config->max_dispatch_tokens_per_rank is {}, allowed in LL mode: at most {} with {} ranks",
            given.max_dispatch_tokens_per_rank, std::min<uint64_t>(INT32_MAX / num_ranks, kMaxPayload / kMaxTopk),
            num_ranks);

    const uint64_t timeout_ns = resolve_timeout_ns(environment, given.timeout_ns);
    communicator.connect("ncclEpCreateGroup", communicator.setup_timeout_ns(timeout_ns));
    const uint32_t lsa_team_size =
        resolve_lsa_team_size(communicator, environment, options.lsa_team_size, "options->lsa_team_size");
    require(options.ht_masks == 0 || lsa_team_size == num_ranks, ncclInvalidUsage,
            "options->ht_masks is 1, allowed where all ranks are in one LSA team: there are {} ranks in "
            "teams of {}",
            num_ranks, lsa_team_size);

    GroupConfig config;
    config.algorithm = static_cast<ncclEpAlgorithm_t>(algorithm);
    config.api_version = given.version;
    config.num_ranks = num_ranks;
    config.lsa_team_size = lsa_team_size;
    config.num_experts = given.num_experts;
    config.max_tokens = given.max_dispatch_tokens_per_rank;
    config.max_recv_tokens = given.max_recv_tokens_per_rank;
    config.max_token_bytes = given.max_token_bytes;
    config.rdma_buffer_size = given.rdma_buffer_size;
    config.num_topk = given.num_topk;
    const bool in_host_memory = communicator.shares_host_memory();
    config.in_host_memory = in_host_memory;
    const uint32_t most_sms = is_ht && in_host_memory ? std::min(device_sms, kMostHtHostSms) : device_sms;
    const auto dispatch_sms = [&](uint32_t preset) {
        return resolve_sms(environment.dispatch_sms, environment.comm_sms, given.dispatch_num_sms, given.max_num_sms,
                           preset, most_sms);
    };
    const auto combine_sms = [&](uint32_t preset) {
        return resolve_sms(environment.combine_sms, environment.comm_sms, given.combine_num_sms, given.max_num_sms,
                           preset, most_sms);
    };
    const bool has_fixed_rings = options.ht_masks != 0 || lsa_team_size < num_ranks;
    const bool takes_many_sms = num_ranks <= kFewRanks && !has_fixed_rings;
    const uint32_t ht_sms = in_host_memory ? kHtHostSms : takes_many_sms ? kHtSms : kHtSmsOfManyRanks;
    const uint32_t flat_sms = in_host_memory ? kHtHostSms : kHtFlatSms;
    config.dispatch_sms = dispatch_sms(is_ht ? ht_sms : device_sms);
    config.combine_sms = combine_sms(is_ht ? ht_sms : device_sms);
    config.mxfp8_combine_sms = combine_sms(!in_host_memory && takes_many_sms ? kHtMxfp8Sms : ht_sms);
    config.flat_dispatch_sms = dispatch_sms(flat_sms);
    config.flat_combine_sms = combine_sms(flat_sms);
    config.most_dispatch_sms = dispatch_sms(device_sms);
    config.most_combine_sms = combine_sms(device_sms);
    config.update_sms = resolve_sms({}, environment.comm_sms, 0, given.max_num_sms,
                                    in_host_memory ? kHtHostUpdateSms : kHtUpdateSms, most_sms);
    config.alloc = given.alloc;
    // The contract ignores enable_mask in HT mode.
    config.masking = is_ht ? options.ht_masks != 0 : given.enable_mask != 0;
    config.timeout_ns = timeout_ns;
    config.zero_copy =
        communicator.shares_host_memory() ? NCCL_EP_ZERO_COPY_OFF : static_cast<ncclEpZeroCopyMode_t>(zero_copy);
    config.overflow_policy = static_cast<ncclEpOverflowPolicy_t>(overflow);
    config.invariant = options.invariant != 0 || environment.is_invariant;
    config.is_invariant_by_environment = environment.is_invariant;
    config.sums_at_sender = environment.sums_at_sender && !config.invariant;
    config.ll128 = environment.ll128;
    config.first_epoch = environment.first_epoch;
    return config;
}

std::vector<GroupConfig::Field> GroupConfig::fields() const {
    return {{"algorithm", static_cast<uint64_t>(algorithm)},
            {"lsa_team_size", lsa_team_size},
            {"num_experts", num_experts},
            {"max_dispatch_tokens_per_rank", max_tokens},
            {"max_recv_tokens_per_rank", max_recv_tokens},
            {"max_token_bytes", max_token_bytes},
            {"rdma_buffer_size", rdma_buffer_size},
            {"num_topk", num_topk},
            {algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT ? "ht_masks" : "enable_mask", masking ? 1u : 0u},
            {"overflow_policy", static_cast<uint64_t>(overflow_policy)},
            {"zero_copy", static_cast<uint64_t>(zero_copy)},
            {"invariant", invariant ? 1u : 0u},
            {"CROSSDOCK_SENDER_SUMS", sums_at_sender ? 1u : 0u},
            {"whether CROSSDOCK_LL128 is set", ll128.has_value() ? 1u : 0u},
            {"CROSSDOCK_LL128", ll128.value_or(false) ? 1u : 0u},
            {"CROSSDOCK_FIRST_EPOCH", first_epoch}};
}

void GroupConfig::expect_equal_on_all_ranks(Communicator& communicator, const std::vector<Field>& given,
                                            const char* what) const {
    std::vector<uint64_t> own;
    own.reserve(given.size());
    for (const Field& field : given) own.push_back(field.value);
    std::vector<uint64_t> all(num_ranks * own.size());
    communicator.all_gather(own.data(), all.data(), sizeof(uint64_t) * own.size(), what,
                            communicator.setup_timeout_ns(timeout_ns));
    for (uint32_t rank = 0; rank < num_ranks; ++rank) {
        const uint64_t* const values = &all[rank * own.size()];
        for (size_t i = 0; i < given.size(); ++i) {
            require(values[i] == all[i], ncclInvalidUsage, "{} differs between ranks: {} on rank 0, {} on rank {}",
                    given[i].name, all[i], values[i], rank);
        }
    }
}

void GroupConfig::expect_rows_to_sum(bool are_by_expert) const {
    require(
        !invariant || are_by_expert, ncclInvalidUsage,
        "the handle is not expert-major, so the caller has summed its rows: an invariant group combines expert-major "
        "rows{}",
        is_invariant_by_environment ? "; NCCL_EP_INVARIANT is set in the environment" : "");
}

}  // namespace crossdock
