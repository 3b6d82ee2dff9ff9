// SPDX-License-Identifier: Apache-2.0
#include "routing.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "api/routing.h"
#include "array.h"
#include "error.h"
#include "gil.h"
#include "stream.h"
#include "strided.h"
#include "torch_maker.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

bool ids_from(nb::handle tensor, Strided& ids) { return strided_from(tensor, ids) && ids.are_ids(); }

template <class Id>
int64_t largest_of(const Strided& ids) {
    int64_t largest = -1;
    for (int64_t token = 0; token < ids.shape[0]; ++token) {
        const Id* choices = static_cast<const Id*>(ids.data) + token * ids.strides[0];
        for (int64_t k = 0; k < ids.shape[1]; ++k) largest = std::max<int64_t>(largest, choices[k * ids.strides[1]]);
    }
    return largest;
}

int64_t largest_of(const Strided& ids) {
    if (ids.device >= 0) return -1;
    return ids.type == ncclInt64 ? largest_of<int64_t>(ids) : largest_of<int32_t>(ids);
}

nb::object largest_id(nb::handle tensor) {
    Strided ids;
    if (!ids_from(tensor, ids)) return nb::none();
    return nb::int_(largest_of(ids));
}

template <class Id>
int64_t most_of_one(const Strided& ids, int64_t num_experts) {
    std::vector<int64_t> counts(static_cast<size_t>(num_experts), 0);
    int64_t most = 0;
    for (int64_t token = 0; token < ids.shape[0]; ++token) {
        const Id* choices = static_cast<const Id*>(ids.data) + token * ids.strides[0];
        for (int64_t k = 0; k < ids.shape[1]; ++k) {
            const int64_t expert = choices[k * ids.strides[1]];
            if (expert >= 0 && expert < num_experts) most = std::max(most, ++counts[static_cast<size_t>(expert)]);
        }
    }
    return most;
}

}  // namespace

void expect_room_for_routing(nb::handle topk_idx, int64_t num_experts, int64_t max_tokens) {
    Strided ids;
    if (!ids_from(topk_idx, ids) || ids.device >= 0) return;
    if (const int64_t largest = largest_of(ids); largest >= num_experts) {
        invalid_argument("topk_idx has the value " + std::to_string(largest) + ", allowed: below num_experts (" +
                         std::to_string(num_experts) + ")");
    }
    // So few choices fit whatever they are.
    if (ids.shape[0] * ids.shape[1] <= max_tokens) return;
    const int64_t most =
        ids.type == ncclInt64 ? most_of_one<int64_t>(ids, num_experts) : most_of_one<int32_t>(ids, num_experts);
    if (most > max_tokens) {
        invalid_argument("topk_idx has an expert " + std::to_string(most) +
                         " times, since rows repeat it, allowed: at most num_max_dispatch_tokens_per_rank (" +
                         std::to_string(max_tokens) + ") times, for which recv_x has room");
    }
}

