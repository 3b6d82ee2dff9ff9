// SPDX-License-Identifier: Apache-2.0
// Wrong arguments: a message with argument, value and range, and no effect.
#include <gtest/gtest.h>

#include <vector>

#include "fake_device.h"
#include "session.h"

namespace crossdock::network {
namespace {

TEST(BadCalls, AreRefusedWithAMessage) {
    run_ranks(2, [](TestRank& rank) {
        std::vector<std::byte> bytes(static_cast<size_t>(1000 + 1000 * rank.rank()));  // ranks may differ
        Session session(rank, 2);
        void* memory = session.add_memory(bytes.data(), bytes.size());
        const auto& table = session.table();
        void* contexts = session.contexts();
        void* request = nullptr;
        if (rank.rank() == 0) {
            const auto refused = [&](ncclResult_t result, std::initializer_list<const char*> words) {
                expect_refused(rank, result, ncclInvalidArgument, words);
                rank.expect(request == nullptr, "a refused call gave a request");
            };
            refused(table.put(contexts, 2, 0, memory, 8, 0, memory, 1, &request), {"context 2", "there are 2"});
            refused(table.put(contexts, -1, 0, memory, 8, 0, memory, 1, &request), {"context -1"});
            refused(table.put(contexts, 0, 0, memory, 8, 0, memory, 2, &request), {"rank 2", "2 ranks"});
            refused(table.put(contexts, 0, 993, memory, 8, 0, memory, 1, &request),
                    {"the source is 8 bytes from offset 993", "rank 0 registered 1000 bytes"});
            refused(table.put(contexts, 0, 0, memory, 8, 1993, memory, 1, &request),
                    {"the target is 8 bytes from offset 1993", "rank 1 registered 2000 bytes"});
            refused(table.put(contexts, 0, 0, memory, 8, UINT64_MAX - 2, memory, 1, &request), {"the target"});
            refused(table.put(contexts, 0, 0, nullptr, 8, 0, memory, 1, &request),
                    {"the source names no registered memory"});
            refused(table.put_signal(contexts, 0, 0, memory, 8, 0, memory, 1, 4, memory, 1, plugin::kSignalAdd, true,
                                     &request),
                    {"the signal's offset is 4", "multiples of 8"});
            refused(table.put_signal(contexts, 0, 0, memory, 8, 0, memory, 1, 2000, memory, 1, plugin::kSignalAdd, true,
                                     &request),
                    {"the signal is 8 bytes from offset 2000"});
            refused(table.put_signal(contexts, 0, 0, memory, 8, 0, memory, 1, 0, memory, 1, 3, true, &request),
                    {"signal operation is 3", "1 (increment)", "2 (add)"});
            refused(table.get(contexts, 0, 1993, memory, 8, 0, memory, 1, &request), {"the remote memory"});
            refused(table.get(contexts, 0, 0, memory, 1008, 0, memory, 1, &request), {"the local memory"});
            void* other = nullptr;
            refused(table.register_memory(session.comm(), bytes.data(), 8, 7, 0, &other), {"type is 7", "1 (host)"});
            plugin::Config14 config{0, -1};
            refused(table.create_context(session.comm(), &config, &other), {"nContexts is 0", "1 and more"});
            config.num_contexts = 5000;
            refused(table.create_context(session.comm(), &config, &other), {"5000 contexts", "4096"});
        }
        session.finish(session.put(1 - rank.rank(), memory, 0, 1000, memory, 0));
        rank.barrier();
    });
}

TEST(BadCalls, DeviceMemoryNeedsADevice) {
    run_ranks(1, [](TestRank& rank) {
        set_fake_device_seed(0);
        std::vector<std::byte> bytes(8);
        Session session(rank);
        void* memory = nullptr;
        const ncclResult_t result =
            session.table().register_memory(session.comm(), bytes.data(), 8, plugin::kPointerCuda, 0, &memory);
        expect_refused(rank, result, ncclInvalidUsage, {"device memory cannot be registered"});
    });
}

// The rank that does not register is named, and the others can end.
TEST(BadCalls, RegisteringAloneEnds) {
    run_ranks(2, [](TestRank& rank) {
        setenv("CROSSDOCK_JOIN_TIMEOUT_MS", "4000", 1);
        std::vector<std::byte> bytes(8);
        Session session(rank);
        if (rank.rank() == 0) {
            void* memory = nullptr;
            const ncclResult_t result =
                session.table().register_memory(session.comm(), bytes.data(), 8, plugin::kPointerHost, 0, &memory);
            expect_refused(rank, result, ncclRemoteError,
                           {"rank 0 timed out after 4000 ms waiting for ranks 1 to register"});
        }
        rank.barrier();
    });
}

TEST(BadCalls, ForeignHandlesAreRefused) {
    const auto& table = ncclRmaPlugin_v14;
    void* instance = nullptr;
    ASSERT_EQ(table.init(&instance, 1, nullptr), ncclSuccess);
    char handle[plugin::kHandleBytes];
    void* listener = nullptr;
    ASSERT_EQ(table.listen(instance, 0, handle, &listener), ncclSuccess);
    char rubbish[plugin::kHandleBytes] = "rubbish";
    void* handles[2] = {handle, rubbish};
    void* comm = nullptr;
    EXPECT_EQ(table.connect(instance, handles, 2, 0, listener, &comm), ncclInvalidArgument);
    EXPECT_EQ(table.connect(instance, handles, 2, 2, listener, &comm), ncclInvalidArgument);
    EXPECT_EQ(comm, nullptr);
    EXPECT_EQ(table.close_listen(listener), ncclSuccess);
    EXPECT_EQ(table.finalize(instance), ncclSuccess);
}

}  // namespace
}  // namespace crossdock::network
