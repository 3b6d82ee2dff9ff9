// SPDX-License-Identifier: Apache-2.0
//
// How a failed call of the C API becomes a Python exception: its class is crossdock.errors' class of the code, its text
// is the library's message.
#pragma once

#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>
#include <type_traits>

#include "crossdock.h"

namespace crossdock::python {

class ApiError : public std::runtime_error {
  public:
    ApiError(ncclResult_t code, const std::string& message) : std::runtime_error(message), code_(code) {}
    ncclResult_t code() const { return code_; }

  private:
    ncclResult_t code_;
};

// Throws unless the call that has just returned on this thread succeeded. Needs no GIL.
void check(ncclResult_t result);

[[noreturn]] void invalid_argument(const std::string& message);
[[noreturn]] void invalid_usage(const std::string& message);

// Whether an exception of this type says something about the call that raised it. Others pass through all code here:
// what is no Exception (KeyboardInterrupt, SystemExit), and MemoryError.
bool is_about_call(nanobind::handle type);

// Forgets the pending exception of Python, if any, for callers who have another answer; throws one that passes through.
void forget_python_error();

// An attribute; an invalid object if it cannot be had.
nanobind::object find_attribute(nanobind::handle object, const char* name);

// "the str() of an object" for messages, at most 80 bytes of UTF-8. Throws only what passes through.
std::string shown(nanobind::handle object);

// The integer that an object stands for; an invalid object if it stands for none.
nanobind::object integer_of(nanobind::handle object);

// value as a T. InvalidArgument: it is none.
template <class T>
T as(nanobind::handle value, const std::string& name, const char* allowed) {
    T result{};
    nanobind::object given = nanobind::borrow(value);
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) given = integer_of(value);
    if (!given.is_valid() || !nanobind::try_cast<T>(given, result))
        invalid_argument(name + " is " + shown(value) + ", allowed: " + allowed);
    return result;
}

// The items of any sequence.
nanobind::tuple items_of(nanobind::handle sequence, const std::string& name);

void bind_errors(nanobind::module_& module);

}  // namespace crossdock::python
