// SPDX-License-Identifier: Apache-2.0
// High throughput, forward and backward together, is the layer and its derivative: outputs equal those of a dense
// layer, gradients of tokens and weights equal its finite differences.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "conformance/support/layer.h"
#include "conformance/support/options.h"

namespace crossdock::testing {
namespace {

constexpr int kHidden = 8;
constexpr int kTokens = 5;
constexpr int kTopk = 3;
constexpr int kLocalExperts = 2;

using Vector = std::vector<double>;

// Expert e maps x[i] to tanh((e + 1) / 4 * x[i]) + x[(i + e + 1) % H] / 2.
double slope_of(int64_t expert) { return static_cast<double>(expert + 1) / 4; }
size_t neighbour_of(int64_t expert, size_t i) { return (i + static_cast<size_t>(expert) + 1) % kHidden; }

Vector expert_output(int64_t expert, const Vector& x) {
    Vector y(x.size());
    for (size_t i = 0; i < x.size(); ++i) y[i] = std::tanh(slope_of(expert) * x[i]) + x[neighbour_of(expert, i)] / 2;
    return y;
}

// The gradient of x where that of the output is g.
Vector expert_gradient(int64_t expert, const Vector& x, const Vector& g) {
    Vector result(x.size(), 0.0);
    for (size_t i = 0; i < x.size(); ++i) {
        const double t = std::tanh(slope_of(expert) * x[i]);
        result[i] += g[i] * slope_of(expert) * (1 - t * t);
        result[neighbour_of(expert, i)] += g[i] / 2;
    }
    return result;
}

// What a dense layer makes of one token: the loss is the product of its output with g.
Vector dense_output(const Vector& x, const Vector& weights, const int64_t* ids) {
    Vector y(x.size(), 0.0);
    for (size_t k = 0; k < weights.size(); ++k) {
        if (ids[k] < 0) continue;
        const Vector expert = expert_output(ids[k], x);
        for (size_t i = 0; i < y.size(); ++i) y[i] += weights[k] * expert[i];
    }
    return y;
}

double dot(const Vector& a, const Vector& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
}

// The layer through the library, fp32 in all tensors.
class Moe {
  public:
    Moe(RankContext& context, const Problem& problem)
        : context_(context),
          problem_(problem),
          own_(problem.ranks[context.rank()]),
          stream_(context.make_stream()),
          group_(context, context.comm(), group_config_for(context, problem)),
          rows_(problem.budget) {
        Buffer ids(context, stream_, own_.ids.size() * sizeof(int64_t));
        ids.write(own_.ids.data(), ids.bytes());
        Tensor tensor(ncclInt64, {kTokens, kTopk}, ids);
        Tensor total(ncclInt32, {1}, total_);
        Fleeting<ncclEpLayoutInfo_t> info{NCCL_EP_LAYOUT_INFO_INIT};
        info->recv_total_counter = total;
        RANK_OK(context,
                ncclEpCreateHandle(&handle_, group_.get(), problem.layout, tensor, info.get(), nullptr, stream_));
        std::memcpy(&received_rows_, total_.read().data(), sizeof received_rows_);
    }
    ~Moe() { ncclEpHandleDestroy(handle_); }
    Moe(const Moe&) = delete;
    Moe& operator=(const Moe&) = delete;

    // Outputs of this rank's tokens.
    std::vector<float> forward(const std::vector<float>& tokens) {
        received_tokens_ = dispatch(tokens, NCCL_EP_FWD_PASS);
        std::vector<float> rows(rows_ * kHidden, 0.0f);
        each_contribution([&](size_t row, int64_t expert, double weight, size_t) {
            const Vector y = expert_output(expert, row_of(received_tokens_, row));
            for (size_t i = 0; i < kHidden; ++i) rows[row * kHidden + i] += static_cast<float>(weight * y[i]);
        });
        return combine(rows, nullptr);
    }

    // Gradients of this rank's tokens; those of its weights in weights_gradient().
    std::vector<float> backward(const std::vector<float>& gradients) {
        const std::vector<float> received = dispatch(gradients, NCCL_EP_BWD_PASS);
        std::vector<float> rows(rows_ * kHidden, 0.0f);
        std::vector<float> weights(received_weights_.bytes() / sizeof(float), 0.0f);
        each_contribution([&](size_t row, int64_t expert, double weight, size_t position) {
            const Vector x = row_of(received_tokens_, row), g = row_of(received, row);
            const Vector dx = expert_gradient(expert, x, g);
            for (size_t i = 0; i < kHidden; ++i) rows[row * kHidden + i] += static_cast<float>(weight * dx[i]);
            weights[position] = static_cast<float>(dot(expert_output(expert, x), g));
        });
        return combine(rows, &weights);
    }
    const std::vector<float>& weights_gradient() const { return weights_gradient_; }

  private:
    static Vector row_of(const std::vector<float>& rows, size_t row) {
        return Vector(rows.begin() + static_cast<std::ptrdiff_t>(row * kHidden),
                      rows.begin() + static_cast<std::ptrdiff_t>((row + 1) * kHidden));
    }

