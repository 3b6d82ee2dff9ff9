// SPDX-License-Identifier: Apache-2.0
// Bytes cross a ring in order, whatever its other end writes into it; and a process opens nothing but a ring.
#include "network/host_ring.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "core/error.h"

namespace crossdock::network {
namespace {

using Bytes = std::vector<unsigned char>;

std::vector<iovec> parts_of(unsigned char* data, const std::vector<size_t>& sizes) {
    std::vector<iovec> parts;
    for (const size_t size : sizes) {
        parts.push_back({data, size});
        data += size;
    }
    return parts;
}

TEST(HostRings, BytesCrossInOrder) {
    const HostInbox inbox(3);
    HostRingReader reader(inbox.ring(1));
    HostRingWriter writer(inbox.offer(), 1);
    std::mt19937 random(7);
    Bytes sent(32 << 20);
    std::ranges::generate(sent, [&] { return static_cast<unsigned char>(random()); });
    Bytes taken(sent.size());
    size_t written = 0, read = 0;
    const auto sizes_of = [&](size_t rest) {
        std::vector<size_t> sizes(random() % 4, 0);
        for (size_t& size : sizes)
            rest -= size = std::min<size_t>(rest, random() % (random() % 2 == 0 ? 100 : 200'000));
        return sizes;
    };
    while (read < sent.size()) {
        const auto out = parts_of(sent.data() + written, sizes_of(sent.size() - written));
        const ptrdiff_t put = writer.write(out);
        if (put < 0) {
            ASSERT_EQ(errno, EAGAIN);
            ASSERT_GT(written - read, HostRing::kBytes - (128 << 10)) << "what was read is not published at once";
        }
        written += static_cast<size_t>(std::max<ptrdiff_t>(put, 0));
        const auto in = parts_of(taken.data() + read, sizes_of(sent.size() - read));
        const ptrdiff_t got = reader.read(in);
        if (got < 0) {
            ASSERT_EQ(errno, EAGAIN);
            ASSERT_EQ(written, read);
        }
        read += static_cast<size_t>(std::max<ptrdiff_t>(got, 0));
    }
    EXPECT_EQ(taken, sent);
    EXPECT_TRUE(reader.is_empty());
    EXPECT_TRUE(HostRingReader(inbox.ring(0)).is_empty()) << "of another writer";
}

TEST(HostRings, PositionsThatCannotBeEndTheStream) {
    Bytes bytes(HostRing::kBytes + 1);  // more than fit, so that the writer looks
    const iovec part[] = {{bytes.data(), bytes.size()}};
    for (const uint64_t wrong : {HostRing::kBytes + 1, uint64_t{1} << 63, UINT64_MAX - HostRing::kBytes}) {
        const HostInbox inbox(1);
        HostRingReader reader(inbox.ring(0));
        HostRingWriter writer(inbox.offer(), 0);
        inbox.ring(0).written = wrong;
        EXPECT_EQ(reader.read(part), -1);
        EXPECT_EQ(errno, EPROTO);
        inbox.ring(0).read = wrong;
        EXPECT_EQ(writer.write(part), -1);
        EXPECT_EQ(errno, EPROTO);
    }
}

// Of a peer only what it offers is known. Anything but its inbox is refused, and opened only if it is memory.
TEST(HostRings, NothingButAnInboxIsOpened) {
    const HostInbox inbox(2);
    const auto refuses = [](const HostInbox::Offer& offer, uint32_t number) {
        try {
            const HostRingWriter writer(offer, number);
        } catch (const Error& error) {
            return error.code() == ncclSystemError;
        }
        return false;
    };
    const HostInbox::Offer good = inbox.offer();
    EXPECT_FALSE(refuses(good, 1));
    EXPECT_TRUE(refuses(good, 2));
    HostInbox::Offer offer = good;
    offer.num_rings = UINT64_MAX;
    EXPECT_TRUE(refuses(offer, 2)) << "beyond the file";
    EXPECT_TRUE(refuses(offer, UINT32_MAX - 1));
    offer = good;
    offer.name[1] ^= 1;
    EXPECT_TRUE(refuses(offer, 0)) << "another inbox that got the same descriptor";
    offer = good;
    offer.process = -1;
    EXPECT_TRUE(refuses(offer, 0));
    // A pipe without a reader would block, and a file that shrinks would kill this process.
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    const int shrinkable = memfd_create("crossdock", MFD_CLOEXEC);
    ASSERT_EQ(ftruncate(shrinkable, 1 << 20), 0);
    for (const int other : {ends[0], ends[1], shrinkable, 0, -1, 1 << 30}) {
        offer = good;
        offer.fd = other;
        EXPECT_TRUE(refuses(offer, 0)) << other;
    }
    for (const int each : {ends[0], ends[1], shrinkable}) close(each);
}

// Memory is this user's only, and takes no room before it is used.
TEST(HostRings, AnInboxIsPrivateAndSparse) {
    const mode_t before = umask(0);
    const HostInbox inbox(1000);
    umask(before);
    struct stat status = {};
    ASSERT_EQ(fstat(static_cast<int>(inbox.offer().fd), &status), 0);
    EXPECT_EQ(status.st_mode & 07777, 0600u);
    EXPECT_EQ(status.st_uid, geteuid());
    EXPECT_GT(status.st_size, 1000 * static_cast<off_t>(HostRing::kBytes));
    EXPECT_LE(status.st_blocks * 512, 1000 * (64 << 10));
}

}  // namespace
}  // namespace crossdock::network
