// SPDX-License-Identifier: Apache-2.0
#include "conformance/support/modes.h"

namespace crossdock::testing {
namespace {

constexpr Phase kPhases[] = {{Phase::kUpdate},
                             {Phase::kDispatch},
                             {Phase::kCombine},
                             {Phase::kDispatch, NCCL_EP_BWD_PASS},
                             {Phase::kCombine, NCCL_EP_BWD_PASS}};

const Phase& phase_of(const Layer& layer, int phase) {
    return phases_of(layer.problem().algorithm)[static_cast<size_t>(phase)];
}

}  // namespace

const char* Phase::name() const {
    return operation == kUpdate ? "update" : operation == kDispatch ? "dispatch" : "combine";
}

std::span<const Phase> phases_of(ncclEpAlgorithm_t mode) {
    const std::span<const Phase> phases(kPhases);
    return is_ht(mode) ? phases : phases.subspan(1, 2);
}

void prepare_phase(Layer& layer, int phase) {
    switch (phase_of(layer, phase).operation) {
        case Phase::kUpdate:
            return layer.prepare_update();
        case Phase::kDispatch:
            return layer.prepare_dispatch();
        case Phase::kCombine:
            return layer.prepare_combine();
    }
}

ncclResult_t run_phase(Layer& layer, int phase) {
    const auto [operation, direction] = phase_of(layer, phase);
    if (operation == Phase::kUpdate) return layer.update();
    return operation == Phase::kDispatch ? layer.dispatch(direction) : layer.combine(direction);
}

void check_phase(Layer& layer, int phase) {
    const auto [operation, direction] = phase_of(layer, phase);
    if (operation == Phase::kUpdate) return layer.check_update();
    operation == Phase::kDispatch ? layer.check_dispatch(direction) : layer.check_combine(direction);
}

}  // namespace crossdock::testing