    static std::vector<float> floats(const Buffer& buffer) {
        const std::vector<std::byte> bytes = buffer.read();
        std::vector<float> values(bytes.size() / sizeof(float));
        std::memcpy(values.data(), bytes.data(), bytes.size());
        return values;
    }

    std::vector<float> dispatch(const std::vector<float>& tokens, ncclEpPassDir_t direction) {
        const bool flat = !problem_.expert_major();
        tokens_.write(tokens.data(), tokens.size() * sizeof(float));
        weights_.write(own_.weights.data(), own_.weights.size() * sizeof(float));
        Tensor in(ncclFloat32, {kTokens, kHidden}, tokens_), out(ncclFloat32, {rows_, kHidden}, received_);
        Tensor weights(ncclFloat32, {kTokens, kTopk}, weights_), ids(ncclInt64, {rows_, kTopk}, received_ids_);
        Tensor flat_weights(ncclFloat32, {rows_, kTopk}, received_weights_);
        Tensor slot_weights(ncclFloat32, {rows_}, received_weights_);
        Tensor counters(ncclInt32, {kLocalExperts}, counters_), offsets(ncclInt32, {kLocalExperts}, offsets_);
        Fleeting<ncclEpDispatchInputs_t> inputs{NCCL_EP_DISPATCH_INPUTS_INIT};
        Fleeting<ncclEpDispatchOutputs_t> outputs{NCCL_EP_DISPATCH_OUTPUTS_INIT};
        Fleeting<ncclEpLayoutInfo_t> info{NCCL_EP_LAYOUT_INFO_INIT};
        Fleeting<ncclEpDispatchConfig_t> config{NCCL_EP_DISPATCH_CONFIG_INIT};
        inputs->tokens = in;
        outputs->tokens = out;
        config->pass_direction = direction;
        if (direction == NCCL_EP_FWD_PASS) {
            inputs->topk_weights = weights;
            outputs->topk_weights = flat ? flat_weights : slot_weights;
            if (flat) outputs->topk_idx = ids;
            info->recv_topk_idx_kind = NCCL_EP_EXPERT_ID_GLOBAL;
            if (!flat) info->expert_counters = counters, info->expert_offsets = offsets;
        }
        RANK_OK(context_, ncclEpDispatch(handle_, inputs.get(), outputs.get(), info.get(), config.get(), stream_));
        return floats(received_);
    }

    std::vector<float> combine(const std::vector<float>& rows, const std::vector<float>* weights) {
        combine_input_.write(rows.data(), rows.size() * sizeof(float));
        Tensor in(ncclFloat32, {rows_, kHidden}, combine_input_), out(ncclFloat32, {kTokens, kHidden}, combined_);
        Tensor flat_weights(ncclFloat32, {rows_, kTopk}, gradients_), slot_weights(ncclFloat32, {rows_}, gradients_);
        Tensor home_weights(ncclFloat32, {kTokens, kTopk}, weights_);
        Fleeting<ncclEpCombineInputs_t> inputs{NCCL_EP_COMBINE_INPUTS_INIT};
        Fleeting<ncclEpCombineOutputs_t> outputs{NCCL_EP_COMBINE_OUTPUTS_INIT};
        Fleeting<ncclEpCombineConfig_t> config{NCCL_EP_COMBINE_CONFIG_INIT};
        inputs->tokens = in;
        outputs->tokens = out;
        if (weights != nullptr) {
            gradients_.write(weights->data(), weights->size() * sizeof(float));
            config->pass_direction = NCCL_EP_BWD_PASS;
            inputs->topk_weights = problem_.expert_major() ? slot_weights : flat_weights;
            outputs->topk_weights = home_weights;
        }
        RANK_OK(context_, ncclEpCombine(handle_, inputs.get(), outputs.get(), config.get(), stream_));
        if (weights != nullptr) weights_gradient_ = floats(weights_);
        return floats(combined_);
    }

    // For every (row, expert) that was received here: the global expert, its weight and where the weight stands. Works
    // from what dispatch has told, not from the reference.
    template <typename Use>
    void each_contribution(Use use) {
        const std::vector<float> weights = floats(received_weights_);
        if (problem_.expert_major()) {
            int32_t counts[kLocalExperts] = {}, offsets[kLocalExperts] = {};
            std::memcpy(counts, counters_.read().data(), sizeof counts);
            std::memcpy(offsets, offsets_.read().data(), sizeof offsets);
            for (int expert = 0; expert < kLocalExperts; ++expert) {
                for (int i = 0; i < counts[expert]; ++i) {
                    const auto row = static_cast<size_t>(offsets[expert] + i);
                    use(row, context_.rank() * kLocalExperts + expert, double{weights[row]}, row);
                }
            }
            return;
        }
        std::vector<int64_t> ids(rows_ * kTopk);
        std::memcpy(ids.data(), received_ids_.read().data(), ids.size() * sizeof(int64_t));
        for (size_t i = 0; i < static_cast<size_t>(received_rows_) * kTopk; ++i) {
            if (ids[i] >= 0) use(i / kTopk, ids[i], double{weights[i]}, i);
        }
    }

