// SPDX-License-Identifier: Apache-2.0
// A communicator is borrowed until the groups on it are destroyed, whatever else is still alive: handles keep their
// group's object, but nothing that belongs to the communicator.
#include <algorithm>
#include <array>

#include "core/group.h"
#include "core/handle.h"
#include "core/structs.h"
#include "hostile.h"

namespace crossdock {
namespace {

constexpr uint32_t kTokens = 3;
constexpr uint32_t kTopk = 2;
constexpr uint32_t kExperts = 4;
constexpr size_t kHidden = 16;

// A communicator as its owner sees it, who may destroy it once nothing uses it.
struct Owned {
    std::shared_ptr<Communicator> ranks = cpu::make_thread_communicators(1).front();
    int objects = 0;   // that stand for it
    int memories = 0;  // registered with it
    bool is_alive = true;
};

class BorrowedMemory final : public SymmetricMemory {
  public:
    BorrowedMemory(std::shared_ptr<Owned> owned, std::unique_ptr<SymmetricMemory> memory)
        : owned_(std::move(owned)), memory_(std::move(memory)) {
        static_cast<SymmetricMemory&>(*this) = *memory_;
        ++owned_->memories;
    }
    ~BorrowedMemory() override {
        EXPECT_TRUE(owned_->is_alive) << "memory is deregistered from a communicator that is gone";
        --owned_->memories;
    }

  private:
    std::shared_ptr<Owned> owned_;
    std::unique_ptr<SymmetricMemory> memory_;
};

class BorrowedCommunicator final : public Communicator {
  public:
    explicit BorrowedCommunicator(std::shared_ptr<Owned> owned) : owned_(std::move(owned)) { ++owned_->objects; }
    ~BorrowedCommunicator() override {
        EXPECT_TRUE(owned_->is_alive) << "a communicator that is gone is used";
        --owned_->objects;
    }
    const BackendTraits& backend() const override { return ranks().backend(); }
    int rank() const override { return ranks().rank(); }
    int num_ranks() const override { return ranks().num_ranks(); }
    Runtime& runtime() override { return ranks().runtime(); }
    uint64_t setup_timeout_ns(uint64_t timeout_ns) const override { return ranks().setup_timeout_ns(timeout_ns); }
    void all_gather(const void* own, void* all, size_t bytes, const char* what, uint64_t timeout_ns) override {
        ranks().all_gather(own, all, bytes, what, timeout_ns);
    }
    std::unique_ptr<SymmetricMemory> allocate_symmetric(size_t bytes, uint64_t timeout_ns) override {
        return std::make_unique<BorrowedMemory>(owned_, ranks().allocate_symmetric(bytes, timeout_ns));
    }
    WindowView window(ncclWindow_t handle) override { return ranks().window(handle); }
    NetworkHandle network_of(const SymmetricMemory& memory) override { return ranks().network_of(memory); }

  private:
    Communicator& ranks() const {
        EXPECT_TRUE(owned_->is_alive) << "a communicator that is gone is used";
        return *owned_->ranks;
    }
    std::shared_ptr<Owned> owned_;
};

struct LiveGroup {
    std::shared_ptr<Owned> owned;
    std::shared_ptr<Group> group;  // null: destroyed
    bool is_ll = false;
    int num_pending = 0;  // send_only operations
};

struct LiveHandle {
    std::shared_ptr<LiveGroup> of;
    std::shared_ptr<Handle> handle;
    bool is_pending = false;
};

struct Tensors {
    GuardedTensor ids{ncclInt64, 8, {kTokens, kTopk}};
    GuardedTensor tokens{ncclFloat32, 4, {kTokens, kHidden}};
    GuardedTensor weights{ncclFloat32, 4, {kTokens, kTopk}};
    GuardedTensor counters{ncclInt32, 4, {kExperts}};
    GuardedTensor ll_rows{ncclFloat32, 4, {kExperts, kTokens, kHidden}};
    GuardedTensor ht_rows{ncclFloat32, 4, {kTokens, kHidden}};
    GuardedTensor ht_weights{ncclFloat32, 4, {kTokens, kTopk}};
    GuardedTensor ht_ids{ncclInt64, 8, {kTokens, kTopk}};
    GuardedTensor sums{ncclFloat32, 4, {kTokens, kHidden}};

