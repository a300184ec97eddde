// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/loader.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "base/clock.hpp"
#include "base/contract.hpp"
#include "base/error.hpp"
#include "base/fault.hpp"
#include "base/trace.hpp"
#include "dataset/activations/row_exchange.hpp"
#include "dataset/activations/window.hpp"
#include "device/memory.hpp"

namespace weft::dataset {
namespace {

using parallel::Range;

constexpr std::int64_t kSlots = 2;
// How long a destructor waits for its thread during stack unwinding. After that MPI_Abort ends both.
constexpr std::chrono::seconds kUnwindingTimeout{10};

/// Fills slots with consecutive batches. Used by one thread at a time.
class BatchSource {
 public:
  /// Collective. `read_ahead`: fraction of the next shuffle block that is read by the time the current one is consumed.
  BatchSource(const Description& description, const Settings& settings, std::uint64_t seed,
              const parallel::World& world, const parallel::Communicator& node, const parallel::Grid& grid,
              Cursor start, int n_threads, double read_ahead)
      : dtype_(description.dtype),
        batch_tokens_(checked(description, settings, start)),
        read_ahead_(read_ahead),
        cursor_(start),
        windows_(description, settings, seed, world, node, n_threads),
        exchange_(windows_, grid, batch_tokens_, description.row_bytes()) {
    const std::int64_t own = grid.own_part(batch_tokens_).size();
    const std::int64_t columns = description.n_layers * description.d_model;
    for (Slot& slot : slots_) {
      slot.inputs = device::HostBuffer<std::byte>(own * description.row_bytes());
      slot.targets = device::HostBuffer<std::byte>(own * description.row_bytes());
      slot.batch.inputs = {slot.inputs.data(), dtype_, own, columns, columns};
      slot.batch.targets = {slot.targets.data(), dtype_, own, columns, columns};
      if (description.targets_are_inputs) slot.batch.targets = slot.batch.inputs;
      slot.batch.n_tokens = batch_tokens_;
    }
  }

  RawBatch& slot(std::int64_t number) { return slots_[number % kSlots].batch; }

  /// Fills the next slot. Collective.
  RawBatch& produce() {
    const trace::Scope scope(trace::Row::reader, "prepare batch");
    Slot& slot = slots_[produced_ % kSlots];
    RawBatch& batch = slot.batch;
    batch.begin = cursor_;
    batch.exchanging = 0;
    batch.exchanged = 0;
    for (Range left{0, batch_tokens_}; left.size() > 0;) {
      const Window& window = windows_.load(cursor_);
      const std::int64_t first = cursor_.position - window.order.begin;
      const Segment segment{first, {left.begin, std::min(left.end, left.begin + window.n_rows() - first)}};
      const double consumed = static_cast<double>(first + segment.tokens.size()) / static_cast<double>(window.n_rows());
      const Traffic traffic = exchange_.deliver(window, segment, {slot.inputs.data(), slot.targets.data()},
                                                windows_.read_ahead(read_ahead_ * consumed));
      batch.exchanging += traffic.seconds;
      batch.exchanged += traffic.bytes;
      cursor_ = advance(windows_.table(), cursor_, segment.tokens.size());
      left.begin = segment.tokens.end;
    }
    batch.end = cursor_;
    ++produced_;
    if (fault::point("data-read", windows_.ranks().rank(), produced_) == fault::Kind::nan && slot.inputs.size() > 0)
      std::memset(slot.inputs.data(), 0xff,  // NaN in every floating type
                  static_cast<std::size_t>(kernels::bytes_of(dtype_)));
    return batch;
  }

 private:
  static std::int64_t checked(const Description& description, const Settings& settings, Cursor start) {
    if (settings.batch_tokens < 1)
      throw collective_error(ExitCode::usage, "data.batch_tokens = {} is out of range (at least 1)",
                             settings.batch_tokens);
    if (start.epoch < 0 || start.position < 0 || start.position >= description.n_rows)
      throw collective_error(
          ExitCode::data,
          "{}: cannot resume at row {} of epoch {} (the dataset has rows 0 to {}); was the dataset changed?",
          description.path, start.position, start.epoch, description.n_rows - 1);
    return settings.batch_tokens;
  }

  struct Slot {
    device::HostBuffer<std::byte> inputs, targets;
    RawBatch batch;
  };

