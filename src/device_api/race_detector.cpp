// SPDX-License-Identifier: Apache-2.0
#include "device_api/race_detector.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "core/error.h"

namespace crossdock::device_api {
namespace {

constexpr size_t kMaxWaits = 8;  // in a deadlock's report

// File and line, if addr2line is installed and the code has debug information.
std::string source_line(const char* object, uintptr_t offset) {
    const std::string command = fmt::format("addr2line -s -e '{}' {:#x} 2>/dev/null", object, offset);
    std::string line;
    if (FILE* pipe = std::strchr(object, '\'') == nullptr ? popen(command.c_str(), "r") : nullptr) {
        char buffer[512];
        if (std::fgets(buffer, sizeof(buffer), pipe) != nullptr) line = buffer;
        pclose(pipe);
    }
    line = line.substr(0, line.find_first_of("\n("));
    while (!line.empty() && line.back() == ' ') line.pop_back();
    return line.empty() || line[0] == '?' ? std::string() : line;
}

std::string place_of(const void* instruction) {
    Dl_info info;
    if (dladdr(instruction, &info) == 0 || info.dli_fname == nullptr) return fmt::format("{}", instruction);
    // The call's return address: the access is before it.
    const uintptr_t offset = reinterpret_cast<uintptr_t>(instruction) - reinterpret_cast<uintptr_t>(info.dli_fbase) - 1;
    const std::string line = source_line(info.dli_fname, offset);
    return line.empty() ? fmt::format("{}+{:#x}", info.dli_fname, offset) : line;
}

}  // namespace

std::string RaceDetector::name(const Who& who) {
    return fmt::format("rank {}, block {}, thread {}", who.rank, who.block, who.thread);
}

std::string RaceDetector::name(crossdockWhere where) {
    if (where.file == nullptr) return "an unknown line";
    const char* slash = std::strrchr(where.file, '/');
    return fmt::format("{}:{}", slash == nullptr ? where.file : slash + 1, where.line);
}

void RaceDetector::watch(const std::byte* memory, size_t bytes, int rank, uint64_t window) {
    const auto found = regions_.find(memory);
    if (found != regions_.end() && found->second.bytes == bytes && found->second.window == window) return;
    // Forget earlier windows at these addresses.
    std::erase_if(regions_, [&](const auto& entry) {
        return entry.first < memory + bytes && memory < entry.first + entry.second.bytes;
    });
    regions_[memory] = {bytes, rank, window, {}};
}

uint32_t RaceDetector::number_of(const Who& who) {
    return numbers_.emplace(std::array{who.rank, who.block, who.thread}, numbers_.size()).first->second;
}

void RaceDetector::violated(const std::string& what) {
    if (!violation_.empty() || !waits_.empty() || !waits_within_blocks_.empty()) return;
    violation_ = fmt::format("seed {}: {}", scheduler_->config().seed, what);
    scheduler_->report(violation_);
    scheduler_->note_progress();  // waiting threads end, too
}

void RaceDetector::add_waiting(const std::string& deadlock, const std::string& wait, bool is_within_block) {
    if (!violation_.empty()) return;
    (is_within_block ? waits_within_blocks_ : waits_).push_back(wait);
    const auto& listed = waits_.empty() ? waits_within_blocks_ : waits_;
    std::string report = deadlock;
    for (size_t i = 0; i < listed.size() && i < kMaxWaits; ++i) {
        report += fmt::format("{} {}", i == 0 ? ":" : ";", listed[i]);
    }
    if (listed.size() > kMaxWaits) report += fmt::format("; and {} more", listed.size() - kMaxWaits);
    scheduler_->report(report);
}

void RaceDetector::thread_accesses(const Who& who, uint32_t number, const Clock& clock, const void* memory,
                                   size_t bytes, bool is_write, const void* instruction) {
    check({is_write ? Kind::kThreadWrite : Kind::kThreadRead, {who}, number, clock.of_thread(number), instruction},
          clock, memory, bytes);
}

void RaceDetector::put_reads(uint64_t put, const Transfer& transfer, const Clock& issued, const void* memory,
                             size_t bytes) {
    check({Kind::kPutRead, transfer, put, 0, nullptr}, issued, memory, bytes);
}

void RaceDetector::put_lands(uint64_t put, const Transfer& transfer, const Clock& issued, const void* memory,
                             size_t bytes) {
    check({Kind::kPutLanding, transfer, put, 0, nullptr}, issued, memory, bytes);
}

bool RaceDetector::is_known(const Access& access, const Clock& clock) const {
    switch (access.kind) {
        case Kind::kThreadRead:
        case Kind::kThreadWrite:
            return access.time <= clock.of_thread(static_cast<uint32_t>(access.number));
        case Kind::kPutRead:
            return clock.knows_read(access.number);
        case Kind::kPutLanding:
            return clock.knows_landed(access.number);
    }
    return true;
}

void RaceDetector::check(const Access& access, const Clock& clock, const void* memory, size_t bytes) {
    if (bytes == 0 || !violation_.empty()) return;
    const auto* first = static_cast<const std::byte*>(memory);
    auto region = regions_.upper_bound(first);
    if (region == regions_.begin()) return;
    --region;
    const size_t offset = static_cast<size_t>(first - region->first);
    if (offset >= region->second.bytes) return;
    // Loops repeat accesses, which share one entry.
    const Access& last = accesses_.back();
    if (last.kind != access.kind || last.number != access.number || last.time != access.time ||
        last.instruction != access.instruction) {
        accesses_.push_back(access);
    }
    const auto index = static_cast<uint32_t>(accesses_.size() - 1);
    const bool is_write = access.kind == Kind::kThreadWrite || access.kind == Kind::kPutLanding;
    for (size_t at = offset; at < std::min(offset + bytes, region->second.bytes); ++at) {
        Byte& byte = region->second.pages[at / kPageBytes][at % kPageBytes];
        for (const uint32_t earlier : {byte.write, is_write ? byte.read : 0, is_write ? byte.put_read : 0}) {
            if (earlier == 0 || earlier == index || is_known(accesses_[earlier], clock)) continue;
            // A put may read what it will overwrite.
            if (accesses_[earlier].kind == Kind::kPutRead && access.kind == Kind::kPutLanding &&
                accesses_[earlier].number == access.number) {
                continue;
            }
            return report(accesses_[earlier], access, region->second, at);
        }
        if (is_write) {
            byte = {index, 0, 0};
        } else if (access.kind == Kind::kPutRead) {
            byte.put_read = index;
        } else {
            byte.read = index;
        }
    }
}

std::string RaceDetector::describe(const Access& access) {
    const auto& [who, where, is_get] = access.by;
    const char* what = is_get ? "get" : "put";
    switch (access.kind) {
        case Kind::kThreadRead:
            return fmt::format("{} reads it at {}", name(who), place_of(access.instruction));
        case Kind::kThreadWrite:
            return fmt::format("{} writes it at {}", name(who), place_of(access.instruction));
        case Kind::kPutRead:
            return fmt::format("it is a source of the {} of {} at {}", what, name(who), name(where));
        case Kind::kPutLanding:
            return fmt::format("the {} of {} at {} writes it", what, name(who), name(where));
    }
    return {};
}

void RaceDetector::report(const Access& first, const Access& second, const Region& region, size_t offset) {
    const auto is_one = [&](Kind kind, bool is_get) {
        return (first.kind == kind && first.by.is_get == is_get) || (second.kind == kind && second.by.is_get == is_get);
    };
    const auto is_write = [](const Access& access) {
        return access.kind == Kind::kThreadWrite || access.kind == Kind::kPutLanding;
    };
    const char* what = "data read and written by two threads that nothing orders";
    if (is_one(Kind::kPutRead, false)) {
        what = "source changed before a flush or a counter said that it was read";
    } else if (is_one(Kind::kPutRead, true)) {
        what = "source of a get changed before the get was done, or got before it was there";
    } else if (is_write(first) && is_write(second)) {
        what = "two unordered writes to one place";
    } else if (is_one(Kind::kPutLanding, true)) {
        what = "data read before a flush said that the get was done, or got over what is still read";
    } else if (is_one(Kind::kPutLanding, false)) {
        what = "data read without waiting for a signal that covers the put, or overwritten before its reader was done";
    }
    violated(fmt::format("{}: byte {} of rank {}'s window {}: {}; {}", what, offset, region.rank, region.window,
                         describe(first), describe(second)));
}

}  // namespace crossdock::device_api