    Tensors() {
        for (size_t i = 0; i < kTokens * kTopk; ++i) {
            ids.as<int64_t>()[i] = static_cast<int64_t>(i % kExperts);
            weights.as<float>()[i] = 0.5f;
        }
        for (size_t i = 0; i < kTokens * kHidden; ++i) tokens.as<float>()[i] = static_cast<float>(i);
    }
    bool are_summed() {
        return std::equal(tokens.as<float>(), tokens.as<float>() + kTokens * kHidden, sums.as<float>());
    }
};

// What is alive, and random steps of one program that owns some communicators.
class Program {
  public:
    explicit Program(uint64_t seed) : random_(seed) {}

    void step() {
        switch (draw(9)) {
            case 0:
                return make_communicator();
            case 1:
                return make_group();
            case 2:
            case 3:
                return make_handle();
            case 4:
            case 5:
                return use_handle();
            case 6:
                return drop_handle();
            case 7:
                return destroy_group();
            default:
                return destroy_communicator();
        }
    }

    // Communicators hold what their groups need, and no more.
    void expect_as_modelled() const {
        for (const auto& owned : communicators_) {
            int objects = 0;
            int memories = 0;
            for (const auto& live : groups_) {
                if (live->owned != owned || live->group == nullptr) continue;
                ++objects;
                memories += live->is_ll ? static_cast<int>(live->group->num_arenas()) : 1;
            }
            EXPECT_EQ(owned->objects, objects);
            EXPECT_EQ(owned->memories, memories);
        }
    }

    int num_outliving = 0;  // communicators that were destroyed before handles of their groups

  private:
    static constexpr size_t kMost = 5;  // communicators, groups

    size_t draw(size_t below) { return random_() % below; }
    template <typename T>
    T& any(std::vector<T>& all) {
        return all[draw(all.size())];
    }

