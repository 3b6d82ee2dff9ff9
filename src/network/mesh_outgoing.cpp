// SPDX-License-Identifier: Apache-2.0
// The mesh's sending half: operations become frames.
#include <algorithm>
#include <initializer_list>

#include "core/error.h"
#include "network/mesh.h"

namespace crossdock::network {
namespace {

// Pieces through staging are small, so that copies and the network work at the same time.
constexpr uint32_t kMaxUnderWay = 16;

uint64_t pieces_of(uint64_t bytes, uint64_t piece_bytes) {
    return bytes <= piece_bytes ? 1 : (bytes + piece_bytes - 1) / piece_bytes;
}

bool has_left(const Region* region) { return region != nullptr && region->is_leaving; }

void note_operation(std::initializer_list<Region*> regions) {
    for (Region* region : regions) {
        if (region != nullptr) ++region->num_operations;
    }
}

}  // namespace

uint64_t Mesh::piece_bytes_for(MemoryKind here, MemoryKind there, uint32_t peer) const {
    const bool staged = here == MemoryKind::kDevice || there == MemoryKind::kDevice;
    return std::min(staged ? kStagedPieceBytes : kMaxFramePayload, transport_.good_payload(peer));
}

void Mesh::check_span(const Span& span, const char* name, uint32_t peer, bool is_remote) const {
    require(span.region != nullptr && !span.region->is_leaving, ncclInvalidArgument,
            "the {} names no registered memory", name);
    const uint64_t bytes = is_remote ? span.region->remote[peer].bytes : span.region->bytes;
    require(fits(span.offset, span.bytes, bytes), ncclInvalidArgument,
            "the {} is {} bytes from offset {}, but rank {} registered {} bytes", name, span.bytes, span.offset,
            is_remote ? peer : rank(), bytes);
}

Operation* Mesh::start(Operation::Kind kind, uint32_t context, uint32_t peer, bool is_late) {
    check_locked();
    require(peer < num_ranks(), ncclInvalidArgument, "rank {} is out of range: there are {} ranks", peer, num_ranks());
    require(context < num_contexts_, ncclInvalidArgument, "context {} is out of range: there are {}", context,
            num_contexts_);
    require(is_late || transport_.is_there(peer), ncclRemoteError, "rank {} has left", peer);
    Operation* operation = operations_.take();
    operation->kind = kind;
    operation->context = context;
    operation->peer = peer;
    operation->number = channel(context, peer).next_operation;
    if (kind != Operation::Kind::kFlush) ++channel(context, peer).next_operation;
    return operation;
}

Operation* Mesh::put(uint32_t context, uint32_t peer, const Span& source, const Span& target, const Signal& signal) {
    const std::lock_guard lock(mutex_);
    send_held();
    note_operation({source.region, target.region, signal.region});
    const bool has_signal = signal.region != nullptr;
    require(source.bytes == target.bytes, ncclInvalidArgument, "a put of {} bytes into {}", source.bytes, target.bytes);
    require(peer < num_ranks(), ncclInvalidArgument, "rank {} is out of range: there are {} ranks", peer, num_ranks());
    // Puts to or from memory that is being deregistered are dropped.
    const bool is_late =
        (source.bytes > 0 && (has_left(source.region) || has_left(target.region))) || has_left(signal.region);
    if (source.bytes > 0 && !is_late) {
        check_span(source, "source", peer, false);
        check_span(target, "target", peer, true);
    }
    if (has_signal && !is_late) check_span({signal.region, signal.offset, kSignalBytes}, "signal", peer, true);
    require(!has_signal || signal.offset % kSignalBytes == 0, ncclInvalidArgument,
            "the signal's offset is {}, allowed: multiples of {}", signal.offset, kSignalBytes);

    Operation* operation = start(Operation::Kind::kPut, context, peer, is_late);
    if (is_late || (source.bytes == 0 && !has_signal)) {
        end(*operation);
        return operation;
    }
    operation->bytes = source.bytes;
    operation->piece_bytes = kMaxFramePayload;
    if (source.bytes > 0) {
        operation->region = source.region;
        operation->address = source.region->base + source.offset;
        operation->piece_bytes = piece_bytes_for(source.region->kind, target.region->remote[peer].kind, peer);
        ++source.region->uses;
    }
    operation->remaining = pieces_of(source.bytes, operation->piece_bytes);
    // The fast path of small puts from host memory: the header is written directly into their only frame.
    const bool is_staged = source.bytes > 0 && source.region->kind == MemoryKind::kDevice;
    OutFrame* frame = operation->remaining == 1 && !is_staged ? take_frame(peer, operation) : nullptr;
    FrameHeader& header = frame != nullptr ? frame->header : operation->pattern;
    header = {};
    header.kind = FrameKind::kPut;
    header.context = static_cast<uint16_t>(context);
    header.number = channel(context, peer).next_frame;
    channel(context, peer).next_frame += operation->remaining;
    if (source.bytes > 0) {
        header.region = target.region->id;
        header.offset = target.offset;
    }
    if (has_signal) {
        // The last piece carries it; pump() takes the flags off the others.
        header.flags = static_cast<uint8_t>(kFlagSignal | (signal.is_strong ? kFlagStrong : 0));
        header.signal_region = signal.region->id;
        header.signal_offset = signal.offset;
        header.value = signal.value;
    }
    if (frame != nullptr) {
        header.length = source.bytes;
        frame->send.bytes = {operation->address, source.bytes};
        operation->begun = operation->under_way = 1;
        send_frame(*frame);
    } else {
        pump(*operation);
    }
    return operation;
}

Operation* Mesh::get(uint32_t context, uint32_t peer, const Span& remote, const Span& local) {
    const std::lock_guard lock(mutex_);
    note_operation({remote.region, local.region});
    require(remote.bytes == local.bytes, ncclInvalidArgument, "a get of {} bytes into {}", remote.bytes, local.bytes);
    require(peer < num_ranks(), ncclInvalidArgument, "rank {} is out of range: there are {} ranks", peer, num_ranks());
    const bool is_late = has_left(remote.region) || has_left(local.region);
    if (!is_late) {
        check_span(remote, "remote memory", peer, true);
        check_span(local, "local memory", peer, false);
    }
    Operation* operation = start(Operation::Kind::kGet, context, peer, is_late);
    if (is_late || local.bytes == 0) {
        end(*operation);
        return operation;
    }
    operation->region = local.region;
    operation->address = local.region->base + local.offset;
    operation->bytes = operation->remaining = local.bytes;
    ++local.region->uses;
    const uint64_t question = next_question_++;
    questions_.emplace(question, operation);

    FrameHeader header = {};
    header.kind = FrameKind::kGet;
    header.context = static_cast<uint16_t>(local.region->kind);
    header.region = remote.region->id;
    header.offset = remote.offset;
    header.length = remote.bytes;
    header.value = question;
    begin_wait(peer);
    send_header(peer, header);
    return operation;
}

Operation* Mesh::flush(uint32_t context, uint32_t peer) {
    const std::lock_guard lock(mutex_);
    return start(Operation::Kind::kFlush, context, peer);
}

bool Mesh::test(Operation* operation) {
    const std::lock_guard lock(mutex_);
    const auto has_ended = [&] {
        if (operation->kind != Operation::Kind::kFlush) return operation->has_ended;
        const uint64_t number = operation->number;
        return number == 0 || channel(operation->context, operation->peer).ended.has_landed(0, number - 1);
    };
    if (!has_ended()) progress_locked();
    if (has_ended()) {
        operations_.give_back(operation);
        return true;
    }
    check_locked();
    return false;
}

// Sends the bytes that a peer has asked for, as an operation that is never tested.
void Mesh::answer(const FrameHeader& question, Region& region) {
    Operation* operation = operations_.take();
    operation->kind = Operation::Kind::kReply;
    operation->peer = question.source;
    operation->pattern = {};
    operation->region = &region;
    operation->address = region.base + question.offset;
    operation->bytes = question.length;
    operation->piece_bytes = piece_bytes_for(region.kind, static_cast<MemoryKind>(question.context), question.source);
    operation->remaining = pieces_of(question.length, operation->piece_bytes);
    operation->pattern.kind = FrameKind::kReply;
    operation->pattern.value = question.value;
    ++region.uses;
    pump(*operation);
}

// Sends as many pieces as may be under way.
void Mesh::pump(Operation& operation) {
    operation.is_pumping = true;
    const uint64_t num_pieces = pieces_of(operation.bytes, operation.piece_bytes);
    while (operation.begun < num_pieces && operation.under_way < kMaxUnderWay && send_piece(operation)) {
    }
    operation.is_pumping = false;
    if (operation.remaining == 0) end(operation);
}

// Returns false if no staging buffer is free; progress_outgoing() retries.
bool Mesh::send_piece(Operation& operation) {
    const uint64_t offset = operation.begun * operation.piece_bytes;
    const uint64_t bytes = std::min(operation.piece_bytes, operation.bytes - offset);
    const bool is_staged = bytes > 0 && operation.region->kind == MemoryKind::kDevice;
    std::byte* staging = nullptr;
    if (is_staged) {
        staging = staging_out_.take(bytes);
        if (staging == nullptr) {
            operation.is_starved = true;
            starved_.push_back(&operation);
            return false;
        }
    }
    OutFrame* frame = take_frame(operation.peer, &operation);
    frame->staging = staging;
    frame->header = operation.pattern;
    FrameHeader& header = frame->header;
    header.length = bytes;
    header.offset += offset;
    const bool is_last = offset + bytes == operation.bytes;
    if (header.kind == FrameKind::kPut) {
        header.number += operation.begun;
        header.span = static_cast<uint32_t>(operation.begun);
        if (!is_last) {
            header.flags = 0;
            header.value = header.signal_offset = header.signal_region = 0;
        }
    }
    const std::byte* source = bytes == 0 ? nullptr : operation.address + offset;
    frame->send.bytes = {is_staged ? staging : source, bytes};
    ++operation.begun;
    ++operation.under_way;
    if (is_staged) {
        leaving_.push_back({config_.device->copy_out(staging, source, bytes), frame});
    } else {
        send_frame(*frame);
    }
    return true;
}

void Mesh::send_header(uint32_t peer, const FrameHeader& header) {
    OutFrame* frame = take_frame(peer, nullptr);
    frame->header = header;
    send_frame(*frame);
}

OutFrame* Mesh::take_frame(uint32_t peer, Operation* operation) {
    OutFrame* frame = frames_.take();
    frame->mesh = this;
    frame->peer = peer;
    frame->operation = operation;
    return frame;
}

void Mesh::send_frame(OutFrame& frame) {
    frame.send.header = std::as_bytes(std::span(&frame.header, 1));
    frame.send.done = on_sent;
    const ucs_status_t status = transport_.send(frame.peer, frame.header, frame.send);
    if (status != UCS_INPROGRESS) return finish(frame, status);
    begin_wait(frame.peer);
    ++num_frames_out_;
}

void Mesh::on_sent(Send& send, ucs_status_t status) {
    // The Send is the first member of an OutFrame.
    auto& frame = reinterpret_cast<OutFrame&>(send);
    Mesh& mesh = *frame.mesh;
    --mesh.num_frames_out_;
    --mesh.peers_[frame.peer].waits;
    mesh.finish(frame, status);
}

// The frame has been sent, or has failed.
void Mesh::finish(OutFrame& frame, ucs_status_t status) {
    note_change(frame.peer);
    if (frame.staging != nullptr) staging_out_.give_back(frame.staging);
    Operation* operation = frame.operation;
    const uint32_t peer = frame.peer;
    if (!frame.copy.empty()) spare_copies_.push_back(std::move(frame.copy));
    frames_.give_back(&frame);
    if (status != UCS_OK) {
        failed_transfers_.emplace_back(peer, fmt::format("sending to rank {} failed: {}", peer, status_name(status)));
    }
    if (operation == nullptr) return;
    --operation->under_way;
    --operation->remaining;
    // Also after a failure, so that test() reports it. The caller may be the transport, through which nothing may be
    // thrown.
    try {
        if (!operation->is_pumping && !operation->is_starved) pump(*operation);
    } catch (const std::exception& error) {
        fail_all(error.what());
    }
}

void Mesh::end(Operation& operation) {
    if (operation.region != nullptr) --operation.region->uses;
    operation.region = nullptr;
    operation.has_ended = true;
    if (operation.kind == Operation::Kind::kReply) {
        operations_.give_back(&operation);
    } else {
        channel(operation.context, operation.peer).ended.land(operation.number);
    }
}

void Mesh::progress_outgoing() {
    if (leaving_.empty() && starved_.empty()) return;
    const uint64_t done = config_.device->done_out();
    while (!leaving_.empty() && leaving_.front().step <= done) {
        OutFrame* frame = leaving_.front().frame;
        leaving_.pop_front();
        send_frame(*frame);
    }
    for (size_t left = starved_.size(); left > 0; --left) {
        Operation* operation = starved_.front();
        starved_.pop_front();
        operation->is_starved = false;
        pump(*operation);
    }
}

}  // namespace crossdock::network
