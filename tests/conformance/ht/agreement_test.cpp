// SPDX-License-Identifier: Apache-2.0
// High throughput: what all ranks must pass alike, passed otherwise by one of them. Every rank gets an error at once,
// of which it learns what differs, between whom, and both values; nothing is written.
#include <gtest/gtest.h>

#include <chrono>
#include <span>

#include "conformance/support/bad_call.h"
#include "conformance/support/layer.h"
#include "conformance/support/scoped_arena.h"
#include "conformance/support/with_lsa_team.h"

namespace crossdock::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kTokens = 3;
constexpr size_t kBufferBytes = 1u << 17;

enum class Kind { kUpdate, kDispatch, kCombine };

// A call that any rank may make.
struct Passed {
    Kind kind = Kind::kUpdate;
    size_t topk = 2;
    size_t hidden = 64;
    ncclDataType_t type = ncclBfloat16;
    size_t num_scales = 0;  // bytes; 0: no recipe
    ncclEpPassDir_t direction = NCCL_EP_FWD_PASS;
    bool other_layout = false;
    bool other_handle = false;  // which was updated later
    size_t window_shift = 0;    // bytes
    size_t scale_shift = 0;
    bool other_window = false;
    unsigned int tag = 0;
    unsigned int sms = 0;
};

// What one rank does otherwise.
struct Difference {
    const char* quantity;
    Passed common;
    Passed odd;
    const char* common_value;
    const char* odd_value;
};

constexpr ncclEpPassDir_t kForward = NCCL_EP_FWD_PASS;
constexpr ncclEpPassDir_t kBackward = NCCL_EP_BWD_PASS;
constexpr Difference kDifferences[] = {
    {"top_k", {.topk = 2}, {.topk = 1}, "2", "1"},
    {"the layout", {.other_layout = false}, {.other_layout = true}, "", ""},
    {"the operation", {}, {.kind = Kind::kDispatch}, "update", "dispatch"},
    {"the operation", {.kind = Kind::kDispatch}, {.kind = Kind::kCombine}, "dispatch", "combine"},
    {"the operation", {.kind = Kind::kCombine}, {.kind = Kind::kUpdate}, "combine", "update"},
    {"the direction",
     {.kind = Kind::kDispatch},
     {.kind = Kind::kDispatch, .direction = kBackward},
     "forward",
     "backward"},
    {"the direction",
     {.kind = Kind::kCombine, .direction = kBackward},
     {.kind = Kind::kCombine, .direction = kForward},
     "backward",
     "forward"},
    {"the bytes of a row", {.kind = Kind::kDispatch}, {.kind = Kind::kDispatch, .hidden = 128}, "128", "256"},
    {"the bytes of a row", {.kind = Kind::kCombine}, {.kind = Kind::kCombine, .hidden = 32}, "128", "64"},
    {"the datatype of the tokens",
     {.kind = Kind::kDispatch},
     {.kind = Kind::kDispatch, .type = ncclFloat16},
     "bfloat16",
     "float16"},
    {"the datatype of the tokens",
     {.kind = Kind::kCombine, .type = ncclFloat16},
     {.kind = Kind::kCombine},
     "float16",
     "bfloat16"},
    {"the quantization recipe", {.kind = Kind::kDispatch}, {.kind = Kind::kDispatch, .num_scales = 16}, "0", "1"},
    {"the bytes of a row's scales",
     {.kind = Kind::kDispatch, .num_scales = 32},
     {.kind = Kind::kDispatch, .num_scales = 16},
     "32",
     "16"},
    {"the tag (crossdockHandleSetTag)", {}, {.tag = 1023}, "0", "1023"},
    {"the tag (crossdockHandleSetTag)", {.tag = 2}, {.tag = 3}, "2", "3"},
    {"the tag (crossdockHandleSetTag)", {.kind = Kind::kDispatch}, {.kind = Kind::kDispatch, .tag = 2}, "0", "2"},
    {"the tag (crossdockHandleSetTag)",
     {.kind = Kind::kDispatch, .tag = 1},
     {.kind = Kind::kDispatch, .tag = 513},
     "1",
     "513"},
    {"the tag (crossdockHandleSetTag)",
     {.kind = Kind::kCombine, .tag = 129},
     {.kind = Kind::kCombine, .tag = 1},
     "129",
     "1"},
    {"the direction",
     {.kind = Kind::kCombine, .direction = kBackward, .tag = 770},
     {.kind = Kind::kCombine, .direction = kForward, .tag = 770},
     "backward",
     "forward"},
    {"win_offset of the tensor of rows is ",
     {.kind = Kind::kDispatch},
     {.kind = Kind::kDispatch, .window_shift = 4096},
     "",
     ""},
    {"win_offset of the tensor of rows is ",
     {.kind = Kind::kCombine},
     {.kind = Kind::kCombine, .window_shift = 4096},
     "",
     ""},
    {"the routing", {.kind = Kind::kDispatch}, {.kind = Kind::kDispatch, .other_handle = true}, "", ""},
    {"the routing", {.kind = Kind::kCombine}, {.kind = Kind::kCombine, .other_handle = true}, "", ""},
};

