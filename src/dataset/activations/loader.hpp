// SPDX-License-Identifier: Apache-2.0
//
// Batches for training, prepared beside the step by a thread of its own.
//
//   files --pread--> window (each block read by one rank) --copy, or all-to-all between nodes--> slots of the owners
//
// The rows of a batch are those of order.hpp, whatever the ranks. Two slots are kept filled; the blocks of the next
// window are read while the present one is consumed, in proportion, so that no step waits for a whole window.
//
// Windows lie in memory that the ranks of a node share (parallel/node_memory.hpp): a rank copies its rows straight out
// of the window of whichever of them has read them. Rows of other nodes come as messages, in pieces, each on its way
// while the one before is put in place. Where a node's memory cannot be shared, its ranks are to one another as if each
// were a node of its own, and a warning says why.
//
// All ranks construct, call `next` and `release` equally often, and destroy the Loader in step: its thread exchanges
// rows with the threads of the other ranks and always finishes `released + 2` batches. A failure on one rank is agreed
// with the next batch and comes out of `next` on all ranks, known to all, after the batches that were still good.
#pragma once

#include <cstdint>
#include <memory>

#include "dataset/activations/description.hpp"
#include "dataset/activations/order.hpp"
#include "dataset/settings.hpp"
#include "kernels/array.hpp"
#include "parallel/communicator.hpp"
#include "parallel/grid.hpp"
#include "parallel/world.hpp"

namespace weft::dataset {

/// A batch as this rank sees it: rows as stored (fp32, fp16 or bf16), in page-locked memory, valid until it is
/// released.
struct RawBatch {
  kernels::AnyMatrix inputs;   ///< [own tokens, n_layers * d_model]: grid.own_part(n_tokens)
  kernels::AnyMatrix targets;  ///< of the same tokens
  std::int64_t n_tokens = 0;   ///< of the whole batch, all ranks together
  Cursor begin;                ///< the first row of the batch
  Cursor end;                  ///< the first row after it: what a checkpoint keeps
  double waited = 0;           ///< seconds that `next` waited for it
  double exchanging = 0;       ///< seconds that messages with its rows were on their way, beside the step
  std::int64_t exchanged = 0;  ///< bytes of its rows that this rank sent as messages; those of shared memory are none
  bool resident = false;       ///< the rows lie where the kernels run already
};

/// Host memory of the loader, bytes on the fullest rank. `total` is an upper bound.
struct LoaderMemory {
  std::int64_t windows = 0;   ///< this rank's share of two windows
  std::int64_t slots = 0;     ///< two batches (page-locked in a CUDA build)
  std::int64_t staging = 0;   ///< messages between ranks; not used where all of them share memory
  std::int64_t order = 0;     ///< permutations
  std::int64_t decoding = 0;  ///< one unpacked HDF5 chunk
  std::int64_t total() const { return windows + slots + staging + order + decoding; }
};
LoaderMemory loader_memory(const Description&, const Settings&, const parallel::GridShape&);

class Loader {
 public:
  /// Collective. Batches of settings.batch_tokens rows from `start` on. `node`: the ranks whose memory this one can
  /// share, world.node(). `n_threads` threads of this rank read files and copy rows.
  Loader(const Description&, const Settings&, std::uint64_t seed, const parallel::World&,
         const parallel::Communicator& node, const parallel::Grid&, Cursor start, int n_threads);
  Loader(const Loader&) = delete;
  ~Loader();

  /// The next batch; waits for it. At most two batches may be out at a time.
  const RawBatch& next();
  /// Gives the oldest batch that is out back: its memory is filled anew.
  void release();

 private:
  struct State;
  std::shared_ptr<State> state_;
  int exceptions_ = 0;  // in flight at construction
};

}  // namespace weft::dataset
