// SPDX-License-Identifier: Apache-2.0
// The mesh's receiving half: frames become bytes in memory, then signals.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/error.h"
#include "network/mesh.h"

namespace crossdock::network {
namespace {

constexpr size_t kMaxEarly = 1 << 16;

}  // namespace

void Mesh::on_frame(const FrameHeader& header, Payload& payload) {
    if (takes_nothing_ || is_lost(header.source)) return;
    guarded([&] { act_on(header, payload); });
}

void Mesh::act_on(const FrameHeader& header, Payload& payload) {
    switch (header.kind) {
        case FrameKind::kAnnounce:
            return on_announcement(header);
        case FrameKind::kPut:
            return on_put(header, payload);
        case FrameKind::kGet:
            return on_get(header);
        case FrameKind::kReply:
            return on_reply(header, payload);
        case FrameKind::kRefusal:
            return on_refusal(header);
        case FrameKind::kNote:
            return on_note(header, payload);
    }
}

void Mesh::on_announcement(const FrameHeader& header) {
    const RemoteRegion remote{true, static_cast<MemoryKind>(header.context), header.value};
    if (was_registered(header.region)) {
        if (Region* region = find(header.region)) region->remote[header.source] = remote;
    } else if (peers_[header.source].early.size() < kMaxEarly) {
        peers_[header.source].early[header.region] = remote;
    }
}

void Mesh::on_put(const FrameHeader& header, Payload& payload) {
    if (payload.bytes() > 0 && !was_registered(header.region)) {
        return fail_peer(header.source,
                         fmt::format("rank {} puts into memory that was never registered", header.source));
    }
    Region* region = payload.bytes() > 0 ? find(header.region) : nullptr;
    // Bytes for deregistered memory are dropped, as late stores of a kernel would be.
    if (region == nullptr) return put_landed(header);
    if (!fits(header.offset, header.length, region->bytes)) {
        return fail_peer(header.source, fmt::format("rank {} puts {} bytes at offset {} into memory of {} bytes",
                                                    header.source, header.length, header.offset, region->bytes));
    }
    land(header, *region, region->base + header.offset, payload);
}

void Mesh::on_get(const FrameHeader& header) {
    Region* region = find(header.region);
    if (region == nullptr) {
        FrameHeader refusal = {};
        refusal.kind = FrameKind::kRefusal;
        refusal.value = header.value;
        return send_header(header.source, refusal);
    }
    if (!fits(header.offset, header.length, region->bytes)) {
        return fail_peer(header.source, fmt::format("rank {} gets {} bytes at offset {} from memory of {} bytes",
                                                    header.source, header.length, header.offset, region->bytes));
    }
    answer(header, *region);
}

void Mesh::on_reply(const FrameHeader& header, Payload& payload) {
    const auto found = questions_.find(header.value);
    Operation* operation = found == questions_.end() ? nullptr : found->second;
    const bool fitting = operation != nullptr && operation->peer == header.source &&
                         fits(header.offset, header.length, operation->bytes) &&
                         header.length <= operation->bytes - operation->begun;
    if (!fitting)
        return fail_peer(header.source, fmt::format("rank {} sent a reply that matches no pending get", header.source));
    operation->begun += header.length;
    note_change(header.source);
    land(header, *operation->region, operation->address + header.offset, payload);
}

void Mesh::on_refusal(const FrameHeader& header) {
    const auto found = questions_.find(header.value);
    if (found == questions_.end() || found->second->peer != header.source) return;
    fail_peer(header.source, fmt::format("rank {} has deregistered the memory that a get reads", header.source));
}

void Mesh::on_note(const FrameHeader& header, const Payload& payload) {
    auto& notes = peers_[header.source].notes;
    if (payload.data() == nullptr || notes.size() >= kMaxEarly) {
        return fail_peer(header.source, fmt::format("rank {} sent an invalid host message, or more than {} unread ones",
                                                    header.source, kMaxEarly));
    }
    notes[header.value].assign(payload.data(), payload.data() + payload.bytes());
}

void Mesh::land(const FrameHeader& header, Region& region, std::byte* target, Payload& payload) {
    // The fast path of small puts into host memory: no state to keep.
    if (region.kind == MemoryKind::kHost && payload.data() != nullptr) {
        std::memcpy(target, payload.data(), payload.bytes());
        if (header.kind == FrameKind::kPut) return put_landed(header);
        return reply_landed(header);
    }
    // A word needs no staging.
    if (region.kind == MemoryKind::kDevice && header.kind == FrameKind::kPut && payload.data() != nullptr &&
        payload.bytes() == sizeof(uint64_t) && reinterpret_cast<uintptr_t>(target) % sizeof(uint64_t) == 0) {
        uint64_t value = 0;
        std::memcpy(&value, payload.data(), sizeof(value));
        write_word(region, header.offset, value);
        return put_landed(header);
    }
    if (region.kind == MemoryKind::kDevice && header.length > kStagedPieceBytes) {
        return fail_peer(header.source,
                         fmt::format("rank {} sends {} bytes for device memory in one frame, of at most {}",
                                     header.source, header.length, kStagedPieceBytes));
    }
    auto* landing = new Landing{this, header, &region, target, nullptr};
    ++region.uses;
    if (region.kind == MemoryKind::kHost) {
        ++num_fetches_;
        payload.fetch(target, on_fetched, landing);
    } else if (!unstaged_.empty() || !stage(*landing, payload)) {
        payload.keep();
        unstaged_.push_back({landing, std::make_unique<Payload>(std::move(payload))});
    }
}

// Fetches into staging memory, then copies to the device. Returns false if no staging buffer is free.
bool Mesh::stage(Landing& landing, Payload& payload) {
    landing.staging = staging_in_.take(payload.bytes());
    if (landing.staging == nullptr) return false;
    ++num_fetches_;
    if (payload.data() != nullptr) {
        std::memcpy(landing.staging, payload.data(), payload.bytes());
        on_fetched(&landing, UCS_OK);
    } else {
        payload.fetch(landing.staging, on_fetched, &landing);
    }
    return true;
}

void Mesh::on_fetched(void* argument, ucs_status_t status) {
    auto* landing = static_cast<Landing*>(argument);
    Mesh& mesh = *landing->mesh;
    --mesh.num_fetches_;
    if (status != UCS_OK) {
        const uint32_t source = landing->header.source;
        mesh.failed_transfers_.emplace_back(
            source, fmt::format("receiving from rank {} failed: {}", source, status_name(status)));
        if (landing->staging != nullptr) mesh.staging_in_.give_back(landing->staging);
        --landing->region->uses;
        delete landing;
        return;
    }
    mesh.guarded([&] { mesh.fetched(landing); });
}

void Mesh::fetched(Landing* landing) {
    if (landing->staging == nullptr) return landed(landing);
    last_step_in_ = config_.device->copy_in(landing->target, landing->staging, landing->header.length);
    landing->region->last_step_in = last_step_in_;
    arriving_.push_back({last_step_in_, landing});
    // Signals are written after this copy, so for them the bytes have landed.
    if (landing->header.kind == FrameKind::kPut) put_landed(landing->header);
}

// The bytes are in place, on the device, too.
void Mesh::landed(Landing* landing) {
    const FrameHeader header = landing->header;
    const bool was_staged = landing->staging != nullptr;
    if (was_staged) staging_in_.give_back(landing->staging);
    --landing->region->uses;
    delete landing;
    if (header.kind == FrameKind::kReply) {
        reply_landed(header);
    } else if (!was_staged) {
        put_landed(header);
    }
}

void Mesh::put_landed(const FrameHeader& header) {
    Inlet& inlet = this->inlet(header.context, header.source);
    if (!inlet.landed.land(header.number)) {
        return fail_peer(header.source,
                         fmt::format("rank {} sent frame {} of context {} twice or outside the receive window",
                                     header.source, header.number, header.context));
    }
    if (inlet.signals.empty()) {
        if ((header.flags & kFlagSignal) != 0 && !try_signal(inlet, header)) inlet.signals.push_back(header);
        return;
    }
    if ((header.flags & kFlagSignal) != 0) {
        // Sorted by number: a strong signal must not be seen before earlier ones.
        const auto later = std::find_if(inlet.signals.begin(), inlet.signals.end(),
                                        [&](const FrameHeader& other) { return other.number > header.number; });
        inlet.signals.insert(later, header);
    }
    std::erase_if(inlet.signals, [&](const FrameHeader& waiting) { return try_signal(inlet, waiting); });
}

bool Mesh::try_signal(Inlet& inlet, const FrameHeader& header) {
    const uint64_t first = (header.flags & kFlagStrong) != 0 ? 0 : header.number - header.span;
    if (!inlet.landed.has_landed(first, header.number)) return false;
    apply_signal(header);
    return true;
}

void Mesh::apply_signal(const FrameHeader& header) {
    Region* region = find(header.signal_region);
    if (region == nullptr) {
        if (was_registered(header.signal_region)) return;  // it was deregistered
        return fail_peer(header.source, fmt::format("rank {} signals memory that was never registered", header.source));
    }
    const uint64_t offset = header.signal_offset;
    const bool is_aligned = reinterpret_cast<uintptr_t>(region->base + offset) % kSignalBytes == 0;
    if (!is_aligned || !fits(offset, kSignalBytes, region->bytes)) {
        return fail_peer(header.source,
                         fmt::format("rank {} signals a word at offset {} of memory of {} bytes{}", header.source,
                                     offset, region->bytes, is_aligned ? "" : ", which is not aligned"));
    }
    LateSignal late = {region, offset, header.value, 0, false, nullptr, {}};
    const bool is_first = late_signals_.empty();
    if (region->kind == MemoryKind::kHost) {
        // Pending copies and words to the device must be done first.
        late.step = last_step_in_;
        if (is_first && (late.step == 0 || late.step <= config_.device->done_in())) return add_to_word(late);
    } else if (const auto* kept = region->word_at(offset); kept != nullptr && kept->has_value()) {
        if (is_first) return add_to_word(late);
    } else {
        // An earlier signal to the same word tells its value.
        late.is_word_unknown = std::none_of(late_signals_.begin(), late_signals_.end(), [&](const LateSignal& other) {
            return other.region == region && other.offset == offset;
        });
        if (late.is_word_unknown) ask_for_word(late);
    }
    ++region->uses;
    late_signals_.push_back(late);
}

// Returns false if no staging buffer is free.
bool Mesh::ask_for_word(LateSignal& late) {
    std::byte* staging = staging_in_.take(sizeof(uint64_t));
    if (staging == nullptr) return false;
    late.step = last_step_in_ = config_.device->read_word(staging, late.region->base + late.offset);
    late.word = staging;
    late.is_word_unknown = false;
    return true;
}

// Applies a signal whose conditions are met.
void Mesh::add_to_word(const LateSignal& late) {
    Region& region = *late.region;
    if (region.kind == MemoryKind::kHost) {
        std::atomic_ref word(*reinterpret_cast<uint64_t*>(region.base + late.offset));
        word.fetch_add(late.value, std::memory_order_release);
        return;
    }
    uint64_t before = late.known.value_or(0);
    if (late.word != nullptr) {
        std::memcpy(&before, late.word, sizeof(before));
        staging_in_.give_back(late.word);
    }
    std::optional<uint64_t>* const kept = region.word_at(late.offset);
    if (kept != nullptr) {
        before = kept->value_or(before);
        *kept = before + late.value;
    }
    write_word(region, late.offset, before + late.value);
    // Nothing else writes the word until the next pending signal to it has been seen, so that one need not read it.
    const auto next = std::find_if(late_signals_.begin(), late_signals_.end(), [&](const LateSignal& other) {
        return &other != &late && other.region == &region && other.offset == late.offset;
    });
    if (next != late_signals_.end()) next->known = before + late.value;
}

void Mesh::write_word(Region& region, uint64_t offset, uint64_t value) {
    region.last_step_in = last_step_in_ = config_.device->write_word(region.base + offset, value);
}

// Applies signals in order, so that a strong signal is seen after earlier ones.
void Mesh::progress_signals(uint64_t done) {
    while (!late_signals_.empty()) {
        LateSignal& late = late_signals_.front();
        if (late.is_word_unknown && !ask_for_word(late)) return;
        if (late.step > done) return;
        add_to_word(late);
        --late.region->uses;
        late_signals_.pop_front();
    }
}

void Mesh::reply_landed(const FrameHeader& header) {
    const auto found = questions_.find(header.value);
    if (found == questions_.end()) return;
    Operation* operation = found->second;
    operation->remaining -= header.length;
    if (operation->remaining > 0) return;
    questions_.erase(found);
    --peers_[operation->peer].waits;
    end(*operation);
}

void Mesh::progress_incoming() {
    if (arriving_.empty() && late_signals_.empty() && unstaged_.empty()) return;
    const uint64_t done = config_.device == nullptr ? 0 : config_.device->done_in();
    while (!arriving_.empty() && arriving_.front().step <= done) {
        Landing* landing = arriving_.front().landing;
        arriving_.pop_front();
        landed(landing);
    }
    progress_signals(done);
    while (!unstaged_.empty() && stage(*unstaged_.front().landing, *unstaged_.front().payload)) unstaged_.pop_front();
}

}  // namespace crossdock::network
