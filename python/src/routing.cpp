// SPDX-License-Identifier: Apache-2.0
#include "routing.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "array.h"
#include "error.h"
#include "gil.h"
#include "stream.h"
#include "strided.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

template <class Struct>
Struct begin_struct(int device) {
    Struct made{};
    made.size = sizeof(Struct);
    made.magic = NCCL_EP_MAGIC;
    made.device = device;
    return made;
}

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

int64_t most_rows_of_expert(nb::handle tensor, int64_t num_experts) {
    Strided ids;
    if (!ids_from(tensor, ids) || ids.device >= 0 || num_experts < 1) return 0;
    return ids.type == ncclInt64 ? most_of_one<int64_t>(ids, num_experts) : most_of_one<int32_t>(ids, num_experts);
}

}  // namespace

bool has_room_for_routing(nb::handle topk_idx, int64_t num_experts, int64_t most_rows) {
    Strided ids;
    if (!ids_from(topk_idx, ids) || ids.device >= 0 || largest_of(ids) >= num_experts) return false;
    // So few choices fit whatever they are.
    if (ids.shape[0] * ids.shape[1] <= most_rows) return true;
    return most_rows_of_expert(topk_idx, num_experts) <= most_rows;
}

namespace {

[[noreturn]] void refuse(nb::handle tensor, const char* name, const std::string& expected) {
    invalid_argument(std::string(name) + " is " + shown_tensor(tensor) + ", expected " + expected);
}

// A tensor of a call whose tensors are all on one device; NULL for None.
class Tensors {
  public:
    explicit Tensors(int device) : device_(device) {}

    template <class Element>
    Element* dense(nb::handle tensor, const char* name, int64_t size) const {
        if (tensor.is_none()) return nullptr;
        const Strided found = strided(tensor, name, sizeof(Element));
        if (!found.is_dense() || found.size() != size) {
            refuse(tensor, name, std::string("a dense tensor of ") + std::to_string(size) + " elements");
        }
        return static_cast<Element*>(found.data);
    }
    Strided strided(nb::handle tensor, const char* name, size_t item_bytes) const {
        Strided found;
        if (!strided_from(tensor, found) || found.item_bytes != static_cast<int64_t>(item_bytes) ||
            found.device != device_) {
            refuse(tensor, name,
                   std::string("elements of ") + std::to_string(item_bytes) + " bytes on " +
                       (device_ < 0 ? "cpu" : std::string("cuda:") + std::to_string(device_)));
        }
        return found;
    }

  private:
    int device_;
};

template <class Struct>
void run(ncclResult_t (*function)(const Struct*, cudaStream_t), const Struct& arguments) {
    const cudaStream_t stream = stream_from(nb::none(), arguments.device < 0, arguments.device);
    const ReleasedGil unlocked;
    check(function(&arguments, stream));
}

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

template <class Struct>
void set_ids(Struct& arguments, const Strided& ids) {
    arguments.topk_idx = ids.data;
    arguments.id_type = *ids.type;
    arguments.num_tokens = static_cast<uint64_t>(ids.shape[0]);
    arguments.num_topk = static_cast<unsigned int>(ids.shape[1]);
    arguments.token_stride = ids.strides[0];
    arguments.choice_stride = ids.strides[1];
}

nb::object count_routing(nb::handle topk_idx, int64_t node_size, nb::handle per_rank, nb::handle per_node,
                         nb::handle per_expert, nb::handle is_in_rank, bool distinct) {
    Strided ids;
    if (!ids_from(topk_idx, ids)) return nb::none();
    const Tensors tensors(ids.device);
    const int64_t num_ranks = tensors.strided(per_rank, "per_rank", sizeof(int32_t)).size();
    const int64_t num_experts = tensors.strided(per_expert, "per_expert", sizeof(int32_t)).size();
    auto counts = begin_struct<crossdockRoutingCounts_t>(ids.device);
    set_ids(counts, ids);
    counts.num_experts = static_cast<unsigned int>(num_experts);
    counts.num_ranks = static_cast<unsigned int>(num_ranks);
    counts.node_ranks = static_cast<unsigned int>(node_size);
    counts.per_rank = tensors.dense<int32_t>(per_rank, "per_rank", num_ranks);
    counts.per_node = tensors.dense<int32_t>(per_node, "per_node", num_ranks / std::max<int64_t>(node_size, 1));
    counts.per_expert = tensors.dense<int32_t>(per_expert, "per_expert", num_experts);
    counts.is_in_rank = tensors.dense<uint8_t>(is_in_rank, "is_in_rank", ids.shape[0] * num_ranks);
    counts.distinct = distinct ? 1 : 0;
    const int64_t largest = largest_of(ids);
    if (largest < num_experts) run(&crossdockCountRouting, counts);
    return nb::int_(largest);
}

}  // namespace

void bind_routing(nb::module_& module) {
    module.def("largest_id", &largest_id, "topk_idx"_a, nb::sig("def largest_id(topk_idx: object) -> int | None"),
               "The largest of [tokens, top-k] numbers in host memory, at least -1; -1 on GPUs; None where there are "
               "no such numbers.");
    module.def(
        "most_rows_of_expert", &most_rows_of_expert, "topk_idx"_a, "num_experts"_a,
        nb::sig("def most_rows_of_expert(topk_idx: object, num_experts: int) -> int"),
        "How often [tokens, top-k] numbers in host memory have the expert that they have most often; 0 on GPUs.");
    module.def("host_bytes", &host_bytes, "tensors"_a, nb::sig("def host_bytes(*tensors: object) -> bytes | None"),
               "The concatenated bytes of dense int32 tensors in host memory; None if one is anything else.");
    module.def("column_sums", &column_sums, "parts"_a, "first"_a, "num"_a,
               nb::sig("def column_sums(parts: list[bytes], first: int, num: int) -> list[int]"),
               "Sums over parts, each bytes of int32, of num columns from first on.");
    module.def(
        "count_routing", &count_routing, "topk_idx"_a, "node_size"_a, "per_rank"_a, "per_node"_a.none(), "per_expert"_a,
        "is_in_rank"_a, "distinct"_a = false,
        nb::sig("def count_routing(topk_idx: object, node_size: int, per_rank: object, per_node: object, "
                "per_expert: object, is_in_rank: object, distinct: bool = False) -> int | None"),
        "crossdockCountRouting: fills dense tensors of torch, per_rank [R] and per_node [R / node_size], or None, "
        "int32, per_expert [E] int32, is_in_rank [T, R] bool. distinct: per_expert counts a token once. Returns "
        "largest_id, and has counted nothing if that is "
        "none of an expert or None.");
}

}  // namespace crossdock::python