    RankContext& context_;
    Problem problem_;
    reference::RankInput own_;
    cudaStream_t stream_;
    Group group_;
    size_t rows_;
    ncclEpHandle_t handle_ = nullptr;
    int32_t received_rows_ = 0;
    std::vector<float> received_tokens_, weights_gradient_;
    Buffer total_{context_, stream_, sizeof(int32_t)};
    Buffer tokens_{context_, stream_, kTokens* kHidden * sizeof(float)};
    Buffer weights_{context_, stream_, kTokens* kTopk * sizeof(float)};
    Buffer received_{context_, stream_, rows_* kHidden * sizeof(float)};
    Buffer received_weights_{context_, stream_, rows_*(problem_.expert_major() ? 1 : kTopk) * sizeof(float)};
    Buffer received_ids_{context_, stream_, rows_* kTopk * sizeof(int64_t)};
    Buffer counters_{context_, stream_, kLocalExperts * sizeof(int32_t)};
    Buffer offsets_{context_, stream_, kLocalExperts * sizeof(int32_t)};
    Buffer combine_input_{context_, stream_, rows_* kHidden * sizeof(float)};
    Buffer gradients_{context_, stream_, received_weights_.bytes()};
    Buffer combined_{context_, stream_, kTokens* kHidden * sizeof(float)};
};

Problem gradient_problem(int num_ranks, ncclEpLayout_t layout) {
    Problem problem{.algorithm = kHighThroughput};
    problem.num_ranks = num_ranks;
    problem.num_experts = kLocalExperts * num_ranks;
    problem.max_tokens = kTokens;
    problem.num_topk = kTopk;
    problem.layout = layout;
    problem.token_type = problem.combine_type = ncclFloat32;
    problem.hidden = problem.combine_hidden = kHidden;
    problem.budget = problem.most_rows();
    problem.ranks.resize(num_ranks);
    Random random(9);
    for (reference::RankInput& rank : problem.ranks) {
        rank.num_tokens = kTokens;
        for (int token = 0; token < kTokens; ++token) {
            // Distinct experts, now and then fewer than K.
            const int first = random.below(problem.num_experts);
            for (int k = 0; k < kTopk; ++k) {
                rank.ids.push_back(random.chance(15) ? -1 : (first + k) % problem.num_experts);
                rank.weights.push_back(static_cast<float>(random.unit()) + 0.25f);
            }
        }
    }
    return problem;
}

void check_gradients(RankContext& context, ncclEpLayout_t layout) {
    const Problem problem = gradient_problem(context.num_ranks(), layout);
    const reference::RankInput& own = problem.ranks[context.rank()];
    Random random(1000 + static_cast<uint64_t>(context.rank()));
    std::vector<float> tokens, gradients;
    for (int i = 0; i < kTokens * kHidden; ++i) {
        tokens.push_back(static_cast<float>(random.unit() * 2 - 1));
        gradients.push_back(static_cast<float>(random.unit() * 2 - 1));
    }
    Moe moe(context, problem);
    const std::vector<float> outputs = moe.forward(tokens);
    const std::vector<float> token_gradients = moe.backward(gradients);
    const auto near = [&](double seen, double expected, const char* what, int token) {
        RANK_CHECK(context, std::fabs(seen - expected) < 2e-5, "{} of token {}: {} instead of {}", what, token, seen,
                   expected);
    };
    constexpr double kStep = 1e-4;
    for (int token = 0; token < kTokens; ++token) {
        const size_t at = static_cast<size_t>(token) * kHidden;
        const int64_t* ids = &own.ids[static_cast<size_t>(token) * kTopk];
        Vector x(&tokens[at], &tokens[at] + kHidden), g(&gradients[at], &gradients[at] + kHidden);
        const float* const weights = &own.weights[static_cast<size_t>(token) * kTopk];
        Vector w(weights, weights + kTopk);
        const Vector y = dense_output(x, w, ids);
        for (size_t i = 0; i < kHidden; ++i) near(outputs[at + i], y[i], "an output", token);
        const auto difference = [&](double& variable) {
            const double before = variable;
            variable = before + kStep;
            const double above = dot(dense_output(x, w, ids), g);
            variable = before - kStep;
            const double below = dot(dense_output(x, w, ids), g);
            variable = before;
            return (above - below) / (2 * kStep);
        };
        for (size_t i = 0; i < kHidden; ++i) near(token_gradients[at + i], difference(x[i]), "the gradient", token);
        for (size_t k = 0; k < kTopk; ++k) {
            near(moe.weights_gradient()[static_cast<size_t>(token) * kTopk + k], difference(w[k]),
                 "a weight's gradient", token);
        }
    }
}

TEST(HtGradient, BackwardIsTheDerivativeOfForward) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const int num_ranks : {2, 4}) {
            for (const ncclEpLayout_t layout : kHtLayouts) {
                expect_clean(spec, ranks_or(num_ranks), std::nullopt,
                             [=](RankContext& context) { check_gradients(context, layout); });
            }
        }
    });
}

}  // namespace
}  // namespace crossdock::testing