// Where operations have several blocks.
constexpr const char* kNumberOfSms = "the number of SMs (crossdockHandleSetSms)";
constexpr Difference kDifferencesOfSms[] = {
    {kNumberOfSms, {.kind = Kind::kDispatch, .sms = 2}, {.kind = Kind::kDispatch, .sms = 1}, "2", "1"},
    {kNumberOfSms, {.kind = Kind::kCombine, .sms = 1}, {.kind = Kind::kCombine, .sms = 2}, "1", "2"},
    {kNumberOfSms,
     {.kind = Kind::kDispatch, .tag = 1023, .sms = 1},
     {.kind = Kind::kDispatch, .tag = 1023, .sms = 1000},
     "1",
     ""},
    {"the tag (crossdockHandleSetTag)",
     {.kind = Kind::kCombine, .tag = 1023, .sms = 2},
     {.kind = Kind::kCombine, .tag = 511, .sms = 2},
     "1023",
     "511"},
};

// Makes calls over two handles of one layout and one of the other, in a group of its own.
class Caller {
  public:
    Caller(RankContext& context, ncclEpLayout_t layout, WindowArena* arena, WindowArena* other_arena = nullptr)
        : context_(context),
          layout_(layout),
          arena_(arena),
          other_arena_(other_arena),
          group_(context, context.comm(), config_of(context)),
          stream_(context.make_stream()),
          ids_(context, stream_, kBufferBytes),
          input_(context, stream_, kBufferBytes, arena),
          output_(context, stream_, kBufferBytes, arena) {
        const std::vector<std::byte> expert_0(kBufferBytes);
        ids_.write(expert_0);
        const ncclEpLayout_t other = layout == NCCL_EP_LAYOUT_FLAT ? NCCL_EP_LAYOUT_EXPERT_MAJOR : NCCL_EP_LAYOUT_FLAT;
        for (const ncclEpLayout_t of : {layout, layout, other}) {
            ncclEpHandle_t handle = nullptr;
            RANK_OK(context_, ncclEpInitHandle(&handle, group_.get(), of, nullptr, -1, nullptr));
            handles_.push_back(handle);
        }
        for (const bool other_handle : {false, true}) RANK_OK(context_, call({.other_handle = other_handle}));
        context_.synchronize(stream_);
        output_.poison();
    }
    ~Caller() {
        for (ncclEpHandle_t handle : handles_) ncclEpHandleDestroy(handle);
    }
    Caller(const Caller&) = delete;
    Caller& operator=(const Caller&) = delete;

