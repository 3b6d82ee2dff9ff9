// SPDX-License-Identifier: Apache-2.0
// Every routing of 2 ranks x 2 experts x 3 tokens x K 2 dispatches and combines correctly: 3^6 = 729 routings per rank
// (ids -1, 0, 1), 531,441 of both. A row that arrives depends on its source's routing, and its place on that of the
// sources before it; a combined row depends on its source rank's routing only. So what a pair of routings must give is
// put together from 729 answers of the reference a rank.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "conformance/support/layer.h"
#include "conformance/support/options.h"

namespace crossdock::testing {
namespace {

using Bytes = std::vector<std::byte>;

constexpr int kRanks = 2;
constexpr int kTokens = 3;
constexpr int kMaxTokens = 6;  // room for every duplicate: 12 slots per expert
constexpr int kTopk = 2;
constexpr int kRoutings = 729;
constexpr size_t kRowBytes = 16;

Problem empty_problem(ncclEpLayout_t layout) {
    Problem problem;
    problem.seed = 42;
    problem.num_ranks = kRanks;
    problem.num_experts = 2;
    problem.max_tokens = kMaxTokens;
    problem.num_topk = kTopk;
    problem.layout = layout;
    problem.index_type = ncclInt32;
    problem.token_type = problem.combine_type = ncclFloat32;
    problem.hidden = problem.combine_hidden = kRowBytes / sizeof(float);
    problem.ranks.resize(kRanks);
    return problem;
}

// Routing number `number` for `source`; the other rank has no tokens.
Problem one_routing(ncclEpLayout_t layout, int source, int number) {
    Problem problem = empty_problem(layout);
    reference::RankInput& own = problem.ranks[source];
    own.num_tokens = kTokens;
    for (int i = 0; i < kTokens * kTopk; ++i, number /= 3) {
        own.ids.push_back(number % 3 - 1);
        own.weights.push_back(0.25f + 0.5f * static_cast<float>(i));
    }
    return problem;
}

// What one routing of one source means for this rank.
struct Answer {
    std::vector<int32_t> ids;  // of the source
    int num_rows = 0;          // that arrive here
    Bytes rows;                // as dispatch delivers them
    Bytes ids_here;            // rank-major
    Bytes expert_rows;         // what the expert here makes of them
    Bytes combined;            // at the source rank
};

std::vector<Answer> answers(ncclEpLayout_t layout, int source, int rank) {
    std::vector<Answer> result(kRoutings);
    for (int number = 0; number < kRoutings; ++number) {
        const Problem problem = one_routing(layout, source, number);
        Answer& answer = result[number];
        answer.ids.assign(problem.ranks[source].ids.begin(), problem.ranks[source].ids.end());
        // One expert per rank: expert-major has one block, rank-major one per source.
        const auto blocks = received_rows(problem, rank);
        for (const reference::RowSource& row : blocks[problem.expert_major() ? 0 : source]) {
            const Bytes tokens = arrived_row(problem, row).tokens;
            const Bytes expert = expert_row(problem, rank, row);
            const Bytes ids = as_integers(ncclInt32, metadata_of(problem, rank, row).ids);
            answer.rows.insert(answer.rows.end(), tokens.begin(), tokens.end());
            answer.expert_rows.insert(answer.expert_rows.end(), expert.begin(), expert.end());
            answer.ids_here.insert(answer.ids_here.end(), ids.begin(), ids.end());
            ++answer.num_rows;
        }
        for (int token = 0; source == rank && token < kTokens; ++token) {
            const Bytes row = combined_row(problem, source, token);
            answer.combined.insert(answer.combined.end(), row.begin(), row.end());
        }
    }
    return result;
}

// One rank's side of the enumeration, with buffers of its own so that a pair of routings costs two calls and a few
// comparisons.
class Enumeration {
  public:
    Enumeration(RankContext& context, ncclEpLayout_t layout)
        : context_(context),
          layout_(layout),
          problem_(empty_problem(layout)),
          stream_(context.make_stream()),
          group_(context, problem_) {
        for (int source = 0; source < kRanks; ++source) answers_.push_back(answers(layout, source, context.rank()));
        const Problem own = one_routing(layout, context.rank(), 0);
        tokens_.write(token_rows());
        weights_.write(own.ranks[context.rank()].weights.data(), kTokens * kTopk * sizeof(float));
        Tensor ids(ncclInt32, {kTokens, kTopk}, ids_);
        RANK_OK(context, ncclEpCreateHandle(&handle_, group_.get(), layout, ids, nullptr, nullptr, stream_));
    }
    ~Enumeration() { ncclEpHandleDestroy(handle_); }

