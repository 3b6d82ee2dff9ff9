// SPDX-License-Identifier: Apache-2.0
#include "core/ht/plan.h"

#include <algorithm>

#include "core/error.h"
#include "kernels/ht/update_words.h"
#include "runtime/runtime.h"

namespace crossdock {
namespace {

constexpr uint32_t kMostWarps = 20;  // per block; more would have too few registers
constexpr uint32_t kGpuUpdateWarps = 16;
constexpr uint32_t kGpuChunkBytes = 16384;
constexpr uint32_t kGpuReturnedBytes = 4096;  // combine: small, so that an SM's L1 has room for rows that are summed
constexpr uint32_t kGpuSummers = 7;
constexpr uint32_t kGpuSenders = 4;         // of sums
constexpr uint32_t kGpuFencingSenders = 5;  // of sums, without an announcer
constexpr uint32_t kGpuOwnSenders = 3;      // of sums of own tokens
constexpr uint32_t kGpuWeightWarps = 2;     // of a combine whose other warps are busy
constexpr uint32_t kGpuMostSharedStages = 32;
constexpr uint32_t kFewestSharedStages = 2;                          // summands are added in pairs
constexpr uint32_t kSummedBytes = PartSum<DType::kF32>::kMostBytes;  // of a part, by a summer
// Warps of a device that send rows directly to their final places, and stages of each: fewer leave the links idle, more
// are slower.
constexpr uint32_t kGpuDirectSenders = 100;
constexpr uint32_t kGpuDirectStages = 2;
constexpr uint32_t kGpuDirectStagesOfSmall = 3;          // of at most half a stage's most
constexpr uint64_t kCpuCacheBytes = uint64_t{32} << 20;  // of a host, roughly: the last level of today's servers

// On CPUs one warp per role, since warps are fibers of one thread. Groups of several teams also have crossers and
// forwarders, and fewer producers and consumers.
HtWarpLayout warp_layout_for(const Group& group, HtWarpLayout gpu, uint32_t crossers) {
    const uint32_t fixed_warps = group.communicator().backend().warps_per_role;
    const uint32_t warps = std::max(fixed_warps, 1u);
    HtWarpLayout warp_layout = gpu;
    if (fixed_warps > 0) {
        warp_layout = {warps,          warps, std::min(gpu.weight_warps, 1u), gpu.producer_stages, gpu.consumer_stages,
                       gpu.chunk_bytes};
        if (fixed_warps > 1) warp_layout.announcers = gpu.announcers;
    }
    if (gpu.summers > 0 && fixed_warps > 1) {
        warp_layout.summers = warps;
        warp_layout.senders = warps;
        if (gpu.producers == gpu.pipeline()) warp_layout.producers = warp_layout.pipeline();
        warp_layout.consumers = std::max(warp_layout.consumers, warp_layout.pipeline() - warp_layout.producers);
    } else if (gpu.summers > 0 && fixed_warps > 0) {
        warp_layout.producer_stages = std::max(gpu.producer_stages, 1u);  // one warp does it all
    }
    if (!group.config().has_several_teams()) return warp_layout;
    warp_layout.crossers = crossers * warps;
    warp_layout.forwarders = warps;
    while (warp_layout.warps() > kMostWarps)
        --(warp_layout.consumers > warp_layout.producers ? warp_layout.consumers : warp_layout.producers);
    return warp_layout;
}

// fixed: the most slots that the backend wants, or 0.
HtSlots slots_for(uint32_t ring_bytes, uint64_t packet_bytes, uint32_t fixed) {
    const uint32_t stride = static_cast<uint32_t>(align_up(std::max<uint64_t>(packet_bytes, 1), 128));
    return {stride, std::min(fixed > 0 ? fixed : kMaxRingSlots, ring_bytes / stride)};
}

// Slots of a ring between teams, whose halves have one credit each.
HtSlots gin_slots_for(uint32_t ring_bytes, uint64_t packet_bytes, uint32_t fixed) {
    HtSlots slots = slots_for(ring_bytes, packet_bytes, fixed);
    slots.num -= slots.num % 2;
    return slots;
}
HtSlots gin_slots_of_rows(const Group& group, const HtCommon& common, uint64_t packet_bytes) {
    return gin_slots_for(common.outbox.rows.ring_bytes, packet_bytes,
                         fixed_gin_slots(group.communicator().backend(), group.config()));
}

// Slots of an operation's rings of rows. Deep: all slots, since sometimes senders and sometimes receivers are slower;
// else as many as keep the rings in a GPU's caches.
HtSlots slots_of_rows(const Group& group, const HtCommon& common, uint64_t packet_bytes, bool is_deep) {
    HtSlots slots = slots_for(common.arena.ring_bytes, packet_bytes, group.communicator().backend().ring_slots);
    if (is_deep) return slots;
    const uint64_t cached = kHtCachedRingBytes / (common.arena.num_rings() * slots.stride);
    slots.num =
        std::min(slots.num, static_cast<uint32_t>(std::clamp<uint64_t>(cached, kHtFewestSlots, kHtMostCachedSlots)));
    return slots;
}

HtSlots slots_of_weights(const HtCommon& common) {
    const uint32_t weights = weights_per_row(common.topk, common.arena.experts_per_rank);
    return gin_slots_for(kWeightRingBytes, sizeof(float) * kChunkTokens * weights, 0);
}
static_assert(2 * sizeof(float) * kChunkTokens * kMaxTopk <= kWeightRingBytes);

// As many stages as fit after `bytes`, at least those that the warps have of their own.
uint32_t shared_stages(const Group& group, const HtWarpLayout& warp_layout, uint32_t stage_bytes, uint64_t bytes) {
    if (warp_layout.summers == 0) return 0;
    const uint32_t fixed = group.communicator().backend().pipeline_stages;
    const uint64_t free = group.max_shared_bytes() - std::min<uint64_t>(bytes, group.max_shared_bytes());
    const uint32_t stages = static_cast<uint32_t>(
        std::clamp<uint64_t>(free / stage_bytes, kFewestSharedStages, fixed > 0 ? fixed : kGpuMostSharedStages));
    return std::max(stages, warp_layout.producers * warp_layout.producer_stages);
}

// Lays out shared memory. Reduces the number of warps until their stages fit, and roughly keeps the ratio of senders to
// receivers. A pipeline gets as many stages as fit.
HtShared lay_out(const Group& group, const HtCommon& common, HtWarpLayout& warp_layout, uint32_t tail_bytes,
                 const char* what) {
    HtShared shared{};
    const auto compute = [&] {
        const uint32_t teams = static_cast<uint32_t>(group.config().num_ranks / group.config().lsa_team_size);
        const bool sums = warp_layout.summers > 0;
        const uint64_t states = sizeof(GinRingState) * num_gin_rings(common.arena.num_ranks, teams);
        Cursor memory(16, kGinStatesOffset + states);
        memory.take(shared.peers, common.arena.num_ranks);
        shared.plan_bytes = view_bytes<HtPlan>(common.topk);
        memory.take(shared.plans, warp_layout.warps(), shared.plan_bytes);
        shared.batch_bytes = view_bytes<HtBatch>(common.topk);
        memory.take(shared.batches, warp_layout.batches(), shared.batch_bytes);
        memory.take(shared.notes, warp_layout.notes(), note_bytes(group.communicator().backend().lanes));
        memory.take(shared.plan_heads, sums ? kSumPlanHeadBytes : 0);
        memory.take(shared.plan_summands, sums ? 2 * planned_rows(common.topk) * common.topk : 0);
        memory.align(128);
        shared.stage_bytes =
            static_cast<uint32_t>(align_up(uint64_t{kStageHeadBytes} + warp_layout.chunk_bytes + tail_bytes, 128));
        warp_layout.shared_stages = shared_stages(group, warp_layout, shared.stage_bytes, align_up(memory.end(), 128));
        memory.take(shared.stages, warp_layout.stages(), shared.stage_bytes);
        shared.bytes = static_cast<uint32_t>(std::min<uint64_t>(memory.end(), UINT32_MAX));
        return shared.bytes;
    };
    const HtWarpLayout wanted = warp_layout;
    while (compute() > group.max_shared_bytes() && warp_layout.summers == 0 &&
           (warp_layout.producers > 1 || warp_layout.consumers > 1)) {
        const bool sheds_receivers =
            warp_layout.consumer_stages > 0 && warp_layout.consumers > 1 &&
            warp_layout.consumers * wanted.producers > warp_layout.producers * wanted.consumers;
        --(sheds_receivers || warp_layout.producers == 1 ? warp_layout.consumers : warp_layout.producers);
    }
    require(shared.bytes <= group.max_shared_bytes(), ncclInvalidArgument,
            "{}: a block needs {} bytes of shared memory for stages of {} bytes, the device has {}", what, shared.bytes,
            warp_layout.chunk_bytes + tail_bytes, group.max_shared_bytes());
    return shared;
}

// The size of equal parts of a row, at most `most` bytes each.
uint32_t part_bytes(uint32_t row_bytes, uint32_t most) {
    if (row_bytes <= most) return row_bytes;
    const uint32_t parts = (row_bytes + most - 1) / most;
    return static_cast<uint32_t>(align_up((row_bytes + parts - 1) / parts, 16));
}

// Bytes of a row per pass through a stage.
uint32_t chunk_bytes(const Group& group, uint32_t row_bytes, uint32_t most) {
    return group.communicator().backend().splits_rows ? part_bytes(row_bytes, most) : row_bytes;
}

// A sender must not reach a part's barrier before the previous part there has been summed. It has seen the last part of
// its own last row summed, so each part from there on must have its own stage.
void limit_senders(HtWarpLayout& warp_layout, uint32_t row_bytes) {
    if (warp_layout.summers == 0) return;
    const uint32_t parts = (row_bytes + warp_layout.chunk_bytes - 1) / warp_layout.chunk_bytes;
    const bool are_producers = warp_layout.producers == warp_layout.pipeline();
    while (warp_layout.senders > 1 && (warp_layout.senders - 1) * parts >= warp_layout.shared_stages) {
        --warp_layout.senders;
        if (are_producers) --warp_layout.producers, ++warp_layout.consumers;
    }
}

// One more if then a row is a single part.
uint32_t summers_for(uint32_t row_bytes) {
    const bool fits_then = row_bytes > kGpuSummers * kSummedBytes && row_bytes <= (kGpuSummers + 1) * kSummedBytes;
    return kGpuSummers + (fits_then ? 1 : 0);
}

// Into parts of rows and summers' shares of a part. Shares that are quantised are all equal but for a row's last.
void divide_rows(HtWarpLayout& warp_layout, uint32_t row_bytes, HtWire wire) {
    if (warp_layout.summers == 0) return;
    const uint32_t granule = wire_granule(wire);
    const uint64_t part = align_up(part_bytes(row_bytes, warp_layout.summers * kSummedBytes), granule);
    warp_layout.chunk_bytes = std::max(granule, static_cast<uint32_t>(part));
    warp_layout.summed_bytes =
        (warp_layout.chunk_bytes / granule + warp_layout.summers - 1) / warp_layout.summers * granule;
    if (is_quantised(wire)) warp_layout.chunk_bytes = warp_layout.summers * warp_layout.summed_bytes;
}
static_assert(kSummedBytes % wire_granule(HtWire::kRows) == 0 && kSummedBytes % wire_granule(HtWire::kMxfp8) == 0);

// Rows are sent directly to their final places; a receiver places rows for a rank without windows.
HtWarpLayout placing_warps(uint32_t channels, uint32_t chunk) {
    constexpr uint32_t kMostSenders = 11;
    const uint32_t senders = std::clamp((kGpuDirectSenders + channels / 2) / channels, 1u, kMostSenders);
    const uint32_t stages = chunk <= kGpuChunkBytes / 2 ? kGpuDirectStagesOfSmall : kGpuDirectStages;
    return {senders, 1, 8, stages, 0, chunk};
}

HtWarpLayout with_announcer(HtWarpLayout warp_layout) {
    warp_layout.announcers = 1;
    return warp_layout;
}

// Receivers read rows where source ranks have them. Senders serve ranks that can't.
HtWarpLayout reading_in_place(uint32_t chunk) { return with_announcer({4, 10, 4, 1, 1, chunk}); }

// Rows are sent through rings. With rings, senders place own rows themselves, so with one peer there is less to receive
// than to send.
HtWarpLayout sending_warps(const HtCommon& common, uint32_t chunk) {
    const bool has_several_peers = common.arena.num_ranks > 2;
    // What is done for each row takes longer than the stores of a small one.
    const bool is_elastic = common.scope.operation == OperationKind::kElasticDispatch;
    if (is_elastic && chunk <= kGpuChunkBytes / 2)
        return with_announcer(has_several_peers ? HtWarpLayout{9, 9, 1, 1, 1, chunk}
                                                : HtWarpLayout{10, 8, 1, 1, 1, chunk});
    if (has_several_peers) return with_announcer({7, 7, 4, 1, 1, chunk});
    return with_announcer(common.expert_major ? HtWarpLayout{9, 5, 4, 1, 1, chunk}
                                              : HtWarpLayout{8, 6, 4, 1, 1, chunk});
}

// Flat rows, and rows of choices, return through rings.
HtWarpLayout returning_warps(const HtCommon& common, uint32_t chunk, uint32_t weight_warps) {
    const uint32_t senders = common.arena.num_ranks > 2 ? 8 : 6;
    HtWarpLayout warp_layout = with_announcer({senders, 0, weight_warps, 2, 0, chunk});
    warp_layout.consumers = kMostWarps - warp_layout.warps();
    return warp_layout;
}

// Expert-major: sums are sent. With so many blocks that each sends little, an announcer gains nothing.
HtWarpLayout summing_warps(const Group& group, const HtCommon& common, uint32_t row_bytes, HtWire wire,
                           uint32_t weight_warps) {
    constexpr uint32_t kMostAnnouncingBlocks = 48;
    HtWarpLayout warp_layout{};
    warp_layout.announcers = common.channels <= kMostAnnouncingBlocks ? 1 : 0;
    warp_layout.summers = summers_for(row_bytes);
    warp_layout.senders = warp_layout.announcers > 0 ? kGpuSenders : kGpuFencingSenders;
    warp_layout.producers = warp_layout.pipeline();
    warp_layout.consumers = kMostWarps - warp_layout.producers - warp_layout.announcers - weight_warps;
    warp_layout.weight_warps = weight_warps;
    warp_layout.chunk_bytes = row_bytes;
    warp_layout = warp_layout_for(group, warp_layout, 0);
    if (warp_layout.summers > 0) warp_layout.senders = warp_layout.producers - 2 - warp_layout.summers;
    divide_rows(warp_layout, row_bytes, wire);
    return warp_layout;
}

// Flat rows in windows: source ranks read them, by a pipeline if all rows are in windows. Only source ranks without
// windows are sent theirs.
HtWarpLayout reading_warps(const Group& group, uint32_t row_bytes, bool with_weights) {
    HtWarpLayout warp_layout{};
    warp_layout.summers = group.config().has_several_teams() ? 0 : summers_for(row_bytes);
    warp_layout.senders = kGpuOwnSenders;
    warp_layout.producers = 1;
    warp_layout.producer_stages = 2;
    if (with_weights)
        warp_layout.weight_warps = warp_layout.summers > 0 ? kMostWarps - warp_layout.pipeline() : kGpuWeightWarps;
    warp_layout.consumers = kMostWarps - warp_layout.producers - warp_layout.weight_warps;
    warp_layout.chunk_bytes = chunk_bytes(group, row_bytes, kGpuChunkBytes);
    warp_layout = warp_layout_for(group, warp_layout, 0);
    divide_rows(warp_layout, row_bytes, HtWire::kRows);
    return warp_layout;
}

LaunchShape shape_of(const Group& group, HtCommon& common, const HtWarpLayout& warp_layout, const HtShared& shared,
                     uint32_t row_bytes) {
    // Not if ranks share a device: one rank's next kernel could take the SMs that another's kernel waits for.
    const bool is_alone = group.communicator().ranks_on_device() == 1 && !group.config().has_several_teams();
    // Blocks that share a TPC were 25 % slower when rows pass through rings, so other blocks do their work. On GPUs
    // without such blocks the cost is a few blocks that return at once.
    const uint32_t paired = group.communicator().backend().paired_blocks;
    const uint32_t sms = static_cast<uint32_t>(group.runtime().num_sms());
    const bool writes_in_place = common.has_windows && !common.windows_are_inputs && warp_layout.summers == 0;
    if (is_alone && !writes_in_place && common.channels + paired <= sms) common.unused_blocks = paired;
    // Bytes that all ranks of the host move, if all have as many tokens.
    const uint64_t moved = uint64_t{common.num_tokens} * common.topk * row_bytes * group.config().num_ranks;
    return {static_cast<int>(common.channels),
            static_cast<int>(warp_layout.warps()),
            shared.bytes,
            is_alone && group.runtime().overlaps_kernels(),
            moved > kCpuCacheBytes,
            static_cast<int>(common.unused_blocks)};
}

}  // namespace

LaunchShape plan_ht_update(const Group& group, const HtUpdateArgs& args) {
    const uint32_t fixed_warps = group.communicator().backend().warps;
    const uint32_t warps = fixed_warps > 0 ? fixed_warps : kGpuUpdateWarps;
    return {static_cast<int>(args.common.channels), static_cast<int>(warps),
            UpdateShared::bytes(args.common.arena.num_ranks),
            group.communicator().ranks_on_device() == 1 && group.runtime().overlaps_kernels()};
}

LaunchShape plan_ht_dispatch(const Group& group, HtDispatchArgs& args) {
    HtCommon& common = args.common;
    args.rows = slots_of_rows(group, common, uint64_t{args.row_bytes} + args.scale_bytes, false);
    args.gin_rows = gin_slots_of_rows(group, common, uint64_t{args.row_bytes} + args.scale_bytes);
    args.weight_slots = slots_of_weights(common);
    const uint32_t chunk = chunk_bytes(group, args.row_bytes, kGpuChunkBytes);
    const HtWarpLayout warp_layout = common.windows_are_inputs ? reading_in_place(chunk)
                                     : common.has_windows      ? placing_warps(common.channels, chunk)
                                                               : sending_warps(common, chunk);
    args.warp_layout = warp_layout_for(group, warp_layout, 1);
    args.shared = lay_out(group, common, args.warp_layout, args.scale_bytes, "dispatch");
    return shape_of(group, common, args.warp_layout, args.shared, args.row_bytes);
}

LaunchShape plan_ht_combine(const Group& group, HtCombineArgs& args) {
    HtCommon& common = args.common;
    const uint32_t weight_warps = args.with_weights ? kGpuWeightWarps : 0;
    const uint32_t chunk = chunk_bytes(group, args.row_bytes, kGpuReturnedBytes);
    // Between teams rows are summed before they return, or return in one packet.
    const bool are_choices = args.wire == HtWire::kChoices;
    const bool sums = common.expert_major && !are_choices;
    args.warp_layout = sums                 ? summing_warps(group, common, args.row_bytes, args.wire, weight_warps)
                       : common.has_windows ? reading_warps(group, args.row_bytes, args.with_weights)
                                            : warp_layout_for(group, returning_warps(common, chunk, weight_warps), 0);
    const uint32_t quantised = args.warp_layout.quantised_bytes();
    const uint32_t experts = common.arena.experts_per_rank;
    const uint32_t rows = are_choices ? rows_of_token(common.topk, experts) : 1;
    const uint32_t rows_of_team = are_choices ? rows_of_token(common.topk, experts * group.config().lsa_team_size) : 1;
    const uint32_t beside_bytes = args.weight_bytes + (are_choices ? kRowCountBytes : 0);
    args.wire_bytes = wire_bytes(args.wire, rows * args.row_bytes, quantised) + beside_bytes;
    args.wire_part = wire_bytes(args.wire, args.warp_layout.chunk_bytes, quantised);
    const uint32_t tail_bytes = is_quantised(args.wire) && args.warp_layout.summers == 0 ? args.wire_part : 0;
    args.rows = slots_of_rows(group, common, args.wire_bytes, common.expert_major);
    args.gin_rows = gin_slots_of_rows(group, common, uint64_t{rows_of_team} * args.row_bytes + beside_bytes);
    args.weight_slots = slots_of_weights(common);
    args.shared = lay_out(group, common, args.warp_layout, tail_bytes, "combine");
    limit_senders(args.warp_layout, args.row_bytes);
    return shape_of(group, common, args.warp_layout, args.shared, args.row_bytes);
}

}  // namespace crossdock
