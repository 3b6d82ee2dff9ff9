// SPDX-License-Identifier: Apache-2.0
// A build without CUDA: host memory only.
#include "plugin/objects.h"

namespace crossdock::plugin {

std::unique_ptr<network::DeviceMemory> make_device_memory() { return nullptr; }

}  // namespace crossdock::plugin
