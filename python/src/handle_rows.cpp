// SPDX-License-Identifier: Apache-2.0
// Rows there and back as crossdock.deep_ep repeats them, with the tensor that is returned: one look at what came, one
// new tensor, one call of the library.
#include "array.h"
#include "configs.h"
#include "handle.h"
#include "stream.h"
#include "torch_view.h"

namespace nb = nanobind;

namespace crossdock::python {
namespace {

constexpr int64_t kGranule = 16;  // bytes

// Dense rows of a tensor of torch that are as long as the library wants.
struct Rows {
    int64_t num = 0, columns = 0, bytes = 0;  // bytes of a row
    ncclDataType_t type = ncclUint8;

    // False: something else, or rows longer than that.
    bool read(nb::handle tensor, int64_t most_bytes) {
        nb::dlpack::dltensor view;
        if (!view_torch(tensor, view) || view.ndim != 2 || !is_contiguous(view)) return false;
        const std::optional<ncclDataType_t> known = datatype_of(view.dtype);
        if (!known) return false;
        num = view.shape[0];
        columns = view.shape[1];
        type = *known;
        bytes = columns * static_cast<int64_t>(bytes_of_datatype(type));
        return bytes > 0 && bytes % kGranule == 0 && bytes <= most_bytes;
    }
};

nb::object new_rows(nb::handle like, int64_t num, int64_t columns) {
    static PyObject* name = PyUnicode_InternFromString("new_empty");
    const nb::int_ extents[] = {nb::int_(num), nb::int_(columns)};
    PyObject* arguments[] = {like.ptr(), extents[0].ptr(), extents[1].ptr()};
    PyObject* made = PyObject_VectorcallMethod(name, arguments, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
    if (made == nullptr) nb::raise_python_error();
    return nb::steal(made);
}

}  // namespace

nb::object Handle::send_again(nb::handle tokens, int64_t num_tokens, int64_t num_rows, int64_t most_bytes) {
    expect_open();
    Rows rows;
    if (!rows.read(tokens, most_bytes) || rows.num != num_tokens || bytes_of_datatype(rows.type) > 4) return nb::none();
    nb::object received = new_rows(tokens, num_rows, rows.columns);
    dispatch_rows(tokens, received, nb::none(), nb::none());
    forget_arrays();
    return received;
}

nb::object Handle::add_up(nb::handle tokens, int64_t num_rows, int64_t num_tokens, int64_t most_bytes) {
    expect_open();
    Rows rows;
    if (!rows.read(tokens, most_bytes) || rows.num != num_rows) return nb::none();
    if (rows.type != ncclBfloat16 && rows.type != ncclFloat16 && rows.type != ncclFloat32) return nb::none();
    nb::object sums = new_rows(tokens, num_tokens, rows.columns);
    CallArrays arrays(group_->communicator().is_cpu());
    auto sent = make_struct<ncclEpCombineInputs_t>();
    sent.tokens = arrays.add(tokens, "rows", Access::kRead);
    auto received = make_struct<ncclEpCombineOutputs_t>();
    received.tokens = arrays.add(sums, "sums", Access::kWrite);
    const auto settings = make_struct<ncclEpCombineConfig_t>();
    const cudaStream_t where = stream_from(nb::none(), group_->communicator().is_cpu(), arrays.device());
    group_->call([&] { check(ncclEpCombine(handle_, &sent, &received, &settings, where)); });
    keep(combined_, arrays, false);
    forget_arrays();
    return sums;
}

}  // namespace crossdock::python
