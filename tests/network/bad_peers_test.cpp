// SPDX-License-Identifier: Apache-2.0
// Peers that die, stop, or send garbage: the error names the rank, nothing crashes and nothing hangs.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "fake_device.h"
#include "network/region.h"
#include "network/transport.h"
#include "session.h"

namespace crossdock::network {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;

// Exchanges data with `peer` until a call fails; the message must contain the words.
void expect_failure(TestRank& rank, Session& session, const std::function<void()>& work,
                    std::initializer_list<const char*> words, int timeout_s = 60) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(timeout_s);
    bool failed = false;
    while (!failed && std::chrono::steady_clock::now() < end) {
        try {
            work();
            session.progress();
        } catch (const std::exception&) {
            failed = true;
        }
    }
    rank.expect(failed, "no call failed");
    bool has_error = false;
    session.table().query_last_error(session.contexts(), &has_error);
    rank.expect(has_error, "queryLastError knows of no error");
    void* request = nullptr;
    const ncclResult_t result = session.table().put(session.contexts(), 0, 0, nullptr, 0, 0, nullptr, 0, &request);
    expect_refused(rank, result, ncclRemoteError, words);
}

class BadPeers : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Memory, BadPeers, testing::Values(plugin::kPointerHost, plugin::kPointerCuda),
                         [](const auto& kind) { return kind.param == plugin::kPointerHost ? "Host" : "Device"; });

TEST_P(BadPeers, NamesTheRankThatDied) {
    run_ranks(3,
              [](TestRank& rank) {
                  std::vector<std::byte> bytes(4 << 20);
                  std::vector<uint64_t> words(8);
                  Session session(rank);
                  void* memory = session.add_memory(bytes.data(), bytes.size(), GetParam());
                  void* signals = session.add_memory(words.data(), 64, GetParam(), 3);
                  rank.barrier();
                  int turn = 0;
                  const auto work = [&] {
                      for (int peer = 0; peer < 3; ++peer) {
                          if (peer == rank.rank()) continue;
                          const size_t size = turn % 3 == 0 ? 3 << 20 : 1000;
                          void* request = session.put_signal(peer, memory, 0, size, memory, 0, signals, 0, 1, true);
                          session.finish(request);
                      }
                      ++turn;
                  };
                  if (rank.rank() == 1) {
                      for (int i = 0; i < 7; ++i) work();
                      kill(getpid(), SIGKILL);
                  }
                  expect_failure(rank, session, work, {"rank 1"});
              },
              {1});
}

TEST_P(BadPeers, NamesTheRankThatAcceptsNoData) {
    run_ranks(2,
              [](TestRank& rank) {
                  setenv("CROSSDOCK_NETWORK_TIMEOUT_MS", "2000", 1);
                  std::vector<std::byte> bytes(16 << 20);
                  Session session(rank);
                  void* memory = session.add_memory(bytes.data(), bytes.size(), GetParam());
                  rank.barrier();
                  if (rank.rank() == 1) {
                      kill(getpid(), SIGSTOP);
                      _exit(0);
                  }
                  std::this_thread::sleep_for(std::chrono::milliseconds(50));
                  std::vector<void*> requests;
                  const auto work = [&] {
                      if (requests.size() < 40) requests.push_back(session.put(1, memory, 0, 8 << 20, memory, 0));
                  };
                  expect_failure(rank, session, work, {"rank 1", "accepted no data for"});
                  session.close();
                  kill(rank.process_of(1), SIGKILL);
              },
              {1});
}

// The next call reports a broken device, whether a call or the progress thread detected it.
TEST(BadDevice, FailsTheCommunicatorAndNotTheProcess) {
    run_ranks(2, [](TestRank& rank) {
        if (rank.rank() == 0) set_fake_device_failure(3);
        std::vector<std::byte> bytes(4 << 20);
        std::vector<uint64_t> words(8);
        Session session(rank);
        void* memory = session.add_memory(bytes.data(), bytes.size(), plugin::kPointerCuda);
        void* signals = session.add_memory(words.data(), 64, plugin::kPointerCuda, 3);
        if (rank.rank() == 0) {
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
            expect_failure(rank, session, [] {}, {"the device has failed"});
            session.close();
            rank.raise(1);
            return;
        }
        for (int i = 0; i < 8; ++i) session.put_signal(0, memory, 0, 1 << 20, memory, 0, signals, 0, 1, true);
        rank.await(1);
    });
}

