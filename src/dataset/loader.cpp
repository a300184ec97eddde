// SPDX-License-Identifier: Apache-2.0
#include "dataset/loader.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "base/contract.hpp"
#include "base/error.hpp"
#include "base/fault.hpp"
#include "dataset/reader.hpp"
#include "device/memory.hpp"

namespace weft::dataset {
namespace {

using parallel::Range;

constexpr std::int64_t kSlots = 2;
// A rank may hold every row of a batch by chance: the exchange goes in this many pieces at most, which bounds its
// staging memory.
constexpr std::int64_t kMostPieces = 8;
// How long an unwinding destructor waits for its thread before it leaves it to MPI_Abort.
constexpr std::chrono::seconds kPatience{10};

Range own_tokens(parallel::GridShape shape, std::int64_t n_tokens, std::int64_t rank) {
  const Range group = parallel::part(n_tokens, shape.data, rank / shape.feature);
  const Range slice = parallel::part(group.size(), shape.feature, rank % shape.feature);
  return {group.begin + slice.begin, group.begin + slice.end};
}

std::int64_t largest_own(parallel::GridShape shape, std::int64_t n_tokens) {
  return parallel::largest_part(parallel::largest_part(n_tokens, shape.data), shape.feature);
}

std::int64_t pieces_of(std::int64_t world) { return std::min(world, kMostPieces); }

/// Rows of one window that one rank holds, at most.
std::int64_t window_capacity(const BlockTable& table, std::int64_t world) {
  std::int64_t block_rows = 0;
  for (const Block& block : table.blocks) block_rows = std::max(block_rows, block.rows);
  const std::int64_t n_blocks = std::min(table.blocks_per_window, static_cast<std::int64_t>(table.blocks.size()));
  return parallel::largest_part(n_blocks, world) * block_rows;
}

/// One window: its order, who reads which block, and this rank's share of the rows.
struct Window {
  std::int64_t epoch = 0, index = 0;
  WindowOrder order;
  std::vector<std::int32_t> reader;     // [block of the window] rank
  std::vector<std::int64_t> first_row;  // [block of the window] in this rank's memory; unused for others
  std::vector<std::vector<RowRead>>
      reads;  // groups that are read together; a group of compressed rows shares its chunks
  std::size_t reads_done = 0;
  std::unique_ptr<std::byte[]> inputs, targets;

