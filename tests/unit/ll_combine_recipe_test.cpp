// SPDX-License-Identifier: Apache-2.0
// An NVFP4 combine is refused where a GPU cannot convert to 4 bits; the message names what it has and what is needed.
#include <gtest/gtest.h>

#include <string>

#include "core/error.h"
#include "core/ll/handle.h"

namespace crossdock {
namespace {

TEST(CombineRecipe, Fp4NeedsAGpuThatConverts) {
    for (const int capable : {0, 100, 103, 110, 120, 121}) EXPECT_NO_THROW(expect_fp4(capable)) << capable;
    for (const int capability : {80, 90, 101}) {
        try {
            expect_fp4(capability);
            ADD_FAILURE() << capability << " was accepted";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ncclInvalidUsage);
            const std::string message = error.what();
            EXPECT_NE(message.find("compute capability 10.0"), std::string::npos) << message;
            const std::string own = std::to_string(capability / 10) + "." + std::to_string(capability % 10);
            EXPECT_NE(message.find("this one has " + own), std::string::npos) << message;
        }
    }
}

}  // namespace
}  // namespace crossdock
