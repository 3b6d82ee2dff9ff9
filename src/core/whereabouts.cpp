// SPDX-License-Identifier: Apache-2.0
// Ranks that call different groups of a communicator, or handles with different memory, wait for each other until a
// wait expires: no kernel sees both operations. But a rank tells all others, in each group's own words, which operation
// it has entered, so this rank's memory says where the other one is.
#include <fmt/format.h>

#include <shared_mutex>

#include "core/diagnosis.h"
#include "core/group.h"
#include "core/objects.h"
#include "kernels/wait_steps.h"
#include "runtime/runtime.h"

namespace crossdock {
namespace {

struct Entered {
    uint64_t epoch = 0;
    Terms terms;

    OperationKind operation() const { return static_cast<OperationKind>(terms.get(Term::kOperation)); }
};

// What the rank's latest word says, or the one of `epoch`.
template <typename Words>
Entered entered_by(Runtime& runtime, const Words& words, int rank, std::optional<uint64_t> epoch = {}) {
    Entered found;
    for (uint32_t i = 0; i < words.count; ++i) {
        uint64_t word[2] = {};
        const std::byte* const at = words.first + i * words.stride + sizeof(TaggedWord) * static_cast<size_t>(rank);
        runtime.look_at_words(word, reinterpret_cast<const uint64_t*>(at), 2);
        const Entered entered{word_epoch(word[1]), {word[0]}};
        if (epoch ? entered.epoch == *epoch : entered.epoch > found.epoch) found = entered;
    }
    return found;
}

const char* mode_of(const GroupConfig& config) { return config.algorithm == NCCL_EP_ALGO_LOW_LATENCY ? "LL" : "HT"; }

// Null if the terms say nothing of the handle.
const Terms* terms_of_handle(const GroupConfig& config, const Entered& entered) {
    const bool tells = config.algorithm == NCCL_EP_ALGO_LOW_LATENCY || entered.operation() == OperationKind::kUpdate;
    return tells && entered.epoch != 0 ? &entered.terms : nullptr;
}

}  // namespace

std::vector<Group::EnteredWords> Group::entered_words() const {
    std::vector<EnteredWords> all;
    for (const auto& arena : arenas_) {
        const LlOffsets offsets = LlArenaLayout::of(arena->geometry).offsets;
        all.push_back({arena->memory->local + offsets.buffers + offsets.entries.offset, offsets.buffer_bytes,
                       arena->geometry.num_buffers});
    }
    if (ht_arena_ != nullptr) {
        const HtOffsets offsets = HtArenaLayout::of(ht_arena_->geometry).offsets;
        const uint32_t ranks = ht_arena_->geometry.num_ranks;
        all.push_back({ht_arena_->memory->local + offsets.terms.offset, sizeof(TaggedWord) * ranks, 2});
    }
    return all;
}

std::string Group::whereabouts(const crossdockDiagnosis_t& diagnosis) const try {
    if (diagnosis.valid == 0 || is_interruption(diagnosis) || diagnosis.peer == rank()) return "";
    const int peer = diagnosis.peer;
    // Memory that is being made or destroyed is left out: whoever does that may wait for this rank. Ranks that are
    // threads may look at the same time.
    Entered ours;
    if (const std::shared_lock lock(memory_mutex_, std::try_to_lock); lock.owns_lock()) {
        for (const EnteredWords& words : entered_words()) {
            const Entered entered = entered_by(runtime(), words, rank(), diagnosis.epoch);
            if (entered.epoch != 0 && entered_by(runtime(), words, peer).epoch <= entered.epoch) ours = entered;
        }
    }
    for (const auto& group : groups().all()) {
        const std::shared_lock lock(group->memory_mutex_, std::try_to_lock);
        if (!lock.owns_lock() || group->communicator_ == nullptr) continue;
        if (group->communicator_->identity() != communicator_->identity()) continue;
        for (const EnteredWords& words : group->entered_words()) {
            const Entered theirs = entered_by(runtime(), words, peer);
            if (theirs.epoch <= entered_by(runtime(), words, rank()).epoch) continue;
            return fmt::format("; rank {} has entered {} {} (operation {}) {}{}", peer, mode_of(group->config_),
                               name_of(theirs.operation()), theirs.epoch,
                               group.get() == this ? "with other memory of the group" : "of another group",
                               differences_of_groups({rank(), config_, terms_of_handle(config_, ours)},
                                                     {peer, group->config_, terms_of_handle(group->config_, theirs)}));
        }
    }
    return "";
} catch (const Error&) {
    return "";  // the device cannot be asked any more
}

}  // namespace crossdock
