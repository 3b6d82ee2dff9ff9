// SPDX-License-Identifier: Apache-2.0
// The plugin's boundary: exceptions become results and messages in NCCL's log.
#pragma once

#include <cstddef>
#include <exception>

#include "core/error.h"
#include "plugin/nccl_rma.h"

namespace crossdock::plugin {

// Uses NCCL's log from now on.
void set_log(LogFunction log) noexcept;
void warn(const char* message) noexcept;
// Copies the last warning of this process, truncated to `bytes` including its 0.
void copy_last_warning(char* message, size_t bytes) noexcept;
void inform(const char* message) noexcept;

// Runs `call` and turns what it throws into a result.
template <class Call>
ncclResult_t guarded(Call call) noexcept {
    try {
        call();
        return ncclSuccess;
    } catch (const Error& error) {
        warn(error.what());
        return error.code();
    } catch (const std::exception& error) {
        warn(error.what());
        return ncclSystemError;
    } catch (...) {
        warn("an exception of unknown kind");
        return ncclInternalError;
    }
}

}  // namespace crossdock::plugin
