// SPDX-License-Identifier: Apache-2.0
// The layouts: what each is called, and which mode has it. Plain data on top of the public header: the library,
// Python's enum, the benchmark's options, the tests and the fuzzer read this table.
#pragma once

#include "nccl_ep.h"

namespace crossdock {

struct Layout {
    ncclEpLayout_t value;
    const char* name;     // behind NCCL_EP_LAYOUT_, and in Python
    const char* label;    // in messages
    const char* option;   // of command lines
    const char* meaning;  // in Python's help
    bool in_ll = false;
    bool in_ht = false;

    constexpr bool is_in(ncclEpAlgorithm_t mode) const { return mode == NCCL_EP_ALGO_LOW_LATENCY ? in_ll : in_ht; }
};

inline constexpr Layout kLayouts[] = {
    {.value = NCCL_EP_LAYOUT_UNSET, .name = "UNSET", .label = "unset", .option = "", .meaning = "Not a layout."},
    {.value = NCCL_EP_LAYOUT_EXPERT_MAJOR,
     .name = "EXPERT_MAJOR",
     .label = "expert-major",
     .option = "em",
     .meaning = "Low latency: [L, R*M, H]; high throughput: [N, H].",
     .in_ll = true,
     .in_ht = true},
    {.value = NCCL_EP_LAYOUT_RANK_MAJOR,
     .name = "RANK_MAJOR",
     .label = "rank-major",
     .option = "rm",
     .meaning = "[R, M, H], low latency only.",
     .in_ll = true},
    {.value = NCCL_EP_LAYOUT_FLAT,
     .name = "FLAT",
     .label = "flat",
     .option = "flat",
     .meaning = "[N, H], high throughput only.",
     .in_ht = true},
};

constexpr const char* label_of(ncclEpLayout_t value) {
    for (const Layout& layout : kLayouts) {
        if (layout.value == value) return layout.label;
    }
    return "another";
}

}  // namespace crossdock
