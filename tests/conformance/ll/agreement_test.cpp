// SPDX-License-Identifier: Apache-2.0
// Low latency: what all ranks must pass alike, passed otherwise by one of them. Every rank gets an error at once, of
// which it learns what differs, between whom, and both values; a dispatch writes nothing.
#include <gtest/gtest.h>

#include <chrono>

#include "conformance/support/bad_call.h"
#include "conformance/support/scoped_arena.h"
#include "conformance/support/with_lsa_team.h"

namespace crossdock::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kBufferBytes = 1u << 17;
constexpr size_t kTopk = 2;
constexpr size_t kIdBytes = kBufferBytes / kTopk;

enum class Kind { kDispatch, kCombine };
enum class HandleOf { kLayout, kLayoutWithOneChoice, kOtherLayout };

// A call that any rank may make.
struct Passed {
    Kind kind = Kind::kDispatch;
    HandleOf handle = HandleOf::kLayout;
    size_t hidden = 128;
    ncclDataType_t type = ncclBfloat16;
    size_t num_scales = 0;  // bytes that are forwarded; 0: none
    bool quantises = false;
    bool rounds_scales = false;
    crossdockSums_t sums = CROSSDOCK_SUMS_EXACT;
    // Where the caller has a window: which outputs are in it, and how many bytes farther on they begin.
    bool tokens_in_window = true;
    bool scales_in_window = true;
    size_t token_shift = 0;
    size_t scale_shift = 0;
};

// What one rank does otherwise. Empty values: whatever the layouts are called.
struct Difference {
    const char* quantity;
    Passed common;
    Passed odd;
    const char* common_value;
    const char* odd_value;
};

constexpr Difference kDifferences[] = {
    {"top_k", {}, {.handle = HandleOf::kLayoutWithOneChoice}, "2", "1"},
    {"the layout", {}, {.handle = HandleOf::kOtherLayout}, "", ""},
    {"the operation", {}, {.kind = Kind::kCombine}, "dispatch", "combine"},
    {"the operation", {.kind = Kind::kCombine}, {}, "combine", "dispatch"},
    {"the bytes of a row", {}, {.hidden = 256}, "256", "512"},
    {"the bytes of a row", {.kind = Kind::kCombine}, {.kind = Kind::kCombine, .hidden = 64}, "256", "128"},
    {"top_k", {.kind = Kind::kCombine}, {.kind = Kind::kCombine, .handle = HandleOf::kLayoutWithOneChoice}, "2", "1"},
    {"the datatype of the tokens", {}, {.type = ncclFloat16}, "bfloat16", "float16"},
    {"the datatype of the tokens",
     {.kind = Kind::kCombine, .type = ncclFloat16},
     {.kind = Kind::kCombine},
     "float16",
     "bfloat16"},
    {"the quantization recipe", {}, {.quantises = true}, "0", "2"},
    {"the quantization recipe", {}, {.num_scales = 16}, "0", "1"},
    {"the quantization recipe",
     {.quantises = true},
     {.quantises = true, .rounds_scales = true},
     "2",
     "2 with rounded scales"},
    {"the bytes of a row's scales", {.num_scales = 32}, {.num_scales = 16}, "32", "16"},
    {"who sums", {.kind = Kind::kCombine}, {.kind = Kind::kCombine, .sums = CROSSDOCK_SUMS_SENDER}, "exact", "sender"},
};

constexpr ncclEpLayout_t other_of(ncclEpLayout_t layout) {
    return layout == NCCL_EP_LAYOUT_EXPERT_MAJOR ? NCCL_EP_LAYOUT_RANK_MAJOR : NCCL_EP_LAYOUT_EXPERT_MAJOR;
}