  const kernels::Scalar dtype_;
  const std::int64_t batch_tokens_;
  const double read_ahead_;
  Cursor cursor_;
  WindowReader windows_;
  RowExchange exchange_;
  Slot slots_[kSlots];
  std::int64_t produced_ = 0;
};

}  // namespace

LoaderMemory loader_memory(const Description& description, const Settings& settings, const parallel::GridShape& shape) {
  const BlockTable table = block_table(description, settings);
  const std::int64_t row = description.row_bytes();
  LoaderMemory memory;
  memory.windows = WindowReader::bytes(table, row, shape.ranks());
  memory.slots = kSlots * shape.largest_part(settings.batch_tokens) * 2 * row;
  memory.staging = RowExchange::bytes(shape, settings.batch_tokens, row);
  const std::int64_t window_rows = std::min(table.n_rows, table.blocks_per_window * settings.block_rows);
  const std::int64_t n_blocks = static_cast<std::int64_t>(table.blocks.size());
  memory.order = n_blocks * static_cast<std::int64_t>(sizeof(Block) + 2 * sizeof(std::uint32_t)) + window_rows * 4 * 8;
  for (const FileDescription& file : description.files) {
    if (file.compressed)
      memory.decoding =
          std::max(memory.decoding, file.chunk_rows * description.d_model * kernels::bytes_of(description.dtype));
    else
      memory.order += 2 * description.n_layers * 24 *
                      (file.chunk_rows > 0 ? (file.rows + file.chunk_rows - 1) / file.chunk_rows : 1);
  }
  return memory;
}

/// When batches are produced.
class Loader::Production {
 public:
  virtual ~Production() = default;
  virtual RawBatch& next() = 0;
  virtual void release() = 0;
};

/// Production in a thread, up to two batches ahead. It always completes `released + 2` batches, also when it is
/// destroyed: the threads of all ranks exchange rows and must run the same number of exchanges.
class Loader::Prefetching final : public Loader::Production {
 public:
  explicit Prefetching(std::unique_ptr<BatchSource> source)
      : state_(std::make_shared<State>(std::move(source))), exceptions_(std::uncaught_exceptions()) {
    // The thread shares the state: the destructor may have to detach it.
    state_->thread = std::thread([state = state_] { state->loop(); });
  }

  ~Prefetching() override {
    State& state = *state_;
    {
      std::unique_lock lock(state.mutex);
      state.stopping = true;
      state.changed.notify_all();
      // After a failure that only this rank knows, the other ranks make no further exchange, and MPI_Abort
      // follows. Do not delay it.
      if (std::uncaught_exceptions() > exceptions_ &&
          !state.changed.wait_for(lock, kUnwindingTimeout, [&] { return state.finished; })) {
        state.thread.detach();
        return;
      }
    }
    state.thread.join();
  }

  RawBatch& next() override {
    State& state = *state_;
    std::unique_lock lock(state.mutex);
    WEFT_ASSERT(state.taken < state.released + kSlots);
    state.changed.wait(lock, [&] { return state.produced > state.taken || state.finished; });
    if (state.produced <= state.taken) std::rethrow_exception(state.failure);
    return state.source->slot(state.taken++);
  }

  void release() override {
    State& state = *state_;
    const std::lock_guard lock(state.mutex);
    WEFT_ASSERT(state.released < state.taken);
    ++state.released;
    state.changed.notify_all();
  }

 private:
  struct State {
    explicit State(std::unique_ptr<BatchSource> s) : source(std::move(s)) {}

    void loop() {
      std::exception_ptr failed;
      try {
        while (true) {
          {
            std::unique_lock lock(mutex);
            // Stopping waits too: the other ranks complete the same number of batches.
            changed.wait(lock, [this] { return produced < released + kSlots || stopping; });
            if (produced >= released + kSlots) break;
          }
          source->produce();
          const std::lock_guard lock(mutex);
          ++produced;
          changed.notify_all();
        }
      } catch (...) {
        failed = std::current_exception();
      }
      const std::lock_guard lock(mutex);
      failure = failed;
      finished = true;
      changed.notify_all();
    }

    const std::unique_ptr<BatchSource> source;  // used by the thread alone, except slots that are complete
    std::mutex mutex;
    std::condition_variable changed;
    std::int64_t produced = 0, taken = 0, released = 0;  // batches
    bool stopping = false, finished = false;
    std::exception_ptr failure;
    std::thread thread;
  };

  std::shared_ptr<State> state_;
  int exceptions_ = 0;  // in flight at construction
};

/// Production in the calling thread, when a batch is requested.
class Loader::OnDemand final : public Loader::Production {
 public:
  explicit OnDemand(std::unique_ptr<BatchSource> source) : source_(std::move(source)) {}

  RawBatch& next() override {
    WEFT_ASSERT(unreleased_ < kSlots);
    RawBatch& batch = source_->produce();
    batch.exchanging = 0;  // nothing overlaps with steps: `waited` includes it
    ++unreleased_;
    return batch;
  }

  void release() override {
    WEFT_ASSERT(unreleased_ > 0);
    --unreleased_;
  }

 private:
  const std::unique_ptr<BatchSource> source_;
  std::int64_t unreleased_ = 0;
};

Loader::Loader(const Description& description, const Settings& settings, std::uint64_t seed,
               const parallel::World& world, const parallel::Communicator& node, const parallel::Grid& grid,
               Cursor start, int n_threads) {
  // A source computes with the kernels of the steps, and so in their thread.
  const bool prefetch = settings.prefetch && description.source == nullptr;
  auto source = std::make_unique<BatchSource>(description, settings, seed, world, node, grid, start, n_threads,
                                              settings.prefetch ? 1.0 : 0.0);
  if (prefetch)
    production_ = std::make_unique<Prefetching>(std::move(source));
  else
    production_ = std::make_unique<OnDemand>(std::move(source));
}

Loader::~Loader() = default;

const RawBatch& Loader::next() {
  fault::point("data-wait");
  const trace::Scope scope(trace::Row::host, "waiting for data");
  const auto began = Clock::now();
  RawBatch& batch = production_->next();
  batch.waited = seconds_since(began);
  return batch;
}

void Loader::release() { production_->release(); }

}  // namespace weft::dataset
