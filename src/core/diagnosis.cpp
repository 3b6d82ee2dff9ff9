// SPDX-License-Identifier: Apache-2.0
#include "core/diagnosis.h"

#include <fmt/format.h>

#include <cstring>

namespace crossdock {
namespace {

const char* name_of(OperationKind operation) {
    switch (operation) {
        case OperationKind::kNone:
            return "";
        case OperationKind::kDispatch:
            return "dispatch";
        case OperationKind::kCombine:
            return "combine";
        case OperationKind::kComplete:
            return "complete";
        case OperationKind::kMaskClean:
            return "mask clean";
        case OperationKind::kUpdate:
            return "update";
        case OperationKind::kA2sgd:
            return "a2sgd";
    }
    return "";
}

const char* name_of(WaitStep step) {
    switch (step) {
        case WaitStep::kNone:
            return "";
        case WaitStep::kCredit:
            return "credit";
        case WaitStep::kEntry:
            return "entry";
        case WaitStep::kCounts:
            return "counts";
        case WaitStep::kRow:
            return "row";
        case WaitStep::kWeights:
            return "weights";
        case WaitStep::kBarrier:
            return "barrier";
        case WaitStep::kBuffer:
            return "buffer";
        case WaitStep::kRouting:
            return "routing";
        case WaitStep::kFinished:
            return "finished";
        case WaitStep::kReport:
            return "report";
        case WaitStep::kMeans:
            return "means";
    }
    return "";
}

}  // namespace

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

std::string describe(const crossdockDiagnosis_t& diagnosis) {
    if (diagnosis.valid == 0) return "the group has failed: a wait for another rank expired";
    if (std::strcmp(diagnosis.step, "buffer") == 0) {
        return fmt::format(
            "the group has failed: operation {} of rank {} ({} of handle {}) found every buffer held by a pending "
            "send_only operation",
            diagnosis.epoch, diagnosis.rank, diagnosis.operation, diagnosis.handle);
    }
    if (std::strcmp(diagnosis.step, "report") == 0 && diagnosis.seen == static_cast<uint64_t>(diagnosis.peer)) {
        return fmt::format(
            "the group has failed: rank {} waited in vain for rank {}, which was told in {} (operation {}, handle {})",
            diagnosis.seen, diagnosis.rank, diagnosis.operation, diagnosis.epoch, diagnosis.handle);
    }
    if (std::strcmp(diagnosis.step, "report") == 0) {
        return fmt::format(
            "the group has failed: rank {} waited in vain for rank {}, of which rank {} was told in {} (operation {}, "
            "handle {})",
            diagnosis.seen, diagnosis.peer, diagnosis.rank, diagnosis.operation, diagnosis.epoch, diagnosis.handle);
    }
    return fmt::format(
        "the group has failed: rank {} waited {} us for rank {} in {} (operation {}, handle {}, step {}: expected {}, "
        "saw {})",
        diagnosis.rank, diagnosis.elapsed_us, diagnosis.peer, diagnosis.operation, diagnosis.epoch, diagnosis.handle,
        diagnosis.step, diagnosis.expected, diagnosis.seen);
}

}  // namespace crossdock