// Makes calls over three handles, each of which has dispatched, in a group of its own. Every rank has a token for every
// rank, or all of them for itself.
class Caller {
  public:
    Caller(RankContext& context, ncclEpLayout_t layout, WindowArena* arena = nullptr, bool to_itself = false)
        : context_(context),
          layout_(layout),
          arena_(arena),
          to_itself_(to_itself),
          group_(context, context.comm(), config_of(context)),
          stream_(context.make_stream()),
          ids_(context, stream_, kBufferBytes),
          input_(context, stream_, kBufferBytes),
          output_(context, stream_, kBufferBytes, arena) {
        std::vector<std::byte> zeros(kBufferBytes);
        ids_.write(ids_of_each_topk());
        input_.write(zeros);
        make_handle(layout, kTopk);
        make_handle(layout, 1);
        make_handle(other_of(layout), kTopk);
        for (const HandleOf handle : {HandleOf::kLayout, HandleOf::kLayoutWithOneChoice, HandleOf::kOtherLayout}) {
            RANK_OK(context_, call({.handle = handle}));
            // One at a time: on a GPU that ranks of one process share, the first kernel of a rank may else start only
            // after those of the others have ended, which wait for it.
            context_.synchronize(stream_);
        }
        output_.poison();
    }
    ~Caller() {
        for (ncclEpHandle_t handle : handles_) ncclEpHandleDestroy(handle);
    }
    Caller(const Caller&) = delete;
    Caller& operator=(const Caller&) = delete;

    ncclResult_t call(const Passed& passed) {
        const ncclEpHandle_t handle = handles_[static_cast<size_t>(passed.handle)];
        const ncclEpLayout_t layout = layout_of(passed);
        const size_t topk = passed.handle == HandleOf::kLayoutWithOneChoice ? 1 : kTopk;
        if (passed.sums != CROSSDOCK_SUMS_EXACT) {
            const ncclResult_t result = crossdockHandleSetSums(handle, passed.sums);
            if (result != ncclSuccess) return result;
        }
        return passed.kind == Kind::kDispatch ? dispatch(handle, layout, topk, passed)
                                              : combine(handle, layout, topk, passed);
    }
    void synchronize() { context_.synchronize(stream_); }
    // Nothing that a peer sent has arrived. In rank-major the place of this rank's own row, of zeros, depends on no
    // peer, so the row may be there already.
    void check_untouched(const Passed& passed) {
        std::vector<std::byte> expected(kBufferBytes, kPoison);
        if (layout_of(passed) == NCCL_EP_LAYOUT_RANK_MAJOR) {
            const size_t row_bytes = passed.hidden * (passed.quantises ? 1 : 2);
            const size_t own_row = static_cast<size_t>(context_.rank()) * tokens() * row_bytes;
            const std::vector<std::byte> seen = output_.read();
            for (size_t i = own_row; i < own_row + row_bytes; ++i) {
                if (seen[i] == std::byte{0}) expected[i] = seen[i];
            }
        }
        output_.check(expected, 128, "the outputs of a dispatch that was refused");
    }
    // Nobody has written bytes [first, first + bytes) of the outputs.
    void check_poison(size_t first, size_t bytes) {
        const std::vector<std::byte> seen = output_.read();
        for (size_t i = first; i < first + bytes; ++i)
            RANK_CHECK(context_, seen[i] == kPoison, "byte {} of the outputs was written", i);
    }
    void check_guards() { output_.check_guards("the outputs of a combine that was refused"); }