    void make_communicator() {
        if (communicators_.size() < kMost) communicators_.push_back(std::make_shared<Owned>());
    }
    void make_group() {
        if (communicators_.empty() || groups_.size() >= kMost) return;
        auto live = std::make_shared<LiveGroup>();
        live->owned = any(communicators_);
        live->is_ll = draw(2) == 0;
        ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
        config.algorithm = live->is_ll ? NCCL_EP_ALGO_LOW_LATENCY : NCCL_EP_ALGO_HIGH_THROUGHPUT;
        config.num_experts = kExperts;
        config.max_dispatch_tokens_per_rank = kTokens;
        config.max_recv_tokens_per_rank = live->is_ll ? 0 : kTokens;
        config.max_token_bytes = sizeof(float) * kHidden;
        config.num_topk = draw(2) == 0 ? kTopk : 0;
        live->group = Group::create(std::make_shared<BorrowedCommunicator>(live->owned), &config, nullptr);
        groups_.push_back(live);
    }
    void make_handle() {
        if (groups_.empty()) return;
        const auto live = any(groups_);
        const ncclEpLayout_t layout = live->is_ll ? NCCL_EP_LAYOUT_EXPERT_MAJOR : NCCL_EP_LAYOUT_FLAT;
        handles_.push_back({live, Handle::create(live->group, layout, nullptr, kTopk, nullptr), false});
    }
    void use_handle() {
        if (handles_.empty()) return;
        LiveHandle& used = any(handles_);
        if (used.of->group == nullptr) {
            try {
                used.handle->update(tensors_.ids.get(), nullptr, nullptr);
                ADD_FAILURE() << "a handle of a destroyed group works";
            } catch (const Error& error) {
                EXPECT_STREQ(error.what(), "the group has been destroyed");
            }
        } else if (used.is_pending) {
            used.handle->complete(nullptr, nullptr);
            used.is_pending = false;
            --used.of->num_pending;
        } else {
            run(used, used.of->is_ll && used.of->num_pending == 0 && draw(3) == 0);
        }
    }
    void run(LiveHandle& used, bool send_only) {
        used.handle->update(tensors_.ids.get(), nullptr, nullptr);
        ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
        inputs.tokens = tensors_.tokens.get();
        GuardedTensor& rows = used.of->is_ll ? tensors_.ll_rows : tensors_.ht_rows;
        ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
        outputs.tokens = rows.get();
        if (!used.of->is_ll) {
            inputs.topk_weights = tensors_.weights.get();
            outputs.topk_weights = tensors_.ht_weights.get();
            outputs.topk_idx = tensors_.ht_ids.get();
        }
        ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
        info.expert_counters = tensors_.counters.get();
        ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
        config.send_only = send_only ? 1 : 0;
        used.handle->dispatch(&inputs, &outputs, used.of->is_ll ? &info : nullptr, &config, nullptr);
        used.is_pending = send_only;
        used.of->num_pending += send_only ? 1 : 0;
        if (send_only) return;
        ncclEpCombineInputs_t returned = NCCL_EP_COMBINE_INPUTS_INIT;
        returned.tokens = rows.get();
        ncclEpCombineOutputs_t sums = NCCL_EP_COMBINE_OUTPUTS_INIT;
        sums.tokens = tensors_.sums.get();
        if (used.of->is_ll) sums.topk_weights = tensors_.weights.get();
        std::memset(tensors_.sums.as<float>(), 0, sizeof(float) * kTokens * kHidden);
        used.handle->combine(&returned, &sums, nullptr, nullptr);
        EXPECT_TRUE(tensors_.are_summed());
    }
    void drop_handle() {
        if (handles_.empty()) return;
        const size_t place = draw(handles_.size());
        LiveHandle& dropped = handles_[place];
        dropped.handle->cancel_pending();
        if (dropped.is_pending) --dropped.of->num_pending;
        handles_.erase(handles_.begin() + static_cast<ptrdiff_t>(place));
    }
    void destroy_group() {
        if (groups_.empty()) return;
        const size_t place = draw(groups_.size());
        const std::shared_ptr<LiveGroup> live = groups_[place];
        std::exchange(live->group, nullptr)->destroy();
        groups_.erase(groups_.begin() + static_cast<ptrdiff_t>(place));
        for (LiveHandle& handle : handles_) handle.is_pending = handle.is_pending && handle.of != live;
    }
    void destroy_communicator() {
        for (auto it = communicators_.begin(); it != communicators_.end(); ++it) {
            const auto is_on_it = [&](const auto& live) { return live->owned == *it; };
            if (std::any_of(groups_.begin(), groups_.end(), is_on_it)) continue;
            (*it)->is_alive = false;
            for (const LiveHandle& handle : handles_) num_outliving += handle.of->owned == *it ? 1 : 0;
            communicators_.erase(it);
            return;
        }
    }

    std::mt19937_64 random_;
    Tensors tensors_;
    std::vector<std::shared_ptr<Owned>> communicators_;
    std::vector<std::shared_ptr<LiveGroup>> groups_;
    std::vector<LiveHandle> handles_;
};

TEST(GroupLifetime, CommunicatorsMayGoOnceTheirGroupsAreDestroyed) {
    int num_outliving = 0;
    for (uint64_t seed = 0; seed < 40; ++seed) {
        Program program(seed);
        for (int i = 0; i < 400; ++i) {
            SCOPED_TRACE(fmt::format("seed {}, step {}", seed, i));
            program.step();
            program.expect_as_modelled();
            if (::testing::Test::HasFailure()) return;
        }
        num_outliving += program.num_outliving;
    }
    EXPECT_GT(num_outliving, 100);
}

}  // namespace
}  // namespace crossdock
