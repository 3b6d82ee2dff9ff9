// SPDX-License-Identifier: Apache-2.0
// The ways in which a caller may do the same thing with a handle.
#pragma once

#include <optional>

#include "conformance/support/random_problem.h"
#include "conformance/support/tensors.h"

namespace crossdock::testing {

// Tensors of a layer that may lie in windows.
constexpr unsigned kOutputs = 1;       // dispatch's tokens and scales
constexpr unsigned kCombineInput = 2;  // its tokens
constexpr unsigned kInputs = 4;        // dispatch's tokens and scales
constexpr unsigned kOtherTensors = 8;

struct LayerOptions {
    WindowArena* arena = nullptr;  // where windows are cut from; without it, tensors have memory of their own
    Naming naming = Naming::kWindowOnly;
    unsigned windows = kOutputs | kCombineInput | kInputs | kOtherTensors;  // what lies in the arena

    bool create_in_one_call = false;  // ncclEpCreateHandle
    bool open_topk = false;           // ncclEpInitHandle without K
    bool own_handle_memory = false;   // the caller's, for ncclEpInitHandle
    Buffer* handle_memory = nullptr;  // the memory to make the handle over
    bool without_update = false;      // the handle is made without one: that memory is routed, or an update follows

    bool odd_scales = false;  // scales begin at no multiple of more than their element
    bool in_place = false;    // combine reads the tensor that dispatch filled, where its type and width allow

    bool version_1_structs = false;  // config and layout structs end where version 1's did
    bool cut_structs = false;        // the same structs end within the field that comes behind, which holds rubbish

    // The numbers of the routing that are asked for: from update in high throughput, from dispatch in low latency,
    // where the expert-major layout always has counters.
    bool ask_counters = true;
    std::optional<bool> ask_offsets, ask_total;  // unset: in high throughput
    ncclDataType_t counter_type = ncclInt32;     // counters of low latency and FLAT are always int32
    bool dispatch_counters = false;              // high throughput: dispatch is asked, too (expert-major)
    bool null_configs = false;  // NULL for configs that hold defaults only, and where no numbers are asked for

    // High throughput.
    size_t extra_rows = 0;  // rows of the receive tensors past those that must be there
    size_t extra_metadata_rows = 0;
    bool exact_rows = false;          // receive tensors have just the rows that arrive (version 1 callers)
    bool exact_combine_rows = false;  // combine's input has just the rows that were received

    uint64_t sms_seed = 0;  // each operation is limited to a number of SMs that this chooses; 0: to none
    // Rows of the blocks that dispatch publishes (not of the flat layout) and, in low latency, combine waits for. 0:
    // off.
    uint32_t overlap_rows = 0;

    // Nobody meets before calls, since some may not come. A low-latency handle that dead ranks keep from being made
    // ends the program, without a failure.
    bool peers_may_die = false;
    // What an earlier dispatch left in unused rows stays there and is not looked at; high throughput's inputs survive.
    bool keep_outputs = false;
};

// Ways to state the calls. arena: where windows come from, if there are any (high throughput).
LayerOptions random_options(uint64_t seed, ncclEpAlgorithm_t algorithm, WindowArena* arena = nullptr);

}  // namespace crossdock::testing
