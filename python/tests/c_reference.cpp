// SPDX-License-Identifier: Apache-2.0
//
// The C suite's oracle (tests/reference) and its random problems for Python: rows as bytes, places as tuples.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "conformance/support/random_problem.h"
#include "reference/combine.h"
#include "reference/ht_combine.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace crossdock::reference;

namespace {

nb::bytes bytes_of(const std::vector<std::byte>& row) { return nb::bytes(row.data(), row.size()); }

Problem random_problem(uint64_t seed, int num_ranks) {
    crossdock::testing::ProblemLimits limits;
    limits.num_ranks = num_ranks;
    limits.most_row_bytes = 512;
    limits.most_receive_bytes = 128u << 10;
    limits.most_tokens = 12;
    limits.quantised_combines = false;
    Problem problem = crossdock::testing::random_problem(seed, limits);
    problem.asks_as_v1 = false;  // only callers of version 1 can
    problem.sums = CROSSDOCK_SUMS_EXACT;
    return problem;
}

// Unquantised, with room for every row.
Problem random_ht_problem(uint64_t seed, int num_ranks, bool is_flat, size_t alignment) {
    Problem problem = random_problem(seed, num_ranks);
    problem.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
    problem.recipe = NCCL_EP_DISP_QUANT_NONE;
    problem.token_type = problem.combine_type;
    problem.hidden = problem.combine_hidden;
    problem.num_scales = 0;
    problem.layout = is_flat ? NCCL_EP_LAYOUT_FLAT : NCCL_EP_LAYOUT_EXPERT_MAJOR;
    problem.alignment = is_flat ? 1 : alignment;
    problem.budget = std::max(problem.most_rows(), static_cast<size_t>(problem.max_tokens));
    return problem;
}

// (source, token, k) of each row, by block.
std::vector<std::vector<std::tuple<int, int, int>>> received(const Problem& problem, int rank) {
    std::vector<std::vector<std::tuple<int, int, int>>> blocks;
    for (const std::vector<RowSource>& rows : received_rows(problem, rank)) {
        blocks.emplace_back();
        for (const RowSource& row : rows) blocks.back().emplace_back(row.source, row.token, row.choice);
    }
    return blocks;
}

// (source, token, local expert) of each row; source -1: padding.
std::vector<std::tuple<int, int, int>> ht_received(const Problem& problem, int rank) {
    const HtRouting routing(problem);
    std::vector<std::tuple<int, int, int>> rows;
    for (const RowSource& row : routing.received(rank).rows) rows.emplace_back(row.source, row.token, row.choice);
    return rows;
}

}  // namespace

NB_MODULE(c_reference, module) {
    nb::class_<Problem>(module, "Problem")
        .def_ro("num_ranks", &Problem::num_ranks)
        .def_ro("num_experts", &Problem::num_experts)
        .def_ro("max_tokens", &Problem::max_tokens)
        .def_ro("num_topk", &Problem::num_topk)
        .def_ro("hidden", &Problem::hidden)
        .def_ro("num_scales", &Problem::num_scales)
        .def_ro("round_scales", &Problem::round_scales)
        .def_ro("combine_hidden", &Problem::combine_hidden)
        .def_prop_ro("layout", [](const Problem& problem) { return static_cast<int>(problem.layout); })
        .def_prop_ro("recipe", [](const Problem& problem) { return static_cast<int>(problem.recipe); })
        .def_prop_ro("id_kind", [](const Problem& problem) { return static_cast<int>(problem.id_kind); })
        .def_prop_ro("index_is_64_bit", [](const Problem& problem) { return problem.index_type == ncclInt64; })
        .def_prop_ro("token_type", [](const Problem& problem) { return static_cast<int>(problem.token_type); })
        .def_prop_ro("scale_type", [](const Problem& problem) { return static_cast<int>(problem.scale_type); })
        .def_prop_ro("received_type", [](const Problem& problem) { return static_cast<int>(problem.received_type()); })
        .def_prop_ro("combine_type", [](const Problem& problem) { return static_cast<int>(problem.combine_type); })
        .def_prop_ro("token_row_bytes", &Problem::token_row_bytes)
        .def_prop_ro("received_row_bytes", &Problem::received_row_bytes)
        .def_prop_ro("scale_row_bytes", &Problem::scale_row_bytes)
        .def_prop_ro("combine_row_bytes", &Problem::combine_row_bytes)
        .def_prop_ro("max_token_bytes", &Problem::max_token_bytes)
        .def_prop_ro("num_blocks", &Problem::num_blocks)
        .def_prop_ro("slots", &Problem::slots)
        .def("describe", &Problem::describe)
        .def("num_tokens", [](const Problem& problem, int rank) { return problem.ranks.at(rank).num_tokens; })
        .def("ids", [](const Problem& problem, int rank) { return problem.ranks.at(rank).ids; })
        .def("weights", [](const Problem& problem, int rank) { return problem.ranks.at(rank).weights; })
        .def("received", &received)
        .def("token_row", [](const Problem& p, int rank, int token) { return bytes_of(token_row(p, rank, token)); })
        .def("scale_row", [](const Problem& p, int rank, int token) { return bytes_of(scale_row(p, rank, token)); })
        .def("arrived_row",
             [](const Problem& p, int source, int token, int k) {
                 const ArrivedRow row = arrived_row(p, {source, token, k});
                 return nb::make_tuple(bytes_of(row.tokens), bytes_of(row.scales));
             })
        .def("metadata",
             [](const Problem& p, int target, int source, int token) {
                 const Metadata found = metadata_of(p, target, {source, token, 0});
                 return nb::make_tuple(nb::cast(found.ids), nb::cast(found.weights));
             })
        .def("expert_row",
             [](const Problem& p, int target, int source, int token, int k) {
                 return bytes_of(expert_row(p, target, RowSource{source, token, k}));
             })
        .def("combined_row",
             [](const Problem& p, int source, int token) { return bytes_of(combined_row(p, source, token)); })
        .def_ro("alignment", &Problem::alignment)
        .def_ro("budget", &Problem::budget)
        .def("ht_received", &ht_received)
        .def("ht_combined_rows", [](const Problem& p, int source) {
            const HtRouting routing(p);
            nb::list rows;
            for (int token = 0; token < p.ranks.at(source).num_tokens; ++token) {
                rows.append(bytes_of(combined_row(p, routing, source, token)));
            }
            return rows;
        });

    module.def("random_problem", &random_problem, "seed"_a, "num_ranks"_a);
    module.def("random_ht_problem", &random_ht_problem, "seed"_a, "num_ranks"_a, "is_flat"_a, "alignment"_a);
}
