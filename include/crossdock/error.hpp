// SPDX-License-Identifier: Apache-2.0
//
// Crossdock's C++ layer, part 1: failed calls become exceptions that carry the library's message. C++11, header only.
#ifndef CROSSDOCK_ERROR_HPP_
#define CROSSDOCK_ERROR_HPP_

#include <stdexcept>
#include <string>

#include "crossdock.h"

namespace crossdock {
// The names of the C++ layer are not those of the library inside, which may be linked statically.
inline namespace cxx {

// A failed call: what() is the message that names argument, value and range; code() is what the C function returned.
class Error : public std::runtime_error {
  public:
    Error(ncclResult_t code, const std::string& message) : std::runtime_error(message), code_(code) {}

    ncclResult_t code() const { return code_; }

  private:
    ncclResult_t code_;
};

// Throws Error unless result is ncclSuccess. To be called on the thread that made the call.
inline void check(ncclResult_t result) {
    if (result != ncclSuccess) {
        throw Error(result, crossdockGetLastError());
    }
}

}  // namespace cxx
}  // namespace crossdock

#endif  // CROSSDOCK_ERROR_HPP_