    ncclResult_t call(const Passed& passed) {
        const ncclEpHandle_t handle = handles_[passed.other_layout ? 2 : passed.other_handle ? 1 : 0];
        for (const ncclResult_t set :
             {crossdockHandleSetTag(handle, passed.tag), crossdockHandleSetSms(handle, passed.sms)}) {
            if (set != ncclSuccess) return set;
        }
        switch (passed.kind) {
            case Kind::kUpdate: {
                OpenTensor ids;
                ids.set(ncclInt64, {kTokens, passed.topk}, ids_.data());
                return ncclEpUpdateHandle(handle, &ids.tensor, nullptr, stream_);
            }
            case Kind::kDispatch:
                return dispatch(handle, passed);
            case Kind::kCombine:
                return combine(handle, passed);
        }
        return ncclInternalError;
    }
    void synchronize() { context_.synchronize(stream_); }
    void check_untouched() {
        output_.check(std::vector<std::byte>(kBufferBytes, kPoison), 128, "the outputs of a call that was refused");
    }
    const char* layout_name(bool other) const {
        return (layout_ == NCCL_EP_LAYOUT_FLAT) != other ? "flat" : "expert-major";
    }

  private:
    size_t rows() const { return static_cast<size_t>(context_.num_ranks()) * 4 * 2; }
    static ncclEpGroupConfig_t config_of(RankContext& context) {
        ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
        config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
        config.num_experts = 2 * static_cast<unsigned>(context.num_ranks());
        config.max_dispatch_tokens_per_rank = 4;
        config.max_recv_tokens_per_rank = 8 * static_cast<unsigned>(context.num_ranks());
        config.max_token_bytes = 1024;
        config.timeout_ns = 60'000'000'000;  // an error is to come long before
        return config;
    }
    // Rows in the window, if there is one.
    void set_rows(OpenTensor& tensor, const Passed& passed, ncclDataType_t type, size_t num, size_t width,
                  const Buffer& buffer, size_t shift) {
        tensor.set(type, {num, width}, buffer.data() + shift);
        if (arena_ == nullptr) return;
        const WindowArena& arena = passed.other_window ? *other_arena_ : *arena_;
        tensor.tensor.win_hdl = arena.window.handle;
        tensor.tensor.win_offset = buffer.window_offset() + shift;
        tensor.tensor.data = arena.window.memory + tensor.tensor.win_offset;
    }
    ncclResult_t dispatch(ncclEpHandle_t handle, const Passed& passed) {
        DispatchArguments call(handle);
        const bool is_flat = layout_ == NCCL_EP_LAYOUT_FLAT;
        call.tokens.set(passed.type, {kTokens, passed.hidden}, input_.data());
        set_rows(call.received, passed, passed.type, rows(), passed.hidden, output_, passed.window_shift);
        call.inputs.tokens = &call.tokens.tensor;
        call.outputs.tokens = &call.received.tensor;
        call.config.pass_direction = passed.direction;
        std::byte* const routing = output_.data() + kBufferBytes / 2;
        if (passed.direction == kForward) {
            call.weights.set(ncclFloat32, {kTokens, 2}, input_.data());
            is_flat ? call.received_weights.set(ncclFloat32, {rows(), 2}, routing)
                    : call.received_weights.set(ncclFloat32, {rows()}, routing);
            call.received_ids.set(ncclInt64, {rows(), 2}, routing + kBufferBytes / 4);
            call.inputs.topk_weights = &call.weights.tensor;
            call.outputs.topk_weights = &call.received_weights.tensor;
            if (is_flat) call.outputs.topk_idx = &call.received_ids.tensor;
        }
        if (passed.num_scales > 0) {
            call.config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
            call.scales.set(ncclUint8, {kTokens, passed.num_scales}, input_.data());
            set_rows(call.received_scales, passed, ncclUint8, rows(), passed.num_scales, output_,
                     kBufferBytes / 4 + passed.scale_shift);
            call.inputs.scales = &call.scales.tensor;
            call.outputs.scales = &call.received_scales.tensor;
        }
        return ncclEpDispatch(handle, call.inputs_pointer, call.outputs_pointer, nullptr, call.config_pointer, stream_);
    }
    ncclResult_t combine(ncclEpHandle_t handle, const Passed& passed) {
        CombineArguments call(handle);
        set_rows(call.rows, passed, passed.type, rows(), passed.hidden, input_, passed.window_shift);
        call.combined.set(passed.type, {kTokens, passed.hidden}, output_.data());
        call.inputs.tokens = &call.rows.tensor;
        call.outputs.tokens = &call.combined.tensor;
        call.config.pass_direction = passed.direction;
        if (passed.direction == kBackward) {
            layout_ == NCCL_EP_LAYOUT_FLAT ? call.weights.set(ncclFloat32, {rows(), 2}, input_.data())
                                           : call.weights.set(ncclFloat32, {rows()}, input_.data());
            call.combined_weights.set(ncclFloat32, {kTokens, 2}, output_.data() + kBufferBytes / 2);
            call.inputs.topk_weights = &call.weights.tensor;
            call.outputs.topk_weights = &call.combined_weights.tensor;
        }
        return ncclEpCombine(handle, call.inputs_pointer, call.outputs_pointer, call.config_pointer, stream_);
    }

