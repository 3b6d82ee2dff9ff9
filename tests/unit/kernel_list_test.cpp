// SPDX-License-Identifier: Apache-2.0
// All kernels are loaded before the first operation, also where CUDA would load each at its first launch.
#include "runtime/cuda/kernel_list.h"

#include <cuda.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "runtime/cuda/cuda_runtime.h"

namespace crossdock {
namespace {

// Modes, types and counts of LSA teams: fewer would mean that launches have stopped listing their kernels.
constexpr size_t kFewestKernels = 35;

TEST(KernelList, NamesEveryKernelOnce) {
    EXPECT_GE(listed_kernels().size(), kFewestKernels);
    for (size_t i = 0; i < listed_kernels().size(); ++i) {
        for (size_t other = 0; other < i; ++other)
            EXPECT_NE(listed_kernels()[i]->function(), listed_kernels()[other]->function());
    }
}

TEST(KernelList, ARuntimeLoadsAll) {
    setenv("CUDA_MODULE_LOADING", "LAZY", 1);  // before CUDA is used first
    int num_devices = 0;
    if (cudaGetDeviceCount(&num_devices) != cudaSuccess || num_devices == 0) GTEST_SKIP() << "no GPU here";
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSymbolNotFound;
    ASSERT_EQ(cudaGetDriverEntryPointByVersion("cuFuncIsLoaded", &entry, 12040, cudaEnableDefault, &status),
              cudaSuccess);
    if (status != cudaDriverEntryPointSuccess) GTEST_SKIP() << "the driver has no cuFuncIsLoaded";
    const auto is_loaded = reinterpret_cast<decltype(&cuFuncIsLoaded)>(entry);
    const CudaRuntime runtime(0);
    for (const ListedKernel* kernel : listed_kernels()) {
        cudaFunction_t function = nullptr;
        const char* name = "?";
        ASSERT_EQ(cudaGetFuncBySymbol(&function, kernel->function()), cudaSuccess);
        EXPECT_EQ(cudaFuncGetName(&name, kernel->function()), cudaSuccess);
        CUfunctionLoadingState state = CU_FUNCTION_LOADING_STATE_UNLOADED;
        ASSERT_EQ(is_loaded(&state, function), CUDA_SUCCESS) << name;
        EXPECT_EQ(state, CU_FUNCTION_LOADING_STATE_LOADED) << name;
    }
}

}  // namespace
}  // namespace crossdock
