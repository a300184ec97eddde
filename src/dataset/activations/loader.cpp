// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/loader.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/contract.hpp"
#include "base/error.hpp"
#include "base/fault.hpp"
#include "base/log.hpp"
#include "base/trace.hpp"
#include "dataset/activations/reader.hpp"
#include "device/memory.hpp"
#include "parallel/node_memory.hpp"

namespace weft::dataset {
namespace {

using parallel::Range;

constexpr std::int64_t kSlots = 2;
// A rank may hold every row of a batch by chance: messages go in this many pieces at most, which bounds their staging
// memory. Two pieces are in memory at a time.
constexpr std::int64_t kMostPieces = 16;
constexpr std::size_t kPiecesAtOnce = 2;
// Bytes that a job copies: many jobs a thread, so that none waits long for another at the end.
constexpr std::int64_t kBytesOfJob = std::int64_t{1} << 20;
// How long an unwinding destructor waits for its thread before it leaves it to MPI_Abort.
constexpr std::chrono::seconds kPatience{10};

std::int64_t pieces_of(std::int64_t world) { return std::min(2 * world, kMostPieces); }

/// Bytes of one piece: what a rank sends at most, to all others together, and what it receives.
struct PieceBytes {
  std::int64_t sent = 0, received = 0;
};
PieceBytes piece_bytes(const parallel::GridShape& shape, std::int64_t batch_tokens, std::int64_t row_bytes) {
  const std::int64_t world = shape.ranks();
  const std::int64_t rows = parallel::largest_part(shape.largest_part(batch_tokens), pieces_of(world));
  return {(world - 1) * rows * 2 * row_bytes, rows * 2 * row_bytes};
}

/// Rows of one window that one rank holds, at most.
std::int64_t window_capacity(const BlockTable& table, std::int64_t world) {
  std::int64_t block_rows = 0;
  for (const Block& block : table.blocks) block_rows = std::max(block_rows, block.rows);
  const std::int64_t n_blocks = std::min(table.blocks_per_window, static_cast<std::int64_t>(table.blocks.size()));
  return parallel::largest_part(n_blocks, world) * block_rows;
}

/// One window: its order, who reads which block, and where its rows lie.
struct Window {
  std::int64_t epoch = 0, index = 0;
  WindowOrder order;
  std::vector<std::int32_t> reader;     // [block of the window] rank
  std::vector<std::int64_t> first_row;  // [block of the window] in its reader's memory
  std::vector<std::vector<RowRead>>
      reads;  // this rank's groups that are read together; a group of compressed rows shares its chunks
  std::size_t reads_done = 0;
  std::int64_t inputs = 0, targets = 0;  // byte of the first row in the window memory of any rank

