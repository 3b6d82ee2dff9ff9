// SPDX-License-Identifier: Apache-2.0
#include "error.h"

#include <cstring>
#include <utility>

#include "interrupt.h"

namespace nb = nanobind;

namespace crossdock::python {
namespace {

// The class is looked up when it is needed: crossdock.errors is ordinary Python.
void raise_in_python(const ApiError& error) {
    if (const nb::object interruption = take_interruption(); interruption.is_valid()) {
        interruption.attr("add_note")(std::string(error.what()).c_str());
        return PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(interruption.ptr())), interruption.ptr());
    }
    nb::object exception = nb::module_::import_("crossdock.errors")
                               .attr("error_of")(static_cast<int>(error.code()), std::string(error.what()).c_str());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
}

}  // namespace

// The library's message with C's words as Python has them: inputs->tokens is NULL.
static std::string in_python(std::string message) {
    for (const auto& [word, ours] : {std::pair{"->", "."}, std::pair{"NULL", "None"}}) {
        for (size_t at = 0; (at = message.find(word, at)) != std::string::npos; at += std::strlen(ours))
            message.replace(at, std::strlen(word), ours);
    }
    return message;
}

void check(ncclResult_t result) {
    if (result == ncclSuccess) return;
    const char* message = crossdockGetLastError();
    throw ApiError(result, *message != 0 ? in_python(message) : "the library gave no reason");
}

void invalid_argument(const std::string& message) { throw ApiError(ncclInvalidArgument, message); }
void invalid_usage(const std::string& message) { throw ApiError(ncclInvalidUsage, message); }

bool is_about_call(nb::handle type) {
    return PyErr_GivenExceptionMatches(type.ptr(), PyExc_Exception) != 0 &&
           PyErr_GivenExceptionMatches(type.ptr(), PyExc_MemoryError) == 0;
}

void forget_python_error() {
    PyObject* type = PyErr_Occurred();
    if (type == nullptr) return;
    if (!is_about_call(type)) nb::raise_python_error();
    PyErr_Clear();
}

nb::object find_attribute(nb::handle object, const char* name) {
    PyObject* value = PyObject_GetAttrString(object.ptr(), name);
    if (value == nullptr) forget_python_error();
    return nb::steal(value);
}

nb::object integer_of(nb::handle object) {
    PyObject* number = PyNumber_Index(object.ptr());
    if (number == nullptr) forget_python_error();
    return nb::steal(number);
}

std::string shown(nb::handle object) {
    constexpr size_t kMost = 80;
    std::string text;
    if (PyObject* string = PyObject_Str(object.ptr())) {
        const char* characters = PyUnicode_AsUTF8(string);
        if (characters != nullptr) text = characters;
        Py_DECREF(string);
    }
    forget_python_error();
    if (text.size() > kMost) {
        size_t end = kMost;
        while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0u) == 0x80) --end;  // not inside a character
        text = text.substr(0, end) + "...";
    }
    return text;
}

nb::tuple items_of(nb::handle sequence, const std::string& name) {
    PyObject* items = PyUnicode_Check(sequence.ptr()) ? nullptr : PySequence_Tuple(sequence.ptr());
    if (items == nullptr) {
        forget_python_error();
        invalid_argument(name + " is " + shown(sequence) + ", allowed: a sequence of numbers");
    }
    return nb::steal<nb::tuple>(items);
}

void bind_errors(nb::module_&) {
    nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
        try {
            std::rethrow_exception(pointer);
        } catch (const ApiError& error) {
            try {
                raise_in_python(error);
            } catch (nb::python_error& other) {
                other.restore();
            }
        }
    });
}

}  // namespace crossdock::python