namespace {

nb::object host_bytes(const nb::args& tensors) {
    std::string bytes;
    for (nb::handle tensor : tensors) {
        Strided found;
        const bool fits = strided_from(tensor, found) && found.device < 0 && found.type == ncclInt32;
        if (!fits || !found.is_dense()) return nb::none();
        bytes.append(static_cast<const char*>(found.data), static_cast<size_t>(4 * found.size()));
    }
    return nb::bytes(bytes.data(), bytes.size());
}

nb::list column_sums(const nb::list& parts, size_t first, size_t num) {
    std::vector<int64_t> sums(num, 0);
    for (nb::handle part : parts) {
        const auto bytes = nb::cast<nb::bytes>(part);
        const size_t columns = bytes.size() / sizeof(int32_t);
        if (first + num > columns) {
            invalid_argument(std::string("a part has ") + std::to_string(columns) + " columns, expected at least " +
                             std::to_string(first + num));
        }
        for (size_t column = 0; column < num; ++column) {
            int32_t value;
            std::memcpy(&value, bytes.c_str() + (first + column) * sizeof(int32_t), sizeof(value));
            sums[column] += value;
        }
    }
    nb::list found;
    for (const int64_t sum : sums) found.append(sum);
    return found;
}

// A new dense tensor on the device of the ids, and its memory.
template <class Element>
nb::object new_counts(nb::handle ids, int device, nb::handle dtype, const nb::tuple& sizes, Element*& data) {
    const nb::object strides = dense_strides(sizes);
    nb::object made = new_tensor(sizes, strides, dtype, ids, device);
    Strided view;
    data = strided_from(made, view) ? static_cast<Element*>(view.data) : nullptr;
    return made;
}

nb::tuple count_routing(nb::handle topk_idx, int64_t num_experts, int64_t num_ranks, int64_t num_nodes, bool distinct) {
    Strided ids;
    if (!ids_from(topk_idx, ids)) {
        invalid_argument("topk_idx is " + shown_tensor(topk_idx) + ", expected [tokens, top-k] of int64 or int32");
    }
    crossdockRoutingCounts_t counts{};
    counts.size = sizeof(counts);
    counts.magic = NCCL_EP_MAGIC;
    counts.device = ids.device;
    counts.topk_idx = ids.data;
    counts.id_type = *ids.type;
    counts.num_tokens = static_cast<uint64_t>(ids.shape[0]);
    counts.num_topk = static_cast<unsigned int>(ids.shape[1]);
    counts.token_stride = ids.strides[0];
    counts.choice_stride = ids.strides[1];
    counts.num_experts = static_cast<unsigned int>(num_experts);
    counts.num_ranks = static_cast<unsigned int>(num_ranks);
    counts.node_ranks = static_cast<unsigned int>(num_ranks / std::max<int64_t>(num_nodes, 1));
    counts.distinct = distinct ? 1 : 0;
    const auto make = [&](int64_t size, int32_t*& data) {
        return new_counts(topk_idx, ids.device, torch_int32(), nb::make_tuple(size), data);
    };
    const nb::object per_rank = make(num_ranks, counts.per_rank);
    const nb::object per_node = num_nodes > 1 ? make(num_nodes, counts.per_node) : nb::none();
    const nb::object per_expert = make(num_experts, counts.per_expert);
    const nb::object is_in_rank =
        new_counts(topk_idx, ids.device, torch_bool(), nb::make_tuple(ids.shape[0], num_ranks), counts.is_in_rank);
    const cudaStream_t stream = stream_from(nb::none(), ids.device < 0, ids.device);
    {
        const ReleasedGil unlocked;
        check(crossdockCountRouting(&counts, stream));
    }
    return nb::make_tuple(per_rank, per_node, per_expert, is_in_rank);
}

}  // namespace

void bind_routing(nb::module_& module) {
    module.def("largest_id", &largest_id, "topk_idx"_a, nb::sig("def largest_id(topk_idx: object) -> int | None"),
               "The largest of [tokens, top-k] numbers in host memory, at least -1; -1 on GPUs; None where there are "
               "no such numbers.");
    module.def("host_bytes", &host_bytes, "tensors"_a, nb::sig("def host_bytes(*tensors: object) -> bytes | None"),
               "The concatenated bytes of dense int32 tensors in host memory; None if one is anything else.");
    module.def("column_sums", &column_sums, "parts"_a, "first"_a, "num"_a,
               nb::sig("def column_sums(parts: list[bytes], first: int, num: int) -> list[int]"),
               "Sums over parts, each bytes of int32, of num columns from first on.");
    module.def(
        "count_routing", &count_routing, "topk_idx"_a, "num_experts"_a, "num_ranks"_a, "num_nodes"_a = 1,
        "distinct"_a = false,
        nb::sig("def count_routing(topk_idx: object, num_experts: int, num_ranks: int, num_nodes: int = 1, distinct: "
                "bool = False) -> tuple[typing.Any, typing.Any, typing.Any, typing.Any]"),
        "crossdockCountRouting into new tensors: per rank [R], per node [num_nodes] (None: there is one) and per "
        "expert "
        "[E], all int32, and [T, R] bool, whether a token is for a rank. distinct: an expert counts a token once.");
}

}  // namespace crossdock::python
