// SPDX-License-Identifier: Apache-2.0
// What a matrix product loses when it runs between the halves of an operation. In a build without CUDA make_gpu_overlap
// throws.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "bench/gate.h"

namespace crossdock::bench {

// Microseconds on one rank.
struct OverlapSample {
    double alone = 0;     // the product after another one
    double between = 0;   // the product after the send half
    double send = 0;      // the send half
    double complete = 0;  // the receive half, after the product
};

class GpuOverlap {
  public:
    virtual ~GpuOverlap() = default;

    // All on the device's stream: a product after another one, then a product between the halves that these enqueue.
    virtual OverlapSample run(const std::function<void()>& send, const std::function<void()>& complete) = 0;
};

// A product of two bf16 matrices of this many rows and columns, by cuBLAS (opened at run time).
inline constexpr int kProductEdge = 4096;

// Null where there is no cuBLAS; `why` is the message then.
std::unique_ptr<GpuOverlap> make_gpu_overlap(tools::Device& device, GpuGate& gate, std::string& why);

}  // namespace crossdock::bench
