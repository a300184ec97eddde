// SPDX-License-Identifier: Apache-2.0
//
// What `weft benchmark` needs of a model family. The recipe (benchmark.cpp) is the same for all.
#pragma once

#include <memory>
#include <string>

#include "bench/benchmark.hpp"
#include "commands/request.hpp"
#include "device/runtime.hpp"
#include "parallel/grid.hpp"

namespace weft::commands {

class BenchmarkFamily {
 public:
  virtual ~BenchmarkFamily() = default;

  virtual bench::BenchmarkSettings& settings(Input&) const = 0;
  virtual const training::RunSettings& run(const Input&) const = 0;
  virtual device::Settings device(const Input&) const = 0;
  /// Sets the number of ranks of a model whose grid has no keys. Throws a collective Error(usage).
  virtual void use_ranks(Input&, const parallel::World&) const {}
  /// Throws a collective Error(usage).
  virtual parallel::GridShape grid(const Input&, const parallel::World&) const = 0;
  /// Reads what a case reads from files; before anything is timed. Throws a collective Error.
  virtual void check(const Input&, const parallel::World&) const {}
  /// GFLOP/s of a product of the model's sizes. Collective.
  virtual double measure_product(const Input&, const parallel::Grid&, const kernels::Execution&) const = 0;

  /// Gives a case what its name stands for; `input`: without the case. Throws a collective Error(usage).
  virtual void resolve(const Input& input, bench::BenchmarkCase&) const = 0;
  /// Why a case cannot be measured on this machine, "" if it can. `dry`: the device was not started. Collective.
  virtual std::string obstacle(const Input&, const parallel::World&, bool dry) const = 0;
  /// What a case needs, for --dry-run.
  virtual std::string plan(const Input&) const = 0;
  /// The input and the grid must outlive the subject. Collective.
  virtual std::unique_ptr<bench::BenchmarkSubject> subject(const Input&, const parallel::Grid&, const device::Runtime&,
                                                           const parallel::World&) const = 0;
  /// Changes the input to the one whose state benchmark.checkpoint writes and reads.
  virtual void take_checkpoint_case(Input&) const = 0;
  /// Compares the cases, where they are comparable.
  virtual void judge(const Input&, bench::BenchmarkResult&) const = 0;
};

std::unique_ptr<BenchmarkFamily> transcoder_benchmark();
std::unique_ptr<BenchmarkFamily> language_model_benchmark();

}  // namespace weft::commands
