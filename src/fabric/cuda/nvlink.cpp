// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda/nvlink.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdint>
#include <cstdio>

namespace crossdock {
namespace {

// NVML's interface, as far as it is used. Its header is not part of every CUDA toolkit.
using NvmlDevice = struct NvmlDeviceObject*;
constexpr int kNvmlSuccess = 0;
constexpr unsigned kP2pOverNvlink = 2;
constexpr unsigned kP2pOk = 0;

// As NVML writes a GPU's UUID.
std::string text_of(const GpuPlace::Uuid& uuid) {
    std::string text = "GPU-";
    for (size_t i = 0; i < uuid.size(); ++i) {
        if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
        text += fmt::format("{:02x}", static_cast<uint8_t>(uuid[i]));
    }
    return text;
}

class Nvml {
  public:
    explicit Nvml(const char* file) {
        library_ = dlopen(file, RTLD_NOW | RTLD_LOCAL);
        if (library_ == nullptr) {
            const char* reason = dlerror();
            problem_ = fmt::format("NVML cannot be opened ({})", reason != nullptr ? reason : file);
            return;
        }
        find(init_, "nvmlInit_v2");
        find(shutdown_, "nvmlShutdown");
        find(handle_by_uuid_, "nvmlDeviceGetHandleByUUID");
        find(p2p_status_, "nvmlDeviceGetP2PStatus");
        if (!problem_.empty()) return;
        const int result = init_();
        is_initialised_ = result == kNvmlSuccess;
        if (!is_initialised_) problem_ = fmt::format("nvmlInit_v2 failed with code {}", result);
    }
    ~Nvml() {
        if (is_initialised_) shutdown_();
        if (library_ != nullptr) (void)dlclose(library_);
    }
    Nvml(const Nvml&) = delete;
    Nvml& operator=(const Nvml&) = delete;

    std::string why_no_nvlink(const GpuPlace::Uuid& own, const GpuPlace::Uuid& peer) const {
        if (!is_initialised_) return problem_;
        std::array<NvmlDevice, 2> devices{};
        const std::array names{text_of(own), text_of(peer)};
        for (size_t i = 0; i < devices.size(); ++i) {
            const int result = handle_by_uuid_(names[i].c_str(), &devices[i]);
            if (result != kNvmlSuccess) return fmt::format("NVML does not find {} (code {})", names[i], result);
        }
        unsigned status = kP2pOk;
        const int result = p2p_status_(devices[0], devices[1], kP2pOverNvlink, &status);
        if (result != kNvmlSuccess)
            return fmt::format("nvmlDeviceGetP2PStatus of {} and {} failed with code {}", names[0], names[1], result);
        return status == kP2pOk ? "" : fmt::format("NVLink does not link {} and {}", names[0], names[1]);
    }

  private:
    template <typename Function>
    void find(Function& function, const char* name) {
        function = reinterpret_cast<Function>(dlsym(library_, name));
        if (function == nullptr && problem_.empty()) problem_ = fmt::format("NVML lacks {}", name);
    }

    void* library_ = nullptr;
    bool is_initialised_ = false;
    std::string problem_;
    int (*init_)() = nullptr;
    int (*shutdown_)() = nullptr;
    int (*handle_by_uuid_)(const char* uuid, NvmlDevice* device) = nullptr;
    int (*p2p_status_)(NvmlDevice first, NvmlDevice second, unsigned capability, unsigned* status) = nullptr;
};

}  // namespace

GpuPlace GpuPlace::of(const Uuid& gpu) {
    GpuPlace place;
    place.gpu = gpu;
    if (FILE* file = std::fopen("/proc/sys/kernel/random/boot_id", "re")) {
        if (std::fread(place.host.data(), place.host.size(), 1, file) != 1) place.host = {};
        std::fclose(file);
    }
    return place;
}

std::string why_no_nvlink(const GpuPlace& own, const GpuPlace& peer, const char* nvml) {
    if (own.gpu == peer.gpu || own.host != peer.host) return "";
    return Nvml(nvml).why_no_nvlink(own.gpu, peer.gpu);
}

}  // namespace crossdock
