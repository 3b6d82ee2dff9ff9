// SPDX-License-Identifier: Apache-2.0
// Frames on links arrive complete and in order, however the kernel splits them; a closed link tells how it ended.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "network/peer_links.h"

namespace crossdock::network {
namespace {

using Bytes = std::vector<std::byte>;

Bytes bytes_from(uint32_t seed, size_t count) {
    std::mt19937 random(seed);
    Bytes bytes(count);
    for (std::byte& each : bytes) each = static_cast<std::byte>(random());
    return bytes;
}

// Receives frames: fetches large ones at once, later, or not at all.
class Taker : public FrameReceiver {
  public:
    enum class Way { kFetch, kKeep, kIgnore };

    void on_frame(std::span<const std::byte> header, Payload& payload) override {
        FrameHeader parsed;
        std::memcpy(&parsed, header.data(), sizeof(parsed));
        const uint64_t number = parsed.value;
        Bytes& bytes = taken[number];
        order.push_back(number);
        if (payload.data() != nullptr || payload.bytes() == 0) {
            bytes.assign(payload.data(), payload.data() + payload.bytes());
            return;
        }
        bytes.resize(payload.bytes());
        if (way == Way::kFetch) payload.fetch(bytes.data(), fetched, this);
        if (way != Way::kKeep) return;
        payload.keep();
        kept = std::make_unique<Payload>(std::move(payload));
        kept_number = number;
    }
    void on_endpoint_error(uint32_t, const char*) override {}

    void fetch_kept() {
        kept->fetch(taken[kept_number].data(), fetched, this);
        kept.reset();
    }

    static void fetched(void* self, ucs_status_t status) {
        auto& taker = *static_cast<Taker*>(self);
        ++(status == UCS_OK ? taker.num_fetched : taker.num_cancelled);
    }

