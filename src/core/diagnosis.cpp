// SPDX-License-Identifier: Apache-2.0
#include "core/diagnosis.h"

#include <fmt/format.h>

#include <cstring>

#include "core/layouts.h"
#include "core/tensor.h"
#include "kernels/agreement.h"
#include "kernels/peer_numbers.h"
#include "kernels/wait_steps.h"

namespace crossdock {
namespace {

bool is_elastic(OperationKind operation) {
    return operation == OperationKind::kElasticDispatch || operation == OperationKind::kElasticCombine;
}

// The caller's name of an argument.
const char* name_of(Term term, OperationKind operation) {
    if (is_elastic(operation) && term == Term::kDirection) return "whether topk_weights travel";
    if (is_elastic(operation) && term == Term::kScaleUnits) return "the scales of a row";
    switch (term) {
        case Term::kOperation:
            return "the operation";
        case Term::kTopk:
            return "top_k";
        case Term::kRowUnits:
            return "the bytes of a row";
        case Term::kDtype:
            return "the datatype of the tokens";
        case Term::kLayout:
            return "the layout";
        case Term::kRecipe:
            return "the quantization recipe";
        case Term::kDirection:
            return "the direction";
        case Term::kScaleUnits:
            return "the bytes of a row's scales";
        case Term::kSums:
            return "who sums (crossdockHandleSetSums)";
        case Term::kRouting:
            return "the routing (the number of the update that made it)";  // of windows: PeerNumber::kWindows
        case Term::kSpare:
        case Term::kNumTerms:
            break;
    }
    return "";
}

// A folded value: the value itself, or "large" and its hash.
std::string unfolded(uint32_t bits, uint64_t folded, uint64_t unit) {
    if (!Terms::is_hash(bits, folded)) return fmt::format("{}", unit * folded);
    const uint64_t top = uint64_t{1} << (bits - 1);
    return fmt::format("{} or more (hash {})", unit * top, folded - top);
}

std::string value_of(Term term, uint64_t value, OperationKind operation) {
    const uint32_t bits = Terms::bits_of(static_cast<uint32_t>(term));
    if (is_elastic(operation) && term == Term::kDirection) return value == 0 ? "no" : "yes";
    if (is_elastic(operation) && term == Term::kScaleUnits) return unfolded(bits, value, 1);
    switch (term) {
        case Term::kOperation:
            return name_of(static_cast<OperationKind>(value));
        case Term::kRowUnits:
        case Term::kScaleUnits:
            return unfolded(bits, value, kRowUnitBytes);
        case Term::kRouting:
            return unfolded(bits, value, 1);
        case Term::kDtype:
            return dtype_name(static_cast<ncclDataType_t>(value));
        case Term::kLayout:
            return label_of(static_cast<ncclEpLayout_t>(value));
        case Term::kDirection:
            return value == 0 ? "forward" : "backward";
        case Term::kSums:
            return value == CROSSDOCK_SUMS_EXACT ? "exact" : "sender";
        case Term::kRecipe:
            return fmt::format("{}{}", value % kRoundedScales, value < kRoundedScales ? "" : " with rounded scales");
        case Term::kTopk:
        case Term::kSpare:
        case Term::kNumTerms:
            break;
    }
    return fmt::format("{}", value);
}

// Of what only hosts know; takes it out of the terms.
std::string difference_of_agreed(const PeerFault& fault, int rank, bool is_ht, Terms& ours, Terms& theirs) {
    const bool is_update = fault.operation == OperationKind::kUpdate;
    const auto take = [&](Terms& terms) {
        const HtAgreed agreed = is_ht ? terms.agreed(is_update) : HtAgreed{terms.tag(), 0};
        terms = is_ht ? terms.without_agreed(is_update) : terms.with_tag(0);
        return agreed;
    };
    const HtAgreed own = take(ours), other = take(theirs);
    std::string differences;
    const auto compare = [&](const char* name, uint64_t mine, uint64_t peers) {
        if (mine == peers) return;
        differences += fmt::format("{}{} is {} on rank {}, {} on rank {}", differences.empty() ? "" : "; ", name, mine,
                                   rank, peers, fault.peer);
    };
    compare("the tag (crossdockHandleSetTag)", own.tag, other.tag);
    compare("the number of SMs (crossdockHandleSetSms)", own.sms, other.sms);
    return differences;
}

// What a rank announced: "announced 70000 rows".
const char* name_of(PeerNumber number) {
    switch (number) {
        case PeerNumber::kNone:
            return "";
        case PeerNumber::kRows:
            return "rows";
        case PeerNumber::kChoices:
            return "choices";
        case PeerNumber::kToken:
            return "as a token's index";
        case PeerNumber::kTarget:
            return "as a rank's index among its token's ranks";
        case PeerNumber::kExpert:
            return "as an expert's id";
        case PeerNumber::kTokens:
            return "tokens";
        case PeerNumber::kBase:
            return "as the index of its first row";
        case PeerNumber::kMask:
            return "as the mask of a chunk's tokens";
        case PeerNumber::kExpertsOfToken:
            return "experts for one token";
        case PeerNumber::kWindowOffset:
            return "as its tensor's win_offset";
        case PeerNumber::kWindows:
            return "as the windows and offsets of its tensors";
        case PeerNumber::kEndInWindow:
            return "rows from the beginning of its tensor to the last one that is sent to it";
        case PeerNumber::kCell:
            return "as the cell of a returned row";
    }
    return "";
}

}  // namespace

std::string describe(PeerFault fault, int rank, const char* mode) {
    // LL ranks may find in a later operation, of perhaps another handle, that they have differed in an earlier one.
    const auto compared = static_cast<OperationKind>(Terms{fault.expected}.get(Term::kOperation));
    if (fault.kind == PeerFaultKind::kDisagrees && std::strcmp(mode, "LL") == 0 && fault.operation != compared) {
        fault.operation = compared;
        fault.handle = 0;
    }
    const std::string of_handle = fault.handle == 0 ? "" : fmt::format(", handle {}", fault.handle);
    const std::string where =
        fmt::format("{} {} (operation {}{})", mode, name_of(fault.operation), fault.epoch, of_handle);
    if (fault.kind == PeerFaultKind::kOutOfRange && fault.number == PeerNumber::kMask) {
        return fmt::format("the group has failed: rank {} announced {:#x} {} to rank {}, allowed: bits of {:#x}; in {}",
                           fault.peer, fault.seen, name_of(fault.number), rank, fault.expected, where);
    }
    if (fault.kind == PeerFaultKind::kOutOfRange) {
        return fmt::format("the group has failed: rank {} announced {} {} to rank {}, allowed: at most {}; in {}",
                           fault.peer, fault.seen, name_of(fault.number), rank, fault.expected, where);
    }
    if (fault.number == PeerNumber::kWindowOffset) {
        return fmt::format(
            "the group has failed: win_offset of the tensor of rows is {} on rank {}, {} on rank {}, expected the same "
            "where both are window-backed; in {}",
            unfolded(static_cast<uint32_t>(kPayloadBits), fault.expected, kWindowUnits), rank,
            unfolded(static_cast<uint32_t>(kPayloadBits), fault.seen, kWindowUnits), fault.peer, where);
    }
    if (fault.number == PeerNumber::kWindows) {
        return fmt::format(
            "the group has failed: outputs->tokens or outputs->scales has another window or win_offset on rank {} than "
            "on rank {} (hashes {:#x} and {:#x}), expected the same where both are window-backed; in {}",
            fault.peer, rank, fault.seen, fault.expected, where);
    }
    Terms own{fault.expected}, other{fault.seen};
    std::string differences;
    const bool is_ht = std::strcmp(mode, "HT") == 0;
    if ((is_ht || is_elastic(fault.operation)) && own.get(Term::kOperation) == other.get(Term::kOperation))
        differences = difference_of_agreed(fault, rank, is_ht, own, other);
    for (uint32_t i = 0; i < static_cast<uint32_t>(Term::kNumTerms); ++i) {
        const Term term = static_cast<Term>(i);
        const uint64_t ours = own.get(term);
        const uint64_t theirs = other.get(term);
        if (ours == theirs) continue;
        differences += fmt::format("{}{} is {} on rank {}, {} on rank {}", differences.empty() ? "" : "; ",
                                   name_of(term, fault.operation), value_of(term, ours, fault.operation), rank,
                                   value_of(term, theirs, fault.operation), fault.peer);
        if (term == Term::kOperation) break;  // other terms have no common meaning
    }
    return fmt::format("the group has failed: {}; all ranks must pass the same to {}", differences, where);
}

std::string differences_of_groups(const RankInGroup& ours, const RankInGroup& theirs) {
    std::string text;
    const auto compare = [&](const char* name, const std::string& own, const std::string& other) {
        if (own == other) return;
        text += fmt::format("{} {} is {} on rank {}, {} on rank {}", text.empty() ? ":" : ";", name, own, ours.rank,
                            other, theirs.rank);
    };
    const std::vector<GroupConfig::Field> own = ours.config.fields(), other = theirs.config.fields();
    for (size_t i = 0; i < own.size(); ++i) {
        if (std::strcmp(own[i].name, other[i].name) == 0)
            compare(own[i].name, std::to_string(own[i].value), std::to_string(other[i].value));
    }
    if (ours.handle == nullptr || theirs.handle == nullptr) return text;
    for (const Term term : {Term::kLayout, Term::kTopk})
        compare(name_of(term, OperationKind::kNone), value_of(term, ours.handle->get(term), OperationKind::kNone),
                value_of(term, theirs.handle->get(term), OperationKind::kNone));
    return text;
}

void read_diagnosis(const ExpiredWait& record, int rank, crossdockDiagnosis_t& diagnosis) {
    if (__atomic_load_n(&record.complete, __ATOMIC_ACQUIRE) == 0) return;
    diagnosis.valid = 1;
    diagnosis.rank = rank;
    diagnosis.peer = static_cast<int>(record.peer);
    diagnosis.operation = name_of(record.operation);
    diagnosis.step = name_of(record.step);
    diagnosis.handle = record.handle;
    diagnosis.epoch = record.epoch;
    diagnosis.expected = record.expected;
    diagnosis.seen = record.seen;
    diagnosis.elapsed_us = record.elapsed_ns / 1000;
}

bool is_interruption(const crossdockDiagnosis_t& diagnosis) {
    return diagnosis.valid != 0 && std::strcmp(diagnosis.step, name_of(WaitStep::kInterrupted)) == 0;
}

bool is_report(const crossdockDiagnosis_t& diagnosis) {
    return diagnosis.valid != 0 && std::strcmp(diagnosis.step, name_of(WaitStep::kReport)) == 0;
}

std::string describe(const crossdockDiagnosis_t& diagnosis, const char* mode) {
    if (diagnosis.valid == 0) return "the group has failed: a wait for another rank expired";
    if (std::strcmp(diagnosis.step, name_of(WaitStep::kBuffer)) == 0) {
        return fmt::format(
            "the group has failed: operation {} of rank {} ({} {} of handle {}) found every buffer held by a pending "
            "send_only operation: call ncclEpComplete first",
            diagnosis.epoch, diagnosis.rank, mode, diagnosis.operation, diagnosis.handle);
    }
    // Another rank found it and reported it; the lost rank may be this one.
    const bool is_refused = std::strcmp(diagnosis.step, name_of(WaitStep::kRefused)) == 0;
    if (is_refused || is_report(diagnosis)) {
        const bool means_us = diagnosis.seen == static_cast<uint64_t>(diagnosis.peer);
        return fmt::format(
            "the group has failed: rank {} stopped: rank {} reported that it {} rank {} in {} {} "
            "(operation {}, handle {})",
            diagnosis.rank, diagnosis.seen, is_refused ? "refused what was announced by" : "timed out waiting for",
            means_us ? diagnosis.rank : diagnosis.peer, mode, diagnosis.operation, diagnosis.epoch, diagnosis.handle);
    }
    if (is_interruption(diagnosis)) {
        return fmt::format(
            "the group has failed: rank {} was interrupted after {} ms waiting for rank {} in {} {} (operation {}, "
            "handle {})",
            diagnosis.rank, static_cast<double>(diagnosis.elapsed_us) / 1000, diagnosis.peer, mode, diagnosis.operation,
            diagnosis.epoch, diagnosis.handle);
    }
    if (std::strcmp(diagnosis.step, name_of(WaitStep::kExperts)) == 0) {
        const auto upper = [](uint64_t word) { return word >> 32; };
        const auto lower = [](uint64_t word) { return word & UINT32_MAX; };
        return fmt::format(
            "the group has failed: rank {} timed out after {} ms waiting for its own experts in {} {} (operation {}, "
            "handle {}): block {} of expert {} (rank-major: of source rank) has counter {}, expected {} or more "
            "(crossdockHandleSetOverlap)",
            diagnosis.rank, static_cast<double>(diagnosis.elapsed_us) / 1000, mode, diagnosis.operation,
            diagnosis.epoch, diagnosis.handle, upper(diagnosis.seen), upper(diagnosis.expected), lower(diagnosis.seen),
            lower(diagnosis.expected));
    }
    return fmt::format(
        "the group has failed: rank {} timed out after {} ms waiting for rank {} in {} {} (operation {}, handle {}, "
        "step {}: expected {}, saw {})",
        diagnosis.rank, static_cast<double>(diagnosis.elapsed_us) / 1000, diagnosis.peer, mode, diagnosis.operation,
        diagnosis.epoch, diagnosis.handle, diagnosis.step, diagnosis.expected, diagnosis.seen);
}

}  // namespace crossdock
