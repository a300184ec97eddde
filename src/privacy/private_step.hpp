// SPDX-License-Identifier: Apache-2.0
//
// One step of private training of a model whose gradients are in memory (DP-SGD, Abadi et al. 2016, arXiv 1607.00133):
//
//   S = sum over the drawn records b of c_b g_b        clipping.hpp, micro-batch by micro-batch; then over the ranks
//   g = (S + sigma C xi) / expected records            xi standard normal, once per update; or that of
//                                                      correlated_noise.hpp
//   C of the next step                                 with privacy.clipping = "adaptive" (kernels::adapt_clip)
//   AdamW with g                                       model/parameter_update.hpp
//
//   const std::vector<std::int64_t> records = account.draw(step, ranks);
//   step.set_noise(account.noise(expected));
//   step.run(constants, records.size());
//   account.count_step();
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "checkpoint/registry.hpp"
#include "model/parameter_update.hpp"
#include "model/step_runner.hpp"
#include "privacy/clipping.hpp"
#include "privacy/correlated_noise.hpp"
#include "privacy/noise_key.hpp"

namespace weft::privacy {

/// Interface of a model to a private step.
class PrivateModel : public Passes {
 public:
  /// Prepares the weights that other ranks have updated. Called before the first pass of a step.
  virtual void prepare_weights() = 0;
  /// Makes records [first, first + count) of those of this rank the micro-batch of the passes that follow.
  virtual MicroBatch load(std::int64_t first, std::int64_t count) = 0;
};

class PrivateStep {
 public:
  /// Objects that the step uses; all must outlive it.
  struct Parts {
    PrivateModel& model;
    model::ParameterUpdate& update;
    model::StepRunner& runner;
    run::Timers& timers;
  };

  /// Arguments: micro_records, records of a micro-batch; sums_phase, phase of the timers while sums are formed.
  PrivateStep(const Parts&, const ClippingContext&, std::int64_t micro_records, std::string_view sums_phase,
              kernels::Array<kernels::StepFlags> flags, ClippingBuffers&&);

  /// Adds what is state of the run: the bound of adaptive clipping, and the noise of earlier steps (privacy.bands).
  /// `writes`: on one rank.
  void register_in(checkpoint::Registry&, bool writes);
  /// C of the next step. With adaptive clipping waits for the last one.
  double clip_bound() const;

  /// Sets the noise of all steps. Call it before the first step.
  void set_noise(const Noise& noise) { noise_ = noise; }
  /// One step on `records` records on this rank, which may be none. Unless gradients are reduced in every micro-batch,
  /// no group of the data axis waits for another between micro-batches: they have different numbers of them.
  /// Collective. Throws Error(numeric) if the sum with its noise is not finite, in this step or one of the two before
  /// it.
  void run(const kernels::AdamStep& constants, std::int64_t records);
  /// The same with micro-batches of these numbers of records, at most micro_records each.
  void run(const kernels::AdamStep& constants, std::span<const std::int64_t> micro_batches);

  /// Clears the sum: before the first micro-batch of a step, also of a step without any.
  void clear();
  /// Adds the clipped gradients of a micro-batch to the sum.
  void add(const MicroBatch&, Passes&);

 private:
  void compute(std::span<const std::int64_t> micro_batches, std::int64_t most);
  void reduce_beside_sums(bool wanted);
  void add_noise();
  void adapt_bound();

  const Parts parts_;
  const ClippingContext context_;
  const std::int64_t micro_records_;
  const std::string_view sums_phase_;
  const kernels::Array<kernels::StepFlags> flags_;
  const kernels::Array<double> bound_;  // ClippingBuffers::bound
  const std::unique_ptr<Clipping> clipping_;
  Noise noise_;
  CorrelatedNoise earlier_;
};

}  // namespace weft::privacy
