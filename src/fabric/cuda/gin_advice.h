// SPDX-License-Identifier: Apache-2.0
// NCCL's network between LSA teams: why kernels get none, or another one than requested, and what Crossdock's plugin
// needs to know. Checks the environment and the plugin's file; needs neither GPU nor NCCL.
#pragma once

#include <cstddef>
#include <string>

namespace crossdock {

// NCCL refuses its network if a GPU lacks the attribute. kGpuFits: this rank's GPU has it, or it is unknown.
inline constexpr int kGpuFits = -1;

// Message suffix: the first reason found why NCCL has no network, and what to set. unfit_gpu: this rank's GPU if it
// lacks the attribute, else kGpuFits.
std::string gin_advice(int nccl_version, int unfit_gpu);

// After NCCL has created its network: a message if it does not use the plugin that NCCL_RMA_PLUGIN names, otherwise
// empty. Can be detected for Crossdock's plugin only.
std::string gin_fallback();

// After NCCL has created its network: a message if it uses Crossdock's plugin while CUDA loads each kernel at its first
// launch, which holds up the plugin's copies; otherwise empty.
std::string gin_loading_advice(bool loads_lazily);

// If NCCL_RMA_PLUGIN names Crossdock's plugin: from now on only signals write these words of a window. words: their
// address in the memory that was registered, which the window maps again at another address.
void tell_plugin_signal_words(const void* words, size_t bytes);

}  // namespace crossdock
