// SPDX-License-Identifier: Apache-2.0
// device.h's GPU half in a build without CUDA.
#include <stdexcept>

#include "tools/common/device.h"

namespace crossdock::tools {

std::string why_no_cuda() { return "this program was built without CUDA (preset cuda builds it with)"; }

int num_cuda_devices() { return 0; }

std::unique_ptr<Device> make_cuda_device(int) { throw std::runtime_error(why_no_cuda()); }

ncclComm_t make_nccl_communicator(const RankContext&) { throw std::runtime_error(why_no_cuda()); }

void destroy_nccl_communicator(ncclComm_t) {}

}  // namespace crossdock::tools
