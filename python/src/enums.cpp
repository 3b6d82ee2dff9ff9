// SPDX-License-Identifier: Apache-2.0
#include "configs.h"
#include "core/layouts.h"
#include "core/recipes.h"

namespace nb = nanobind;

namespace crossdock::python {

namespace {

// The rows of a table of the library are the enum's members.
template <typename Row, size_t kNum>
void bind_table(nb::module_& module, const char* name, const Row (&table)[kNum], const char* meaning) {
    nb::enum_<decltype(Row::value)> bound(module, name, nb::is_arithmetic(), meaning);
    for (const Row& row : table) bound.value(row.name, row.value, row.meaning);
}

}  // namespace

void bind_enums(nb::module_& module) {
    nb::enum_<ncclEpAlgorithm_t>(module, "Algorithm", nb::is_arithmetic(), "What a group is tuned for.")
        .value("LOW_LATENCY", NCCL_EP_ALGO_LOW_LATENCY, "Few tokens: one kernel per operation, no routing exchange.")
        .value("HIGH_THROUGHPUT", NCCL_EP_ALGO_HIGH_THROUGHPUT,
               "Many tokens: update exchanges the routing, receive arrays are dense.");
    bind_table(module, "Layout", kLayouts, "How dispatched rows lie in the receive array.");
    nb::enum_<ncclEpPassDir_t>(module, "PassDir", nb::is_arithmetic(), "Direction of a training step.")
        .value("FWD", NCCL_EP_FWD_PASS)
        .value("BWD", NCCL_EP_BWD_PASS);
    nb::enum_<ncclEpOverflowPolicy_t>(module, "OverflowPolicy", nb::is_arithmetic(),
                                      "What happens when more rows arrive than max_recv_tokens_per_rank allows.")
        .value("AUTO", NCCL_EP_OVERFLOW_AUTO, "As TRAP; in low latency as DROP.")
        .value("TRAP", NCCL_EP_OVERFLOW_TRAP, "The group fails with an error that names total and room.")
        .value("DROP", NCCL_EP_OVERFLOW_DROP, "Rows without room are dropped.");
    nb::enum_<ncclEpZeroCopyMode_t>(module, "ZeroCopyMode", nb::is_arithmetic(), "Whether arrays lie in windows.")
        .value("AUTO", NCCL_EP_ZERO_COPY_AUTO)
        .value("OFF", NCCL_EP_ZERO_COPY_OFF)
        .value("ON", NCCL_EP_ZERO_COPY_ON);
    nb::enum_<ncclEpExpertIdKind_t>(module, "ExpertIdKind", nb::is_arithmetic(),
                                    "Numbering of the expert ids that a receiver gets.")
        .value("AUTO", NCCL_EP_EXPERT_ID_AUTO, "As LOCAL.")
        .value("LOCAL", NCCL_EP_EXPERT_ID_LOCAL, "0 .. L-1.")
        .value("GLOBAL", NCCL_EP_EXPERT_ID_GLOBAL, "0 .. E-1.");
    bind_table(module, "DispatchQuantizationRecipe", kDispatchRecipes,
               "What dispatch does to rows and scales on the way.");
    bind_table(module, "CombineQuantizationRecipe", kCombineRecipes, "What combine does to rows on the way.");
    nb::enum_<crossdockSums_t>(module, "Sums", nb::is_arithmetic(), "How the low-latency expert-major combine sums.")
        .value("EXACT", CROSSDOCK_SUMS_EXACT, "Every row travels; fp32 in order of k, one rounding.")
        .value("SENDER", CROSSDOCK_SUMS_SENDER, "A rank sums a token's rows first: less traffic, one rounding more.");
}

}  // namespace crossdock::python
