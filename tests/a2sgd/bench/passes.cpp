// SPDX-License-Identifier: Apache-2.0
#include "tests/a2sgd/bench/passes.h"

#include "crossdock/a2sgd.h"
#include "crossdock/error.hpp"
#include "tests/a2sgd/bench/stream_clock.h"

namespace crossdock::bench {
namespace {

ncclDataType_t type_of(const std::string& dtype) {
    if (dtype == "bf16") return ncclBfloat16;
    return dtype == "fp16" ? ncclFloat16 : ncclFloat32;
}

// Both signs, no pattern that a branch could learn: 2.x and -2.x in every type.
std::vector<uint32_t> some_bits(size_t bytes) {
    std::vector<uint32_t> words((bytes + 3) / 4);
    uint32_t state = 1;
    for (uint32_t& word : words) {
        state = state * 1664525u + 1013904223u;
        word = (state & 0x80008000u) | 0x40004000u | (state >> 9 & 0x00070007u);
    }
    return words;
}

// A communicator of one rank, and what it needs.
class Rank {
  public:
    explicit Rank(bool is_gpu) : is_gpu_(is_gpu) {
        check(crossdockCommInitAll(&host_, 1));
        device_ = is_gpu ? tools::make_cuda_device(0) : tools::make_cpu_device();
        clock_ = is_gpu ? make_cuda_clock(device_->stream()) : make_cpu_clock();
        comm_ = is_gpu ? tools::make_nccl_communicator({0, 1, host_}) : host_;
    }
    ~Rank() {
        if (is_gpu_) tools::destroy_nccl_communicator(comm_);
        crossdockCommDestroy(host_);
    }
    Rank(const Rank&) = delete;
    Rank& operator=(const Rank&) = delete;

    ncclComm_t comm() const { return comm_; }
    tools::Device& device() { return *device_; }
    StreamClock& clock() { return *clock_; }

  private:
    bool is_gpu_;
    ncclComm_t host_ = nullptr;
    ncclComm_t comm_ = nullptr;
    std::unique_ptr<tools::Device> device_;
    std::unique_ptr<StreamClock> clock_;
};

double gb_s(double bytes, const tools::Spread& us) { return us.median > 0 ? bytes / us.median * 1e-3 : 0; }

}  // namespace

PassResult time_passes(const PassSetting& setting) {
    Rank rank(setting.device == "cuda");
    const ncclDataType_t type = type_of(setting.dtype);
    const size_t bytes = setting.entries * (type == ncclFloat32 ? 4 : 2);
    tools::DeviceArray<uint32_t> gradient(rank.device(), some_bits(bytes)), target(rank.device(), (bytes + 3) / 4);

    crossdockA2sgdConfig_t config = CROSSDOCK_A2SGD_CONFIG_INIT;
    config.sums = setting.sums_in_fp64 ? CROSSDOCK_A2SGD_SUMS_FP64 : CROSSDOCK_A2SGD_SUMS_FP32;
    const crossdockA2sgdPiece_t piece{gradient.data(), setting.entries, type, "gradient"};
    crossdockA2sgd_t a2sgd = nullptr;
    check(crossdockA2sgdCreate(&a2sgd, rank.comm(), &piece, 1, &config));

    std::vector<double> copies, begins, ends;
    constexpr int kWarmup = 3;
    for (int i = 0; i < kWarmup + setting.iterations; ++i) {
        StreamClock& clock = rank.clock();
        clock.mark();
        clock.copy(target.data(), gradient.data(), bytes);
        clock.mark();
        check(crossdockA2sgdBegin(a2sgd, rank.device().stream()));
        clock.mark();
        check(crossdockA2sgdEnd(a2sgd, rank.device().stream()));
        clock.mark();
        const std::vector<double> laps = clock.laps_us();
        if (i < kWarmup) continue;
        copies.push_back(laps[0]);
        begins.push_back(laps[1]);
        ends.push_back(laps[2]);
    }
    check(crossdockA2sgdDestroy(a2sgd));

    PassResult result{setting, tools::spread_of(copies), tools::spread_of(begins), tools::spread_of(ends)};
    result.copy_gb_s = gb_s(2.0 * static_cast<double>(bytes), result.copy_us);
    result.begin_gb_s = gb_s(static_cast<double>(bytes), result.begin_us);
    result.end_gb_s = gb_s(2.0 * static_cast<double>(bytes), result.end_us);
    return result;
}

}  // namespace crossdock::bench