    RankContext& context_;
    ncclEpLayout_t layout_;
    WindowArena* arena_;
    WindowArena* other_arena_;
    Group group_;
    cudaStream_t stream_;
    Buffer ids_, input_, output_;
    std::vector<ncclEpHandle_t> handles_;
};

// Tags are numbers of ten bits, of high throughput.
TEST(HtAgreement, TagsHaveARange) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(1), std::nullopt, [](RankContext& context) {
            Caller caller(context, NCCL_EP_LAYOUT_FLAT, nullptr);
            RANK_OK(context, caller.call({.kind = Kind::kDispatch, .tag = 1023}));
            RANK_REFUSED(context, ncclInvalidArgument, "tag is 1024, allowed: 0..1023", caller.call({.tag = 1024}));
            RANK_REFUSED(context, ncclInvalidArgument, "handle", crossdockHandleSetTag(nullptr, 1));
            caller.synchronize();
        });
    });
}

void disagree(RankContext& context, ncclEpLayout_t layout, const Difference& difference, int odd_rank, bool windows) {
    ScopedArena arena(context, kHtWindowBytes);
    {
        Caller caller(context, layout, windows ? arena.get() : nullptr);
        context.barrier();
        const bool is_odd = context.rank() == odd_rank;
        const Passed& passed = is_odd ? difference.odd : difference.common;
        const auto begin = Clock::now();
        const ncclResult_t first = caller.call(passed);
        caller.synchronize();
        const double elapsed_s = std::chrono::duration<double>(Clock::now() - begin).count();
        const std::string what =
            fmt::format("{} of rank {} {} windows", difference.quantity, odd_rank, windows ? "with" : "without");
        // Of windows that lie otherwise a rank may also learn from who reached them first.
        const bool may_be_told = difference.odd.window_shift > 0;
        const auto is_expected = [&](ncclResult_t result) {
            return result == ncclInvalidUsage || (may_be_told && result == ncclRemoteError);
        };
        RANK_CHECK(context, is_expected(first) || context.is_gpu(), "{}: {}, \"{}\"", what, result_name(first),
                   crossdockGetLastError());
        RANK_CHECK(context, elapsed_s < 30, "{}: the error took {} s", what, elapsed_s);
        const ncclResult_t again = caller.call(passed);
        const std::string message = crossdockGetLastError();
        RANK_CHECK(context, is_expected(again), "{}: {}, \"{}\"", what, result_name(again), message);
        const bool is_layout = std::string(difference.quantity) == "the layout";
        const std::string common = is_layout ? caller.layout_name(false) : difference.common_value;
        const std::string odd = is_layout ? caller.layout_name(true) : difference.odd_value;
        // Who differs names any of the others, these name it.
        const std::string own = fmt::format("{} on rank {}", is_odd ? odd : common, context.rank());
        const std::string other =
            is_odd ? fmt::format("{} on rank ", common) : fmt::format("{} on rank {}", odd, odd_rank);
        for (const std::string& word : {std::string(difference.quantity), own, other}) {
            if (again == ncclRemoteError) break;
            RANK_CHECK(context, message.find(word) != std::string::npos, "{}: \"{}\" lacks \"{}\"", what, message,
                       word);
        }
        if (again == ncclRemoteError) {
            RANK_CHECK(context, message.find(fmt::format("rank {}", odd_rank)) != std::string::npos, "{}", message);
        }
        caller.check_untouched();
        context.barrier();
    }
}

