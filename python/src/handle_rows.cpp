// SPDX-License-Identifier: Apache-2.0
// Rows there and back as crossdock.deep_ep repeats them, with the tensor that is returned: one look at what came, one
// new tensor, one call of the library.
#include "array.h"
#include "configs.h"
#include "handle.h"
#include "stream.h"
#include "torch_maker.h"
#include "torch_view.h"

namespace nb = nanobind;

namespace crossdock::python {
namespace {

constexpr int64_t kGranule = 16;  // bytes

// Dense rows of a tensor of torch that are as long as the library wants.
struct Rows {
    nb::handle tensor;
    int64_t num = 0, columns = 0, bytes = 0;  // bytes of a row
    ncclDataType_t type = ncclUint8;
    int device = -1;  // -1: the host

    // False: something else, or rows longer than that.
    bool read(nb::handle object, int64_t most_bytes) {
        nb::dlpack::dltensor view;
        if (!view_torch(object, view) || view.ndim != 2 || !is_contiguous(view)) return false;
        const std::optional<ncclDataType_t> known = datatype_of(view.dtype);
        if (!known) return false;
        tensor = object;
        device = is_on_host(view) ? -1 : view.device.device_id;
        num = view.shape[0];
        columns = view.shape[1];
        type = *known;
        bytes = columns * static_cast<int64_t>(bytes_of_datatype(type));
        return bytes > 0 && bytes % kGranule == 0 && bytes <= most_bytes;
    }
};

// Of the type of those, on their device.
nb::object new_rows(const Rows& like, int64_t num) {
    return new_tensor(nb::make_tuple(num, like.columns), nb::make_tuple(like.columns, 1), like.tensor.attr("dtype"),
                      like.tensor, like.device);
}

}  // namespace

nb::object Handle::send_again(nb::handle tokens, int64_t num_tokens, int64_t num_rows, int64_t most_bytes,
                              nb::handle stream) {
    expect_open();
    Rows rows;
    if (!rows.read(tokens, most_bytes) || rows.num != num_tokens || bytes_of_datatype(rows.type) > 4) return nb::none();
    nb::object received = new_rows(rows, num_rows);
    dispatch_rows(tokens, received, nb::none(), nb::none(), stream);
    forget_arrays();
    return received;
}

nb::object Handle::add_up(nb::handle tokens, int64_t num_rows, int64_t num_tokens, int64_t most_bytes,
                          nb::handle stream) {
    expect_open();
    Rows rows;
    if (!rows.read(tokens, most_bytes) || rows.num != num_rows) return nb::none();
    if (rows.type != ncclBfloat16 && rows.type != ncclFloat16 && rows.type != ncclFloat32) return nb::none();
    nb::object sums = new_rows(rows, num_tokens);
    CallArrays arrays(group_->communicator().is_cpu(), 2);
    auto sent = make_struct<ncclEpCombineInputs_t>();
    sent.tokens = arrays.add(tokens, "rows", Access::kRead);
    auto received = make_struct<ncclEpCombineOutputs_t>();
    received.tokens = arrays.add(sums, "sums", Access::kWrite);
    const auto settings = make_struct<ncclEpCombineConfig_t>();
    const cudaStream_t where = stream_from(stream, group_->communicator().is_cpu(), arrays.device());
    group_->call([&] { check(ncclEpCombine(handle_, &sent, &received, &settings, where)); });
    keep(combined_, arrays, false, where);
    forget_arrays();
    return sums;
}

}  // namespace crossdock::python
