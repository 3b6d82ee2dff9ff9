// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "demo/expert_runner.h"
#include "demo/layer.h"
#include "tools/common/bfloat16.h"

namespace crossdock::demo {
namespace {

class CpuExperts : public ExpertRunner {
  public:
    CpuExperts(const LayerShape& shape, int first_expert, int num_local)
        : shape_(shape), hidden_(static_cast<size_t>(shape.hidden)) {
        for (int local = 0; local < num_local; ++local) {
            weights_.push_back(make_expert(shape, first_expert + local));
        }
    }

    void run(uint16_t* rows, const int32_t* counters, size_t slots) override {
        for (size_t local = 0; local < weights_.size(); ++local) {
            uint16_t* zone = rows + local * slots * hidden_;
            run_expert(shape_, weights_[local], zone, static_cast<size_t>(counters[local]), zone);
        }
    }

    void run_zones(const ZoneRows& zones, uint16_t* results) override {
        for (size_t local = 0; local < weights_.size(); ++local) {
            const auto first = static_cast<size_t>(zones.offsets[local]);
            const auto count = static_cast<size_t>(zones.counters[local]);
            run_expert(shape_, weights_[local], zones.rows + first * hidden_, count, results + first * hidden_);
            weigh(zones.weights + first, count, results + first * hidden_);
        }
    }

    void run_zones_backward(const ZoneRows& zones, const uint16_t* gradients, uint16_t* row_gradients,
                            float* weight_gradients) override {
        for (size_t local = 0; local < weights_.size(); ++local) {
            const auto first = static_cast<size_t>(zones.offsets[local]);
            const auto count = static_cast<size_t>(zones.counters[local]);
            run_expert_backward(shape_, weights_[local], transpose(shape_, weights_[local]),
                                zones.rows + first * hidden_, gradients + first * hidden_, count,
                                row_gradients + first * hidden_, weight_gradients + first);
            weigh(zones.weights + first, count, row_gradients + first * hidden_);
        }
    }

  private:
    void weigh(const float* weights, size_t count, uint16_t* rows) const {
        for (size_t i = 0; i < count * hidden_; ++i) {
            rows[i] = tools::float_to_bfloat16(weights[i / hidden_] * tools::bfloat16_to_float(rows[i]));
        }
    }

    LayerShape shape_;
    size_t hidden_;
    std::vector<ExpertWeights> weights_;
};

}  // namespace

std::unique_ptr<ExpertRunner> make_cpu_experts(const LayerShape& shape, int first_expert, int num_local) {
    return std::make_unique<CpuExperts>(shape, first_expert, num_local);
}

}  // namespace crossdock::demo
