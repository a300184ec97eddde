// SPDX-License-Identifier: Apache-2.0
#include "parallel/communicator.hpp"

#include <mpi.h>

#include <algorithm>
#include <cstring>

#include "base/contract.hpp"
#include "base/error.hpp"
#include "base/fault.hpp"
#include "base/progress.hpp"

namespace weft::parallel {
namespace {

// MPI-3 counts are int: larger messages are sent in pieces of this many bytes.
constexpr std::int64_t kLargestMessage = std::int64_t{1} << 30;

void check(int status, const char* what) {
  if (status == MPI_SUCCESS) return note_progress();
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(status, text, &length);
  throw error(ExitCode::communication, "{} failed ({})", what, std::string(text, static_cast<std::size_t>(length)));
}

template <class T>
MPI_Datatype type_of();
template <>
MPI_Datatype type_of<std::int64_t>() {
  return MPI_INT64_T;
}

template <class T>
void reduce(MPI_Comm comm, std::span<T> values, MPI_Op operation, const char* what) {
  fault::point("collective");
  if (comm == MPI_COMM_NULL) return note_progress();
  check(MPI_Allreduce(MPI_IN_PLACE, values.data(), static_cast<int>(values.size()), type_of<T>(), operation, comm),
        what);
}

}  // namespace

struct Communicator::Handle {
  MPI_Comm comm = MPI_COMM_NULL;  // also of a process that computes without MPI: it is alone
  bool owned = false;
  std::shared_ptr<GpuGroups> gpu_groups;

  bool alone() const { return comm == MPI_COMM_NULL; }

  ~Handle() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (owned && !finalized) MPI_Comm_free(&comm);
  }
};

Communicator::Communicator(std::unique_ptr<Handle> handle) : handle_(std::move(handle)) {
  if (handle_->alone()) return;
  check(MPI_Comm_set_errhandler(handle_->comm, MPI_ERRORS_RETURN), "setting the MPI error handler");
  check(MPI_Comm_rank(handle_->comm, &rank_), "reading the rank");
  check(MPI_Comm_size(handle_->comm, &size_), "reading the number of ranks");
}

Communicator::Communicator(Communicator&&) noexcept = default;
Communicator& Communicator::operator=(Communicator&&) noexcept = default;
Communicator::~Communicator() = default;

Communicator Communicator::world() {
  auto handle = std::make_unique<Handle>();
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized) handle->comm = MPI_COMM_WORLD;
  return Communicator(std::move(handle));
}

Communicator Communicator::split(int colour, int key) const {
  auto handle = std::make_unique<Handle>();
  if (handle_->alone()) return Communicator(std::move(handle));
  check(MPI_Comm_split(handle_->comm, colour, key, &handle->comm), "splitting a communicator");
  handle->owned = true;
  return Communicator(std::move(handle));
}

Communicator Communicator::split_by_node() const {
  auto handle = std::make_unique<Handle>();
  if (handle_->alone()) return Communicator(std::move(handle));
  check(MPI_Comm_split_type(handle_->comm, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &handle->comm),
        "finding the ranks of a node");
  handle->owned = true;
  return Communicator(std::move(handle));
}

Communicator Communicator::duplicate() const {
  auto handle = std::make_unique<Handle>();
  if (handle_->alone()) return Communicator(std::move(handle));
  check(MPI_Comm_dup(handle_->comm, &handle->comm), "duplicating a communicator");
  handle->owned = true;
  return Communicator(std::move(handle));
}

std::shared_ptr<GpuGroups>& Communicator::gpu_groups() const { return handle_->gpu_groups; }

void* Communicator::native() const { return &handle_->comm; }

void Communicator::barrier() const {
  fault::point("collective");
  if (handle_->alone()) return note_progress();
  check(MPI_Barrier(handle_->comm), "barrier");
}

void Communicator::broadcast(void* data, std::int64_t bytes, int root) const {
  fault::point("collective");
  if (handle_->alone()) return note_progress();
  for (std::int64_t begin = 0; begin < bytes; begin += kLargestMessage)
    check(MPI_Bcast(static_cast<char*>(data) + begin, static_cast<int>(std::min(kLargestMessage, bytes - begin)),
                    MPI_BYTE, root, handle_->comm),
          "broadcast");
}

std::string Communicator::broadcast(std::string text, int root) const {
  std::int64_t size = static_cast<std::int64_t>(text.size());
  broadcast(&size, sizeof size, root);
  text.resize(static_cast<std::size_t>(size));
  broadcast(text.data(), size, root);
  return text;
}

void Communicator::all_gather(const void* send, void* receive, std::int64_t bytes) const {
  const std::vector<std::int64_t> sizes(static_cast<std::size_t>(size_), bytes);
  all_gather_uneven(send, receive, sizes);
}

