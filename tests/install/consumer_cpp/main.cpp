// SPDX-License-Identifier: Apache-2.0
// The smallest C++ program on an installed tree: the library answers, a descriptor goes there and back, and a failed
// call becomes an exception with the library's message, whichever way the library is linked.
#include <crossdock.h>
#include <nccl_ep.h>

#include <crossdock/communicator.hpp>
#include <crossdock/group.hpp>
#include <cstring>
#include <nccl_ep/common.hpp>

static bool refuses_bad_group() {
    std::vector<crossdock::Communicator> comms = crossdock::Communicator::threads(1);
    try {
        crossdock::Group group(comms[0].get(), crossdock::low_latency_config(0, 1, 16));
    } catch (const crossdock::Error& error) {
        return error.code() == ncclInvalidArgument && std::strstr(error.what(), "num_experts") != nullptr;
    }
    return false;
}

int main() {
    int version = 0;
    if (ncclEpGetVersion(&version) != ncclSuccess || version != NCCL_EP_VERSION_CODE) return 1;
    const size_t sizes[2] = {128, 7168};
    ncclEpTensor_t* tensor = nullptr;
    if (ncclEpTensorAlloc(&tensor, 2, ncclBfloat16, sizes, nullptr) != ncclSuccess) return 1;
    if (tensor->sizes == sizes || tensor->sizes[1] != 7168) return 1;
    if (nccl_ep::get_low_latency_rdma_size_hint(128, 14336, 8, 256) == 0) return 1;
    if (ncclEpTensorDestroy(tensor) != ncclSuccess) return 1;
    return refuses_bad_group() ? 0 : 1;
}
