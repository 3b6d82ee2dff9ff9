// SPDX-License-Identifier: Apache-2.0
//
// crossdock._core.Forms: what is known of calls by the forms of their arguments, so that a repeated call is recognised
// with one look instead of being checked again.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <unordered_map>

namespace crossdock::python {

// The form of a tensor of torch is its type, its device, its extents, and whether it is dense; that of a number, or of
// None, is what it is. Arguments of other kinds, and tensors whose memory does not hold their elements, have none:
// calls with them are never known.
class Forms {
  public:
    // What was kept for arguments of these forms, else None.
    nanobind::object find(const nanobind::args& arguments) const;
    // The same, borrowed; NULL for None.
    nanobind::handle look_up(std::initializer_list<nanobind::handle> arguments) const;
    void keep(nanobind::handle known, const nanobind::args& arguments);
    void clear();
    int visit(visitproc visit, void* arg) const;

  private:
    static constexpr size_t kMost = 1024;  // all are forgotten when there are more

    struct Hash : std::hash<std::string_view> {
        using is_transparent = void;
    };
    using Known = std::unordered_map<std::string, nanobind::object, Hash, std::equal_to<>>;

    Known known_;
};

void bind_forms(nanobind::module_& module);

}  // namespace crossdock::python
