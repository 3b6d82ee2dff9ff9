// SPDX-License-Identifier: Apache-2.0
#include "conformance/support/layer_options.h"

namespace crossdock::testing {

LayerOptions random_options(uint64_t seed, ncclEpAlgorithm_t algorithm, WindowArena* arena) {
    Random random(seed ^ 0x5EED);
    LayerOptions options;
    options.create_in_one_call = random.chance(30);
    if (algorithm == kLowLatency) {
        options.own_handle_memory = random.chance(30);
        options.in_place = random.chance(30);
        options.ask_counters = random.chance(70);
        options.ask_offsets = options.ask_total = random.chance(40);
        options.counter_type = random.pick({ncclInt32, ncclInt64});
        options.null_configs = random.chance(50);
        Random overlap(seed ^ 0x0E5);
        options.overlap_rows = static_cast<uint32_t>(overlap.chance(40) ? overlap.pick({1, 2, 3, 64}) : 0);
        options.sms_seed = overlap.chance(30) ? seed | 1 : 0;
        return options;
    }
    options.own_handle_memory = !options.create_in_one_call && random.chance(40);
    options.in_place = random.chance(30);
    options.null_configs = random.chance(50);
    options.ask_counters = random.chance(70);
    options.ask_offsets = random.chance(70);
    options.ask_total = random.chance(70);
    options.counter_type = random.pick({ncclInt32, ncclInt64});
    options.dispatch_counters = random.chance(30);
    options.extra_rows = static_cast<size_t>(random.pick({0, 0, 0, 1, 7}));
    options.extra_metadata_rows = static_cast<size_t>(random.pick({0, 0, 0, 1, 7}));
    options.exact_combine_rows = random.chance(40);
    options.sms_seed = Random(seed ^ 0x535).chance(60) ? seed | 1 : 0;
    Random overlap(seed ^ 0x0E5);
    options.overlap_rows = static_cast<uint32_t>(overlap.chance(40) ? overlap.pick({1, 2, 3, 64}) : 0);
    if (arena == nullptr) return options;
    options.arena = arena;
    options.naming = random.pick({Naming::kWindowOnly, Naming::kWindowAndData});
    const bool outputs = random.chance(70), combine_input = random.chance(70), others = random.chance(30);
    const bool inputs = random.chance(60);
    options.windows = (outputs ? kOutputs : 0) | (combine_input ? kCombineInput : 0) | (inputs ? kInputs : 0) |
                      (others ? kOtherTensors : 0);
    return options;
}

}  // namespace crossdock::testing
