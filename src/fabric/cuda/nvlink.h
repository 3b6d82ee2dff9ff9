// SPDX-License-Identifier: Apache-2.0
// Whether GPUs are linked by NVLink, as the driver's management library (NVML) says. Needs no CUDA. NVML is asked, not
// the CUDA driver, because a process may see its own GPU only (CUDA_VISIBLE_DEVICES).
#pragma once

#include <array>
#include <string>

namespace crossdock {

// Which GPU a rank uses, and on which host: plain bytes, exchanged among ranks.
struct GpuPlace {
    using Uuid = std::array<char, 16>;
    Uuid gpu{};                   // cudaDeviceProp::uuid, globally unique
    std::array<char, 36> host{};  // the kernel's boot ID, the same in all containers of a host; zeros: not known

    // gpu is a GPU of this host.
    static GpuPlace of(const Uuid& gpu);
};

inline constexpr const char* kNvmlLibrary = "libnvidia-ml.so.1";

// For two ranks of one LSA team, `own` on this host: empty if their GPUs are linked by NVLink, directly or through
// switches, or are the same GPU; otherwise the reason why not, or why it is not known. Ranks of different hosts are
// linked, since only NVLink joins hosts into one LSA team. nvml: the library's file.
std::string why_no_nvlink(const GpuPlace& own, const GpuPlace& peer, const char* nvml = kNvmlLibrary);

}  // namespace crossdock
