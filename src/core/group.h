// SPDX-License-Identifier: Apache-2.0
// A group: one rank's part of a set of ranks that dispatch and combine together. Holds what its handles share.
#pragma once

#include <memory>
#include <optional>
#include <shared_mutex>
#include <vector>

#include "core/error.h"
#include "core/failure_watch.h"
#include "core/group_config.h"
#include "core/handle_memory.h"
#include "core/ht/arena.h"
#include "core/ll/arena.h"
#include "core/memory.h"
#include "crossdock.h"
#include "device/wait_records.h"
#include "fabric/communicator.h"
#include "kernels/mask_exchange.h"

namespace crossdock {

class Handle;

class Group {
  public:
    // Collective. options may be null.
    static std::shared_ptr<Group> create(std::shared_ptr<Communicator> communicator, const ncclEpGroupConfig_t* config,
                                         const crossdockGroupOptions_t* options);

    // Local. Frees what a failed creation has allocated; a destroyed group holds nothing.
    ~Group();

    // Collective; waits for a lost rank no longer than the timeout. Handles that still exist lose their memory and
    // refuse every use. Afterwards nothing of the communicator is used, whatever still refers to this object.
    void destroy() noexcept;

    Communicator& communicator() const { return *communicator_; }
    Runtime& runtime() const { return communicator_->runtime(); }
    const GroupConfig& config() const { return config_; }
    int rank() const { return communicator_->rank(); }
    uint64_t number() const { return number_; }  // unique in this process

    // Throws RemoteError that names the ranks if the group has failed, InvalidUsage if it is destroyed.
    void expect_working() const;

    // An arena for handles of this layout and top-k; makes one (collective) if none fits.
    std::shared_ptr<LlArena> arena_for(ncclEpLayout_t layout, uint32_t topk);

    size_t num_arenas() const { return arenas_.size(); }

    const HtArena& ht_arena() const { return *ht_arena_; }  // of HT groups

    HandleMemory& handle_memory() { return handle_memory_; }
    WaitScope wait_scope(OperationKind operation, uint64_t handle_number) const;

    uint64_t add_handle(Handle* handle);  // returns its number, from 1
    void remove_handle(Handle* handle);
    // The next number of an update, from 1, by which a handle knows the total of its latest update from that of the one
    // before. Numbers repeat after 2^32 - 1 updates of the group: these two would have to be exactly that far apart.
    uint32_t next_update() { return ++num_updates_ != 0 ? num_updates_ : ++num_updates_; }
    // If operations may still be queued, memory of the caller's allocator waits for the next call.
    void give_back(DeviceMemory memory, bool is_in_graphs);

    // Shared memory that a block of the group's kernels may use: the device's, or less after limit_shared_bytes and
    // with CROSSDOCK_SHARED_BYTES.
    size_t max_shared_bytes() const;
    void limit_shared_bytes(int bytes);
    // Of the latest LL combine; 0: there was none.
    int last_combine_warps() const { return last_combine_warps_; }
    void note_combine_warps(int warps) { last_combine_warps_ = warps; }

    // Called around every launch for the group. Returns true if the operation is captured into a graph.
    bool before_operation(cudaStream_t stream);
    void after_operation(cudaStream_t stream, bool rest_follows = false);
    // Waits for all operations that were issued, on any stream.
    void await_operations();

    void mask_query(int* mask_status, cudaStream_t stream);
    void mask_update(const int* mask, cudaStream_t stream);
    void mask_clean(cudaStream_t stream);
    // Never UINT32_MAX, which handles take for any.
    uint32_t num_cleans() const { return static_cast<uint32_t>(num_cleans_ % UINT32_MAX); }
    int async_error() const;
    void clear_error();

    crossdockDiagnosis_t diagnosis() const;
    crossdockTraffic_t traffic();
    size_t symmetric_bytes() const;
    size_t local_bytes() const;
    crossdockMemoryUse_t memory_use() const;

  private:
    Group(std::shared_ptr<Communicator> communicator, const GroupConfig& config);
    // The reason if the group has failed.
    std::optional<Error> failure() const;
    // "; rank 1 has entered LL dispatch of another group ...", or "": what the rank that a wait expired for does
    // instead. It has told this rank, whose memory holds that group's words, too.
    std::string whereabouts(const crossdockDiagnosis_t& diagnosis) const;
    // In an arena: TaggedWord [ranks], `count` times, `stride` bytes apart. Each says which operation a rank has
    // entered, with its Terms, and is kept until a later operation takes its turn.
    struct EnteredWords {
        const std::byte* first;
        uint64_t stride;
        uint32_t count;
    };
    std::vector<EnteredWords> entered_words() const;  // with memory_mutex_ held
    void expect_masks() const;
    MaskExchange mask_exchange(const PeerMap& peers, uint64_t barrier_offset, const Reach& reach) const;
    void preallocate();

    const uint64_t number_;
    std::shared_ptr<Communicator> communicator_;  // null once destroyed
    GroupConfig config_;
    HostVisibleStatus* status_ = nullptr;
    DeviceMemory words_;  // WaitControl, then the mask
    std::unique_ptr<StreamOrder> order_;
    mutable std::shared_mutex memory_mutex_;  // arenas come and go while another group looks into them (whereabouts)
    std::vector<std::shared_ptr<LlArena>> arenas_;
    std::unique_ptr<HtArena> ht_arena_;
    std::vector<Handle*> handles_;
    HandleMemory handle_memory_;
    uint64_t num_handles_ever_ = 0;
    uint32_t num_updates_ = 0;
    uint64_t num_cleans_ = 0;
    size_t shared_bytes_limit_ = SIZE_MAX;
    int last_combine_warps_ = 0;
    bool is_destroyed_ = false;
    FailureWatch::Registration watch_;  // on GPUs: a group may fail between two calls
};

}  // namespace crossdock
