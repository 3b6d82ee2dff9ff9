// SPDX-License-Identifier: Apache-2.0
// A mailbox shows the two latest posts, whole, to readers that look while it is written.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "fabric/cpu/mailbox.h"

namespace crossdock::cpu {
namespace {

Mailbox::Label labelled(const char* what, uint64_t bytes) {
    Mailbox::Label label;
    label.total_bytes = bytes;
    std::strncpy(label.what, what, sizeof(label.what) - 1);
    return label;
}

TEST(Mailbox, ShowsTheTwoLatestPosts) {
    const auto mailbox = std::make_unique<Mailbox>();
    Mailbox::Label label;
    uint64_t content = 77;
    EXPECT_EQ(mailbox->read(1, label, &content, 8), Mailbox::Seen::kNotYet);
    for (uint64_t number = 1; number <= 5; ++number) {
        mailbox->post(number, labelled("call", number), &number, 8);
        EXPECT_EQ(mailbox->read(number + 1, label, &content, 8), Mailbox::Seen::kNotYet);
    }
    EXPECT_EQ(content, 77u);
    for (uint64_t number : {4, 5}) {
        EXPECT_EQ(mailbox->read(number, label, &content, 8), Mailbox::Seen::kRead);
        EXPECT_EQ(content, number);
        EXPECT_EQ(label, labelled("call", number));
    }
    EXPECT_EQ(mailbox->read(3, label, &content, 8), Mailbox::Seen::kGone);
}

// The writer is always one post ahead of what the reader still needs, as a fast rank is; no post may seem gone.
TEST(Mailbox, NothingIsGoneThatAReaderMayStillNeed) {
    constexpr uint64_t kPosts = 20'000;
    const auto mailbox = std::make_unique<Mailbox>();
    std::atomic<uint64_t> num_read{0};
    std::thread writer([&] {
        for (uint64_t number = 1; number <= kPosts; ++number) {
            while (num_read.load(std::memory_order_acquire) + 2 < number) std::this_thread::yield();
            const std::vector<uint64_t> content(16, number);
            mailbox->post(number, labelled("call", number), content.data(), 128);
        }
    });
    Mailbox::Label label;
    uint64_t content[16];
    for (uint64_t number = 1; number <= kPosts; ++number) {
        auto seen = Mailbox::Seen::kNotYet;
        while ((seen = mailbox->read(number, label, content, 128)) == Mailbox::Seen::kNotYet) std::this_thread::yield();
        EXPECT_EQ(seen, Mailbox::Seen::kRead) << number;
        for (uint64_t word : content) EXPECT_EQ(word, number);
        num_read.store(number, std::memory_order_release);
    }
    writer.join();
}

}  // namespace
}  // namespace crossdock::cpu