void Communicator::all_gather_uneven(const void* send, void* receive,
                                     std::span<const std::int64_t> receive_bytes) const {
  WEFT_ASSERT(static_cast<int>(receive_bytes.size()) == size_);
  fault::point("collective");
  std::vector<std::int64_t> begin{0};
  for (const std::int64_t bytes : receive_bytes) begin.push_back(begin.back() + bytes);
  const auto piece = [&](int r) { return static_cast<char*>(receive) + begin[static_cast<std::size_t>(r)]; };
  if (receive_bytes[rank_] > 0 && piece(rank_) != send)
    std::memmove(piece(rank_), send, static_cast<std::size_t>(receive_bytes[rank_]));
  if (handle_->alone()) return note_progress();
  if (begin.back() > kLargestMessage) {  // counts and displacements of MPI are int
    for (int r = 0; r < size_; ++r) broadcast(piece(r), receive_bytes[r], r);
    return;
  }
  // All pieces at a time: broadcasts in turn would use one direction of a link only.
  const std::vector<int> counts(receive_bytes.begin(), receive_bytes.end()), displacements(begin.begin(), begin.end());
  check(MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, receive, counts.data(), displacements.data(), MPI_BYTE,
                       handle_->comm),
        "all-gather");
}

void Communicator::all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive,
                              std::span<const std::int64_t> receive_bytes) const {
  WEFT_ASSERT(static_cast<int>(send_bytes.size()) == size_ && static_cast<int>(receive_bytes.size()) == size_);
  fault::point("collective");
  // Pairwise messages instead of MPI_Alltoallv: its displacements are int and overflow on large batches.
  std::vector<MPI_Request> requests;
  const auto post = [&](auto call, auto* base, std::span<const std::int64_t> bytes) {
    std::int64_t begin = 0;
    for (int r = 0; r < size_; ++r) {
      if (r != rank_)
        for (std::int64_t piece = 0; piece < bytes[r]; piece += kLargestMessage) {
          requests.emplace_back();
          check(call(base + begin + piece, static_cast<int>(std::min(kLargestMessage, bytes[r] - piece)), MPI_BYTE, r,
                     0, handle_->comm, &requests.back()),
                "all-to-all");
        }
      begin += bytes[r];
    }
  };
  post(MPI_Irecv, static_cast<char*>(receive), receive_bytes);
  post(MPI_Isend, static_cast<const char*>(send), send_bytes);
  std::int64_t from = 0, to = 0;
  for (int r = 0; r < rank_; ++r) {
    from += send_bytes[r];
    to += receive_bytes[r];
  }
  if (send_bytes[rank_] > 0)
    std::memcpy(static_cast<char*>(receive) + to, static_cast<const char*>(send) + from,
                static_cast<std::size_t>(send_bytes[rank_]));
  if (handle_->alone()) return note_progress();
  check(MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE), "all-to-all");
}

void Communicator::sum(std::span<std::int64_t> values) const { reduce(handle_->comm, values, MPI_SUM, "sum"); }
void Communicator::minimum(std::span<std::int64_t> values) const { reduce(handle_->comm, values, MPI_MIN, "minimum"); }
void Communicator::maximum(std::span<std::int64_t> values) const { reduce(handle_->comm, values, MPI_MAX, "maximum"); }

void Communicator::sum(std::span<double> values) const {
  std::vector<double> all(values.size() * static_cast<std::size_t>(size_));
  all_gather(values.data(), all.data(), static_cast<std::int64_t>(values.size_bytes()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    double total = 0;
    for (int r = 0; r < size_; ++r) total += all[static_cast<std::size_t>(r) * values.size() + i];
    values[i] = total;
  }
}

struct Communicator::PendingMaximum::State {
  std::vector<std::int64_t> values;
  MPI_Request request = MPI_REQUEST_NULL;

  ~State() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (request != MPI_REQUEST_NULL && !finalized) MPI_Wait(&request, MPI_STATUS_IGNORE);
  }
};

Communicator::PendingMaximum::PendingMaximum() = default;
Communicator::PendingMaximum::PendingMaximum(PendingMaximum&&) noexcept = default;
Communicator::PendingMaximum& Communicator::PendingMaximum::operator=(PendingMaximum&&) noexcept = default;
Communicator::PendingMaximum::~PendingMaximum() = default;
bool Communicator::PendingMaximum::active() const { return state_ != nullptr; }

std::vector<std::int64_t> Communicator::PendingMaximum::wait() {
  WEFT_ASSERT(active());
  if (state_->request != MPI_REQUEST_NULL) check(MPI_Wait(&state_->request, MPI_STATUS_IGNORE), "agreement of ranks");
  return std::move(std::exchange(state_, nullptr)->values);
}

Communicator::PendingMaximum Communicator::start_maximum(std::vector<std::int64_t> values) const {
  fault::point("collective");
  PendingMaximum pending;
  pending.state_ = std::make_unique<PendingMaximum::State>();
  pending.state_->values = std::move(values);
  auto& state = *pending.state_;
  if (handle_->alone()) return pending;
  check(MPI_Iallreduce(MPI_IN_PLACE, state.values.data(), static_cast<int>(state.values.size()), MPI_INT64_T, MPI_MAX,
                       handle_->comm, &state.request),
        "agreement of ranks");
  return pending;
}

}  // namespace weft::parallel
