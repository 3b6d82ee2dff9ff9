// SPDX-License-Identifier: Apache-2.0
#include "torch_view.h"

#include "error.h"

namespace nb = nanobind;
using namespace nb::literals;

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

// DLPack's numbers of types.
enum Code : uint8_t {
    kInt = 0,
    kUInt = 1,
    kFloat = 2,
    kBfloat = 4,
    kComplex = 5,
    kFloat8E4m3fn = 10,
    kFloat8E5m2 = 12
};

struct KnownType {
    uint8_t code, bits;
    ncclDataType_t type;
};
constexpr KnownType kKnownTypes[] = {
    {kBfloat, 16, ncclBfloat16},
    {kFloat, 32, ncclFloat32},
    {kInt, 64, ncclInt64},
    {kInt, 32, ncclInt32},
    {kFloat, 16, ncclFloat16},
    {kFloat8E4m3fn, 8, ncclFloat8e4m3},
    {kFloat8E5m2, 8, ncclFloat8e5m2},
    {kUInt, 8, ncclUint8},
    {kInt, 8, ncclInt8},
    {kFloat, 64, ncclFloat64},
    {kUInt, 32, ncclUint32},
    {kUInt, 64, ncclUint64},
};

// torch.Tensor and torch.nn.Parameter, once the program has imported torch; kept for good, as torch is.
struct TorchTypes {
    PyTypeObject* tensor = nullptr;
    PyTypeObject* parameter = nullptr;
    const Exchange* exchange = nullptr;
    PyObject *is_neg = nullptr, *is_conj = nullptr;  // methods
};

PyObject* imported(const char* module_name, const char* name) {
    PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), module_name);
    if (module == nullptr) return nullptr;
    return find_attribute(module, name).release().ptr();
}

PyTypeObject* imported_type(const char* module_name, const char* name) {
    PyObject* found = imported(module_name, name);
    if (found != nullptr && PyType_Check(found)) return reinterpret_cast<PyTypeObject*>(found);
    Py_XDECREF(found);
    return nullptr;
}

const Exchange* exchange_of(PyTypeObject* type) {
    const nb::object capsule = find_attribute(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
    const void* found = nullptr;
    if (capsule.is_valid()) found = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
    forget_python_error();
    const auto* exchange = static_cast<const Exchange*>(found);
    const bool fits = exchange != nullptr && exchange->major == kMajor && exchange->tensor_from_object != nullptr;
    return fits ? exchange : nullptr;
}

const TorchTypes& torch_types() {
    static TorchTypes types;
    if (types.tensor == nullptr) {
        PyTypeObject* tensor = imported_type("torch", "Tensor");
        if (tensor == nullptr) return types;
        types.exchange = exchange_of(tensor);
        types.is_neg = find_attribute(reinterpret_cast<PyObject*>(tensor), "is_neg").release().ptr();
        types.is_conj = find_attribute(reinterpret_cast<PyObject*>(tensor), "is_conj").release().ptr();
        types.tensor = tensor;
    }
    if (types.parameter == nullptr) {
        types.parameter = imported_type("torch.nn.parameter", "Parameter");
    }
    return types;
}

constexpr const char* kNegative = "has its negative bit set: pass its resolve_neg()";
constexpr const char* kConjugate = "has its conjugate bit set: pass its resolve_conj()";
constexpr const char* kSparse = "is not a dense tensor: pass its to_dense()";
constexpr const char* kNested = "is a nested tensor: pass its to_padded_tensor(0)";
constexpr const char* kNoMemory = "has no memory, as a tensor of zeros that torch does not store: pass its clone()";

bool is_set(PyObject* method, nb::handle tensor) {
    PyObject* arguments[] = {tensor.ptr()};
    const nb::object found = nb::steal(PyObject_Vectorcall(method, arguments, 1, nullptr));
    if (!found.is_valid()) nb::raise_python_error();
    return found.ptr() == Py_True;
}

bool has_elements(const nb::dlpack::dltensor& view) {
    for (int32_t dimension = 0; dimension < view.ndim; ++dimension) {
        if (view.shape[dimension] == 0) return false;
    }
    return true;
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
        forget_python_error();
        return false;
    }
    view.data = static_cast<char*>(view.data) + view.byte_offset;
    view.byte_offset = 0;
    return true;
}

const char* fault_of_memory(nb::handle tensor, const nb::dlpack::dltensor& view) {
    const TorchTypes& types = torch_types();
    if (view.data == nullptr && has_elements(view)) return kNoMemory;
    if (is_set(types.is_neg, tensor)) return kNegative;
    return view.dtype.code == kComplex && is_set(types.is_conj, tensor) ? kConjugate : nullptr;
}

const char* fault_of_memory(nb::handle tensor) {
    nb::dlpack::dltensor view;
    if (view_torch(tensor, view)) return fault_of_memory(tensor, view);
    const TorchTypes& types = torch_types();
    if (is_set(types.is_neg, tensor)) return kNegative;
    if (is_set(types.is_conj, tensor)) return kConjugate;
    if (nb::cast<bool>(tensor.attr("is_nested"))) return kNested;
    if (!tensor.attr("layout").is(nb::module_::import_("torch").attr("strided"))) return kSparse;
    const bool has_place = nb::cast<bool>(tensor.attr("is_cpu")) || nb::cast<bool>(tensor.attr("is_cuda"));
    const bool lacks_memory =
        has_place && nb::cast<size_t>(tensor.attr("data_ptr")()) == 0 && nb::cast<size_t>(tensor.attr("numel")()) > 0;
    return lacks_memory ? kNoMemory : nullptr;
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
    for (const KnownType& known : kKnownTypes) {
        if (known.code == type.code && known.bits == type.bits && type.lanes == 1) return known.type;
    }
    return std::nullopt;
}

void bind_torch_views(nb::module_& module) {
    module.def(
        "fault_of_memory", nb::overload_cast<nb::handle>(&fault_of_memory), "tensor"_a,
        nb::sig("def fault_of_memory(tensor: object) -> str | None"),
        "What keeps a torch tensor's elements from being those in its memory, as 'has its negative bit set: ...'.");
}

}  // namespace crossdock::python