    Way way = Way::kFetch;
    std::map<uint64_t, Bytes> taken;
    std::vector<uint64_t> order;
    std::unique_ptr<Payload> kept;
    uint64_t kept_number = 0;
    int num_fetched = 0;
    int num_cancelled = 0;
};

struct Frame : Send {
    Frame(uint64_t number, Bytes content) : content_(std::move(content)) {
        header_.value = number;
        header = std::as_bytes(std::span(&header_, 1));
        bytes = content_;
        done = [](Send& send, ucs_status_t status) {
            auto& frame = static_cast<Frame&>(send);
            frame.status = status;
            ++frame.num_ends;
        };
    }
    Frame(const Frame&) = delete;
    Frame& operator=(const Frame&) = delete;
    FrameHeader header_ = {};
    Bytes content_;
    ucs_status_t status = UCS_INPROGRESS;
    int num_ends = 0;
};

// Two ends of a connection with small buffers.
struct Pair {
    Pair() {
        int ends[2];
        EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
        for (const int end : ends) {
            const int few = 16 << 10;
            setsockopt(end, SOL_SOCKET, SO_SNDBUF, &few, sizeof(few));
        }
        from = std::make_unique<LinkStream>(Socket(ends[0]));
        to = std::make_unique<LinkStream>(Socket(ends[1]));
    }
    void turn(Taker& taker) {
        from->flush();
        to->receive(taker, link_end);
        if (link_end != nullptr) to->close();
    }
    std::unique_ptr<LinkStream> from, to;
    std::unique_ptr<LinkEnd> link_end;
};

TEST(Links, FramesOfAllSizesArriveWholeAndInOrder) {
    Pair pair;
    Taker taker;
    std::deque<Frame> frames;
    uint64_t number = 0;
    for (const size_t bytes : {0, 1, 8, 4096, 65536, 65537, 100'000, 3, 524'288, 0, 1'000'000, 70'000, 65'535}) {
        frames.emplace_back(number, bytes_from(static_cast<uint32_t>(number), bytes));
        ++number;
    }
    for (Frame& frame : frames) {
        const ucs_status_t status = pair.from->send(frame);
        if (status != UCS_INPROGRESS) frame.done(frame, status);
    }
    for (int i = 0; i < 100'000 && taker.order.size() < frames.size(); ++i) pair.turn(taker);
    for (int i = 0; i < 1000; ++i) pair.turn(taker);
    ASSERT_EQ(taker.order.size(), frames.size());
    for (uint64_t i = 0; i < frames.size(); ++i) {
        EXPECT_EQ(taker.order[i], i);
        EXPECT_EQ(taker.taken[i], frames[i].content_) << i;
        EXPECT_EQ(frames[i].status, UCS_OK);
        EXPECT_EQ(frames[i].num_ends, 1);
    }
    EXPECT_TRUE(pair.from->is_flushed());
    EXPECT_EQ(pair.link_end, nullptr);
}

// Bytes of a held frame stay in the connection, and so do later frames.
TEST(Links, AKeptFrameHoldsBackWhatIsBehindIt) {
    Pair pair;
    Taker taker;
    taker.way = Taker::Way::kKeep;
    Frame large(0, bytes_from(1, 300'000));
    Frame small(1, bytes_from(2, 10));
    pair.from->send(large);
    pair.from->send(small);
    for (int i = 0; i < 1000; ++i) pair.turn(taker);
    EXPECT_EQ(taker.order, std::vector<uint64_t>{0});
    EXPECT_EQ(large.num_ends, 0);
    taker.fetch_kept();
    for (int i = 0; i < 1000; ++i) pair.turn(taker);
    EXPECT_EQ(taker.order, (std::vector<uint64_t>{0, 1}));
    EXPECT_EQ(taker.taken[0], large.content_);
    EXPECT_EQ(taker.taken[1], small.content_);
    EXPECT_EQ(taker.num_fetched, 1);
}

TEST(Links, AnUnwantedFrameIsSkipped) {
    for (const bool was_kept : {false, true}) {
        Pair pair;
        Taker taker;
        taker.way = was_kept ? Taker::Way::kKeep : Taker::Way::kIgnore;
        Frame large(0, bytes_from(1, 300'000));
        Frame small(1, bytes_from(2, 10));
        pair.from->send(large);
        pair.from->send(small);
        for (int i = 0; i < 10; ++i) pair.turn(taker);
        taker.kept.reset();
        for (int i = 0; i < 1000; ++i) pair.turn(taker);
        EXPECT_EQ(taker.taken[1], small.content_);
    }
}

// A close notice follows the frame that is being sent, and cancels none that has been handed out.
TEST(Links, ACloseNoticeCutsNoFrame) {
    Pair pair;
    Taker taker;
    Frame large(0, bytes_from(1, 300'000));
    EXPECT_EQ(pair.from->send(large), UCS_INPROGRESS);
    pair.from->send_close_notice(7);
    for (int i = 0; i < 1000 && pair.link_end == nullptr; ++i) pair.turn(taker);
    ASSERT_NE(pair.link_end, nullptr);
    EXPECT_TRUE(pair.link_end->in_order);
    EXPECT_EQ(pair.link_end->because_of, 7u);
    EXPECT_EQ(taker.taken[0], large.content_);
}

// What arrives after this rank's close notice is discarded in parts: a peer that goes on sending blocks nothing.
TEST(Links, DrainingTakesAPartAtATime) {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
    Socket other(ends[0]);
    LinkStream stream{Socket(ends[1])};
    const Bytes some(100'000);
    ASSERT_EQ(write(other.fd(), some.data(), some.size()), static_cast<ssize_t>(some.size()));
    EXPECT_FALSE(stream.drain());
    int num_left = 0;
    ASSERT_EQ(ioctl(stream.fd(), FIONREAD, &num_left), 0);
    EXPECT_GT(num_left, 0);
    EXPECT_FALSE(stream.drain());
    EXPECT_FALSE(stream.drain()) << "nothing has come, the other end is there";
    other.close();
    EXPECT_TRUE(stream.drain());
}

TEST(Links, CancelsAFrameWhoseSenderDied) {
    Pair pair;
    Taker taker;
    Frame large(0, bytes_from(1, 300'000));
    EXPECT_EQ(pair.from->send(large), UCS_INPROGRESS);
    for (int i = 0; i < 3; ++i) pair.turn(taker);
    pair.from.reset();
    EXPECT_EQ(large.status, UCS_ERR_CANCELED);
    for (int i = 0; i < 100 && pair.link_end == nullptr; ++i) pair.to->receive(taker, pair.link_end);
    ASSERT_NE(pair.link_end, nullptr);
    pair.to->close();
    EXPECT_FALSE(pair.link_end->in_order);
    EXPECT_EQ(pair.link_end->reason, "its process ended");
    EXPECT_EQ(taker.num_cancelled, 1);
}

// Received bytes are not trusted: the link ends, or continues with complete frames.
TEST(Links, GarbageEndsTheLink) {
    for (uint32_t seed = 0; seed < 200; ++seed) {
        int ends[2];
        ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
        const Socket writer(ends[0]);
        LinkStream stream{Socket(ends[1])};
        Taker taker;
        Bytes rubbish = bytes_from(seed, 1 + seed * 7);
        if (seed % 2 == 1) {
            const uint32_t head[2] = {0x6d617266, seed % 4 == 1 ? UINT32_MAX : seed * 100};  // as of a frame
            std::memcpy(rubbish.data(), head, std::min(rubbish.size(), sizeof(head)));
        }
        ASSERT_EQ(write(ends[0], rubbish.data(), rubbish.size()), static_cast<ssize_t>(rubbish.size()));
        std::unique_ptr<LinkEnd> link_end;
        for (int i = 0; i < 10 && link_end == nullptr; ++i) stream.receive(taker, link_end);
        if (seed % 4 != 3 && rubbish.size() >= 8) {
            ASSERT_NE(link_end, nullptr) << seed;
            EXPECT_EQ(link_end->reason, "it sent what no rank sends");
        }
    }
}

TEST(Links, TellHowAPeerLeft) {
    int pairs[3][2];
    std::vector<Link> links(4);
    for (int i = 0; i < 3; ++i) {
        ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pairs[i]), 0);
        links[static_cast<size_t>(i)].socket = Socket(pairs[i][0]);
    }
    Socket others[3] = {Socket(pairs[0][1]), Socket(pairs[1][1]), Socket(pairs[2][1])};
    Taker taker;
    PeerLinks watch(std::move(links), taker);
    std::vector<Departure> left;
    watch.look_at_all(left);
    EXPECT_TRUE(left.empty());
    // A rank that has lost rank 2 leaves in order.
    std::vector<Link> own(1);
    own[0].socket = std::move(others[0]);
    PeerLinks(std::move(own), taker).send_close_notice(2);
    others[1].close();
    ASSERT_EQ(write(others[2].fd(), "? not a rank", 12), 12);
    watch.look_at_all(left);
    ASSERT_EQ(left.size(), 3u);
    for (const Departure& each : left) {
        EXPECT_EQ(each.link_end.in_order, each.rank == 0) << each.rank;
        EXPECT_EQ(each.link_end.because_of, each.rank == 0 ? 2 : kNoRank) << each.rank;
    }
    left.clear();
    watch.look_at_all(left);
    EXPECT_TRUE(left.empty());
}

// What a rank reports before it ends is known when its end is, and what it withdraws is forgotten.
TEST(Links, KeepAFailureReportBeyondTheEnd) {
    int pairs[2][2];
    std::vector<Link> links(2);
    for (size_t i = 0; i < 2; ++i) {
        ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pairs[i]), 0);
        links[i].socket = Socket(pairs[i][0]);
    }
    Taker taker;
    PeerLinks watch(std::move(links), taker);
    for (uint32_t peer = 0; peer < 2; ++peer) {
        std::vector<Link> own(1);
        own[0].socket = Socket(pairs[peer][1]);
        PeerLinks ending(std::move(own), taker);
        ending.send_failure_report(7);
        if (peer == 1) ending.send_failure_report(kNoRank);
    }
    EXPECT_EQ(watch.reported_loss(0), kNoRank) << "not received";
    std::vector<Departure> left;
    for (int look = 0; look < 2; ++look) watch.look_at_all(left);  // first the reports, then the ends
    ASSERT_EQ(left.size(), 2u);
    EXPECT_FALSE(left[0].link_end.in_order || left[1].link_end.in_order);
    EXPECT_EQ(watch.reported_loss(0), 7u);
    EXPECT_EQ(watch.reported_loss(1), kNoRank);
}

// Peers see that a process has ended although its forked child lives on, even one forked during the handshake.
TEST(Links, AChildKeepsNone) {
    for (const bool have_met : {false, true}) {
        int ends[2];
        ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
        const Socket other(ends[1]);
        std::vector<Link> links(1);
        links[0].socket = Socket(ends[0]);
        Taker taker;
        std::unique_ptr<PeerLinks> watch;
        if (have_met) watch = std::make_unique<PeerLinks>(std::move(links), taker);
        const pid_t child = fork();
        if (child == 0) {
            close(other.fd());
            for (;;) pause();
        }
        watch.reset();
        links.clear();
        pollfd ended{other.fd(), POLLIN, 0};
        EXPECT_EQ(poll(&ended, 1, 20'000), 1) << "the link is still open";
        char nothing = 0;
        EXPECT_EQ(recv(other.fd(), &nothing, 1, MSG_DONTWAIT), 0);
        kill(child, SIGKILL);
        waitpid(child, nullptr, 0);
    }
}

// The link of a rank that has left is not polled any more, even if another process has the socket open, too.
TEST(Links, ARankThatLeftIsNotPolled) {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    const Socket copy(dup(ends[0]));
    std::vector<Link> links(1);
    links[0].socket = Socket(ends[0]);
    Taker taker;
    PeerLinks watch(std::move(links), taker);
    const auto num_watched = [] {
        int count = 0;
        for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fdinfo")) {
            std::ifstream file(entry.path());
            for (std::string line; std::getline(file, line);) count += line.starts_with("tfd:") ? 1 : 0;
        }
        return count;
    };
    EXPECT_EQ(num_watched(), 1);
    close(ends[1]);
    std::vector<Departure> left;
    watch.look_at_all(left);
    EXPECT_EQ(left.size(), 1u);
    EXPECT_EQ(num_watched(), 0);
}

}  // namespace
}  // namespace crossdock::network