  private:
    // Token t goes to rank t, or all to this rank, with each of its choices: [tokens, topk] for top_k 1 to kTopk,
    // kIdBytes apart.
    std::vector<std::byte> ids_of_each_topk() const {
        std::vector<std::byte> ids(kBufferBytes);
        for (size_t topk = 1; topk <= kTopk; ++topk) {
            for (size_t i = 0; i < tokens() * topk; ++i) {
                const int64_t expert = 2 * (to_itself_ ? context_.rank() : static_cast<int64_t>(i / topk));
                std::memcpy(&ids[(topk - 1) * kIdBytes + 8 * i], &expert, 8);
            }
        }
        return ids;
    }
    void put_in_window(OpenTensor& tensor, size_t shift) {
        auto* const data = static_cast<std::byte*>(tensor.tensor.data) + shift;
        tensor.tensor.data = data;
        tensor.tensor.win_hdl = arena_->window.handle;
        tensor.tensor.win_offset = static_cast<uint64_t>(data - arena_->window.memory);
    }
    ncclEpLayout_t layout_of(const Passed& passed) const {
        return passed.handle == HandleOf::kOtherLayout ? other_of(layout_) : layout_;
    }
    size_t tokens() const { return static_cast<size_t>(context_.num_ranks()); }
    size_t ranks() const { return static_cast<size_t>(context_.num_ranks()); }
    static ncclEpGroupConfig_t config_of(RankContext& context) {
        ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
        config.algorithm = NCCL_EP_ALGO_LOW_LATENCY;
        config.num_experts = 2 * static_cast<unsigned>(context.num_ranks());
        config.max_dispatch_tokens_per_rank = static_cast<unsigned>(context.num_ranks());
        config.max_token_bytes = 1024;
        config.timeout_ns = 60'000'000'000;  // an error is to come long before
        return config;
    }
    void make_handle(ncclEpLayout_t layout, size_t topk) {
        ncclEpHandle_t handle = nullptr;
        RANK_OK(context_, ncclEpInitHandle(&handle, group_.get(), layout, nullptr, static_cast<int>(topk), nullptr));
        handles_.push_back(handle);
        OpenTensor ids;
        ids.set(ncclInt64, {tokens(), topk}, ids_.data() + (topk - 1) * kIdBytes);
        RANK_OK(context_, ncclEpUpdateHandle(handle, &ids.tensor, nullptr, stream_));
    }
    ncclResult_t dispatch(ncclEpHandle_t handle, ncclEpLayout_t layout, size_t topk, const Passed& passed) {
        const bool expert_major = layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
        const size_t blocks = expert_major ? 2 : ranks();
        const size_t rows = expert_major ? ranks() * tokens() : tokens();
        std::byte* const behind_rows = output_.data() + kBufferBytes / 2;
        DispatchArguments call(handle);
        call.tokens.set(passed.type, {tokens(), passed.hidden}, input_.data());
        call.received.set(passed.quantises ? ncclFloat8e4m3 : passed.type, {blocks, rows, passed.hidden},
                          output_.data());
        call.inputs.tokens = &call.tokens.tensor;
        call.outputs.tokens = &call.received.tensor;
        call.counters.set(ncclInt32, {blocks}, behind_rows);
        if (passed.num_scales > 0) {
            call.config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
            call.scales.set(ncclUint8, {tokens(), passed.num_scales}, input_.data());
            call.received_scales.set(ncclUint8, {blocks, rows, passed.num_scales}, behind_rows + kBufferBytes / 4);
            call.inputs.scales = &call.scales.tensor;
            call.outputs.scales = &call.received_scales.tensor;
        }
        if (passed.quantises) {
            call.config.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
            call.config.round_scales = passed.rounds_scales ? 1 : 0;
            call.received_scales.set(ncclFloat32, {blocks, rows, passed.hidden / 128}, behind_rows + kBufferBytes / 4);
            call.outputs.scales = &call.received_scales.tensor;
        }
        if (arena_ != nullptr && passed.tokens_in_window) put_in_window(call.received, passed.token_shift);
        if (arena_ != nullptr && passed.num_scales > 0 && passed.scales_in_window)
            put_in_window(call.received_scales, passed.scale_shift);
        if (expert_major) {
            call.info.expert_counters = &call.counters.tensor;
        } else {
            call.info.src_rank_counters = &call.counters.tensor;
            call.weights.set(ncclFloat32, {tokens(), topk}, input_.data());
            call.received_weights.set(ncclFloat32, {blocks, rows, topk}, behind_rows + 1024);
            call.received_ids.set(ncclInt32, {blocks, rows, topk}, behind_rows + kBufferBytes / 8);
            call.inputs.topk_weights = &call.weights.tensor;
            call.outputs.topk_weights = &call.received_weights.tensor;
            call.outputs.topk_idx = &call.received_ids.tensor;
        }
        return ncclEpDispatch(handle, call.inputs_pointer, call.outputs_pointer, call.info_pointer, call.config_pointer,
                              stream_);
    }
    ncclResult_t combine(ncclEpHandle_t handle, ncclEpLayout_t layout, size_t topk, const Passed& passed) {
        const bool expert_major = layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
        CombineArguments call(handle);
        call.rows.set(passed.type,
                      {expert_major ? 2 : ranks(), expert_major ? ranks() * tokens() : tokens(), passed.hidden},
                      input_.data());
        call.combined.set(passed.type, {tokens(), passed.hidden}, output_.data());
        call.weights.set(ncclFloat32, {tokens(), topk}, input_.data());
        call.inputs.tokens = &call.rows.tensor;
        call.outputs.tokens = &call.combined.tensor;
        if (expert_major) call.outputs.topk_weights = &call.weights.tensor;
        return ncclEpCombine(handle, call.inputs_pointer, call.outputs_pointer, call.config_pointer, stream_);
    }

