// SPDX-License-Identifier: Apache-2.0
// The operations of all modes and what they wait for, with their names in messages.
#pragma once

#include "device/wait_records.h"

namespace crossdock {

enum class OperationKind : uint32_t {
    kNone,
    kDispatch,
    kCombine,
    kUpdate,
    kElasticDispatch,
    kElasticCombine,  // ranks compare the kinds up to here (Term::kOperation)
    kComplete,
    kMaskClean,
    kA2sgd
};

constexpr const char* name_of(OperationKind operation) {
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
        case OperationKind::kElasticDispatch:
            return "elastic dispatch";
        case OperationKind::kElasticCombine:
            return "elastic combine";
    }
    return "";
}

enum class WaitStep : uint32_t {
    kNone,
    kCredit,
    kEntry,
    kCounts,
    kRow,
    kWeights,  // LL
    kBarrier,
    kBuffer,       // LL
    kRouting,      // HT
    kFinished,     // HT
    kReport,       // another rank reported the loss of the peer
    kMeans,        // A2SGD
    kRefused,      // HT: another rank refused the peer's words
    kInterrupted,  // the program ended the wait
    kExperts,      // LL: the rows of a block that this rank's experts compute
};

constexpr const char* name_of(WaitStep step) {
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
        case WaitStep::kRefused:
            return "refused";
        case WaitStep::kInterrupted:
            return "interrupted";
        case WaitStep::kExperts:
            return "experts";
    }
    return "";
}

}  // namespace crossdock
