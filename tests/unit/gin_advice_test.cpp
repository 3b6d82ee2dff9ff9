// SPDX-License-Identifier: Apache-2.0
// Where NCCL gives kernels no network, or another than asked for, one message says what to set.
#include "fabric/cuda/gin_advice.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <initializer_list>

#include "messages.h"

namespace crossdock {
namespace {

constexpr int kNccl = 23007;

class GinAdvice : public testing::Test {
  protected:
    void SetUp() override {
        for (const char* name : kVariables) unsetenv(name);
    }
    void TearDown() override { SetUp(); }

  private:
    static constexpr std::initializer_list<const char*> kVariables = {
        "NCCL_RMA_PLUGIN", "NCCL_GIN_ENABLE", "NCCL_GIN_TYPE", "IMITATED_CONTEXTS", "IMITATED_ERROR", "TOLD_WORDS"};
};

TEST_F(GinAdvice, TellsOurPluginOfSignalWords) {
    const uint64_t words[4] = {};
    tell_plugin_signal_words(words, sizeof(words));
    for (const char* other : {"/nowhere/plugin.so", FOREIGN_PLUGIN}) {
        setenv("NCCL_RMA_PLUGIN", other, 1);
        tell_plugin_signal_words(words, sizeof(words));
    }
    EXPECT_EQ(getenv("TOLD_WORDS"), nullptr);
    setenv("NCCL_RMA_PLUGIN", IMITATION_PLUGIN, 1);
    tell_plugin_signal_words(words, sizeof(words));
    ASSERT_NE(getenv("TOLD_WORDS"), nullptr);
    EXPECT_EQ(getenv("TOLD_WORDS"), fmt::format("{} 32", static_cast<const void*>(words)));
}

TEST_F(GinAdvice, WithoutPluginSaysWhatToSet) {
    EXPECT_EQ(gin_advice(kNccl, kGpuFits),
              "start the program with python -m crossdock run, or set NCCL_RMA_PLUGIN to the path of "
              "libnccl-rma-crossdock.so (docs/deployment.md)");
}

TEST_F(GinAdvice, NamesAnOldNccl) {
    expect_mentions(gin_advice(23004, kGpuFits), {"NCCL 2.30.4", "2.30.7 or newer", "CROSSDOCK_NCCL_LIBRARY"});
}

TEST_F(GinAdvice, NamesWhatTheEnvironmentForbids) {
    setenv("NCCL_GIN_ENABLE", "0", 1);
    EXPECT_EQ(gin_advice(kNccl, kGpuFits), "NCCL_GIN_ENABLE is 0: unset it, or set it to 1");
    setenv("NCCL_GIN_ENABLE", "1", 1);
    setenv("NCCL_GIN_TYPE", "3", 1);
    EXPECT_EQ(gin_advice(kNccl, kGpuFits), "NCCL_GIN_TYPE is 3: unset it, or set it to 2 (proxy)");
    setenv("NCCL_GIN_TYPE", "2", 1);
    expect_mentions(gin_advice(kNccl, kGpuFits), {"set NCCL_RMA_PLUGIN"});
}

TEST_F(GinAdvice, NamesTheGpuThatDoesNotFit) {
    expect_mentions(gin_advice(kNccl, 3), {"GPU 3", "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED", "NCCL_LSA_TEAM_SIZE",
                                           "CROSSDOCK_LSA_TEAM_SIZE"});
}

TEST_F(GinAdvice, NamesAMissingPlugin) {
    setenv("NCCL_RMA_PLUGIN", "/nowhere/plugin.so", 1);
    expect_mentions(gin_advice(kNccl, kGpuFits), {"NCCL_RMA_PLUGIN is /nowhere/plugin.so", "cannot open shared object",
                                                  "set it to the path of libnccl-rma-crossdock.so, or unset it"});
    expect_mentions(gin_fallback(), {"another network", "/nowhere/plugin.so", "cannot open shared object"});
}

TEST_F(GinAdvice, NamesAPluginOfAnotherKind) {
    setenv("NCCL_RMA_PLUGIN", NO_PLUGIN, 1);
    expect_mentions(gin_advice(kNccl, kGpuFits), {NO_PLUGIN, "neither ncclRmaPlugin_v14 nor ncclRmaPlugin_v13"});
    expect_mentions(gin_fallback(), {NO_PLUGIN, "neither ncclRmaPlugin_v14 nor ncclRmaPlugin_v13"});
}

TEST_F(GinAdvice, PassesOnWhatThePluginSays) {
    setenv("NCCL_RMA_PLUGIN", IMITATION_PLUGIN, 1);
    expect_mentions(gin_advice(kNccl, kGpuFits), {"did not take the plugin", IMITATION_PLUGIN, "NCCL_DEBUG=WARN"});
    setenv("IMITATED_ERROR", "no UCX", 1);
    expect_mentions(gin_advice(kNccl, kGpuFits), {IMITATION_PLUGIN, "says: no UCX"});
}

TEST_F(GinAdvice, NoticesAFallback) {
    EXPECT_EQ(gin_fallback(), "");  // nothing was asked for
    setenv("NCCL_RMA_PLUGIN", IMITATION_PLUGIN, 1);
    setenv("IMITATED_CONTEXTS", "1", 1);
    EXPECT_EQ(gin_fallback(), "");
    setenv("IMITATED_CONTEXTS", "0", 1);
    setenv("IMITATED_ERROR", "no UCX", 1);
    expect_mentions(gin_fallback(), {"another network", IMITATION_PLUGIN, "it says: no UCX", "NCCL_DEBUG=WARN"});
    setenv("NCCL_RMA_PLUGIN", FOREIGN_PLUGIN, 1);  // cannot be asked
    EXPECT_EQ(gin_fallback(), "");
}

TEST_F(GinAdvice, SaysHowCudaMustLoadKernels) {
    EXPECT_EQ(gin_loading_advice(true), "");  // no plugin
    setenv("NCCL_RMA_PLUGIN", IMITATION_PLUGIN, 1);
    setenv("IMITATED_CONTEXTS", "1", 1);
    expect_mentions(gin_loading_advice(true), {"set CUDA_MODULE_LOADING to EAGER"});
    EXPECT_EQ(gin_loading_advice(false), "");
    setenv("IMITATED_CONTEXTS", "0", 1);  // NCCL uses another network
    EXPECT_EQ(gin_loading_advice(true), "");
    setenv("NCCL_RMA_PLUGIN", FOREIGN_PLUGIN, 1);
    EXPECT_EQ(gin_loading_advice(true), "");
}

TEST_F(GinAdvice, KnowsOurPlugin) {
    if (*OUR_PLUGIN == '\0') GTEST_SKIP() << "the plugin is not part of this build";
    setenv("NCCL_RMA_PLUGIN", OUR_PLUGIN, 1);
    expect_mentions(gin_advice(kNccl, kGpuFits), {"did not take the plugin", OUR_PLUGIN});
    expect_mentions(gin_fallback(), {"another network", OUR_PLUGIN});
}

}  // namespace
}  // namespace crossdock
