// SPDX-License-Identifier: Apache-2.0
#include "a2sgd/a2sgd.h"

#include <algorithm>
#include <array>

#include "a2sgd/kernels/launch.h"
#include "core/diagnosis.h"
#include "core/error.h"
#include "core/log.h"
#include "core/structs.h"
#include "core/tensor.h"

namespace crossdock {
namespace {

constexpr size_t kControlOffset = align_up(sizeof(A2sgdState), 16);
constexpr uint32_t kGpuWarps = 4;    // of a block
constexpr int kGpuBlocksPerSm = 16;  // resident ones and those that follow them

uint64_t segments_of(uint64_t chunks) { return (chunks + kChunksOfSegment - 1) / kChunksOfSegment; }

DType checked_dtype(const crossdockA2sgdPiece_t& piece, const std::string& name) {
    const unsigned int bits = enum_bits(piece.datatype);
    require(bits == ncclFloat32 || bits == ncclFloat16 || bits == ncclBfloat16, ncclInvalidArgument,
            "{} has datatype {}, allowed: {} (ncclFloat16), {} (ncclFloat32), {} (ncclBfloat16)", name, bits,
            static_cast<int>(ncclFloat16), static_cast<int>(ncclFloat32), static_cast<int>(ncclBfloat16));
    return kernel_dtype(piece.datatype);
}

std::vector<A2sgdPiece> checked_pieces(const crossdockA2sgdPiece_t* caller, size_t num_pieces) {
    require(caller != nullptr, ncclInvalidArgument, "pieces is NULL");
    require(num_pieces > 0 && num_pieces <= kMostPieces, ncclInvalidArgument, "num_pieces is {}, allowed: 1..{}",
            num_pieces, kMostPieces);
    std::vector<A2sgdPiece> pieces;
    pieces.reserve(num_pieces);
    for (size_t i = 0; i < num_pieces; ++i) {
        const crossdockA2sgdPiece_t& given = caller[i];
        const std::string name = given.name != nullptr ? given.name : fmt::format("piece {}", i);
        const DType dtype = checked_dtype(given, name);
        require(given.data != nullptr || given.count == 0, ncclInvalidArgument,
                "{} has {} entries, but its data is NULL", name, given.count);
        require(given.count <= SIZE_MAX / 8, ncclInvalidArgument, "{} has {} entries, more than memory can hold", name,
                given.count);
        require(reinterpret_cast<uintptr_t>(given.data) % dtype_bytes(dtype) == 0, ncclInvalidArgument,
                "{} is at {}, expected a multiple of {}", name, given.data, dtype_bytes(dtype));
        pieces.push_back({static_cast<std::byte*>(given.data), given.count, dtype, name});
    }
    return pieces;
}

uint64_t entries_of(const std::vector<A2sgdPiece>& pieces) {
    uint64_t count = 0;
    for (const A2sgdPiece& piece : pieces) {
        require(!__builtin_add_overflow(count, piece.count, &count) && count <= SIZE_MAX / 8, ncclInvalidArgument,
                "{} has {} entries, with which the pieces hold more than memory can", piece.name, piece.count);
    }
    return count;
}

}  // namespace

A2sgd::Settings A2sgd::resolve(Communicator& communicator, const crossdockA2sgdConfig_t* caller) {
    const auto given = optional_struct(caller, sizeof(crossdockA2sgdConfig_t), "config");
    const unsigned int sums = enum_bits(given.sums);
    require(sums <= CROSSDOCK_A2SGD_SUMS_FP64, ncclInvalidArgument, "config->sums is {}, allowed: 0 (fp32), 1 (fp64)",
            sums);
    require(given.skip_nonfinite == 0 || given.skip_nonfinite == 1, ncclInvalidArgument,
            "config->skip_nonfinite is {}, allowed: 0 (off), 1 (on)", given.skip_nonfinite);
    const Environment environment = Environment::read();
    const uint64_t timeout_ns = resolve_timeout_ns(environment, given.timeout_ns);
    communicator.connect("crossdockA2sgdCreate", communicator.setup_timeout_ns(timeout_ns));
    return {sums == CROSSDOCK_A2SGD_SUMS_FP64, given.skip_nonfinite != 0, timeout_ns,
            resolve_lsa_team_size(communicator, environment, given.lsa_team_size, "config->lsa_team_size"),
            environment.is_quiet};
}

std::shared_ptr<A2sgd> A2sgd::create(std::shared_ptr<Communicator> communicator, const crossdockA2sgdPiece_t* pieces,
                                     size_t num_pieces, const crossdockA2sgdConfig_t* config) {
    const Settings settings = resolve(*communicator, config);
    std::vector<A2sgdPiece> checked = checked_pieces(pieces, num_pieces);
    DeviceScope device(communicator->runtime());
    std::shared_ptr<A2sgd> a2sgd(new A2sgd(std::move(communicator), settings, std::move(checked)));
    // No rank's kernels may start to wait while other ranks still set up memory.
    Communicator& peers = *a2sgd->communicator_;
    peers.barrier("crossdockA2sgdCreate", peers.setup_timeout_ns(settings.timeout_ns));
    if (a2sgd->order_ != nullptr && !settings.is_quiet) {
        a2sgd->watch_ = FailureWatch::watch(*a2sgd->status_, [own = a2sgd.get()] { warn(own->failure()->what()); });
    }
    return a2sgd;
}

A2sgd::A2sgd(std::shared_ptr<Communicator> communicator, const Settings& settings, std::vector<A2sgdPiece> pieces)
    : communicator_(std::move(communicator)), settings_(settings), count_(entries_of(pieces)) {
    expect_equal_on_all_ranks();
    Runtime& device = runtime();
    const A2sgdArena arena{static_cast<uint32_t>(communicator_->num_ranks())};
    GroupConfig config;
    config.num_ranks = arena.num_ranks;
    config.lsa_team_size = settings_.lsa_team_size;
    GinWords words;
    memory_ =
        communicator_->allocate_symmetric(arena.lay_out(words), communicator_->setup_timeout_ns(settings_.timeout_ns));
    team_ = std::make_unique<TeamView>(*communicator_, config, *memory_, words);
    state_ = DeviceMemory(device, {}, kControlOffset + sizeof(WaitControl));
    use(std::move(pieces));
    order_ = device.make_stream_order();
    status_ = static_cast<HostVisibleStatus*>(device.allocate_host_visible(sizeof(HostVisibleStatus)));
    report_ = static_cast<A2sgdReport*>(device.allocate_host_visible(sizeof(A2sgdReport)));
}

A2sgd::~A2sgd() {
    watch_.reset();
    if (status_ != nullptr) runtime().free_host_visible(status_);
    if (report_ != nullptr) runtime().free_host_visible(report_);
}

void A2sgd::destroy() noexcept {
    is_destroyed_ = true;
    try {
        DeviceScope scope(runtime());
        runtime().synchronize_device();
        watch_.reset();
        // Peers may still send into this rank's memory until they have drained as well.
        const bool is_interrupted = is_interruption(diagnosis());
        if (is_interrupted) communicator_->stop_waiting();
        if (!communicator_->is_killed() && !is_interrupted)
            communicator_->barrier("crossdockA2sgdDestroy", settings_.timeout_ns);
    } catch (const std::exception& error) {
        debug(error.what());
    }
    try {
        DeviceScope scope(runtime());
        team_.reset();
        memory_.reset();
        order_.reset();
        state_.release();
        chunks_.release();
        partials_.release();
    } catch (const std::exception& error) {
        debug(error.what());
    }
}

void A2sgd::expect_equal_on_all_ranks() const {
    struct Field {
        const char* name;
        uint64_t value;
    };
    const std::array fields{Field{"the gradient's number of entries", count_},
                            Field{"config->sums", settings_.sums_in_fp64 ? 1u : 0u},
                            Field{"config->skip_nonfinite", settings_.skips_nonfinite ? 1u : 0u},
                            Field{"config->lsa_team_size", settings_.lsa_team_size}};
    std::array<uint64_t, fields.size()> own{};
    for (size_t i = 0; i < fields.size(); ++i) own[i] = fields[i].value;
    std::vector<decltype(own)> all(static_cast<size_t>(communicator_->num_ranks()));
    communicator_->all_gather(own.data(), all.data(), sizeof(own), "crossdockA2sgdCreate",
                              communicator_->setup_timeout_ns(settings_.timeout_ns));
    for (size_t rank = 0; rank < all.size(); ++rank) {
        for (size_t i = 0; i < fields.size(); ++i) {
            require(all[rank][i] == all[0][i], ncclInvalidUsage,
                    "{} differs between ranks: {} on rank 0, {} on rank {}", fields[i].name, all[0][i], all[rank][i],
                    rank);
        }
    }
    require(count_ > 0, ncclInvalidUsage, "the gradient is empty: its pieces hold 0 entries, allowed: 1 and more");
}

void A2sgd::expect_working() const {
    require(!is_destroyed_, ncclInvalidUsage, "the a2sgd object has been destroyed");
    require(!communicator_->is_killed(), ncclSystemError, "rank {} was killed by fault injection",
            communicator_->rank());
    if (const auto error = failure()) throw *error;
}

crossdockDiagnosis_t A2sgd::diagnosis() const {
    crossdockDiagnosis_t what = CROSSDOCK_DIAGNOSIS_INIT;
    read_diagnosis(status_->expired, communicator_->rank(), what);
    return what;
}

std::optional<Error> A2sgd::failure() const {
    if (__atomic_load_n(&status_->failed, __ATOMIC_ACQUIRE) == 0) return std::nullopt;
    const crossdockDiagnosis_t what = diagnosis();
    const std::string gone = what.valid != 0 ? communicator_->why_gone(what.peer) : "";
    std::string happened;
    if (is_report(what)) {
        happened = fmt::format("stopped in step {}: rank {} reported that it timed out waiting for rank {}",
                               what.expected, what.seen, what.peer);
    } else {
        happened = fmt::format("{} after {} ms waiting for the means of rank {} in step {}",
                               is_interruption(what) ? "was interrupted" : "timed out",
                               static_cast<double>(what.elapsed_us) / 1000, what.peer, what.expected);
        if (!is_interruption(what)) happened += fmt::format(" (the last received: step {})", what.seen);
    }
    return Error(ncclRemoteError, fmt::format("the a2sgd object has failed: rank {} {}{}{}", what.rank, happened,
                                              gone.empty() ? "" : "; ", gone));
}

void A2sgd::use(std::vector<A2sgdPiece> pieces) {
    std::vector<A2sgdChunk> chunks;
    chunks.reserve(entries_of(pieces) / kSignChunk + pieces.size());  // out of memory fails here
    for (size_t i = 0; i < pieces.size(); ++i) {
        const A2sgdPiece& piece = pieces[i];
        for (uint64_t first = 0; first < piece.count; first += kSignChunk) {
            const uint64_t count = std::min<uint64_t>(kSignChunk, piece.count - first);
            chunks.push_back({piece.data + first * dtype_bytes(piece.dtype), static_cast<uint32_t>(count), piece.dtype,
                              static_cast<uint32_t>(i), 0});
        }
    }
    const size_t chunk_bytes = chunks.size() * sizeof(A2sgdChunk);
    const size_t partial_bytes = segments_of(chunks.size()) * sizeof(A2sgdSums);
    if (chunks_.bytes() < chunk_bytes) chunks_ = DeviceMemory(runtime(), {}, chunk_bytes);
    if (partials_.bytes() < partial_bytes) partials_ = DeviceMemory(runtime(), {}, partial_bytes);
    runtime().copy_to_device(chunks_.data(), chunks.data(), chunk_bytes, nullptr);
    runtime().synchronize(nullptr);
    num_chunks_ = chunks.size();
    pieces_ = std::move(pieces);
}

void A2sgd::set_pieces(const crossdockA2sgdPiece_t* caller, size_t num_pieces) {
    expect_working();
    require(!is_between_halves_, ncclInvalidUsage, "a step has begun: call crossdockA2sgdEnd first");
    std::vector<A2sgdPiece> pieces = checked_pieces(caller, num_pieces);
    const uint64_t count = entries_of(pieces);
    require(count == count_, ncclInvalidArgument, "the pieces hold {} entries, expected {} as at creation", count,
            count_);
    if (pieces == pieces_) return;
    DeviceScope device(runtime());
    if (order_ != nullptr) order_->synchronize();
    use(std::move(pieces));
}

A2sgdArgs A2sgd::args() const {
    A2sgdArgs args{};
    args.arena.num_ranks = static_cast<uint32_t>(communicator_->num_ranks());
    args.peers = team_->peers;
    args.reach = team_->reach;
    args.rank = communicator_->rank();
    args.scope.operation = OperationKind::kA2sgd;
    args.scope.timeout_ns = settings_.timeout_ns;
    args.scope.control = reinterpret_cast<WaitControl*>(state_.data() + kControlOffset);
    args.scope.status = status_;
    args.state = reinterpret_cast<A2sgdState*>(state_.data());
    args.report = report_;
    args.chunks = reinterpret_cast<const A2sgdChunk*>(chunks_.data());
    args.num_chunks = num_chunks_;
    args.partials = reinterpret_cast<A2sgdSums*>(partials_.data());
    args.num_segments = segments_of(num_chunks_);
    args.count = count_;
    args.sums_in_fp64 = settings_.sums_in_fp64;
    args.skips_nonfinite = settings_.skips_nonfinite;
    return args;
}

// A pass over the gradient in `turns` turns of a block. Blocks do not wait for each other, so not all must be resident.
LaunchShape A2sgd::pass_shape(uint64_t turns, size_t shared_bytes) const {
    const BackendTraits& backend = communicator_->backend();
    const uint64_t most =
        backend.blocks > 0 ? backend.blocks : static_cast<uint64_t>(runtime().num_sms()) * kGpuBlocksPerSm;
    const uint32_t warps = backend.warps > 0 ? backend.warps : kGpuWarps;
    return {static_cast<int>(std::min(turns, most)), static_cast<int>(warps), shared_bytes};
}

void A2sgd::begin(cudaStream_t stream) {
    expect_working();
    require(!is_between_halves_, ncclInvalidUsage, "a step has begun: call crossdockA2sgdEnd first");
    DeviceScope device(runtime());
    if (order_ != nullptr) order_->before_operation(stream);
    launch<A2sgdSumsKernel>(runtime(), args(), pass_shape(segments_of(num_chunks_), sizeof(A2sgdSumsShared)), stream);
    is_between_halves_ = true;
    if (order_ != nullptr) order_->after_operation(stream);
}

void A2sgd::end(cudaStream_t stream) {
    expect_working();
    require(is_between_halves_, ncclInvalidUsage, "no step has begun: call crossdockA2sgdBegin first");
    const A2sgdArgs step = args();
    LaunchShape waiting = pass_shape(1, a2sgd_means_shared_bytes(step.arena.num_ranks));
    DeviceScope device(runtime());
    if (order_ != nullptr) order_->before_operation(stream);
    is_between_halves_ = false;
    launch<A2sgdMeansKernel>(runtime(), step, waiting, stream);
    launch<A2sgdApplyKernel>(runtime(), step, pass_shape(segments_of(num_chunks_), 0), stream);
    if (order_ != nullptr) order_->after_operation(stream);
    // On the CPU the step has finished, so a wait that expired in it is already known.
    if (order_ == nullptr) expect_working();
}

crossdockA2sgdReport_t A2sgd::report() {
    expect_working();
    DeviceScope device(runtime());
    if (order_ != nullptr) order_->synchronize();
    expect_working();
    crossdockA2sgdReport_t report = CROSSDOCK_A2SGD_REPORT_INIT;
    if (report_->step == 0) return report;
    report.step = report_->step;
    report.count = count_;
    report.num_nonnegative = report_->num_positive;
    report.a = report_->own[0];
    report.b = report_->own[1];
    report.mean_a = report_->mean[0];
    report.mean_b = report_->mean[1];
    report.num_nonfinite_ranks = static_cast<int>(report_->num_nonfinite_ranks);
    report.nonfinite_rank = report_->nonfinite_rank;
    report.nonfinite_piece = report_->nonfinite_piece;
    const auto piece = static_cast<size_t>(report_->nonfinite_piece);
    if (report_->nonfinite_piece >= 0 && piece < pieces_.size()) report.nonfinite_name = pieces_[piece].name.c_str();
    report.skipped = static_cast<int>(report_->skipped);
    return report;
}

}  // namespace crossdock
