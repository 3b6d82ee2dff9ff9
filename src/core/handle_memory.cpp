// SPDX-License-Identifier: Apache-2.0
#include "core/handle_memory.h"

#include <algorithm>
#include <utility>

namespace crossdock {

DeviceMemory HandleMemory::take(size_t bytes) {
    // The smallest that is large enough, unless most of it would be wasted.
    auto best = spare_.end();
    for (auto it = spare_.begin(); it != spare_.end(); ++it) {
        const bool fits = it->bytes() >= bytes && it->bytes() / 2 <= bytes;
        if (fits && (best == spare_.end() || it->bytes() < best->bytes())) best = it;
    }
    DeviceMemory memory;
    if (best != spare_.end()) {
        memory = std::move(*best);
        spare_.erase(best);
        spare_bytes_ -= memory.bytes();
    } else {
        memory = DeviceMemory(runtime_, hooks_, bytes, false);
    }
    used_bytes_ += memory.bytes();
    most_used_bytes_ = std::max(most_used_bytes_, used_bytes_);
    trim();
    return memory;
}

void HandleMemory::give_back(DeviceMemory memory, bool is_in_graphs) {
    if (memory.data() == nullptr) return;
    used_bytes_ -= memory.bytes();
    if (is_in_graphs) {
        in_graphs_.push_back(std::move(memory));
    } else {
        spare_bytes_ += memory.bytes();
        spare_.push_back(std::move(memory));
        trim();
    }
}

void HandleMemory::trim() {
    const size_t most = std::max(kAlwaysKept, 2 * most_used_bytes_);
    while (!spare_.empty() && used_bytes_ + spare_bytes_ > most) {
        spare_bytes_ -= spare_.front().bytes();
        // The runtime frees memory only after queued operations; hooks do not wait, so their memory is retired first.
        if (hooks_.free_fn != nullptr) retired_.push_back(std::move(spare_.front()));
        spare_.erase(spare_.begin());
    }
}

uint64_t* HandleMemory::take_word() {
    if (spare_words_.empty()) {
        auto* made = static_cast<uint64_t*>(runtime_.allocate_host_visible(sizeof(uint64_t)));
        ++num_words_;
        return made;
    }
    uint64_t* word = spare_words_.back();
    spare_words_.pop_back();
    return word;
}

void HandleMemory::give_back(uint64_t* word) { spare_words_.push_back(word); }

size_t HandleMemory::held_bytes() const {
    size_t bytes = used_bytes_ + spare_bytes_;
    for (const auto* kept : {&retired_, &in_graphs_}) {
        for (const DeviceMemory& memory : *kept) bytes += memory.bytes();
    }
    return bytes;
}

void HandleMemory::clear() noexcept {
    spare_.clear();
    retired_.clear();
    in_graphs_.clear();
    spare_bytes_ = 0;
    for (uint64_t* word : spare_words_) runtime_.free_host_visible(word);
    num_words_ -= spare_words_.size();
    spare_words_.clear();
}

}  // namespace crossdock
