// SPDX-License-Identifier: Apache-2.0
// The smallest C++ program on an installed tree: the library answers, and a descriptor goes there and back.
#include <crossdock.h>
#include <nccl_ep.h>

#include <nccl_ep/common.hpp>

int main() {
    int version = 0;
    if (ncclEpGetVersion(&version) != ncclSuccess || version != NCCL_EP_VERSION_CODE) return 1;
    const size_t sizes[2] = {128, 7168};
    ncclEpTensor_t* tensor = nullptr;
    if (ncclEpTensorAlloc(&tensor, 2, ncclBfloat16, sizes, nullptr) != ncclSuccess) return 1;
    if (tensor->sizes == sizes || tensor->sizes[1] != 7168) return 1;
    if (nccl_ep::get_low_latency_rdma_size_hint(128, 14336, 8, 256) == 0) return 1;
    return ncclEpTensorDestroy(tensor) == ncclSuccess ? 0 : 1;
}
