// SPDX-License-Identifier: Apache-2.0
// A fault that a kernel records reaches the host when all of the record is there, blames no rank for itself, and is
// told with the numbers that are meant.
#include <gtest/gtest.h>

#include <string>

#include "core/diagnosis.h"
#include "kernels/agreement.h"
#include "kernels/ll/operation.h"
#include "runtime/cpu/local_executor.h"

namespace crossdock {
namespace {

template <typename Kernel>
void run(Kernel&& kernel) {
    cpu::LocalExecutor(1).run({1, 1, 1024}, [&](cpu::Warp& warp) { kernel(Ctx(warp)); });
}

// What a wait needs to know of a group of ranks.
struct Waiting {
    WaitControl control{};
    HostVisibleStatus status{};
    uint32_t mask[4] = {1, 1, 1, 1};

    WaitScope scope(bool masks) {
        WaitScope scope{};
        scope.operation = OperationKind::kDispatch;
        scope.masking = masks ? 1 : 0;
        scope.control = &control;
        scope.mask = mask;
        scope.status = &status;
        return scope;
    }
    void record(bool masks = false) {
        run([&](const Ctx& ctx) {
            record_peer_fault(ctx, scope(masks), Operation{}, PeerFaultKind::kDisagrees, PeerNumber::kNone, 1, 1, 2);
        });
    }
};

// One thread has claimed the record and not yet written it, when another one fails the group: the host is told by
// whoever is the later one, and finds the record.
TEST(PeerFaults, TheHostLearnsOfAFailureWithItsRecord) {
    Waiting waiting;
    waiting.status.fault.claimed = 1;
    waiting.record();
    EXPECT_EQ(waiting.control.failed, 1u);
    EXPECT_EQ(waiting.status.failed, 0u);
    run([&](const Ctx& ctx) {
        PeerFault& fault = waiting.status.fault;
        complete_record(ctx, waiting.scope(false), &fault.claimed, &fault.complete);
    });
    EXPECT_EQ(waiting.status.fault.complete, 1u);
    EXPECT_NE(waiting.status.failed, 0u);

    Waiting alone;
    alone.record();
    EXPECT_EQ(alone.status.fault.complete, 1u);
    EXPECT_NE(alone.status.failed, 0u);

    // A record of an earlier fault, which masked a peer, is there; a later one fails the group.
    Waiting later;
    run([&](const Ctx& ctx) {
        record_peer_fault(ctx, later.scope(true), Operation{}, PeerFaultKind::kOutOfRange, PeerNumber::kRows, 1, 1, 2);
    });
    EXPECT_EQ(later.status.failed, 0u);
    later.record(true);
    EXPECT_NE(later.status.failed, 0u);
}

// With masks a rank that finds garbage among its own words fails: it is not left out by itself.
TEST(PeerFaults, ARankDoesNotMaskItself) {
    for (const uint32_t peer : {1u, 2u}) {
        Waiting waiting;
        LlDispatchArgs args{};
        args.common.rank = 2;
        args.common.scope = waiting.scope(true);
        run([&](const Ctx& ctx) { EXPECT_FALSE(LlOperation(ctx, args).expect(PeerNumber::kRows, peer, 10, 11)); });
        EXPECT_EQ(waiting.mask[peer], peer == 2 ? 1u : 0u);
        EXPECT_EQ(waiting.status.failed != 0, peer == 2);
    }
}

void expect_words(const std::string& text, std::initializer_list<const char*> words) {
    for (const char* word : words) EXPECT_NE(text.find(word), std::string::npos) << text << "\nlacks: " << word;
}

PeerFault fault_of(PeerFaultKind kind, PeerNumber number, uint64_t expected, uint64_t seen) {
    PeerFault fault{};
    fault.kind = kind;
    fault.number = number;
    fault.operation = OperationKind::kDispatch;
    fault.peer = 3;
    fault.expected = expected;
    fault.seen = seen;
    return fault;
}

TEST(PeerFaults, AMessageSaysWhatTheNumberIs) {
    const std::string end = describe(fault_of(PeerFaultKind::kOutOfRange, PeerNumber::kEndInWindow, 64, 70), 0, "HT");
    expect_words(end, {"rank 3", "70 rows from the beginning of its tensor", "at most 64", "in HT dispatch"});
    EXPECT_EQ(end.find("first row"), std::string::npos) << end;
    const std::string mask = describe(fault_of(PeerFaultKind::kOutOfRange, PeerNumber::kMask, 0xff, 0x100), 0, "HT");
    expect_words(mask, {"rank 3", "0x100", "bits of 0xff"});
    EXPECT_EQ(mask.find("at most"), std::string::npos) << mask;
    constexpr uint64_t kUnits = 1'000'000;
    const Terms large = Terms{}.with_folded(Term::kRowUnits, kUnits);
    const Terms small = Terms{}.with_folded(Term::kRowUnits, 256);
    expect_words(describe(fault_of(PeerFaultKind::kDisagrees, PeerNumber::kNone, small.word, large.word), 0, "HT"),
                 {"the bytes of a row is 4096 on rank 0", "32768 or more", "on rank 3"});
    expect_words(describe(fault_of(PeerFaultKind::kDisagrees, PeerNumber::kWindowOffset, folded_window_offset(4096),
                                   folded_window_offset(64 << 20)),
                          0, "HT"),
                 {"win_offset of the tensor of rows is 4096 on rank 0", "67108864 on rank 3"});
}

// What needs fewer bits than a term has is told apart always and read again; what needs more, nearly always, also where
// values are powers of two apart.
TEST(PeerFaults, TermsOfLargeValuesAreSeldomAlike) {
    for (const Term term : {Term::kRowUnits, Term::kScaleUnits, Term::kRouting}) {
        const uint32_t bits = Terms::bits_of(static_cast<uint32_t>(term));
        const auto field = [&](uint64_t value) { return Terms{}.with_folded(term, value).get(term); };
        for (uint64_t value = 0; value < uint64_t{1} << (bits - 1); ++value) EXPECT_EQ(field(value), value);
        int aliases = 0;
        for (uint64_t value = 1; value < 1000; ++value) {
            for (uint32_t shift = bits - 1; shift < 40; ++shift)
                aliases += field(value) == field(value + (uint64_t{1} << shift)) ? 1 : 0;
        }
        EXPECT_LE(aliases, 2 * 1000 * 40 >> (bits - 1)) << static_cast<int>(term);
    }
    // Scales of 16 and of 4112 bytes, and updates 2048 apart, once looked alike.
    EXPECT_NE(Terms{}.with_folded(Term::kScaleUnits, 16 / kRowUnitBytes).word,
              Terms{}.with_folded(Term::kScaleUnits, 4112 / kRowUnitBytes).word);
    EXPECT_NE(Terms{}.with_folded(Term::kRouting, 5).word, Terms{}.with_folded(Term::kRouting, 5 + 2048).word);
}

// The host's own terms are read again, and leave the kernel's alone.
TEST(PeerFaults, AgreedNumbersHaveBitsOfTheirOwn) {
    const Terms shared = Terms{}
                             .with(Term::kOperation, 2)
                             .with(Term::kRowUnits, 4095)
                             .with(Term::kDtype, 15)
                             .with(Term::kRecipe, 3)
                             .with(Term::kDirection, 1)
                             .with(Term::kScaleUnits, 127);
    for (const uint64_t tag : {0u, 1u, 2u, 511u, 512u, 1023u}) {
        for (const uint64_t sms : {1u, 2u, 20u, 132u, 255u}) {
            const Terms terms = shared.with_agreed({tag, sms}, false);
            EXPECT_EQ(terms.agreed(false).tag, tag);
            EXPECT_EQ(terms.agreed(false).sms, sms);
            EXPECT_EQ(terms.without_agreed(false).word, shared.word);
            EXPECT_EQ(terms.get(Term::kRouting), 0u);  // the kernel's
        }
        const Terms update = shared.with(Term::kTopk, 8).with(Term::kLayout, 3);
        EXPECT_EQ(update.with_agreed({tag, 77}, true).agreed(true).tag, tag);
        EXPECT_EQ(update.with_agreed({tag, 77}, true).without_agreed(true).word, update.word);
    }
    const auto fault = [&](HtAgreed own, HtAgreed other) {
        return describe(fault_of(PeerFaultKind::kDisagrees, PeerNumber::kNone, shared.with_agreed(own, false).word,
                                 shared.with_agreed(other, false).word),
                        0, "HT");
    };
    expect_words(fault({7, 20}, {8, 132}),
                 {"the tag (crossdockHandleSetTag) is 7 on rank 0, 8 on rank 3",
                  "the number of SMs (crossdockHandleSetSms) is 20 on rank 0, 132 on rank 3"});
    EXPECT_EQ(fault({7, 20}, {7, 24}).find("tag"), std::string::npos);
}

// Ranks of a low-latency dispatch that offer the same parts of their outputs must have them at the same places; others
// write nothing straight, and need not.
TEST(PeerFaults, WindowsAgreeWhereTheyAreReached) {
    const WindowPlace here{1, 0}, there{1, uint64_t{64} << 20}, elsewhere{2, 0};
    const auto terms = [](uint32_t parts, const WindowPlace& tokens, const WindowPlace& scales) {
        return Terms{}.with(Term::kTopk, 4).with(Term::kRouting, window_term(parts, tokens, scales)).word;
    };
    const auto alike = [&](uint64_t a, uint64_t b) {
        EXPECT_EQ(WindowTerm::are_alike(a, b), WindowTerm::are_alike(b, a));
        return WindowTerm::are_alike(a, b);
    };
    EXPECT_TRUE(alike(terms(3, here, there), terms(3, here, there)));
    EXPECT_FALSE(alike(terms(1, here, here), terms(1, there, here)));
    EXPECT_FALSE(alike(terms(1, here, here), terms(1, elsewhere, here)));
    EXPECT_FALSE(alike(terms(3, here, here), terms(3, here, there)));
    EXPECT_TRUE(alike(terms(1, here, here), terms(1, here, there)));  // no peer writes the scales
    EXPECT_TRUE(alike(terms(0, here, here), terms(0, there, there)));
    EXPECT_TRUE(alike(terms(0, here, here), terms(1, there, there)));
    EXPECT_TRUE(alike(terms(3, here, here), terms(1, there, there)));
    EXPECT_FALSE(alike(terms(1, here, here), terms(3, here, here) ^ Terms{}.with(Term::kTopk, 1).word));
}

}  // namespace
}  // namespace crossdock
