// SPDX-License-Identifier: Apache-2.0
#include "network/staging.h"

namespace crossdock::network {

std::byte* StagingRing::take(uint64_t bytes) {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    uint64_t offset = 0;
    if (!pieces_.empty()) {
        const uint64_t oldest = pieces_.front().offset;
        const uint64_t next = pieces_.back().offset + pieces_.back().bytes;
        const bool wrapped = pieces_.back().offset < oldest;
        if (wrapped) {
            if (next + bytes > oldest) return nullptr;
            offset = next;
        } else if (next + bytes <= memory_.size()) {
            offset = next;
        } else if (bytes > oldest) {  // from the start again: not even there
            return nullptr;
        }
    } else if (bytes > memory_.size()) {
        return nullptr;
    }
    pieces_.push_back({offset, bytes, false});
    return memory_.data() + offset;
}

void StagingRing::give_back(const std::byte* piece) {
    const auto offset = static_cast<uint64_t>(piece - memory_.data());
    for (Piece& each : pieces_) {
        if (each.offset == offset && !each.is_free) {
            each.is_free = true;
            break;
        }
    }
    while (!pieces_.empty() && pieces_.front().is_free) pieces_.pop_front();
}

}  // namespace crossdock::network
