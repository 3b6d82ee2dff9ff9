// SPDX-License-Identifier: Apache-2.0
// Handles that come and go take no memory from the system, and give none back.
#include "core/handle_memory.h"

#include <gtest/gtest.h>

#include "runtime/cpu/cpu_runtime.h"
#include "runtime/cpu/local_executor.h"

namespace crossdock {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

class CountingRuntime : public cpu::CpuRuntime {
  public:
    CountingRuntime() : CpuRuntime(executor_) {}
    void* allocate(size_t bytes) override {
        ++num_allocated;
        return CpuRuntime::allocate(bytes);
    }
    void free(void* memory) noexcept override {
        ++num_freed;
        CpuRuntime::free(memory);
    }

    int num_allocated = 0;
    int num_freed = 0;

  private:
    cpu::LocalExecutor executor_{1};
};

TEST(HandleMemory, IsReused) {
    CountingRuntime runtime;
    {
        HandleMemory memory(runtime, {});
        for (int step = 0; step < 100'000; ++step) {
            DeviceMemory first = memory.take(1000);
            DeviceMemory second = memory.take(900);
            uint64_t* word = memory.take_word();
            EXPECT_NE(first.data(), second.data());
            memory.give_back(std::move(second), false);
            memory.give_back(std::move(first), false);
            memory.give_back(word);
        }
        EXPECT_LE(runtime.num_allocated, 4);  // the smaller may first get, then want, the larger one's
        EXPECT_EQ(runtime.num_freed, 0);
    }
    EXPECT_EQ(runtime.num_freed, runtime.num_allocated);
}

TEST(HandleMemory, IsNotTakenFarTooLarge) {
    CountingRuntime runtime;
    HandleMemory memory(runtime, {});
    memory.give_back(memory.take(10'000), false);
    const DeviceMemory small = memory.take(1000);
    EXPECT_LE(small.bytes(), 2000u);
    EXPECT_EQ(memory.take(9'000).bytes(), 10'000u);
}

// Sizes that never come again do not pile up.
TEST(HandleMemory, IsBounded) {
    CountingRuntime runtime;
    HandleMemory memory(runtime, {});
    for (size_t mib = 1; mib <= 24; ++mib) memory.give_back(memory.take(mib * mib * kMiB / 4), false);
    // 144 MiB at most at once, so at most 288 MiB are kept.
    EXPECT_GT(runtime.num_freed, 10);
    const int allocated = runtime.num_allocated;
    memory.give_back(memory.take(144 * kMiB), false);
    EXPECT_EQ(runtime.num_allocated, allocated) << "the latest is kept longest";
}

TEST(HandleMemory, OfGraphsIsKeptForReplays) {
    CountingRuntime runtime;
    HandleMemory memory(runtime, {});
    DeviceMemory captured = memory.take(1000);
    const std::byte* address = captured.data();
    memory.give_back(std::move(captured), true);
    EXPECT_NE(memory.take(1000).data(), address);
    EXPECT_EQ(runtime.num_freed, 1);  // the one just taken
    memory.clear();
    EXPECT_EQ(runtime.num_freed, 2);
}

// Memory of a caller's allocator is reused as well. What is too much returns to it, but not before operations have
// ended.
TEST(HandleMemory, OfHooksIsReused) {
    struct Hooks {
        int num_allocated = 0;
        int num_freed = 0;
    } hooks;
    const ncclEpAllocConfig_t config{[](void** memory, size_t bytes, void* context) {
                                         ++static_cast<Hooks*>(context)->num_allocated;
                                         *memory = std::malloc(bytes);
                                         return cudaSuccess;
                                     },
                                     [](void* memory, void* context) {
                                         ++static_cast<Hooks*>(context)->num_freed;
                                         std::free(memory);
                                         return cudaSuccess;
                                     },
                                     &hooks};
    CountingRuntime runtime;
    {
        HandleMemory memory(runtime, config);
        for (int step = 0; step < 1000; ++step) memory.give_back(memory.take(1000), false);
        EXPECT_EQ(hooks.num_allocated, 1);
        EXPECT_EQ(hooks.num_freed, 0);
        EXPECT_FALSE(memory.has_retired());
        for (size_t mib = 1; mib <= 24; ++mib) memory.give_back(memory.take(mib * mib * kMiB / 4), false);
        EXPECT_TRUE(memory.has_retired());
        EXPECT_EQ(hooks.num_freed, 0) << "operations may be queued";
        memory.return_to_hooks();
        EXPECT_GT(hooks.num_freed, 10);
        EXPECT_LT(hooks.num_freed, hooks.num_allocated);
    }
    EXPECT_EQ(hooks.num_freed, hooks.num_allocated);
    EXPECT_EQ(runtime.num_allocated, 0);
}

}  // namespace
}  // namespace crossdock
