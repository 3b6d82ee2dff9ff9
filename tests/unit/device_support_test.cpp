// SPDX-License-Identifier: Apache-2.0
// An NVFP4 combine is refused where a GPU cannot convert to 4 bits; the message names what it has and what is needed.
#include <gtest/gtest.h>

#include <string>

#include "core/error.h"
#include "core/ll/recipes.h"
#include "messages.h"

namespace crossdock {
namespace {

TEST(CombineRecipe, Fp4NeedsAGpuThatConverts) {
    for (const int capable : {0, 100, 103, 110, 120, 121}) EXPECT_NO_THROW(expect_fp4(capable)) << capable;
    for (const int capability : {80, 90, 101}) {
        const std::string own = fmt::format("this one has {}.{}", capability / 10, capability % 10);
        expect_mentions(message_of([=] { expect_fp4(capability); }, ncclInvalidUsage),
                        {"compute capability 10.0", own});
    }
}

}  // namespace
}  // namespace crossdock
