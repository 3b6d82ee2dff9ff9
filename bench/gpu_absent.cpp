// SPDX-License-Identifier: Apache-2.0
// What the benchmark needs of GPUs, in a build without CUDA. The command line has refused --backend cuda before any of
// these can be called.
#include <stdexcept>

#include "bench/gate.h"
#include "bench/gpu.h"
#include "bench/kernel_clock.h"
#include "bench/overlap.h"

namespace crossdock::bench {
namespace {

[[noreturn]] void refuse() { throw std::runtime_error(tools::why_no_cuda()); }

}  // namespace

GpuWindow make_gpu_window(ncclComm_t, size_t) { refuse(); }
GpuWindow expect_gpu_window(ncclComm_t, size_t) { refuse(); }
void free_gpu_window(ncclComm_t, const GpuWindow&) {}
std::unique_ptr<GpuStopwatch> make_gpu_stopwatch(tools::Device&) { refuse(); }
std::unique_ptr<GpuLowerBound> make_gpu_lower_bound(const tools::RankContext&, ncclComm_t, tools::Device&, uint64_t) {
    refuse();
}
std::unique_ptr<BareLl> make_bare_ll(tools::Device&, const BareShape&) { refuse(); }
std::unique_ptr<GpuGate> make_gpu_gate(const tools::RankContext&, ncclComm_t, tools::Device&, std::string&) {
    refuse();
}
std::unique_ptr<KernelClock> make_kernel_clock(tools::Device&, std::string&) { refuse(); }
std::unique_ptr<GpuOverlap> make_gpu_overlap(tools::Device&, GpuGate&, std::string&) { refuse(); }
size_t used_gpu_memory() { refuse(); }
std::string describe_gpu() { return ""; }

}  // namespace crossdock::bench
