// SPDX-License-Identifier: Apache-2.0
// Catches all exceptions at the C boundary: none leaves the library, and every failure sets the last error.
#pragma once

#include <new>
#include <utility>

#include "core/error.h"
#include "core/log.h"

namespace crossdock {

// Runs body and turns what it throws into a result code and the thread's last error, which is printed if NCCL_DEBUG or
// NCCL_EP_DEBUG asks for it.
template <typename Body>
ncclResult_t boundary(Body&& body) noexcept {
    try {
        std::forward<Body>(body)();
        return ncclSuccess;
    } catch (const Error& error) {
        return report_failure(error.code(), error.what());
    } catch (const std::bad_alloc&) {
        return report_failure(ncclSystemError, "out of host memory");
    } catch (const std::exception& error) {
        return report_failure(ncclInternalError, error.what());
    } catch (...) {
        return report_failure(ncclInternalError, "an exception of unknown type inside the library");
    }
}

}  // namespace crossdock