// An authenticated rank that sends any frame it is given.
class RogueRank : public FrameSink {
  public:
    explicit RogueRank(TestRank& rank) : listener_("=lo") {
        char handle[128] = {};
        std::memcpy(handle, &listener_.address(), sizeof(RankAddress));
        for (auto& each : rank.exchange(handle)) addresses_.push_back(read_address(each.data()));
        transport_ = std::make_unique<Transport>(listener_, addresses_, static_cast<uint32_t>(rank.rank()),
                                                 TransportConfig{4096, 30 * kSecond}, *this);
    }

    // Announces memory number `id`, as rank 0 registers it.
    void announce(uint32_t id, uint64_t bytes, MemoryKind kind = MemoryKind::kHost) {
        FrameHeader header = {};
        header.kind = FrameKind::kAnnounce;
        header.region = id;
        header.value = bytes;
        header.context = static_cast<uint16_t>(kind);
        send(header, {});
    }

    void send(FrameHeader header, const std::vector<std::byte>& bytes, bool has_key = true,
              size_t header_bytes = sizeof(FrameHeader)) {
        struct Sent : Send {
            FrameHeader header, without_key;
            std::vector<std::byte> bytes;
            bool is_done = false;
        } sent;
        sent.header = sent.without_key = header;
        sent.bytes = bytes;
        sent.bytes.resize(bytes.size() + 1);
        sent.Send::bytes = std::span<const std::byte>(sent.bytes).first(bytes.size());
        std::vector<std::byte> raw(header_bytes);
        const FrameHeader& used = has_key ? sent.header : sent.without_key;
        sent.Send::header =
            header_bytes == sizeof(FrameHeader) ? std::as_bytes(std::span(&used, 1)) : std::span<const std::byte>(raw);
        sent.done = [](Send& send, ucs_status_t) { static_cast<Sent&>(send).is_done = true; };
        sent.is_done = transport_->send(0, sent.header, sent) != UCS_INPROGRESS;
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
        while (!sent.is_done && std::chrono::steady_clock::now() < end) progress();
    }

    void progress() {
        transport_->progress();
        transport_->look_after_peers();  // rank 0 leaves without having read all
    }

  private:
    void on_frame(const FrameHeader&, Payload&) override {}
    void on_departure(const Departure&) override {}
    Listener listener_;
    std::vector<RankAddress> addresses_;
    std::unique_ptr<Transport> transport_;
};

FrameHeader put_header() {
    FrameHeader header = {};
    header.kind = FrameKind::kPut;
    return header;
}

// Rank 1 sends something bad; rank 0 must report it.
void run_rogue(const std::function<void(RogueRank&)>& misbehave, std::initializer_list<const char*> words,
               MemoryKind kind = MemoryKind::kHost, size_t num_bytes = 1000) {
    run_ranks(2, [&](TestRank& rank) {
        if (rank.rank() == 1) {
            RogueRank rogue(rank);
            rogue.announce(0, num_bytes, kind);
            rank.await(1);
            misbehave(rogue);
            rank.await(0);
            return;
        }
        std::vector<std::byte> bytes(num_bytes);
        Session session(rank);
        session.add_memory(bytes.data(), bytes.size(),
                           kind == MemoryKind::kHost ? plugin::kPointerHost : plugin::kPointerCuda);
        rank.raise(1);
        expect_failure(
            rank, session, [] {}, words);
        rank.raise(0);
    });
}

TEST(BadPeersFrames, MalformedOnesAreNamed) {
    run_rogue(
        [](RogueRank& rogue) {
            FrameHeader header = put_header();
            header.kind = static_cast<FrameKind>(99);
            rogue.send(header, {});
        },
        {"rank 1", "malformed frame: the kind is unknown"});
    run_rogue(
        [](RogueRank& rogue) {
            FrameHeader header = put_header();
            header.length = 7;
            rogue.send(header, std::vector<std::byte>(100));
        },
        {"rank 1", "a put's length is not that of its bytes"});
}

