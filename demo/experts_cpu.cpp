// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "demo/expert_runner.h"
#include "demo/layer.h"

namespace crossdock::demo {
namespace {

class CpuExperts : public ExpertRunner {
  public:
    CpuExperts(const LayerShape& shape, int first_expert, int num_local) : shape_(shape) {
        for (int local = 0; local < num_local; ++local) {
            weights_.push_back(make_expert(shape, first_expert + local));
        }
    }

    void run(uint16_t* rows, const int32_t* counters, size_t slots) override {
        for (size_t local = 0; local < weights_.size(); ++local) {
            uint16_t* zone = rows + local * slots * static_cast<size_t>(shape_.hidden);
            run_expert(shape_, weights_[local], zone, static_cast<size_t>(counters[local]), zone);
        }
    }

  private:
    LayerShape shape_;
    std::vector<ExpertWeights> weights_;
};

}  // namespace

std::unique_ptr<ExpertRunner> make_cpu_experts(const LayerShape& shape, int first_expert, int num_local) {
    return std::make_unique<CpuExperts>(shape, first_expert, num_local);
}

}  // namespace crossdock::demo
