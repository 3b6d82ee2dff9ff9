// SPDX-License-Identifier: Apache-2.0
#include "conformance/support/modes.h"

namespace crossdock::testing {
namespace {

enum HtPhase { kUpdate, kDispatch, kCombine, kBackwardDispatch, kBackwardCombine };

ncclEpPassDir_t direction_of(int phase) { return phase < kBackwardDispatch ? NCCL_EP_FWD_PASS : NCCL_EP_BWD_PASS; }

bool is_dispatch(int phase) { return phase == kDispatch || phase == kBackwardDispatch; }

}  // namespace

void LowLatency::prepare(Layer& layer, int phase) { phase == 0 ? layer.prepare_dispatch() : layer.prepare_combine(); }

ncclResult_t LowLatency::run(Layer& layer, int phase) { return phase == 0 ? layer.dispatch() : layer.combine(); }

void LowLatency::check(Layer& layer, int phase) { phase == 0 ? layer.check_dispatch() : layer.check_combine(); }

void HighThroughput::prepare(Layer& layer, int phase) {
    if (phase == kUpdate) return layer.prepare_update();
    is_dispatch(phase) ? layer.prepare_dispatch() : layer.prepare_combine();
}

ncclResult_t HighThroughput::run(Layer& layer, int phase) {
    if (phase == kUpdate) return layer.update();
    return is_dispatch(phase) ? layer.dispatch(direction_of(phase)) : layer.combine(direction_of(phase));
}

void HighThroughput::check(Layer& layer, int phase) {
    if (phase == kUpdate) return layer.check_update();
    is_dispatch(phase) ? layer.check_dispatch(direction_of(phase)) : layer.check_combine(direction_of(phase));
}

}  // namespace crossdock::testing