void all_disagree(const BackendSpec& spec, int num_ranks, bool one_team,
                  std::span<const Difference> differences = kDifferences) {
    for (const Difference& difference : differences) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            for (const bool windows : {false, true}) {
                if (windows && layout != NCCL_EP_LAYOUT_FLAT) continue;
                // Only who reaches another's window learns where that lies.
                if (difference.odd.window_shift > 0 && (!windows || !one_team)) continue;
                const int odd_rank = static_cast<int>(&difference - differences.data()) % num_ranks;
                expect_clean(spec, num_ranks, std::nullopt,
                             [&](RankContext& context) { disagree(context, layout, difference, odd_rank, windows); });
            }
        }
    }
}

TEST(HtAgreement, EveryRankLearnsWhatDiffers) {
    on_each_backend_as_one_team(reaching_windows(kEveryBackend),
                                [](const BackendSpec& spec) { all_disagree(spec, ranks_or(3), true); });
}

// Windows that lie otherwise in a way that is easily missed: a power of two apart, for the scales alone, or at the same
// place of another window.
TEST(HtAgreement, WindowsThatLieOtherwiseAreNoticed) {
    constexpr size_t kFar = size_t{64} << 20;
    constexpr Passed kOdd[] = {
        {.kind = Kind::kDispatch, .num_scales = 16, .window_shift = kFar},
        {.kind = Kind::kDispatch, .num_scales = 16, .scale_shift = 4096},
        {.kind = Kind::kDispatch, .num_scales = 16, .other_window = true},
        {.kind = Kind::kCombine, .window_shift = kFar},
        {.kind = Kind::kCombine, .other_window = true},
    };
    on_each_backend_as_one_team(reaching_windows({Backend::kThreads, Backend::kCuda}), [&](const BackendSpec& spec) {
        for (const Passed& odd : kOdd) {
            expect_clean(spec, ranks_or(3), std::nullopt, [&](RankContext& context) {
                // The same number does not name the same window on GPUs (nccl_ep.h).
                if (odd.other_window && context.is_gpu()) return;
                ScopedArena arena(context, kFar + kHtWindowBytes);
                ScopedArena other(context, kFar + kHtWindowBytes);
                {
                    Caller caller(context, NCCL_EP_LAYOUT_FLAT, arena.get(), other.get());
                    context.barrier();
                    const Passed passed =
                        context.rank() == 1 ? odd : Passed{.kind = odd.kind, .num_scales = odd.num_scales};
                    // Who reached nobody's window yet learns it from who did.
                    const auto is_expected = [](ncclResult_t result) {
                        return result == ncclInvalidUsage || result == ncclRemoteError;
                    };
                    const ncclResult_t first = caller.call(passed);
                    caller.synchronize();
                    RANK_CHECK(context, is_expected(first) || context.is_gpu(), "{}, \"{}\"", result_name(first),
                               crossdockGetLastError());
                    const ncclResult_t again = caller.call(passed);
                    const std::string message = crossdockGetLastError();
                    RANK_CHECK(context, is_expected(again), "{}, \"{}\"", result_name(again), message);
                    RANK_CHECK(context, message.find("rank 1") != std::string::npos, "\"{}\"", message);
                    RANK_CHECK(context, again == ncclRemoteError || message.find("window") != std::string::npos,
                               "\"{}\"", message);
                    caller.check_untouched();
                    context.barrier();
                }
            });
        }
    });
}

// Between teams, of which the odd rank is in one.
TEST(HtAgreement, ItDoesBetweenLsaTeams) {
    on_each_backend({Backend::kProcesses, Backend::kThreads, Backend::kSimulation}, [](const BackendSpec& spec) {
        const WithLsaTeam team(2);
        all_disagree(spec, 4, false);
    });
}

