// SPDX-License-Identifier: Apache-2.0
#include "configs.h"

#include <string>

#include "error.h"

namespace nb = nanobind;

namespace crossdock::python {
namespace {

// A config's __init__ takes every field by keyword.
template <class Struct>
void init(nb::handle self, const nb::kwargs& fields) {
    new (nb::inst_ptr<Struct>(self)) Struct(make_struct<Struct>());
    nb::inst_mark_ready(self);
    set_fields(self, fields);
}

template <class Struct, class Field>
void flag(nb::class_<Struct>& config, const char* name, Field Struct::*field, const char* doc) {
    config.def_prop_rw(
        name, [field](const Struct& self) { return self.*field != 0; },
        [field](Struct& self, bool value) { self.*field = value ? 1u : 0u; }, doc);
}

void bind_group_config(nb::module_& module) {
    using Config = ncclEpGroupConfig_t;
    nb::class_<ncclEpAllocConfig_t>(module, "AllocConfig",
                                    "Device memory hooks of C: addresses of alloc_fn, free_fn and their context.")
        .def(
            "__init__",
            [](nb::handle self, const nb::kwargs& fields) {
                new (nb::inst_ptr<ncclEpAllocConfig_t>(self)) ncclEpAllocConfig_t{};
                nb::inst_mark_ready(self);
                set_fields(self, fields);
            },
            nb::sig("def __init__(self, *, alloc_fn: int = 0, free_fn: int = 0, context: int = 0) -> None"))
        .def_prop_rw(
            "alloc_fn", [](const ncclEpAllocConfig_t& self) { return reinterpret_cast<size_t>(self.alloc_fn); },
            [](ncclEpAllocConfig_t& self, size_t value) { self.alloc_fn = reinterpret_cast<ncclEpAllocFn_t>(value); })
        .def_prop_rw(
            "free_fn", [](const ncclEpAllocConfig_t& self) { return reinterpret_cast<size_t>(self.free_fn); },
            [](ncclEpAllocConfig_t& self, size_t value) { self.free_fn = reinterpret_cast<ncclEpFreeFn_t>(value); })
        .def_prop_rw(
            "context", [](const ncclEpAllocConfig_t& self) { return reinterpret_cast<size_t>(self.context); },
            [](ncclEpAllocConfig_t& self, size_t value) { self.context = reinterpret_cast<void*>(value); });

    nb::class_<Config> config(module, "GroupConfig",
                              "A group's configuration: the fields of ncclEpGroupConfig_t. Equal on all ranks; what is "
                              "not given is 0, which means that the library chooses.");
    config
        .def("__init__", &init<Config>,
             nb::sig("def __init__(self, *, algorithm: Algorithm = ..., num_experts: int = 0, "
                     "max_dispatch_tokens_per_rank: int = 0, max_recv_tokens_per_rank: int = 0, "
                     "max_token_bytes: int = 0, rdma_buffer_size: int = 0, num_qp_per_rank: int = 0, "
                     "num_channels: int = 0, max_num_sms: int = 0, alloc: AllocConfig = ..., "
                     "enable_mask: bool = False, timeout_ns: int = 0, zero_copy: ZeroCopyMode = ..., "
                     "overflow_policy: OverflowPolicy = ..., num_topk: int = 0, dispatch_num_sms: int = 0, "
                     "combine_num_sms: int = 0) -> None"))
        .def_rw("algorithm", &Config::algorithm, "LOW_LATENCY or HIGH_THROUGHPUT.")
        .def_rw("num_experts", &Config::num_experts, "E, a positive multiple of the number of ranks.")
        .def_rw("max_dispatch_tokens_per_rank", &Config::max_dispatch_tokens_per_rank, "M, positive.")
        .def_rw("max_recv_tokens_per_rank", &Config::max_recv_tokens_per_rank,
                "High throughput: rows that a rank can receive, at least M; 0: receive arrays are sized after updates.")
        .def_rw("max_token_bytes", &Config::max_token_bytes, "Most bytes of a row with its scales.")
        .def_rw("rdma_buffer_size", &Config::rdma_buffer_size, "Bytes, a hint.")
        .def_rw("num_qp_per_rank", &Config::num_qp_per_rank, "A hint.")
        .def_rw("num_channels", &Config::num_channels, "Without effect.")
        .def_rw("max_num_sms", &Config::max_num_sms, "Most SMs that an operation occupies.")
        .def_rw("alloc", &Config::alloc, "Device memory hooks.")
        .def_rw("timeout_ns", &Config::timeout_ns, "Bound of every wait for another rank; 0: 100 s.")
        .def_rw("zero_copy", &Config::zero_copy, "ON: arrays must lie in windows.")
        .def_rw("overflow_policy", &Config::overflow_policy, "High throughput.")
        .def_rw("num_topk", &Config::num_topk, "High throughput: most choices per token, of all handles.")
        .def_rw("dispatch_num_sms", &Config::dispatch_num_sms, "Most SMs of a dispatch; 0: max_num_sms.")
        .def_rw("combine_num_sms", &Config::combine_num_sms, "Most SMs of a combine; 0: max_num_sms.");
    flag(config, "enable_mask", &Config::enable_mask, "Low latency: silent ranks are masked, the group goes on.");
}

void bind_handle_config(nb::module_& module) {
    using Config = ncclEpHandleConfig_t;
    nb::class_<Config>(module, "HandleConfig", "The fields of ncclEpHandleConfig_t.")
        .def("__init__", &init<Config>,
             nb::sig("def __init__(self, *, dispatch_output_per_expert_alignment: int = 0) -> None"))
        .def_rw("dispatch_output_per_expert_alignment", &Config::dispatch_output_per_expert_alignment,
                "High throughput, expert-major: an expert's rows are padded to a multiple of this power of two.");
}

void bind_operation_configs(nb::module_& module) {
    nb::class_<ncclEpDispatchConfig_t> dispatch(module, "DispatchConfig", "The fields of ncclEpDispatchConfig_t.");
    dispatch
        .def("__init__", &init<ncclEpDispatchConfig_t>,
             nb::sig("def __init__(self, *, send_only: bool = False, round_scales: bool = False, pass_direction: "
                     "PassDir = ..., quant_recipe: DispatchQuantizationRecipe = ..., quantization_recipe: "
                     "DispatchQuantizationRecipe = ...) -> None"))
        .def_rw("pass_direction", &ncclEpDispatchConfig_t::pass_direction, "BWD carries gradients; high throughput.")
        .def_rw("quant_recipe", &ncclEpDispatchConfig_t::quant_recipe, "What happens to rows on the way.")
        .def_rw("quantization_recipe", &ncclEpDispatchConfig_t::quantization_recipe, "The same as quant_recipe.");
    flag(dispatch, "send_only", &ncclEpDispatchConfig_t::send_only, "Low latency: Handle.complete does the rest.");
    flag(dispatch, "round_scales", &ncclEpDispatchConfig_t::round_scales, "Scales are rounded up to powers of two.");

    nb::class_<ncclEpCombineConfig_t> combine(module, "CombineConfig", "The fields of ncclEpCombineConfig_t.");
    combine
        .def("__init__", &init<ncclEpCombineConfig_t>,
             nb::sig("def __init__(self, *, send_only: bool = False, pass_direction: PassDir = ..., "
                     "quant_recipe: CombineQuantizationRecipe = ..., quantization_recipe: CombineQuantizationRecipe = "
                     "...) -> None"))
        .def_rw("pass_direction", &ncclEpCombineConfig_t::pass_direction, "BWD also returns gradients of weights.")
        .def_rw("quant_recipe", &ncclEpCombineConfig_t::quant_recipe, "What happens to rows on the way.")
        .def_rw("quantization_recipe", &ncclEpCombineConfig_t::quantization_recipe, "The same as quant_recipe.");
    flag(combine, "send_only", &ncclEpCombineConfig_t::send_only, "Low latency: Handle.complete does the rest.");
}

}  // namespace

void refuse_config(nb::handle config, nb::handle expected_type) {
    invalid_argument("config is of type " + shown(config.type().attr("__name__")) +
                     ", allowed: " + shown(expected_type.attr("__name__")) + ", None");
}

namespace {

bool takes(nb::handle config, nb::handle name, nb::handle value) {
    const bool is_set = PyObject_SetAttr(config.ptr(), name.ptr(), value.ptr()) == 0;
    if (!is_set) PyErr_Clear();
    return is_set;
}

// Of a field that holds numbers; changes its value.
const char* range_of(nb::handle config, nb::handle name) {
    const bool is_wide = takes(config, name, nb::int_(uint64_t{1} << 32));
    if (takes(config, name, nb::int_(-1))) return is_wide ? "-2**63..2**63-1" : "-2147483648..2147483647";
    return is_wide ? "0..2**64-1" : "0..4294967295";
}

}  // namespace

void set_fields(nb::handle config, const nb::kwargs& fields) {
    for (const auto& [name, value] : fields) {
        const bool is_field = PyObject_HasAttr(reinterpret_cast<PyObject*>(Py_TYPE(config.ptr())), name.ptr()) != 0 &&
                              shown(name).rfind("__", 0) != 0;
        if (!is_field) {
            throw nb::type_error(
                (std::string(Py_TYPE(config.ptr())->tp_name) + " has no field " + shown(name)).c_str());
        }
        if (PyObject_SetAttr(config.ptr(), name.ptr(), value.ptr()) != 0) {
            if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) nb::raise_python_error();
            PyErr_Clear();
            if (PyLong_CheckExact(value.ptr()) != 0 && PyLong_CheckExact(config.attr(name).ptr()) != 0)
                invalid_argument(shown(name) + " is " + shown(value) + ", allowed: " + range_of(config, name));
            throw nb::type_error((shown(name) + " is " + shown(value) + ", which is out of range or of a wrong type, " +
                                  Py_TYPE(value.ptr())->tp_name)
                                     .c_str());
        }
    }
}

void bind_configs(nb::module_& module) {
    bind_group_config(module);
    bind_handle_config(module);
    bind_operation_configs(module);
}

}  // namespace crossdock::python
