// SPDX-License-Identifier: Apache-2.0
#include "routing.h"

#include <algorithm>
#include <cstdint>

#include "array.h"
#include "error.h"
#include "torch_view.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

// Expert numbers [tokens, top-k] on the host, of any strides.
struct Ids {
    const void* data = nullptr;
    bool are_64_bit = false;
    int64_t num_tokens = 0, topk = 0;
    int64_t token_stride = 0, column_stride = 0;  // in elements

    int64_t at(int64_t token, int64_t column) const {
        const int64_t place = token * token_stride + column * column_stride;
        return are_64_bit ? static_cast<const int64_t*>(data)[place] : static_cast<const int32_t*>(data)[place];
    }
};

// False: not on the host, or not to be seen from C.
bool ids_from(nb::handle tensor, Ids& ids) {
    nb::dlpack::dltensor view;
    if (!view_torch(tensor, view) || !is_on_host(view) || view.ndim != 2) return false;
    const auto type = datatype_of(view.dtype);
    if (type != ncclInt32 && type != ncclInt64) return false;
    ids = {view.data, type == ncclInt64, view.shape[0], view.shape[1], view.shape[1], 1};
    if (view.strides != nullptr) ids.token_stride = view.strides[0], ids.column_stride = view.strides[1];
    return true;
}

int64_t largest_of(const Ids& ids) {
    int64_t largest = -1;
    for (int64_t token = 0; token < ids.num_tokens; ++token) {
        for (int64_t column = 0; column < ids.topk; ++column) largest = std::max(largest, ids.at(token, column));
    }
    return largest;
}

nb::object largest_id(nb::handle tensor) {
    Ids ids;
    if (!ids_from(tensor, ids)) return nb::none();
    return nb::int_(largest_of(ids));
}

// A dense tensor that is to be filled, and its number of elements.
template <class Element>
struct Filled {
    Element* data = nullptr;
    int64_t size = 0;
};

template <class Element>
Filled<Element> filled_from(nb::handle tensor, const char* name) {
    nb::dlpack::dltensor view;
    const bool fits = view_torch(tensor, view) && is_on_host(view) && is_contiguous(view) &&
                      view.dtype.bits == 8 * sizeof(Element) && view.dtype.lanes == 1;
    if (!fits) invalid_argument(std::string(name) + " is no dense tensor of this size of elements on the host");
    Filled<Element> filled{static_cast<Element*>(view.data), 1};
    for (int32_t dimension = 0; dimension < view.ndim; ++dimension) filled.size *= view.shape[dimension];
    std::fill_n(filled.data, filled.size, Element{0});
    return filled;
}

nb::object count_routing(nb::handle tensor, int64_t node_size, nb::handle per_rank, nb::handle per_node,
                         nb::handle per_expert, nb::handle is_in_rank) {
    Ids ids;
    if (!ids_from(tensor, ids)) return nb::none();
    const auto of_rank = filled_from<int32_t>(per_rank, "per_rank");
    const auto of_expert = filled_from<int32_t>(per_expert, "per_expert");
    const auto chosen = filled_from<uint8_t>(is_in_rank, "is_in_rank");
    Filled<int32_t> of_node;
    if (!per_node.is_none()) of_node = filled_from<int32_t>(per_node, "per_node");
    const int64_t num_ranks = of_rank.size;
    const int64_t num_experts = of_expert.size;
    const bool fits = num_ranks > 0 && num_experts > 0 && num_experts % num_ranks == 0 && node_size > 0 &&
                      chosen.size == ids.num_tokens * num_ranks &&
                      (of_node.data == nullptr || of_node.size * node_size == num_ranks);
    if (!fits) invalid_argument("the tensors to be filled have other numbers of elements than topk_idx asks for");
    const int64_t largest = largest_of(ids);
    if (largest >= num_experts) return nb::int_(largest);

    const int64_t local = num_experts / num_ranks;
    for (int64_t token = 0; token < ids.num_tokens; ++token) {
        uint8_t* ranks = chosen.data + token * num_ranks;
        for (int64_t column = 0; column < ids.topk; ++column) {
            const int64_t expert = ids.at(token, column);
            if (expert < 0) continue;
            ++of_expert.data[expert];
            ranks[expert / local] = 1;
        }
        for (int64_t rank = 0; rank < num_ranks; ++rank) of_rank.data[rank] += ranks[rank];
        for (int64_t node = 0; node < of_node.size; ++node) {
            const uint8_t* first = ranks + node * node_size;
            of_node.data[node] += std::any_of(first, first + node_size, [](uint8_t is_chosen) { return is_chosen; });
        }
    }
    return nb::int_(largest);
}

}  // namespace

void bind_routing(nb::module_& module) {
    module.def("largest_id", &largest_id, "topk_idx"_a, nb::sig("def largest_id(topk_idx: object) -> int | None"),
               "The largest of [tokens, top-k] numbers in host memory, at least -1; None where that cannot be seen at "
               "once.");
    module.def(
        "count_routing", &count_routing, "topk_idx"_a, "node_size"_a, "per_rank"_a, "per_node"_a.none(), "per_expert"_a,
        "is_in_rank"_a,
        nb::sig("def count_routing(topk_idx: object, node_size: int, per_rank: object, per_node: object, "
                "per_expert: object, is_in_rank: object) -> int | None"),
        "Fills dense tensors of torch on the host: per_rank [R] and per_node [R / node_size], or None, int32, "
        "tokens for each; per_expert [E] int32, how often it occurs; is_in_rank [T, R] bool. Returns the largest "
        "number, and has counted nothing if that is none of an expert; None: topk_idx cannot be seen from here.");
}

}  // namespace crossdock::python