    RankContext& context_;
    ncclEpLayout_t layout_;
    WindowArena* arena_;
    bool to_itself_;
    Group group_;
    cudaStream_t stream_;
    Buffer ids_, input_, output_;
    std::vector<ncclEpHandle_t> handles_;
};

const char* name_of(ncclEpLayout_t layout) {
    return layout == NCCL_EP_LAYOUT_EXPERT_MAJOR ? "expert-major" : "rank-major";
}

void disagree(RankContext& context, ncclEpLayout_t layout, const Difference& difference, int odd_rank, bool to_itself) {
    Caller caller(context, layout, nullptr, to_itself);
    context.barrier();
    const bool is_odd = context.rank() == odd_rank;
    const Passed& passed = is_odd ? difference.odd : difference.common;
    const auto begin = Clock::now();
    const ncclResult_t first = caller.call(passed);
    caller.synchronize();
    const double elapsed_s = std::chrono::duration<double>(Clock::now() - begin).count();
    const std::string what = fmt::format("{} of rank {}, {}", difference.quantity, odd_rank, name_of(layout));
    RANK_CHECK(context, first == ncclInvalidUsage || context.is_gpu() || to_itself, "{}: {}, \"{}\"", what,
               result_name(first), crossdockGetLastError());
    RANK_CHECK(context, elapsed_s < 30, "{}: the error took {} s", what, elapsed_s);
    if (to_itself) {
        // Who came first learns it in its next operation.
        caller.call({});
        caller.synchronize();
    }
    const ncclResult_t again = caller.call(passed);
    const std::string message = crossdockGetLastError();
    RANK_CHECK(context, again == ncclInvalidUsage, "{}: {}, \"{}\"", what, result_name(again), message);
    const bool is_layout = std::string(difference.quantity) == "the layout";
    const std::string common = is_layout ? name_of(layout) : difference.common_value;
    const std::string odd = is_layout ? name_of(other_of(layout)) : difference.odd_value;
    // Who differs names any of the others, these name it.
    const std::string own = fmt::format("{} on rank {}", is_odd ? odd : common, context.rank());
    const std::string other = is_odd ? fmt::format("{} on rank ", common) : fmt::format("{} on rank {}", odd, odd_rank);
    for (const std::string& word : {std::string(difference.quantity), own, other}) {
        RANK_CHECK(context, message.find(word) != std::string::npos, "{}: \"{}\" lacks \"{}\"", what, message, word);
    }
    const bool all_dispatch = difference.common.kind == Kind::kDispatch && difference.odd.kind == Kind::kDispatch;
    all_dispatch && !to_itself ? caller.check_untouched(passed) : caller.check_guards();
    context.barrier();
}

void all_disagree(const BackendSpec& spec, int num_ranks, bool one_team) {
    for (const Difference& difference : kDifferences) {
        for (const ncclEpLayout_t layout : kLlLayouts) {
            if (difference.odd.sums != CROSSDOCK_SUMS_EXACT && layout != NCCL_EP_LAYOUT_EXPERT_MAJOR) continue;
            const int odd_rank = static_cast<int>(&difference - kDifferences) % num_ranks;
            for (const bool to_itself : {false, true}) {
                if (to_itself && !one_team) continue;
                expect_clean(spec, num_ranks, std::nullopt,
                             [&](RankContext& context) { disagree(context, layout, difference, odd_rank, to_itself); });
            }
        }
    }
}

