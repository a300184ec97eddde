// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/window.hpp"

#include <algorithm>
#include <cmath>
#include <exception>
#include <iterator>
#include <numeric>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/trace.hpp"
#include "parallel/grid.hpp"

namespace weft::dataset {
namespace {

/// Largest number of rows that a rank reads of one shuffle block.
std::int64_t window_capacity(const BlockTable& table, std::int64_t n_ranks) {
  std::int64_t block_rows = 0;
  for (const Block& block : table.blocks) block_rows = std::max(block_rows, block.rows);
  const std::int64_t n_blocks = std::min(table.blocks_per_window, static_cast<std::int64_t>(table.blocks.size()));
  return parallel::largest_part(n_blocks, n_ranks) * block_rows;
}

}  // namespace

std::int64_t WindowReader::bytes(const BlockTable& table, std::int64_t row_bytes, std::int64_t n_ranks) {
  return 2 * window_capacity(table, n_ranks) * 2 * row_bytes;
}

WindowReader::WindowReader(const Description& description, const Settings& settings, std::uint64_t seed,
                           const parallel::World& world, const parallel::Communicator& node, int n_threads)
    : description_(description),
      table_(block_table(description, settings)),
      seed_(seed),
      ranks_(world.all().duplicate()),
      reader_(description, n_threads) {
  const std::int64_t side_bytes = window_capacity(table_, ranks_.size()) * description_.row_bytes();
  current_.targets = side_bytes;
  next_.inputs = 2 * side_bytes;
  next_.targets = 3 * side_bytes;
  allocate(world, node, 4 * side_bytes);
  if (description.source != nullptr) lock_.emplace(memory_, 4 * side_bytes);
}

WindowReader::~WindowReader() { reader_.wait_for_source(); }

/// Collective.
void WindowReader::allocate(const parallel::World& world, const parallel::Communicator& node, std::int64_t bytes) {
  memory_of_.assign(static_cast<std::size_t>(ranks_.size()), nullptr);
  const std::int64_t rank = ranks_.rank(), n_ranks = ranks_.size();
  std::string refusal;
  if (node.size() > 1) {
    node_memory_.emplace(node, bytes);
    refusal = node_memory_->refusal();
  }
  if (node.size() > 1 && refusal.empty()) {
    std::vector<std::int64_t> world_ranks(static_cast<std::size_t>(node.size()));
    node.all_gather(&rank, world_ranks.data(), sizeof rank);
    for (int i = 0; i < node.size(); ++i)
      memory_of_[static_cast<std::size_t>(world_ranks[static_cast<std::size_t>(i)])] = node_memory_->of(i);
    memory_ = node_memory_->own();
  } else {
    node_memory_.reset();
    own_memory_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes));
    memory_ = own_memory_.get();
    memory_of_[static_cast<std::size_t>(rank)] = memory_;
  }
  std::int64_t first_refused = refusal.empty() ? n_ranks : rank;
  ranks_.minimum({&first_refused, 1});
  if (first_refused == n_ranks) return;
  const std::string why =
      ranks_.broadcast(fmt::format("{}: {}", world.host(), refusal), static_cast<int>(first_refused));
  if (rank == 0)
    log::warning(
        "shared memory unavailable on a node ({}); sending rows over MPI, several times slower: enlarge /dev/shm or "
        "lower data.window_rows",
        why);
}

bool WindowReader::all_visible() const { return std::count(memory_of_.begin(), memory_of_.end(), nullptr) == 0; }

const EpochOrder& WindowReader::epoch(std::int64_t number) {
  EpochOrder& order = epochs_[number % 2];
  if (order.blocks.empty() || order.epoch != number) order = epoch_order(table_, seed_, number);
  return order;
}

