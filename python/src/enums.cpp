// SPDX-License-Identifier: Apache-2.0
#include "configs.h"

namespace nb = nanobind;

namespace crossdock::python {

void bind_enums(nb::module_& module) {
    nb::enum_<ncclEpAlgorithm_t>(module, "Algorithm", nb::is_arithmetic(), "What a group is tuned for.")
        .value("LOW_LATENCY", NCCL_EP_ALGO_LOW_LATENCY, "Few tokens: one kernel per operation, no routing exchange.")
        .value("HIGH_THROUGHPUT", NCCL_EP_ALGO_HIGH_THROUGHPUT,
               "Many tokens: update exchanges the routing, receive arrays are dense.");
    nb::enum_<ncclEpLayout_t>(module, "Layout", nb::is_arithmetic(), "How dispatched rows lie in the receive array.")
        .value("UNSET", NCCL_EP_LAYOUT_UNSET, "Not a layout.")
        .value("EXPERT_MAJOR", NCCL_EP_LAYOUT_EXPERT_MAJOR, "Low latency: [L, R*M, H]; high throughput: [N, H].")
        .value("RANK_MAJOR", NCCL_EP_LAYOUT_RANK_MAJOR, "[R, M, H], low latency only.")
        .value("FLAT", NCCL_EP_LAYOUT_FLAT, "[N, H], high throughput only.");
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
    nb::enum_<ncclEpDispQuant_t>(module, "DispatchQuantizationRecipe", nb::is_arithmetic(),
                                 "What dispatch does to rows and scales on the way.")
        .value("NONE", NCCL_EP_DISP_QUANT_NONE, "Rows travel as they are; no scales.")
        .value("FWD", NCCL_EP_DISP_QUANT_FWD, "Quantised rows and their scales travel unchanged.")
        .value("DS_FP8E3M4", NCCL_EP_DISP_QUANT_DS_FP8E3M4, "bf16 is quantised to e4m3, a scale for 128 elements.");
    nb::enum_<ncclEpCombQuant_t>(module, "CombineQuantizationRecipe", nb::is_arithmetic(),
                                 "What combine does to rows on the way.")
        .value("NONE", NCCL_EP_COMB_QUANT_NONE, "Rows travel as they are.")
        .value("NVFP4", NCCL_EP_COMB_QUANT_NVFP4, "bf16 rows travel as 4-bit floats with scales; low latency.")
        .value("MXFP8", NCCL_EP_COMB_QUANT_MXFP8,
               "bf16 rows travel as e4m3 with a power of two per 32 elements; high throughput, expert-major.");
    nb::enum_<crossdockSums_t>(module, "Sums", nb::is_arithmetic(), "How the low-latency expert-major combine sums.")
        .value("EXACT", CROSSDOCK_SUMS_EXACT, "Every row travels; fp32 in order of k, one rounding.")
        .value("SENDER", CROSSDOCK_SUMS_SENDER, "A rank sums a token's rows first: less traffic, one rounding more.");
}

}  // namespace crossdock::python