TEST(BadPeersFrames, ForeignMemoryIsOutOfReach) {
    run_rogue(
        [](RogueRank& rogue) {
            FrameHeader header = put_header();
            header.offset = 990;
            header.length = 100;
            rogue.send(header, std::vector<std::byte>(100));
        },
        {"rank 1 puts 100 bytes at offset 990 into memory of 1000 bytes"});
    run_rogue(
        [](RogueRank& rogue) {
            FrameHeader header = put_header();
            header.region = 17;
            header.length = 1 << 20;
            rogue.send(header, std::vector<std::byte>(1 << 20));
        },
        {"rank 1 puts into memory that was never registered"});
    run_rogue(
        [](RogueRank& rogue) {
            FrameHeader header = put_header();
            header.flags = kFlagSignal;
            header.signal_offset = 1000;
            rogue.send(header, {});
        },
        {"rank 1 signals a word at offset 1000 of memory of 1000 bytes"});
    run_rogue(
        [](RogueRank& rogue) {
            FrameHeader header = {};
            header.kind = FrameKind::kGet;
            header.offset = 1;
            header.length = 1000;
            rogue.send(header, {});
        },
        {"rank 1 gets 1000 bytes at offset 1 from memory of 1000 bytes"});
}

// Frames larger than staging memory.
TEST(BadPeersFrames, DeviceMemoryTakesSmallOnes) {
    run_rogue(
        [](RogueRank& rogue) {
            FrameHeader header = put_header();
            header.length = 8 << 20;
            rogue.send(header, std::vector<std::byte>(8 << 20));
        },
        {"rank 1 sends 8388608 bytes for device memory in one frame, of at most 524288"}, MemoryKind::kDevice,
        16 << 20);
}

TEST(BadPeersFrames, AnswersNeedQuestions) {
    run_rogue(
        [](RogueRank& rogue) {
            FrameHeader header = {};
            header.kind = FrameKind::kReply;
            header.length = 8;
            rogue.send(header, std::vector<std::byte>(8));
        },
        {"rank 1 sent a reply that matches no pending get"});
}

TEST(BadPeersFrames, NumbersCountOnce) {
    run_rogue(
        [](RogueRank& rogue) {
            FrameHeader header = put_header();
            header.length = 8;
            rogue.send(header, std::vector<std::byte>(8));
            rogue.send(header, std::vector<std::byte>(8));
        },
        {"rank 1 sent frame 0 of context 0 twice"});
    run_rogue(
        [](RogueRank& rogue) {
            FrameHeader header = put_header();
            header.length = 8;
            header.number = uint64_t{1} << 50;
            rogue.send(header, std::vector<std::byte>(8));
        },
        {"rank 1 sent frame", "outside the receive window"});
}

// A link tells who sends, so a frame in the name of another rank is its owner's fault.
TEST(BadPeersFrames, OtherRanksNamesAreRefused) {
    if (!is_across(Across::kLinks)) GTEST_SKIP() << "links carry no frames";
    run_rogue(
        [](RogueRank& rogue) {
            FrameHeader header = put_header();
            header.source = 0;
            header.length = 8;
            rogue.send(header, std::vector<std::byte>(8), false);
        },
        {"rank 1", "it says that another rank sent it"});
}

// Other processes may write into a UCX worker. Frames with a wrong key are ignored, whatever they contain.
TEST(BadPeersFrames, FramesWithAWrongKeyAreIgnored) {
    if (!is_across(Across::kUcx)) GTEST_SKIP() << "nobody else can write to a link or an inbox";
    run_ranks(2, [&](TestRank& rank) {
        if (rank.rank() == 1) {
            RogueRank rogue(rank);
            rogue.announce(0, 1000);
            FrameHeader header = put_header();
            header.source = 1;
            header.length = 8;
            for (int i = 0; i < 100; ++i) {
                rogue.send(header, std::vector<std::byte>(8, std::byte{0xff}), false);
                rogue.send(header, std::vector<std::byte>(static_cast<size_t>(i) * 3000), false);
                rogue.send(header, std::vector<std::byte>(8), false, 1 + static_cast<size_t>(i) * 3);
            }
            header.flags = kFlagSignal;
            rogue.send(header, std::vector<std::byte>(8, std::byte{1}));
            rank.await(0);
            return;
        }
        std::vector<uint64_t> words(125);
        Session session(rank);
        session.add_memory(words.data(), 1000);
        session.await_word(words[0], 0x0101010101010101);
        rank.expect(words[0] == 0x0101010101010101, "a frame with a wrong key wrote");
        rank.raise(0);
    });
}

}  // namespace
}  // namespace crossdock::network
