// SPDX-License-Identifier: Apache-2.0
//
// Shuffle blocks (order.hpp) in host memory: which rank reads which block, where each row lies, and the reading itself.
//
// The blocks of a shuffle block are distributed over the ranks in stored order, so that each rank reads
// neighbouring parts of the files. Memory holds two shuffle blocks: the current one, whose rows are consumed, and the
// next one. The ranks of a node share this memory (parallel/node_memory.hpp). If they cannot, each rank can access its
// part only, and a warning gives the reason.
//
// Collective calls of `load` order reads and copies in shared memory. They come after a shuffle block was read and
// before any of its rows is copied, hence between the last copy out of a shuffle block and the first read into the same
// memory (for the one after the next). No other synchronisation is needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "dataset/activations/description.hpp"
#include "dataset/activations/order.hpp"
#include "dataset/activations/reader.hpp"
#include "device/page_lock.hpp"
#include "parallel/communicator.hpp"
#include "parallel/node_memory.hpp"
#include "parallel/world.hpp"

namespace weft::dataset {

struct Window {
  std::int64_t epoch = -1;  ///< -1: not planned yet
  std::int64_t index = 0;   ///< number of the shuffle block in the epoch
  WindowOrder order;
  std::vector<std::int32_t> reader;         ///< [block] rank that reads it
  std::vector<std::int64_t> first_row;      ///< [block] row in the reader's part
  std::vector<std::vector<RowRead>> reads;  ///< [group] one job reads a group; its rows may share HDF5 chunks
  std::size_t reads_done = 0;               ///< groups for which jobs were made
  bool complete = false;                    ///< all rows of this rank are in memory
  std::int64_t inputs = 0;                  ///< offset in bytes of the first row in the memory of every rank
  std::int64_t targets = 0;

  std::int64_t n_rows() const { return static_cast<std::int64_t>(order.rows.size()); }
};

class WindowReader {
 public:
  /// Collective. `node`: the ranks that can share memory with this one. Reads with `n_threads` threads.
  WindowReader(const Description&, const Settings&, std::uint64_t seed, const parallel::World&,
               const parallel::Communicator& node, int n_threads);
  /// Waits for rows that a source still writes to this memory.
  ~WindowReader();

  /// Host bytes of two shuffle blocks on the rank with the most rows, of `n_ranks` ranks.
  static std::int64_t bytes(const BlockTable&, std::int64_t row_bytes, std::int64_t n_ranks);

  const BlockTable& table() const { return table_; }
  /// All ranks, with a separate communication context for the thread that reads.
  const parallel::Communicator& ranks() const { return ranks_; }

  /// Makes the shuffle block of `cursor` current and reads what is missing of it. Cursors must not skip one.
  /// Collective: returns when every rank has read its part. Throws, known to all ranks, the failure of the lowest rank
  /// that has one.
  const Window& load(Cursor cursor);

  /// Jobs that read the next shuffle block until `fraction` of this rank's part is in memory. Failures are kept for
  /// `load`.
  std::vector<Job> read_ahead(double fraction);

  /// Runs jobs in the given order on the worker threads, and `concurrently` on the calling thread. Failures of jobs are
  /// kept for `load`; those of `concurrently` are thrown.
  void run(
      std::span<const Job> jobs, const std::function<void()>& concurrently = [] {});

  /// Memory of a rank for its shuffle blocks; null if it is not visible and its rows must be sent.
  const std::byte* memory_of(std::int64_t rank) const { return memory_of_[static_cast<std::size_t>(rank)]; }
  bool all_visible() const;

 private:
  void allocate(const parallel::World&, const parallel::Communicator& node, std::int64_t bytes);
  const EpochOrder& epoch(std::int64_t number);
  void plan(Window&, std::int64_t epoch_number, std::int64_t index);
  void plan_next();
  std::vector<Job> jobs(Window&, double fraction);
  void agree();

  const Description description_;
  const BlockTable table_;
  const std::uint64_t seed_;
  const parallel::Communicator ranks_;
  Reader reader_;
  EpochOrder epochs_[2];
  Window current_, next_;
  std::unique_ptr<std::byte[]> own_memory_;          // both shuffle blocks, if no other rank can access them
  std::optional<parallel::NodeMemory> node_memory_;  // both shuffle blocks, if the ranks of the node share them
  std::byte* memory_ = nullptr;                      // this rank's part, in one of the two
  std::optional<device::PageLock> lock_;             // locks memory_, if a source writes to it from a GPU
  std::vector<const std::byte*> memory_of_;          // [rank]
  std::exception_ptr failure_;
};

}  // namespace weft::dataset