TEST(Agreement, EveryRankLearnsWhatDiffers) {
    on_each_backend_as_one_team(kEveryBackend, [](const BackendSpec& spec) { all_disagree(spec, ranks_or(3), true); });
}

// Peers write rows straight into windows at their own offsets: ranks whose tensors lie otherwise get an error, and
// nothing is written elsewhere.
TEST(Agreement, WindowsThatLieOtherwiseAreNoticed) {
    constexpr size_t kShift = 4096;
    constexpr Passed kNoScales{};
    constexpr Passed kScales{.num_scales = 16};
    struct Shifted {
        Passed common;
        Passed odd;
    };
    constexpr Shifted kShifted[] = {
        {kNoScales, {.token_shift = kShift}},
        {kScales, {.num_scales = 16, .token_shift = kShift}},
        {kScales, {.num_scales = 16, .scale_shift = kShift}},
    };
    on_each_backend(reaching_windows(kEveryBackend), [&](const BackendSpec& spec) {
        for (const Shifted& shifted : kShifted) {
            expect_clean(spec, ranks_or(3), std::nullopt, [&](RankContext& context) {
                ScopedArena arena(context, 4 * kBufferBytes);
                Caller caller(context, NCCL_EP_LAYOUT_RANK_MAJOR, arena.get());
                context.barrier();
                const bool is_odd = context.rank() == 1;
                const Passed& passed = is_odd ? shifted.odd : shifted.common;
                const ncclResult_t first = caller.call(passed);
                caller.synchronize();
                RANK_CHECK(context, first == ncclInvalidUsage || context.is_gpu(), "{}, \"{}\"", result_name(first),
                           crossdockGetLastError());
                RANK_REFUSED(context, ncclInvalidUsage, "has another window or win_offset", caller.call(passed));
                RANK_REFUSED(context, ncclInvalidUsage, is_odd ? "than on rank 1" : "on rank 1 than on",
                             caller.call(passed));
                context.barrier();  // a peer whose call is not over yet may still write
                // Ranks that lie alike may have written to each other, but nobody where only the writer's tensor lies.
                if (shifted.odd.token_shift > 0) caller.check_poison(is_odd ? 0 : kShift, kShift);
                if (shifted.odd.scale_shift > 0)
                    caller.check_poison(kBufferBytes / 4 * 3 + (is_odd ? 0 : kShift), kShift);
                caller.check_guards();
                context.barrier();
            });
        }
    });
}

// Who offers no window, or only one of two, need not have it where the others do: then nobody writes straight there.
TEST(Agreement, WindowsOutOfReachMayLieAnywhere) {
    constexpr Passed kOdd[] = {
        {.num_scales = 16, .tokens_in_window = false, .scales_in_window = false, .token_shift = 4096},
        {.num_scales = 16, .scales_in_window = false, .token_shift = 4096},
        {.num_scales = 16, .tokens_in_window = false, .scale_shift = 4096},
    };
    on_each_backend(kEveryBackend, [&](const BackendSpec& spec) {
        for (const Passed& odd : kOdd) {
            expect_clean(spec, ranks_or(3), std::nullopt, [&](RankContext& context) {
                ScopedArena arena(context, 4 * kBufferBytes);
                Caller caller(context, NCCL_EP_LAYOUT_RANK_MAJOR, arena.get());
                context.barrier();
                for (int i = 0; i < 3; ++i)
                    RANK_OK(context, caller.call(context.rank() == 1 ? odd : Passed{.num_scales = 16}));
                caller.synchronize();
                context.barrier();
            });
        }
    });
}

// Between teams, of which the odd rank is in one.
TEST(Agreement, ItDoesBetweenLsaTeams) {
    on_each_backend({Backend::kProcesses, Backend::kThreads, Backend::kSimulation}, [](const BackendSpec& spec) {
        const WithLsaTeam team(2);
        all_disagree(spec, 4, false);
    });
}

}  // namespace
}  // namespace crossdock::testing
