// SPDX-License-Identifier: Apache-2.0
//
// Windows of rows in host memory: which rank reads which block, where each row lies, and the reading itself.
//
// The blocks of a window (order.hpp) are distributed over the ranks in stored order, so that each rank reads
// neighbouring parts of the files. Memory holds two windows: the current one, whose rows are consumed, and the next
// one. The ranks of a node share this memory (parallel/node_memory.hpp). If they cannot, each rank sees only its own
// part, and a warning gives the reason.
//
// Collective calls of `load` order reads and copies in shared memory. They come after a window was read and before any
// of its rows is copied, hence between the last copy out of a window and the first read into the same memory (for the
// window after the next one). No other synchronisation is needed.
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
  std::int64_t index = 0;   ///< of the epoch
  WindowOrder order;
  std::vector<std::int32_t> reader;         ///< [block of the window] rank that reads it
  std::vector<std::int64_t> first_row;      ///< [block of the window] row in the reader's part of the window
  std::vector<std::vector<RowRead>> reads;  ///< of this rank; a group is read in one job if its rows share HDF5 chunks
  std::size_t reads_done = 0;               ///< groups for which jobs were made
  bool complete = false;                    ///< all rows of this rank are in memory
  std::int64_t inputs = 0;                  ///< offset in bytes of the first row in the window memory of every rank
  std::int64_t targets = 0;

  std::int64_t n_rows() const { return static_cast<std::int64_t>(order.rows.size()); }
};

class WindowReader {
 public:
  /// Collective. `node`: the ranks that can share memory with this one. Reads with `n_threads` threads.
  WindowReader(const Description&, const Settings&, std::uint64_t seed, const parallel::World&,
               const parallel::Communicator& node, int n_threads);
  /// Waits for rows that a source still writes to the windows.
  ~WindowReader();

  /// Host bytes of two windows on the fullest of `n_ranks` ranks.
  static std::int64_t bytes(const BlockTable&, std::int64_t row_bytes, std::int64_t n_ranks);

  const BlockTable& table() const { return table_; }
  /// All ranks, with a communication context of their own: for the thread that reads.
  const parallel::Communicator& ranks() const { return ranks_; }

  /// Makes the window of `cursor` current and reads what is missing of it. Cursors must not skip a window. Collective:
  /// returns when every rank has read its part. Throws, known to all ranks, the failure of the lowest rank that has
  /// one.
  const Window& load(Cursor cursor);

  /// Jobs that read the next window until `fraction` of this rank's part is in memory. Failures are kept for `load`.
  std::vector<Job> read_ahead(double fraction);

  /// Runs jobs in the given order on the worker threads, and `concurrently` on the calling thread. Failures of jobs are
  /// kept for `load`; those of `concurrently` are thrown.
  void run(
      std::span<const Job> jobs, const std::function<void()>& concurrently = [] {});

  /// Window memory of a rank; null if it is not visible and its rows must be sent.
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
  std::unique_ptr<std::byte[]> own_memory_;          // both windows, if no other rank can see them
  std::optional<parallel::NodeMemory> node_memory_;  // both windows, if the ranks of the node share them
  std::byte* memory_ = nullptr;                      // this rank's part, in one of the two
  std::optional<device::PageLock> lock_;             // of it, if a source writes to it from a GPU
  std::vector<const std::byte*> memory_of_;          // [rank]
  std::exception_ptr failure_;
};

}  // namespace weft::dataset
