// SPDX-License-Identifier: Apache-2.0
//
// The C API's configuration structs and enumerations as Python classes, field by field.
#pragma once

#include <nanobind/nanobind.h>

#include "crossdock.h"
#include "error.h"

namespace crossdock::python {

// A struct of the C API as its INIT macro makes it.
template <class Struct>
Struct make_struct() {
    Struct fresh{};
    fresh.size = static_cast<unsigned int>(sizeof(Struct));
    fresh.magic = NCCL_EP_MAGIC;
    return fresh;
}

// Sets attributes by name on the Python object of a configuration. TypeError: there is no such field.
void set_fields(nanobind::handle config, const nanobind::kwargs& fields);

[[noreturn]] void refuse_config(nanobind::handle config, nanobind::handle expected_type);

// A copy of config, or of the default where it is None, with the fields set. InvalidArgument: it is something else.
template <class Struct>
Struct config_from(nanobind::handle config, const nanobind::kwargs& fields) {
    nanobind::object copy = nanobind::type<Struct>()();
    if (nanobind::isinstance<Struct>(config)) {
        nanobind::cast<Struct&>(copy) = nanobind::cast<const Struct&>(config);
    } else if (!config.is_none()) {
        refuse_config(config, nanobind::type<Struct>());
    }
    set_fields(copy, fields);
    return nanobind::cast<Struct&>(copy);
}

void bind_enums(nanobind::module_& module);
void bind_configs(nanobind::module_& module);

}  // namespace crossdock::python
