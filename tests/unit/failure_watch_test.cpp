// SPDX-License-Identifier: Apache-2.0
// A failure that a kernel leaves in host-visible memory is reported once, without a call of the library.
#include "core/failure_watch.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <memory>
#include <vector>

#include "runtime/cpu/sanitizer.h"

namespace crossdock {
namespace {

// As a kernel does it.
void let_fail(HostVisibleStatus& status) { __atomic_store_n(&status.failed, 1u, __ATOMIC_RELEASE); }

struct Told {
    std::atomic<int> times{0};
    std::promise<void> first;
    void operator()() {
        if (times++ == 0) first.set_value();
    }
    bool comes() { return first.get_future().wait_for(std::chrono::seconds(20)) == std::future_status::ready; }
};

TEST(FailureWatch, TellsOnceAndOfTheGroupThatFailed) {
    HostVisibleStatus bad{}, good{}, later{};
    Told told_bad, told_good, told_later;
    const auto bad_watch = FailureWatch::watch(bad, std::ref(told_bad));
    const auto good_watch = FailureWatch::watch(good, std::ref(told_good));
    let_fail(bad);
    EXPECT_TRUE(told_bad.comes());
    // A round after that: the first is not told again.
    const auto later_watch = FailureWatch::watch(later, std::ref(told_later));
    let_fail(later);
    EXPECT_TRUE(told_later.comes());
    EXPECT_EQ(told_bad.times, 1);
    EXPECT_EQ(told_good.times, 0);
}

// A group that is destroyed right after its failure does not take the message with it.
TEST(FailureWatch, LooksOnceMoreAtTheEnd) {
    auto status = std::make_unique<HostVisibleStatus>();
    Told told;
    auto registration = FailureWatch::watch(*status, std::ref(told));
    let_fail(*status);
    registration.reset();
    EXPECT_EQ(told.times, 1);
    status.reset();
}

// Groups come and go while others fail; the last one ends the thread, and the next one starts another.
TEST(FailureWatch, RegistrationsComeAndGo) {
    for (int round = 0; round < 200; ++round) {
        std::vector<std::unique_ptr<HostVisibleStatus>> statuses;
        std::vector<std::unique_ptr<Told>> told;
        std::vector<FailureWatch::Registration> registrations;
        for (int i = 0; i < 4; ++i) {
            statuses.push_back(std::make_unique<HostVisibleStatus>());
            told.push_back(std::make_unique<Told>());
            registrations.push_back(FailureWatch::watch(*statuses[i], std::ref(*told[i])));
        }
        let_fail(*statuses[round % 4]);
        registrations.clear();
        for (int i = 0; i < 4; ++i) ASSERT_EQ(told[i]->times, i == round % 4 ? 1 : 0);
    }
}

// A forked child, which has no such thread, gives up what it inherits without a word, and ends.
TEST(FailureWatch, AForkedChildEnds) {
#if defined(CROSSDOCK_TSAN)
    GTEST_SKIP() << "ThreadSanitizer knows no new threads in a child that is forked beside other threads";
#endif
    // The thread is past its beginning, where it may hold locks of the C library or of a sanitizer.
    HostVisibleStatus earlier{};
    Told told_earlier;
    const auto earlier_watch = FailureWatch::watch(earlier, std::ref(told_earlier));
    let_fail(earlier);
    ASSERT_TRUE(told_earlier.comes());
    HostVisibleStatus status{};
    Told told;
    auto registration = FailureWatch::watch(status, std::ref(told));
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        let_fail(status);
        registration.reset();
        HostVisibleStatus own{};
        Told told_own;
        const auto own_watch = FailureWatch::watch(own, std::ref(told_own));
        let_fail(own);
        _exit(told_own.comes() && told.times == 0 ? 0 : 1);
    }
    int outcome = -1;
    ASSERT_EQ(waitpid(child, &outcome, 0), child);
    EXPECT_EQ(outcome, 0);
    EXPECT_EQ(told.times, 0);
}

}  // namespace
}  // namespace crossdock