    // The routings a and b of ranks 0 and 1.
    void check(int a, int b) {
        const int routing[kRanks] = {a, b};
        const Answer& own = answers_[context_.rank()][routing[context_.rank()]];
        ids_.write(own.ids.data(), own.ids.size() * sizeof(int32_t));
        received_.poison();
        counters_.poison();
        dispatch();
        expected_.assign(received_.bytes(), kPoison);
        expert_rows_.assign(received_.bytes(), kPoison);
        int32_t counts[kRanks] = {};
        Bytes ids_here(received_ids_.bytes(), std::byte{0xFF});
        size_t slot = 0;
        for (int source = 0; source < kRanks; ++source) {
            const Answer& answer = answers_[source][routing[source]];
            if (!problem_.expert_major()) slot = static_cast<size_t>(source) * kMaxTokens;
            std::copy(answer.rows.begin(), answer.rows.end(),
                      expected_.begin() + static_cast<std::ptrdiff_t>(slot * kRowBytes));
            std::copy(answer.expert_rows.begin(), answer.expert_rows.end(),
                      expert_rows_.begin() + static_cast<std::ptrdiff_t>(slot * kRowBytes));
            std::copy(answer.ids_here.begin(), answer.ids_here.end(),
                      ids_here.begin() + static_cast<std::ptrdiff_t>(slot * kTopk * sizeof(int32_t)));
            slot += static_cast<size_t>(answer.num_rows);
            counts[problem_.expert_major() ? 0 : source] += answer.num_rows;
        }
        Bytes count_bytes(counters_.bytes());
        std::memcpy(count_bytes.data(), counts, count_bytes.size());
        compare(counters_, count_bytes, a, b, "counters");
        compare(received_, expected_, a, b, "dispatch's rows");
        if (!problem_.expert_major()) compare(received_ids_, ids_here, a, b, "dispatch's expert ids");
        received_.write(expert_rows_);
        combined_.poison();
        combine();
        compare(combined_, own.combined, a, b, "combine's rows");
    }

  private:
    Bytes token_rows() const {
        Bytes rows;
        for (int token = 0; token < kTokens; ++token) {
            const Bytes row = token_row(problem_, context_.rank(), token);
            rows.insert(rows.end(), row.begin(), row.end());
        }
        return rows;
    }

    void compare(const Buffer& buffer, const Bytes& expected, int a, int b, const char* what) {
        if (buffer.read() == expected) return;
        RANK_CHECK(context_, false, "{} of routings {} and {}, layout {}", what, a, b, static_cast<int>(layout_));
        throw StopProgram(what);
    }

    void dispatch() {
        Tensor tokens(ncclFloat32, {kTokens, 4}, tokens_);
        Tensor weights(ncclFloat32, {kTokens, kTopk}, weights_);
        const size_t blocks = static_cast<size_t>(problem_.num_blocks());
        const size_t slots = static_cast<size_t>(problem_.slots());
        Tensor received(ncclFloat32, {blocks, slots, 4}, received_);
        Tensor received_weights(ncclFloat32, {blocks, slots, kTopk}, received_weights_);
        Tensor received_ids(ncclInt32, {blocks, slots, kTopk}, received_ids_);
        Tensor counters(ncclInt32, {blocks}, counters_);
        ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
        ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
        ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
        inputs.tokens = tokens;
        outputs.tokens = received;
        (problem_.expert_major() ? info.expert_counters : info.src_rank_counters) = counters;
        if (!problem_.expert_major()) {
            inputs.topk_weights = weights;
            outputs.topk_weights = received_weights;
            outputs.topk_idx = received_ids;
        }
        RANK_OK(context_, ncclEpDispatch(handle_, &inputs, &outputs, &info, nullptr, stream_));
    }

