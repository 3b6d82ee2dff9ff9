// SPDX-License-Identifier: Apache-2.0
#include "forms.h"

#include <cstdint>
#include <string_view>

#include "collected.h"
#include "torch_view.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

enum class Kind : int64_t { kNone, kNumber, kTensor, kDescribed };

// Words of 64 bits as the bytes of a key.
class Key {
  public:
    // Returns false if an argument has no form or there are too many arguments.
    template <class Arguments>
    bool add_forms(const Arguments& arguments) {
        for (nb::handle argument : arguments) {
            if (!add_form(argument)) return false;
        }
        return size_ <= kMost;
    }
    std::string_view bytes() const { return {reinterpret_cast<const char*>(words_), size_ * sizeof(words_[0])}; }

  private:
    static constexpr size_t kMost = 128;

    void add(int64_t word) {
        if (size_ < kMost) words_[size_] = word;
        ++size_;
    }
    void add(Kind kind) { add(static_cast<int64_t>(kind)); }

    bool add_form(nb::handle argument) {
        if (argument.is_none()) {
            add(Kind::kNone);
            return true;
        }
        if (PyLong_Check(argument.ptr())) return add_number(argument);
        nb::dlpack::dltensor view;
        if (view_torch(argument, view)) {
            if (fault_of_memory(argument, view) != nullptr) return false;
            add_view(view);
            return true;
        }
        return is_torch_tensor(argument) && add_described(argument);
    }

    bool add_number(nb::handle number) {
        int overflow = 0;
        const int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
        add(Kind::kNumber);
        add(value);
        return overflow == 0;
    }

    void add_view(const nb::dlpack::dltensor& view) {
        add(Kind::kTensor);
        add(int64_t{view.dtype.code} | int64_t{view.dtype.bits} << 8 | int64_t{view.dtype.lanes} << 16 |
            int64_t{is_contiguous(view)} << 32);
        add(int64_t{view.device.device_type} << 32 | static_cast<uint32_t>(view.device.device_id));
        add(int64_t{view.ndim});
        for (int32_t dimension = 0; dimension < view.ndim; ++dimension) add(view.shape[dimension]);
    }

    // By Python's attributes, where torch has no quicker way. Its dtypes live as long as the process.
    bool add_described(nb::handle tensor) {
        if (fault_of_memory(tensor) != nullptr) return false;
        add(Kind::kDescribed);
        add(static_cast<int64_t>(reinterpret_cast<intptr_t>(nb::object(tensor.attr("dtype")).ptr())));
        add(nb::hash(tensor.attr("device")));
        add(int64_t{nb::cast<bool>(tensor.attr("is_contiguous")())});
        const nb::tuple shape = nb::cast<nb::tuple>(tensor.attr("shape"));
        add(static_cast<int64_t>(nb::len(shape)));
        for (nb::handle extent : shape) add(nb::cast<int64_t>(extent));
        return true;
    }

    int64_t words_[kMost];
    size_t size_ = 0;
};

}  // namespace

nb::object Forms::find(const nb::args& arguments) const {
    Key key;
    if (!key.add_forms(arguments)) return nb::none();
    const auto found = known_.find(key.bytes());
    return found == known_.end() ? nb::none() : found->second;
}

nb::handle Forms::look_up(std::initializer_list<nb::handle> arguments) const {
    Key key;
    if (!key.add_forms(arguments)) return {};
    const auto found = known_.find(key.bytes());
    return found == known_.end() ? nb::handle() : nb::handle(found->second);
}

void Forms::keep(nb::handle known, const nb::args& arguments) {
    Key key;
    if (!key.add_forms(arguments)) return;
    if (known_.size() >= kMost) clear();
    known_[std::string(key.bytes())] = nb::borrow(known);
}

void Forms::clear() {
    // What goes may come back here.
    Known gone;
    gone.swap(known_);
}

int Forms::visit(visitproc visit, void* arg) const {
    for (const auto& [key, known] : known_) Py_VISIT(known.ptr());
    return 0;
}

void bind_forms(nb::module_& module) {
    nb::class_<Forms>(module, "Forms", nb::type_slots(collected<Forms>()),
                      R"(What is known of calls, by the forms of their arguments.

Arguments are tensors of torch, whose form is all that they are but for their elements and where these lie, numbers, and
None. Calls with anything else are never known.)")
        .def(nb::init<>())
        .def("find", &Forms::find, "arguments"_a, nb::sig("def find(self, *arguments: object) -> typing.Any"),
             "What was kept for arguments of these forms, else None.")
        .def("keep", &Forms::keep, "known"_a, "arguments"_a,
             nb::sig("def keep(self, known: object, *arguments: object) -> None"))
        .def("clear", &Forms::clear);
}

}  // namespace crossdock::python
