// SPDX-License-Identifier: Apache-2.0
// Fibers switch, restart, hand exceptions over and keep the C++ runtime's exception state apart.
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/cpu/fiber.h"

namespace crossdock::cpu {
namespace {

struct Script {
    Fiber fiber{kWarpStackBytes};
    std::function<void(Script&)> body;
    explicit Script(std::function<void(Script&)> what) : body(std::move(what)) {
        fiber.start(
            [](void* self) {
                auto* script = static_cast<Script*>(self);
                script->body(*script);
            },
            this);
    }
};

TEST(Fiber, SwitchesBackAndForth) {
    std::string trace;
    Script script([&](Script& self) {
        trace += 'b';
        self.fiber.suspend();
        trace += 'd';
    });
    trace += 'a';
    script.fiber.resume();
    trace += 'c';
    EXPECT_FALSE(script.fiber.is_finished());
    script.fiber.resume();
    EXPECT_EQ(trace, "abcd");
    EXPECT_TRUE(script.fiber.is_finished());
}

TEST(Fiber, ManyBodiesAfterEachOtherOnOneStack) {
    Fiber fiber(kWarpStackBytes);
    int num_runs = 0;
    for (int i = 0; i < 1000; ++i) {
        fiber.start([](void* count) { ++*static_cast<int*>(count); }, &num_runs);
        fiber.resume();
        ASSERT_TRUE(fiber.is_finished());
    }
    EXPECT_EQ(num_runs, 1000);
}

TEST(Fiber, HandsItsExceptionOver) {
    Script script([](Script&) { throw std::runtime_error("from inside"); });
    script.fiber.resume();
    ASSERT_TRUE(script.fiber.is_finished());
    try {
        std::rethrow_exception(script.fiber.take_exception());
    } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "from inside");
    }
    EXPECT_EQ(script.fiber.take_exception(), nullptr);
}

// A destructor that waits while an exception passes through is what RAII objects of a failing program do.
TEST(Fiber, SuspendsWhileAnExceptionIsUnderWay) {
    struct SuspendsAtEnd {
        Fiber& fiber;
        ~SuspendsAtEnd() { fiber.suspend(); }
    };
    std::vector<std::string> caught;
    const auto body = [&](Script& self) {
        try {
            SuspendsAtEnd guard{self.fiber};
            throw std::runtime_error("fiber");
        } catch (const std::runtime_error& error) {
            self.fiber.suspend();
            caught.push_back(error.what());
            EXPECT_EQ(std::uncaught_exceptions(), 0);
        }
    };
    Script first(body);
    Script second(body);
    for (int round = 0; round < 3; ++round) {
        first.fiber.resume();
        EXPECT_EQ(std::uncaught_exceptions(), 0);
        second.fiber.resume();
        EXPECT_EQ(std::uncaught_exceptions(), 0);
        EXPECT_EQ(std::current_exception(), nullptr);
    }
    EXPECT_TRUE(first.fiber.is_finished() && second.fiber.is_finished());
    EXPECT_EQ(caught, (std::vector<std::string>{"fiber", "fiber"}));
}

TEST(Fiber, NestsInAnotherFiber) {
    std::string trace;
    Script inner([&](Script& self) {
        trace += '2';
        self.fiber.suspend();
        trace += '4';
    });
    Script outer([&](Script& self) {
        trace += '1';
        inner.fiber.resume();
        trace += '3';
        self.fiber.suspend();
        inner.fiber.resume();
        trace += '5';
    });
    outer.fiber.resume();
    outer.fiber.resume();
    EXPECT_EQ(trace, "12345");
}

}  // namespace
}  // namespace crossdock::cpu