    void combine() {
        const size_t blocks = static_cast<size_t>(problem_.num_blocks());
        const size_t slots = static_cast<size_t>(problem_.slots());
        Tensor rows(ncclFloat32, {blocks, slots, 4}, received_);
        Tensor combined(ncclFloat32, {kTokens, 4}, combined_);
        Tensor weights(ncclFloat32, {kTokens, kTopk}, weights_);
        ncclEpCombineInputs_t inputs = NCCL_EP_COMBINE_INPUTS_INIT;
        ncclEpCombineOutputs_t outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
        inputs.tokens = rows;
        outputs.tokens = combined;
        if (problem_.expert_major()) outputs.topk_weights = weights;
        RANK_OK(context_, ncclEpCombine(handle_, &inputs, &outputs, nullptr, stream_));
    }

    static constexpr size_t kRows = kRanks * kMaxTokens;
    RankContext& context_;
    ncclEpLayout_t layout_;
    Problem problem_;
    cudaStream_t stream_;
    Group group_;
    std::vector<std::vector<Answer>> answers_;
    ncclEpHandle_t handle_ = nullptr;
    Bytes expected_, expert_rows_;
    Buffer ids_{context_, stream_, kTokens* kTopk * sizeof(int32_t)};
    Buffer tokens_{context_, stream_, kTokens* kRowBytes};
    Buffer weights_{context_, stream_, kTokens* kTopk * sizeof(float)};
    Buffer received_{context_, stream_, kRows* kRowBytes};
    Buffer received_weights_{context_, stream_, kRows* kTopk * sizeof(float)};
    Buffer received_ids_{context_, stream_, kRows* kTopk * sizeof(int32_t)};
    Buffer counters_{context_, stream_, static_cast<size_t>(problem_.num_blocks()) * sizeof(int32_t)};
    Buffer combined_{context_, stream_, kTokens* kRowBytes};
};

// All pairs, or every `stride`th of them in an order that mixes both routings.
void enumerate(const BackendSpec& spec, ncclEpLayout_t layout, int stride) {
    ASSERT_EQ(std::gcd(stride, kRoutings), 1);
    expect_clean(spec, kRanks, std::nullopt, [=](RankContext& context) {
        Enumeration enumeration(context, layout);
        for (int pair = 0; pair < kRoutings * kRoutings; pair += stride)
            enumeration.check(pair / kRoutings, pair % kRoutings);
    });
}

// All pairs among threads; a sample elsewhere, where the same kernels run on other memory or slower, and of at most
// --seeds pairs.
int stride_of(Backend kind) {
    if (options().num_seeds) {
        // No multiple of 3, so that it has no divisor in common with the number of pairs.
        const auto stride = static_cast<int>((kRoutings * kRoutings - 1) / *options().num_seeds) + 1;
        return stride % 3 == 0 ? stride + 1 : stride;
    }
    return kind == Backend::kThreads      ? 1
           : kind == Backend::kSimulation ? 10
           : kind == Backend::kProcesses  ? 25
           : is_cuda(kind)                ? 499
                                          : 199;
}

TEST(Exhaustive, ExpertMajor) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        enumerate(spec, NCCL_EP_LAYOUT_EXPERT_MAJOR, stride_of(spec.kind));
    });
}

TEST(Exhaustive, RankMajor) {
    on_each_backend(kEveryBackend,
                    [](const BackendSpec& spec) { enumerate(spec, NCCL_EP_LAYOUT_RANK_MAJOR, stride_of(spec.kind)); });
}

}  // namespace
}  // namespace crossdock::testing
