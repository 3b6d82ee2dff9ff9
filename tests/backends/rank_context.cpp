// SPDX-License-Identifier: Apache-2.0
#include "rank_context.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <thread>

namespace crossdock::testing {

void RankContext::pause() { std::this_thread::yield(); }
void RankContext::yield() { std::this_thread::yield(); }

void RankContext::record_failure(const char* file, int line, const std::string& message) {
    constexpr size_t kMostFailures = 8;
    if (failures_.size() >= kMostFailures) return;
    failures_.push_back(
        fmt::format("rank {}: {}:{}: {}", rank_, std::filesystem::path(file).filename().string(), line, message));
}

void RankContext::add_to_digest(const void* bytes, size_t size) {
    // FNV-1a over words, with the length, so that neighbouring pieces cannot trade bytes.
    const auto add = [this](uint64_t word) { digest_ = (digest_ ^ word) * 0x100000001B3u; };
    const auto* begin = static_cast<const std::byte*>(bytes);
    for (size_t i = 0; i < size; i += sizeof(uint64_t)) {
        uint64_t word = 0;
        std::memcpy(&word, begin + i, std::min(sizeof word, size - i));
        add(word);
    }
    add(size);
}

const char* result_name(ncclResult_t result) {
    switch (static_cast<int>(result)) {
        case ncclSuccess:
            return "ncclSuccess";
        case ncclUnhandledCudaError:
            return "ncclUnhandledCudaError";
        case ncclSystemError:
            return "ncclSystemError";
        case ncclInternalError:
            return "ncclInternalError";
        case ncclInvalidArgument:
            return "ncclInvalidArgument";
        case ncclInvalidUsage:
            return "ncclInvalidUsage";
        case ncclRemoteError:
            return "ncclRemoteError";
        case ncclInProgress:
            return "ncclInProgress";
        case ncclTimeout:
            return "ncclTimeout";
        default:
            return "an unknown result";
    }
}

void require_success(RankContext& context, ncclResult_t result, const char* file, int line, const char* call) {
    if (result == ncclSuccess) return;
    context.record_failure(file, line,
                           fmt::format("{} answered {}: {}", call, result_name(result), crossdockGetLastError()));
    throw StopProgram("a call failed");
}

void check_refused(RankContext& context, ncclResult_t result, ncclResult_t expected, const std::string& word,
                   const char* file, int line, const char* call) {
    const std::string message = crossdockGetLastError();
    if (result != expected) {
        context.record_failure(file, line,
                               fmt::format("{} answered {} instead of {}; last error: \"{}\"", call,
                                           result_name(result), result_name(expected), message));
    } else if (message.empty() || message.find(word) == std::string::npos) {
        context.record_failure(file, line,
                               fmt::format("{}: the message \"{}\" does not say \"{}\"", call, message, word));
    }
}

}  // namespace crossdock::testing
