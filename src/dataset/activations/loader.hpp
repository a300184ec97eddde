// SPDX-License-Identifier: Apache-2.0
//
// Batches for training, prefetched from activation files.
//
//   files --pread--> shuffle block (each block read by one rank) --copy, or MPI between nodes--> slots of the owners
//
// The rows of a batch are those of order.hpp, for any number of ranks. With prefetching a thread keeps two slots filled
// and reads the blocks of the next shuffle block in proportion to the rows consumed of the current one, so that no step
// waits for a whole shuffle block. Rows that a source computes are read ahead in the same proportion, but in the thread
// that calls `next`, since they are computed with the kernels of the steps. Without prefetching (a baseline of bench/)
// `next` reads each shuffle block when its first row is needed: same batches, bit for bit.
//
// All ranks construct, call `next` and `release` equally often, and destroy the Loader in the same order relative to
// other collective calls. A failure on one rank is agreed on with the next batch: `next` throws it on all ranks, known
// to all, after the batches that were complete.
#pragma once

#include <cstdint>
#include <memory>

#include "dataset/activations/description.hpp"
#include "dataset/activations/order.hpp"
#include "dataset/dataset_settings.hpp"
#include "kernels/array.hpp"
#include "parallel/communicator.hpp"
#include "parallel/grid.hpp"
#include "parallel/world.hpp"

namespace weft::dataset {

/// A batch on this rank: rows as stored (fp32, fp16 or bf16), in page-locked memory, valid until it is released.
struct RawBatch {
  kernels::AnyMatrix inputs;   ///< [own tokens, n_layers * d_model]: grid.own_part(n_tokens)
  kernels::AnyMatrix targets;  ///< targets of the same tokens
  std::int64_t n_tokens = 0;   ///< tokens of the whole batch, all ranks together
  Cursor begin;                ///< the first row of the batch
  Cursor end;                  ///< the first row after it: what a checkpoint keeps
  double waited = 0;           ///< seconds that `next` took
  double exchanging = 0;       ///< seconds for which its rows were in transit over MPI while steps ran
  std::int64_t exchanged = 0;  ///< bytes of its rows that this rank sent over MPI; shared memory counts as none
  bool resident = false;       ///< the rows are in device memory already
};

/// Host memory of the loader in bytes, on the rank that needs most. `total` is an upper bound.
struct LoaderMemory {
  std::int64_t windows = 0;   ///< this rank's part of two shuffle blocks
  std::int64_t slots = 0;     ///< two batches (page-locked in a CUDA build)
  std::int64_t staging = 0;   ///< MPI messages between ranks; not used if all of them share memory
  std::int64_t order = 0;     ///< permutations
  std::int64_t decoding = 0;  ///< one decompressed HDF5 chunk
  std::int64_t total() const { return windows + slots + staging + order + decoding; }
};
LoaderMemory loader_memory(const Description&, const Settings&, const parallel::GridShape&);

class Loader {
 public:
  /// Collective. Batches of settings.batch_tokens rows from `start` on. `node`: the ranks that can share memory with
  /// this one, usually world.node(). `n_threads` threads of this rank read files and copy rows. Throws, known to all
  /// ranks, Error(usage) for batch_tokens < 1 and Error(data) for a cursor outside the dataset.
  Loader(const Description&, const Settings&, std::uint64_t seed, const parallel::World&,
         const parallel::Communicator& node, const parallel::Grid&, Cursor start, int n_threads);
  Loader(const Loader&) = delete;
  ~Loader();

  /// The next batch; blocks until it is complete. At most two batches may be unreleased at a time. Collective.
  const RawBatch& next();
  /// Releases the oldest unreleased batch: its memory is reused.
  void release();

 private:
  class Production;
  class Prefetching;
  class OnDemand;
  std::unique_ptr<Production> production_;
};

}  // namespace weft::dataset