  std::int64_t n_rows() const { return static_cast<std::int64_t>(order.rows.size()); }
};

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

}  // namespace

LoaderMemory loader_memory(const Description& description, const Settings& settings, parallel::GridShape shape) {
  const BlockTable table = block_table(description, settings);
  const std::int64_t world = shape.data * shape.feature, row = description.row_bytes();
  LoaderMemory memory;
  memory.windows = 2 * window_capacity(table, world) * 2 * row;
  memory.slots = kSlots * largest_own(shape, settings.batch_tokens) * 2 * row;
  if (world > 1)
    memory.staging =
        (world + 1) * parallel::largest_part(largest_own(shape, settings.batch_tokens), pieces_of(world)) * 2 * row;
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

struct Loader::State {
  const Description description;
  const BlockTable table;
  const std::int64_t batch_tokens;
  const std::uint64_t seed;
  const parallel::GridShape shape;
  const std::int64_t rank, n_ranks;
  const Range own;
  const std::int64_t row_bytes;
  // Of the thread alone.
  const parallel::Communicator world;
  Reader reader;
  Cursor cursor;
  EpochOrder epochs[2];
  Window windows[2];  // the one that is consumed, and the one after it
  std::vector<std::byte> send, receive;
  std::exception_ptr reading_failure;

  struct Slot {
    device::HostBuffer<std::byte> inputs, targets;
    RawBatch batch;
  } slots[kSlots];

  // Between the threads.
  std::mutex mutex;
  std::condition_variable changed;
  std::int64_t produced = 0, taken = 0, released = 0;
  bool stopping = false, finished = false;
  std::exception_ptr failure;
  std::thread thread;

  State(const Description& d, const Settings& settings, std::uint64_t s, const parallel::World& w,
        const parallel::Grid& grid, Cursor start, int n_threads)
      : description(d),
        table(block_table(d, settings)),
        batch_tokens(settings.batch_tokens),
        seed(s),
        shape(grid.shape()),
        rank(w.rank()),
        n_ranks(w.size()),
        own(grid.own_tokens(batch_tokens)),
        row_bytes(d.row_bytes()),
        world(w.all().duplicate()),
        reader(d, n_threads),
        cursor(start) {
    if (batch_tokens < 1) throw collective_error(ExitCode::usage, "data.batch_tokens = {} (at least 1)", batch_tokens);
    if (start.epoch < 0 || start.position < 0 || start.position >= table.n_rows)
      throw collective_error(
          ExitCode::data,
          "{}: the rows go from 0 to {}, training is to go on at row {} of epoch {}; was the dataset changed?", d.path,
          table.n_rows - 1, start.position, start.epoch);
    const std::int64_t columns = d.n_layers * d.d_model;
    for (Slot& slot : slots) {
      slot.inputs = device::HostBuffer<std::byte>(own.size() * row_bytes);
      slot.targets = device::HostBuffer<std::byte>(own.size() * row_bytes);
      slot.batch.inputs = {slot.inputs.data(), d.dtype, own.size(), columns, columns};
      slot.batch.targets = {slot.targets.data(), d.dtype, own.size(), columns, columns};
      slot.batch.n_tokens = batch_tokens;
    }
    const std::size_t capacity = static_cast<std::size_t>(window_capacity(table, n_ranks) * row_bytes);
    for (Window& window : windows) {
      window.inputs = std::make_unique_for_overwrite<std::byte[]>(capacity);
      window.targets = std::make_unique_for_overwrite<std::byte[]>(capacity);
    }
    if (n_ranks > 1) {
      const std::int64_t rows = parallel::largest_part(largest_own(shape, batch_tokens), pieces_of(n_ranks));
      send.resize(static_cast<std::size_t>(n_ranks * rows * 2 * row_bytes));
      receive.resize(static_cast<std::size_t>(rows * 2 * row_bytes));
    }
  }

  const EpochOrder& epoch(std::int64_t number) {
    EpochOrder& order = epochs[number % 2];
    if (order.blocks.empty() || order.epoch != number) order = epoch_order(table, seed, number);
    return order;
  }

  /// Plans a window; nothing is read yet. Blocks are dealt out in stored order, so that a rank's reads are near one
  /// another.
  void plan(Window& window, std::int64_t epoch_number, std::int64_t index) {
    window.epoch = epoch_number;
    window.index = index;
    window.order = window_order(table, epoch(epoch_number), seed, index);
    const std::vector<std::uint32_t>& blocks = window.order.blocks;
    const std::int64_t n = static_cast<std::int64_t>(blocks.size());
    std::vector<std::int64_t> stored(blocks.size());
    std::iota(stored.begin(), stored.end(), std::int64_t{0});
    std::sort(stored.begin(), stored.end(), [&](std::int64_t a, std::int64_t b) {
      return blocks[static_cast<std::size_t>(a)] < blocks[static_cast<std::size_t>(b)];
    });
    window.reader.assign(blocks.size(), 0);
    window.first_row.assign(blocks.size(), 0);
    window.reads.clear();
    window.reads_done = 0;
    for (std::int64_t r = 0; r < n_ranks; ++r)
      for (std::int64_t i = parallel::part(n, n_ranks, r).begin; i < parallel::part(n, n_ranks, r).end; ++i)
        window.reader[static_cast<std::size_t>(stored[static_cast<std::size_t>(i)])] = static_cast<std::int32_t>(r);
    std::int64_t row = 0, last_file = -1, last_band = -1;
    for (const std::int64_t b : stored) {
      if (window.reader[static_cast<std::size_t>(b)] != rank) continue;
      const Block& block = table.blocks[blocks[static_cast<std::size_t>(b)]];
      const FileDescription& file = description.files[static_cast<std::size_t>(block.file)];
      const std::int64_t band = file.compressed && file.chunk_rows > 0 ? block.row_begin / file.chunk_rows : -1;
      if (band < 0 || block.file != last_file || band != last_band) window.reads.emplace_back();
      window.reads.back().push_back({block.file, block.row_begin, block.rows, window.inputs.get() + row * row_bytes,
                                     window.targets.get() + row * row_bytes});
      window.first_row[static_cast<std::size_t>(b)] = row;
      row += block.rows;
      last_file = block.file;
      last_band = band;
    }
  }

  void plan_after(Window& window, const Window& before) {
    const bool last = before.index + 1 == table.n_windows();
    plan(window, before.epoch + (last ? 1 : 0), last ? 0 : before.index + 1);
  }

  /// Reads until `fraction` of this rank's share is in memory. A failure waits for the next agreement.
  void read(Window& window, double fraction) {
    if (reading_failure) return;
    const std::size_t wanted = std::min(
        window.reads.size(), static_cast<std::size_t>(std::ceil(fraction * static_cast<double>(window.reads.size()))));
    try {
      std::vector<RowRead> reads;
      for (; window.reads_done < wanted; ++window.reads_done)
        reads.insert(reads.end(), window.reads[window.reads_done].begin(), window.reads[window.reads_done].end());
      reader.read(reads);
    } catch (...) {
      reading_failure = std::current_exception();
    }
  }

  /// All ranks go on, or all throw what the lowest failing one met.
  void agree() {
    std::int64_t worst = reading_failure ? n_ranks - rank : 0;
    world.maximum({&worst, 1});
    if (worst == 0) return;
    const int speaker = static_cast<int>(n_ranks - worst);
    std::int64_t code = static_cast<std::int64_t>(ExitCode::internal);
    std::string message;
    if (rank == speaker) try {
        std::rethrow_exception(reading_failure);
      } catch (const Error& failed) {
        code = static_cast<std::int64_t>(failed.code());
        message = failed.what();
      } catch (const std::exception& failed) {
        message = fmt::format("reading activations failed ({})", failed.what());
      }
    world.broadcast(&code, sizeof code, speaker);
    message = world.broadcast(std::move(message), speaker);
    throw Error(static_cast<ExitCode>(code), message, KnownTo::all_ranks);
  }

  /// Tokens [segment) of the batch are the window's rows from `first` on: brings them to their owners.
  void exchange(const Window& window, std::int64_t first, Range segment, Slot& slot) {
    const auto row_of = [&](std::int64_t token) {
      return window.order.rows[static_cast<std::size_t>(first + token - segment.begin)];
    };
    const auto stored_at = [&](WindowOrder::Row row) { return (window.first_row[row.block] + row.row) * row_bytes; };
    std::byte* const inputs = slot.inputs.data() - own.begin * row_bytes;
    std::byte* const targets = slot.targets.data() - own.begin * row_bytes;
    constexpr std::int64_t kTokens = 64;  // of one task
    if (n_ranks == 1) {
      reader.workers().run((segment.size() + kTokens - 1) / kTokens, [&](std::int64_t task) {
        const std::int64_t begin = segment.begin + task * kTokens;
        for (std::int64_t token = begin; token < std::min(begin + kTokens, segment.end); ++token) {
          const std::int64_t at = stored_at(row_of(token));
          std::memcpy(inputs + token * row_bytes, window.inputs.get() + at, static_cast<std::size_t>(row_bytes));
          std::memcpy(targets + token * row_bytes, window.targets.get() + at, static_cast<std::size_t>(row_bytes));
        }
      });
      return;
    }
    const std::int64_t n_pieces = pieces_of(n_ranks);
    std::vector<std::int64_t> send_bytes(static_cast<std::size_t>(n_ranks)),
        receive_bytes(static_cast<std::size_t>(n_ranks)), from;
    std::vector<std::vector<std::int64_t>> to(static_cast<std::size_t>(n_ranks));
    for (std::int64_t piece = 0; piece < n_pieces; ++piece) {
      from.clear();
      for (std::int64_t r = 0; r < n_ranks; ++r) {
        const Range theirs = intersection(own_tokens(shape, batch_tokens, r), segment);
        const Range part = parallel::part(theirs.size(), n_pieces, piece);
        const std::size_t before = from.size();
        if (r == rank)
          for (auto& tokens : to) tokens.clear();
        for (std::int64_t token = theirs.begin + part.begin; token < theirs.begin + part.end; ++token) {
          const WindowOrder::Row row = row_of(token);
          const std::int32_t source = window.reader[row.block];
          if (source == rank) from.push_back(stored_at(row));
          if (r == rank) to[static_cast<std::size_t>(source)].push_back(token);
        }
        send_bytes[static_cast<std::size_t>(r)] = static_cast<std::int64_t>(from.size() - before) * 2 * row_bytes;
      }
      for (std::size_t r = 0; r < to.size(); ++r)
        receive_bytes[r] = static_cast<std::int64_t>(to[r].size()) * 2 * row_bytes;
      const std::int64_t n_send = static_cast<std::int64_t>(from.size());
      reader.workers().run((n_send + kTokens - 1) / kTokens, [&](std::int64_t task) {
        for (std::int64_t i = task * kTokens; i < std::min((task + 1) * kTokens, n_send); ++i) {
          std::byte* row = send.data() + i * 2 * row_bytes;
          std::memcpy(row, window.inputs.get() + from[static_cast<std::size_t>(i)],
                      static_cast<std::size_t>(row_bytes));
          std::memcpy(row + row_bytes, window.targets.get() + from[static_cast<std::size_t>(i)],
                      static_cast<std::size_t>(row_bytes));
        }
      });
      const auto began = Clock::now();
      world.all_to_all(send.data(), send_bytes, receive.data(), receive_bytes);
      slot.batch.exchanging += seconds_since(began);
      slot.batch.exchanged += std::accumulate(send_bytes.begin(), send_bytes.end(), std::int64_t{0}) -
                              send_bytes[static_cast<std::size_t>(rank)];
      const std::byte* row = receive.data();
      for (const auto& tokens : to)
        for (const std::int64_t token : tokens) {
          std::memcpy(inputs + token * row_bytes, row, static_cast<std::size_t>(row_bytes));
          std::memcpy(targets + token * row_bytes, row + row_bytes, static_cast<std::size_t>(row_bytes));
          row += 2 * row_bytes;
        }
    }
  }

  void produce(Slot& slot, std::int64_t number) {
    slot.batch.begin = cursor;
    slot.batch.exchanging = 0;
    slot.batch.exchanged = 0;
    for (Range left{0, batch_tokens}; left.size() > 0;) {
      Window* window = &windows[0];
      std::int64_t first = cursor.position - window->order.begin;
      if (cursor.epoch != window->epoch || first >= window->n_rows()) {
        std::swap(windows[0], windows[1]);
        plan_after(windows[1], windows[0]);
        first = cursor.position - window->order.begin;
      }
      read(*window, 1.0);
      agree();
      const Range segment{left.begin, std::min(left.end, left.begin + window->n_rows() - first)};
      exchange(*window, first, segment, slot);
      cursor = advance(table, cursor, segment.size());
      left.begin = segment.end;
      read(windows[1], static_cast<double>(first + segment.size()) / static_cast<double>(window->n_rows()));
    }
    if (fault::point("data-read", static_cast<int>(rank), number) == fault::Kind::nan && own.size() > 0)
      std::memset(slot.inputs.data(), 0xff,  // NaN in every floating type
                  static_cast<std::size_t>(kernels::bytes_of(description.dtype)));
    slot.batch.end = cursor;
  }

  void loop() {
    std::exception_ptr failed;
    try {
      const std::int64_t index = epoch(cursor.epoch).window_of(cursor.position);
      plan(windows[0], cursor.epoch, index);
      plan_after(windows[1], windows[0]);
      while (true) {
        {
          std::unique_lock lock(mutex);
          // Also when stopping: the other ranks finish the same number of batches.
          changed.wait(lock, [this] { return produced < released + kSlots || stopping; });
          if (produced >= released + kSlots) break;
        }
        produce(slots[produced % kSlots], produced + 1);
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
};

Loader::Loader(const Description& description, const Settings& settings, std::uint64_t seed,
               const parallel::World& world, const parallel::Grid& grid, Cursor start, int n_threads)
    : state_(std::make_shared<State>(description, settings, seed, world, grid, start, n_threads)),
      exceptions_(std::uncaught_exceptions()) {
  // The thread keeps the state alive: see the destructor.
  state_->thread = std::thread([state = state_] { state->loop(); });
}

Loader::~Loader() {
  State& state = *state_;
  {
    std::unique_lock lock(state.mutex);
    state.stopping = true;
    state.changed.notify_all();
    // After a failure that only this rank knows of, the others do not come to the exchange any more; the job is about
    // to be aborted, and waiting for them would only delay that.
    if (std::uncaught_exceptions() > exceptions_ &&
        !state.changed.wait_for(lock, kPatience, [&] { return state.finished; })) {
      state.thread.detach();
      return;
    }
  }
  state.thread.join();
}

const RawBatch& Loader::next() {
  State& state = *state_;
  fault::point("data-wait");
  const auto began = Clock::now();
  std::unique_lock lock(state.mutex);
  WEFT_ASSERT(state.taken < state.released + kSlots);
  state.changed.wait(lock, [&] { return state.produced > state.taken || state.finished; });
  if (state.produced <= state.taken) std::rethrow_exception(state.failure);
  RawBatch& batch = state.slots[state.taken % kSlots].batch;
  ++state.taken;
  batch.waited = seconds_since(began);
  return batch;
}

void Loader::release() {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  WEFT_ASSERT(state.released < state.taken);
  ++state.released;
  state.changed.notify_all();
}

}  // namespace weft::dataset