// Rows would come by other blocks' rings. Numbers that are alike once they are lowered are none that differ, and
// updates have no rings.
TEST(HtAgreement, EveryRankLearnsOfOtherNumbersOfSms) {
    on_each_backend_as_one_team(
        {Backend::kSimulation, Backend::kCuda, Backend::kCudaProcesses}, [](const BackendSpec& spec) {
            all_disagree(spec, ranks_or(3), true, kDifferencesOfSms);
            expect_clean(spec, ranks_or(3), std::nullopt, [](RankContext& context) {
                Caller caller(context, NCCL_EP_LAYOUT_FLAT, nullptr);
                const auto own = static_cast<unsigned>(context.rank());
                for (const Passed& passed :
                     {Passed{.sms = 1 + own}, Passed{.kind = Kind::kDispatch, .sms = 1000 + own},
                      Passed{.kind = Kind::kCombine, .sms = 2000 + own}, Passed{.kind = Kind::kDispatch, .sms = 1}})
                    RANK_OK(context, caller.call(passed));
                caller.synchronize();
            });
        });
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& spec) {
        const WithLsaTeam team(2);
        all_disagree(spec, 4, false, kDifferencesOfSms);
    });
}

// Who has no rows need not say what they are like; with other numbers of tokens ranks do not disagree.
// Nor where its peers have their inputs in windows, and its own empty tensor is named by the same place.
TEST(HtAgreement, ARankWithoutRowsNeedNotKnowTheirs) {
    const auto run = [](RankContext& context, bool in_window) {
        ScopedArena arena(context, kHtWindowBytes);
        {
            Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_FLAT, 5, kHighThroughput);
            // The last rank has no tokens, and none goes to its experts.
            problem.ranks.back().num_tokens = 0;
            problem.ranks.back().ids.clear();
            problem.ranks.back().weights.clear();
            for (reference::RankInput& rank : problem.ranks) {
                for (int64_t& id : rank.ids) id %= problem.num_experts - problem.local_experts();
            }
            problem.budget = 0;
            problem.group_topk = problem.num_topk;
            Group group(context, problem);
            Layer layer(context, group.get(), problem,
                        {.arena = in_window ? arena.get() : nullptr,
                         .windows = kInputs,
                         .exact_rows = true,
                         .exact_combine_rows = true});
            layer.prepare_update();
            if (!context.is_gpu()) context.barrier();
            layer.route(problem);
            if (context.rank() + 1 < context.num_ranks()) {
                layer.pass(NCCL_EP_FWD_PASS);
                return context.barrier();
            }
            DispatchArguments dispatch(layer.handle());
            for (OpenTensor* tensor : {&dispatch.tokens, &dispatch.received}) tensor->set(ncclFloat32, {0, 0}, nullptr);
            if (in_window) {
                dispatch.tokens.tensor.win_hdl = arena.get()->window.handle;
                dispatch.tokens.tensor.win_offset = layer.tokens().window_offset();
            }
            const size_t topk = static_cast<size_t>(problem.num_topk);
            for (OpenTensor* tensor : {&dispatch.weights, &dispatch.received_weights})
                tensor->set(ncclFloat32, {0, topk}, nullptr);
            dispatch.received_ids.set(ncclInt64, {0, topk}, nullptr);
            dispatch.inputs.tokens = &dispatch.tokens.tensor;
            dispatch.inputs.topk_weights = &dispatch.weights.tensor;
            dispatch.outputs.tokens = &dispatch.received.tensor;
            dispatch.outputs.topk_weights = &dispatch.received_weights.tensor;
            dispatch.outputs.topk_idx = &dispatch.received_ids.tensor;
            if (in_window) context.barrier();  // as other ranks' layers
            RANK_OK(context, dispatch());
            CombineArguments combine(layer.handle());
            for (OpenTensor* tensor : {&combine.rows, &combine.combined}) tensor->set(ncclFloat32, {0, 0}, nullptr);
            combine.inputs.tokens = &combine.rows.tensor;
            combine.outputs.tokens = &combine.combined.tensor;
            if (in_window) context.barrier();
            RANK_OK(context, combine());
            context.barrier();
        }
    };
    on_each_backend_as_one_team(kEveryBackend, [&](const BackendSpec& spec) {
        for (const bool in_window : {false, true})
            expect_clean(spec, ranks_or(3), std::nullopt, [=](RankContext& context) { run(context, in_window); });
    });
}

}  // namespace
}  // namespace crossdock::testing
