// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda/gin_advice.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <optional>

#include "core/log.h"

namespace crossdock {
namespace {

constexpr int kMinPluginVersion = 23007;  // first NCCL version that looks for the plugin's functions
constexpr const char* kVariable = "NCCL_RMA_PLUGIN";
constexpr const char* kWhatToSet =
    "start the program with python -m crossdock run, or set NCCL_RMA_PLUGIN to the path of libnccl-rma-crossdock.so "
    "(docs/deployment.md)";

constexpr const char* kWhatElseToSet =
    "set it to the path of libnccl-rma-crossdock.so, or unset it and start the program with python -m crossdock run "
    "(docs/deployment.md)";

std::optional<std::string> value_of(const char* variable) {
    const char* value = std::getenv(variable);
    if (value == nullptr || *value == '\0') return std::nullopt;
    return value;
}

// The plugin that NCCL_RMA_PLUGIN names, opened as NCCL does: by file name, or as libnccl-rma-NAME.so.
class Plugin {
  public:
    explicit Plugin(const std::string& named) {
        library_ = dlopen(named.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (library_ != nullptr) return;
        const char* reason = dlerror();
        reason_ = reason != nullptr ? reason : "no reason given";
        library_ = dlopen(fmt::format("libnccl-rma-{}.so", named).c_str(), RTLD_NOW | RTLD_LOCAL);
    }
    ~Plugin() {
        if (library_ != nullptr) (void)dlclose(library_);
    }
    Plugin(const Plugin&) = delete;
    Plugin& operator=(const Plugin&) = delete;

    // Empty if NCCL accepts the plugin.
    std::string problem() const {
        if (library_ == nullptr) return fmt::format("which cannot be opened ({})", reason_);
        if (find("ncclRmaPlugin_v14") == nullptr && find("ncclRmaPlugin_v13") == nullptr)
            return "which has neither ncclRmaPlugin_v14 nor ncclRmaPlugin_v13";
        return "";
    }
    // Of Crossdock's plugin; others do not say.
    std::optional<int> contexts() const {
        const auto num_contexts = reinterpret_cast<int (*)()>(find("crossdockRmaPluginContexts"));
        return num_contexts != nullptr ? std::optional(num_contexts()) : std::nullopt;
    }
    void note_signal_words(const void* words, size_t bytes) const {
        const auto note = reinterpret_cast<int (*)(const void*, size_t)>(find("crossdockRmaPluginSignalWords"));
        if (note != nullptr && note(words, bytes) == 0) debug("the network plugin does not know a group's signals");
    }
    std::string last_error() const {
        const auto copy = reinterpret_cast<void (*)(char*, size_t)>(find("crossdockRmaPluginLastError"));
        std::array<char, 1024> message = {};
        if (copy != nullptr) copy(message.data(), message.size());
        return message.data();
    }

  private:
    void* find(const char* symbol) const { return library_ != nullptr ? dlsym(library_, symbol) : nullptr; }
    void* library_ = nullptr;
    std::string reason_;
};

}  // namespace

std::string gin_advice(int nccl_version, int unfit_gpu) {
    if (nccl_version < kMinPluginVersion)
        return fmt::format(
            "NCCL {}.{}.{} loads no plugin for it: install 2.30.7 or newer, and make the program load that "
            "(LD_LIBRARY_PATH, or the file's name in CROSSDOCK_NCCL_LIBRARY)",
            nccl_version / 10000, nccl_version / 100 % 100, nccl_version % 100);
    if (value_of("NCCL_GIN_ENABLE") == "0") return "NCCL_GIN_ENABLE is 0: unset it, or set it to 1";
    if (const auto type = value_of("NCCL_GIN_TYPE"); type && *type != "2" && *type != "-1")
        return fmt::format("NCCL_GIN_TYPE is {}: unset it, or set it to 2 (proxy)", *type);
    if (unfit_gpu != kGpuFits)
        return fmt::format(
            "GPU {} lacks the attribute GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, which NCCL asks of every GPU: "
            "keep all ranks in one LSA team (unset NCCL_LSA_TEAM_SIZE, NCCL_HOSTID and CROSSDOCK_LSA_TEAM_SIZE), or "
            "use "
            "other GPUs",
            unfit_gpu);
    const auto named = value_of(kVariable);
    if (!named) return kWhatToSet;
    const Plugin plugin(*named);
    if (const std::string problem = plugin.problem(); !problem.empty())
        return fmt::format("{} is {}, {}: {}", kVariable, *named, problem, kWhatElseToSet);
    if (const std::string said = plugin.last_error(); !said.empty())
        return fmt::format("the plugin {} says: {}", *named, said);
    return fmt::format("NCCL did not take the plugin {}, and says why with NCCL_DEBUG=WARN", *named);
}

std::string gin_fallback() {
    const auto named = value_of(kVariable);
    if (!named) return "";
    const Plugin plugin(*named);
    const std::string problem = plugin.problem();
    if (problem.empty() && plugin.contexts() != 0) return "";
    std::string said = problem.empty() ? plugin.last_error() : "";
    if (!said.empty()) said = fmt::format(" (it says: {})", said);
    return problem.empty() ? fmt::format(
                                 "NCCL uses another network between LSA teams than the plugin that {} names, {}{}: "
                                 "NCCL_DEBUG=WARN tells why",
                                 kVariable, *named, said)
                           : fmt::format("NCCL uses another network between LSA teams than {} names, {}, {}: {}",
                                         kVariable, *named, problem, kWhatElseToSet);
}

std::string gin_loading_advice(bool loads_lazily) {
    const auto named = loads_lazily ? value_of(kVariable) : std::nullopt;
    if (!named || Plugin(*named).contexts().value_or(0) == 0) return "";
    return "CUDA loads each kernel at its first launch, and waits for running kernels before it does. This stops the "
           "copies of NCCL's network plugin, so waits for peers may time out: set CUDA_MODULE_LOADING to EAGER before "
           "the program starts";
}

void tell_plugin_signal_words(const void* words, size_t bytes) {
    if (const auto named = value_of(kVariable)) Plugin(*named).note_signal_words(words, bytes);
}

}  // namespace crossdock