  std::int64_t n_rows() const { return static_cast<std::int64_t>(order.rows.size()); }
};

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

}  // namespace

LoaderMemory loader_memory(const Description& description, const Settings& settings, const parallel::GridShape& shape) {
  const BlockTable table = block_table(description, settings);
  const std::int64_t world = shape.ranks(), row = description.row_bytes();
  LoaderMemory memory;
  memory.windows = 2 * window_capacity(table, world) * 2 * row;
  memory.slots = kSlots * shape.largest_part(settings.batch_tokens) * 2 * row;
  if (world > 1) {
    const PieceBytes piece = piece_bytes(shape, settings.batch_tokens, row);
    memory.staging = std::int64_t{kPiecesAtOnce} * (piece.sent + piece.received);
  }
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
  Window windows[2];                                // the one that is consumed, and the one after it
  std::unique_ptr<std::byte[]> own_memory;          // of both windows, where no other rank can see it
  std::optional<parallel::NodeMemory> node_memory;  // or where the ranks of the node can
  std::byte* memory = nullptr;                      // this rank's
  std::vector<const std::byte*> memory_of;          // [rank]; null: out of sight, its rows come as messages
  std::vector<std::byte> send[kPiecesAtOnce], receive[kPiecesAtOnce];
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
        const parallel::Communicator& node, const parallel::Grid& grid, Cursor start, int n_threads)
      : description(d),
        table(block_table(d, settings)),
        batch_tokens(settings.batch_tokens),
        seed(s),
        shape(grid.shape()),
        rank(w.rank()),
        n_ranks(w.size()),
        own(grid.own_part(batch_tokens)),
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
    const std::int64_t capacity = window_capacity(table, n_ranks) * row_bytes;
    for (const std::int64_t i : {0, 1}) {
      windows[i].inputs = 2 * i * capacity;
      windows[i].targets = (2 * i + 1) * capacity;
    }
    make_memory(w, node, 4 * capacity);
    if (!std::count(memory_of.begin(), memory_of.end(), nullptr)) return;
    const PieceBytes piece = piece_bytes(shape, batch_tokens, row_bytes);
    for (auto& buffer : send) buffer.resize(static_cast<std::size_t>(piece.sent));
    for (auto& buffer : receive) buffer.resize(static_cast<std::size_t>(piece.received));
  }

  /// Window memory of `bytes`, seen by the ranks of the node if that can be. Collective.
  void make_memory(const parallel::World& w, const parallel::Communicator& node, std::int64_t bytes) {
    memory_of.assign(static_cast<std::size_t>(n_ranks), nullptr);
    std::string refusal;
    if (node.size() > 1) {
      node_memory.emplace(node, bytes);
      refusal = node_memory->refusal();
    }
    if (node.size() > 1 && refusal.empty()) {
      std::vector<std::int64_t> ranks(static_cast<std::size_t>(node.size()));
      node.all_gather(&rank, ranks.data(), sizeof rank);
      for (int i = 0; i < node.size(); ++i)
        memory_of[static_cast<std::size_t>(ranks[static_cast<std::size_t>(i)])] = node_memory->of(i);
      memory = node_memory->own();
    } else {
      node_memory.reset();
      own_memory = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes));
      memory = own_memory.get();
      memory_of[static_cast<std::size_t>(rank)] = memory;
    }
    std::int64_t speaker = refusal.empty() ? n_ranks : rank;
    world.minimum({&speaker, 1});
    if (speaker == n_ranks) return;
    const std::string why = world.broadcast(fmt::format("{}: {}", w.host(), refusal), static_cast<int>(speaker));
    if (rank == 0)
      log::warning(
          "the ranks of a node cannot share memory ({}); their rows go by messages, several times slower: make room "
          "in /dev/shm or lower data.window_rows",
          why);
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
    for (std::int64_t r = 0; r < n_ranks; ++r) {
      const Range share = parallel::part(n, n_ranks, r);
      std::int64_t row = 0, last_file = -1, last_band = -1;
      for (std::int64_t i = share.begin; i < share.end; ++i) {
        const std::size_t b = static_cast<std::size_t>(stored[static_cast<std::size_t>(i)]);
        const Block& block = table.blocks[blocks[b]];
        window.reader[b] = static_cast<std::int32_t>(r);
        window.first_row[b] = row;
        if (r == rank) {
          const FileDescription& file = description.files[static_cast<std::size_t>(block.file)];
          const std::int64_t band = file.compressed && file.chunk_rows > 0 ? block.row_begin / file.chunk_rows : -1;
          if (band < 0 || block.file != last_file || band != last_band) window.reads.emplace_back();
          window.reads.back().push_back({block.file, block.row_begin, block.rows,
                                         memory + window.inputs + row * row_bytes,
                                         memory + window.targets + row * row_bytes});
          last_file = block.file;
          last_band = band;
        }
        row += block.rows;
      }
    }
  }

  void plan_after(Window& window, const Window& before) {
    const bool last = before.index + 1 == table.n_windows();
    plan(window, before.epoch + (last ? 1 : 0), last ? 0 : before.index + 1);
  }

  /// Jobs that read until `fraction` of this rank's share is in memory. A failure waits for the next agreement.
  std::vector<Job> reading(Window& window, double fraction) {
    if (reading_failure) return {};
    const std::size_t wanted = std::min(
        window.reads.size(), static_cast<std::size_t>(std::ceil(fraction * static_cast<double>(window.reads.size()))));
    std::vector<RowRead> reads;
    for (; window.reads_done < wanted; ++window.reads_done)
      reads.insert(reads.end(), window.reads[window.reads_done].begin(), window.reads[window.reads_done].end());
    try {
      return reader.jobs(reads);
    } catch (...) {
      reading_failure = std::current_exception();
      return {};
    }
  }

  /// Does the jobs, those first that stand first, at the same time as `beside` runs here. Only those that read can
  /// fail: a failure waits for the next agreement.
  template <class Beside>
  void work(std::span<const Job> jobs, Beside&& beside) {
    std::exception_ptr failure;
    reader.workers().start(jobs);
    try {
      beside();
    } catch (...) {
      failure = std::current_exception();
    }
    try {
      reader.workers().finish();
    } catch (...) {
      if (!reading_failure) reading_failure = std::current_exception();
    }
    if (failure) std::rethrow_exception(failure);
  }

  /// All ranks go on, or all throw what the lowest failing one met. It comes after a window was read and before any of
  /// it is copied, and so between the last copy out of a window and the first reading into its memory for the window
  /// after the next one: nothing else is needed to keep ranks out of each other's way in memory that they share.
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

  /// Messages with a part of a batch's rows.
  struct Piece {
    std::vector<std::int64_t> send_bytes, receive_bytes;  // [rank]
    std::vector<WindowOrder::Row> sent;                   // in the order of the message
    std::vector<std::int64_t> received;                   // their tokens, likewise
  };

  /// Tokens [segment) of the batch are the window's rows from `first` on: brings them to their owners. `reads`, jobs
  /// of the next window, are done beside that.
  void exchange(const Window& window, std::int64_t first, Range segment, Slot& slot, std::vector<Job> reads) {
    const auto row_of = [&](std::int64_t token) {
      return window.order.rows[static_cast<std::size_t>(first + token - segment.begin)];
    };
    const auto memory_of_row = [&](WindowOrder::Row row) {
      return memory_of[static_cast<std::size_t>(window.reader[row.block])];
    };
    std::byte* const inputs = slot.inputs.data() - own.begin * row_bytes;
    std::byte* const targets = slot.targets.data() - own.begin * row_bytes;
    const std::size_t size = static_cast<std::size_t>(row_bytes);
    // From where `from` says in the window memory `at`.
    const auto copy = [&](std::byte* to_inputs, std::byte* to_targets, const std::byte* at, WindowOrder::Row from) {
      const std::int64_t offset = (window.first_row[from.block] + from.row) * row_bytes;
      std::memcpy(to_inputs, at + window.inputs + offset, size);
      std::memcpy(to_targets, at + window.targets + offset, size);
    };
    std::vector<Job> jobs;
    // `of_one` for all i in [begin, end).
    const auto add = [&](std::int64_t begin, std::int64_t end, auto of_one) {
      const std::int64_t at_once = std::max<std::int64_t>(1, kBytesOfJob / (2 * row_bytes));
      for (; begin < end; begin += at_once)
        jobs.push_back([begin, end = std::min(end, begin + at_once), of_one] {
          for (std::int64_t i = begin; i < end; ++i) of_one(i);
        });
    };
    const auto add_copies = [&] {
      const Range mine = intersection(own, segment);
      add(mine.begin, mine.end, [&](std::int64_t token) {
        const WindowOrder::Row row = row_of(token);
        if (const std::byte* const at = memory_of_row(row); at != nullptr)
          copy(inputs + token * row_bytes, targets + token * row_bytes, at, row);
      });
    };
    // In the order in which jobs are begun: rows that are waited for before those of later batches.
    const auto add_reads = [&](Range part) {
      jobs.insert(jobs.end(), std::move_iterator(reads.begin() + part.begin),
                  std::move_iterator(reads.begin() + part.end));
    };
    const std::int64_t n_reads = static_cast<std::int64_t>(reads.size());
    if (send[0].empty()) {
      add_copies();
      add_reads({0, n_reads});
      work(jobs, [] {});
      return;
    }

    // Piece by piece: one is on its way while the one before is unpacked, the one after packed, and the rest done.
    const std::int64_t n_pieces = pieces_of(n_ranks);
    Piece pieces[3];
    for (std::int64_t stage = 0; stage < n_pieces + 2; ++stage) {
      jobs.clear();
      if (stage >= 2) {
        const Piece& arrived = pieces[(stage - 2) % 3];
        const std::byte* const from = receive[stage % 2].data();
        add(0, static_cast<std::int64_t>(arrived.received.size()), [&, from, &piece = arrived](std::int64_t i) {
          const std::int64_t token = piece.received[static_cast<std::size_t>(i)];
          std::memcpy(inputs + token * row_bytes, from + 2 * i * row_bytes, size);
          std::memcpy(targets + token * row_bytes, from + (2 * i + 1) * row_bytes, size);
        });
      }
      if (stage < n_pieces) {
        Piece& next = pieces[stage % 3];
        next = plan_piece(window, first, segment, stage);
        std::byte* const to = send[stage % 2].data();
        add(0, static_cast<std::int64_t>(next.sent.size()), [&, to, &piece = next](std::int64_t i) {
          copy(to + 2 * i * row_bytes, to + (2 * i + 1) * row_bytes, memory, piece.sent[static_cast<std::size_t>(i)]);
        });
      }
      if (stage == 1) add_copies();
      if (stage >= 1 && stage <= n_pieces) add_reads(parallel::part(n_reads, n_pieces, stage - 1));
      work(jobs, [&] {
        if (stage < 1 || stage > n_pieces) return;
        const Piece& piece = pieces[(stage - 1) % 3];
        const auto began = Clock::now();
        const trace::Scope scope(trace::Row::reader, "exchange rows");
        world.all_to_all(send[(stage - 1) % 2].data(), piece.send_bytes, receive[(stage - 1) % 2].data(),
                         piece.receive_bytes);
        slot.batch.exchanging += seconds_since(began);
        slot.batch.exchanged += std::accumulate(piece.send_bytes.begin(), piece.send_bytes.end(), std::int64_t{0});
      });
    }
  }

  /// Piece `index` of the messages of exchange(window, first, segment): of each owner's tokens one part.
  Piece plan_piece(const Window& window, std::int64_t first, Range segment, std::int64_t index) const {
    const std::size_t n = static_cast<std::size_t>(n_ranks);
    Piece piece{std::vector<std::int64_t>(n), std::vector<std::int64_t>(n), {}, {}};
    std::vector<std::vector<std::int64_t>> received(n);
    for (std::size_t r = 0; r < n; ++r) {
      const bool mine = static_cast<std::int64_t>(r) == rank;
      if (!mine && memory_of[r] != nullptr) continue;
      const Range theirs = intersection(shape.part_of_rank(batch_tokens, static_cast<std::int64_t>(r)), segment);
      const Range part = parallel::part(theirs.size(), pieces_of(n_ranks), index);
      for (std::int64_t token = theirs.begin + part.begin; token < theirs.begin + part.end; ++token) {
        const WindowOrder::Row row = window.order.rows[static_cast<std::size_t>(first + token - segment.begin)];
        const std::size_t source = static_cast<std::size_t>(window.reader[row.block]);
        if (mine && memory_of[source] == nullptr) {
          received[source].push_back(token);
          piece.receive_bytes[source] += 2 * row_bytes;
        } else if (!mine && static_cast<std::int64_t>(source) == rank) {
          piece.sent.push_back(row);
          piece.send_bytes[r] += 2 * row_bytes;
        }
      }
    }
    for (const auto& tokens : received) piece.received.insert(piece.received.end(), tokens.begin(), tokens.end());
    return piece;
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
      {
        const trace::Scope scope(trace::Row::reader, "read");
        work(reading(*window, 1.0), [] {});
      }
      agree();
      const Range segment{left.begin, std::min(left.end, left.begin + window->n_rows() - first)};
      const double consumed = static_cast<double>(first + segment.size()) / static_cast<double>(window->n_rows());
      exchange(*window, first, segment, slot, reading(windows[1], consumed));
      cursor = advance(table, cursor, segment.size());
      left.begin = segment.end;
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
        {
          const trace::Scope scope(trace::Row::reader, "prepare batch");
          produce(slots[produced % kSlots], produced + 1);
        }
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
               const parallel::World& world, const parallel::Communicator& node, const parallel::Grid& grid,
               Cursor start, int n_threads)
    : state_(std::make_shared<State>(description, settings, seed, world, node, grid, start, n_threads)),
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
  const trace::Scope scope(trace::Row::host, "waiting for data");
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