/// Distributes the blocks of a shuffle block over the ranks; reads nothing.
void WindowReader::plan(Window& window, std::int64_t epoch_number, std::int64_t index) {
  window.epoch = epoch_number;
  window.index = index;
  window.order = window_order(table_, epoch(epoch_number), seed_, index);
  const std::vector<std::uint32_t>& blocks = window.order.blocks;
  std::vector<std::size_t> stored(blocks.size());
  std::iota(stored.begin(), stored.end(), std::size_t{0});
  std::sort(stored.begin(), stored.end(), [&](std::size_t a, std::size_t b) { return blocks[a] < blocks[b]; });
  window.reader.assign(blocks.size(), 0);
  window.first_row.assign(blocks.size(), 0);
  window.reads.clear();
  window.reads_done = 0;
  window.complete = false;
  const std::int64_t row_bytes = description_.row_bytes();
  for (std::int64_t r = 0; r < ranks_.size(); ++r) {
    const parallel::Range share = parallel::part(static_cast<std::int64_t>(blocks.size()), ranks_.size(), r);
    std::int64_t row = 0, last_file = -1, last_band = -1;
    for (std::int64_t i = share.begin; i < share.end; ++i) {
      const std::size_t b = stored[static_cast<std::size_t>(i)];
      const Block& block = table_.blocks[blocks[b]];
      window.reader[b] = static_cast<std::int32_t>(r);
      window.first_row[b] = row;
      if (r == ranks_.rank()) {
        // Compressed blocks of one band of HDF5 chunks are read together, so that each chunk is unpacked once.
        const FileDescription& file = description_.files[static_cast<std::size_t>(block.file)];
        const std::int64_t band = file.compressed && file.chunk_rows > 0 ? block.row_begin / file.chunk_rows : -1;
        if (band < 0 || block.file != last_file || band != last_band) window.reads.emplace_back();
        window.reads.back().push_back({block.file, block.row_begin, block.rows,
                                       memory_ + window.inputs + row * row_bytes,
                                       memory_ + window.targets + row * row_bytes});
        last_file = block.file;
        last_band = band;
      }
      row += block.rows;
    }
  }
}

void WindowReader::plan_next() {
  const bool last = current_.index + 1 == table_.n_windows();
  plan(next_, current_.epoch + (last ? 1 : 0), last ? 0 : current_.index + 1);
}

std::vector<Job> WindowReader::jobs(Window& window, double fraction) {
  if (failure_) return {};
  const std::size_t wanted = std::min(
      window.reads.size(), static_cast<std::size_t>(std::ceil(fraction * static_cast<double>(window.reads.size()))));
  std::vector<RowRead> reads;
  for (; window.reads_done < wanted; ++window.reads_done)
    reads.insert(reads.end(), window.reads[window.reads_done].begin(), window.reads[window.reads_done].end());
  try {
    return reader_.jobs(reads);
  } catch (...) {
    failure_ = std::current_exception();
    return {};
  }
}

std::vector<Job> WindowReader::read_ahead(double fraction) { return jobs(next_, fraction); }

const Window& WindowReader::load(Cursor cursor) {
  if (current_.epoch < 0) {
    plan(current_, cursor.epoch, epoch(cursor.epoch).window_of(cursor.position));
    plan_next();
  } else if (cursor.epoch != current_.epoch || cursor.position >= current_.order.begin + current_.n_rows()) {
    std::swap(current_, next_);
    plan_next();
  }
  if (!current_.complete) {
    const trace::Scope scope(trace::Row::reader, "read");
    run(jobs(current_, 1.0));
    try {
      reader_.finish_source();
    } catch (...) {
      if (!failure_) failure_ = std::current_exception();
    }
    current_.complete = true;
  }
  agree();
  return current_;
}

void WindowReader::run(std::span<const Job> jobs, const std::function<void()>& concurrently) {
  std::exception_ptr failed;
  reader_.workers().start(jobs);
  try {
    concurrently();
  } catch (...) {
    failed = std::current_exception();
  }
  try {
    reader_.workers().finish();
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
  }
  if (failed) std::rethrow_exception(failed);
}

/// Throws, on all ranks, the failure of the lowest rank that has one.
void WindowReader::agree() {
  const auto own = parallel::attempt([this] {
    try {
      if (failure_) std::rethrow_exception(failure_);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& failed) {
      throw error(ExitCode::internal, "reading activations failed ({})", failed.what());
    }
  });
  if (const auto failure = parallel::first_failure(ranks_, own)) failure->raise();
}

}  // namespace weft::dataset
