// SPDX-License-Identifier: Apache-2.0
#include "runtime/cpu/slot_checker.h"

#include <fmt/format.h>

#include <climits>

namespace crossdock::cpu {

void SlotChecker::slot_written(int writer, int owner, const void* memory, int buffer, uint64_t slot_idx,
                               uint64_t epoch) {
    Slot& slot = slots_[{memory, buffer, slot_idx}];
    std::string dispute;
    if (!slot.is_read && is_undisturbed()) {
        const std::string what = fmt::format(
            "rank {} wrote slot {} of buffer {} of rank {} for epoch {} before rank {} had read what rank {} "
            "wrote there for epoch {}",
            writer, slot_idx, buffer, owner, epoch, owner, slot.writer, slot.epoch);
        if (slot.writer != writer && slot.epoch == epoch) {
            dispute = what;
        } else {
            violated(what);
        }
    }
    slot = {writer, epoch, false, dispute};
}

void SlotChecker::slot_read(int owner, const void* memory, int buffer, uint64_t slot_idx, uint64_t epoch) {
    Slot& slot = slots_[{memory, buffer, slot_idx}];
    if (slot.writer < 0) {
        violated(fmt::format("rank {} read its slot {} of buffer {} for epoch {}, which was never written", owner,
                             slot_idx, buffer, epoch));
    } else if (slot.epoch != epoch) {
        violated(
            fmt::format("rank {} read its slot {} of buffer {} for epoch {}, but rank {} last wrote it for epoch {}",
                        owner, slot_idx, buffer, epoch, slot.writer, slot.epoch));
    } else if (slot.is_read && is_undisturbed()) {
        violated(
            fmt::format("rank {} read its slot {} of buffer {} twice for epoch {}", owner, slot_idx, buffer, epoch));
    } else if (!slot.dispute.empty() && is_undisturbed()) {
        violated(slot.dispute);
    }
    slot.is_read = true;
}

void SlotChecker::operation_read(int owner, uint64_t epoch, uint64_t rows_announced, uint64_t rows_read) {
    if (rows_announced != rows_read && is_undisturbed()) {
        violated(fmt::format("rank {} read {} rows in epoch {}, but {} were announced to it", owner, rows_read, epoch,
                             rows_announced));
    }
}

void SlotChecker::memory_is_new(const void* memory) {
    slots_.erase(slots_.lower_bound({memory, INT_MIN, 0}), slots_.upper_bound({memory, INT_MAX, UINT64_MAX}));
}

void SlotChecker::violated(const std::string& what) {
    if (scheduler_->config().fault == Fault::kWriteGarbage) return;
    if (violation_.empty()) {
        violation_ = fmt::format("seed {}, step {}: {}", scheduler_->config().seed, scheduler_->num_steps(), what);
    }
}

}  // namespace crossdock::cpu
