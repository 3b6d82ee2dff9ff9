// SPDX-License-Identifier: Apache-2.0
#include "torch_view.h"

namespace nb = nanobind;

namespace crossdock::python {
namespace {

// What a type's __dlpack_c_exchange_api__ points to, as DLPack 1.3 lays it out; later minor versions only add to it.
struct Exchange {
    uint32_t major, minor;
    void* older;
    void (*allocate)();
    void (*managed_from_object)();
    void (*object_from_managed)();
    int (*tensor_from_object)(void* object, nb::dlpack::dltensor* out);
};

constexpr uint32_t kMajor = 1;

// torch.Tensor and torch.nn.Parameter once torch has been imported by somebody; kept for good, as torch is.
struct TorchTypes {
    PyTypeObject* tensor = nullptr;
    PyTypeObject* parameter = nullptr;
    const Exchange* exchange = nullptr;
};

PyObject* imported(const char* module_name, const char* name) {
    PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), module_name);
    if (module == nullptr) return nullptr;
    PyObject* found = PyObject_GetAttrString(module, name);
    if (found == nullptr) PyErr_Clear();
    return found;
}

PyTypeObject* imported_type(const char* module_name, const char* name) {
    PyObject* found = imported(module_name, name);
    if (found != nullptr && PyType_Check(found)) return reinterpret_cast<PyTypeObject*>(found);
    Py_XDECREF(found);
    return nullptr;
}

const Exchange* exchange_of(PyTypeObject* type) {
    PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
    const void* found = nullptr;
    if (capsule != nullptr) found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_XDECREF(capsule);
    PyErr_Clear();
    const auto* exchange = static_cast<const Exchange*>(found);
    const bool fits = exchange != nullptr && exchange->major == kMajor && exchange->tensor_from_object != nullptr;
    return fits ? exchange : nullptr;
}

const TorchTypes& torch_types() {
    static TorchTypes types;
    if (types.tensor == nullptr) {
        types.tensor = imported_type("torch", "Tensor");
        if (types.tensor != nullptr) types.exchange = exchange_of(types.tensor);
    }
    if (types.parameter == nullptr && types.tensor != nullptr) {
        types.parameter = imported_type("torch.nn.parameter", "Parameter");
    }
    return types;
}

}  // namespace

bool is_torch_tensor(nb::handle object) {
    PyTypeObject* type = torch_types().tensor;
    return type != nullptr && PyObject_TypeCheck(object.ptr(), type);
}

bool view_torch(nb::handle object, nb::dlpack::dltensor& view) {
    const TorchTypes& types = torch_types();
    PyTypeObject* type = Py_TYPE(object.ptr());
    // Other subclasses may mean something else than the memory that they have.
    if (types.exchange == nullptr || (type != types.tensor && type != types.parameter)) return false;
    if (types.exchange->tensor_from_object(object.ptr(), &view) != 0) {
        PyErr_Clear();
        return false;
    }
    view.data = static_cast<char*>(view.data) + view.byte_offset;
    view.byte_offset = 0;
    return true;
}

bool is_contiguous(const nb::dlpack::dltensor& view) {
    if (view.strides == nullptr) return true;
    for (int32_t dimension = 0; dimension < view.ndim; ++dimension) {
        if (view.shape[dimension] == 0) return true;
    }
    int64_t expected = 1;
    for (int32_t dimension = view.ndim; dimension-- > 0;) {
        if (view.shape[dimension] > 1 && view.strides[dimension] != expected) return false;
        expected *= view.shape[dimension];
    }
    return true;
}

std::optional<ncclDataType_t> datatype_of(nb::dlpack::dtype type) {
    using Code = nb::dlpack::dtype_code;
    if (type.lanes != 1) return std::nullopt;
    switch (static_cast<Code>(type.code)) {
        case Code::Int:
            if (type.bits == 8) return ncclInt8;
            if (type.bits == 32) return ncclInt32;
            if (type.bits == 64) return ncclInt64;
            return std::nullopt;
        case Code::UInt:
            if (type.bits == 8) return ncclUint8;
            if (type.bits == 32) return ncclUint32;
            if (type.bits == 64) return ncclUint64;
            return std::nullopt;
        case Code::Float:
            if (type.bits == 16) return ncclFloat16;
            if (type.bits == 32) return ncclFloat32;
            if (type.bits == 64) return ncclFloat64;
            return std::nullopt;
        case Code::Bfloat:
            return type.bits == 16 ? std::optional(ncclBfloat16) : std::nullopt;
        case Code::Float8_E4M3FN:
            return ncclFloat8e4m3;
        case Code::Float8_E5M2:
            return ncclFloat8e5m2;
        default:
            return std::nullopt;
    }
}

}  // namespace crossdock::python
