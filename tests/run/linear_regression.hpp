// SPDX-License-Identifier: Apache-2.0
//
// The smallest model that trains through the loop: y = W x + b by gradient descent, in fp64 on the host.
//
// Two tensors. The rows of W are cut over all ranks; b is on every rank and written by rank 0. Every sum is formed in
// the order of the examples or rows, so the results are the same bits on any number of ranks.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "kernels/random.hpp"
#include "parallel/grid.hpp"
#include "run/trainable.hpp"

namespace weft::testing {

class LinearRegression final : public run::Trainable {
 public:
  static constexpr std::int64_t kInputs = 5, kOutputs = 7, kBatch = 16;

  LinearRegression(const parallel::Grid& grid, std::uint64_t seed, double learning_rate)
      : grid_(grid),
        rows_(grid.part(parallel::kDataAxis, kOutputs)),
        seed_(seed),
        learning_rate_(learning_rate),
        weight_(static_cast<std::size_t>(rows_.size() * kInputs)),
        bias_(kOutputs) {
    registry_.add({.name = "weight",
                   .type = kernels::Scalar::fp64,
                   .shape = {kOutputs, kInputs},
                   .held = rows_,
                   .owned = rows_,
                   .data = weight_.data()});
    registry_.add({.name = "bias",
                   .type = kernels::Scalar::fp64,
                   .shape = {kOutputs},
                   .held = {0, kOutputs},
                   .owned = {0, grid.world().rank() == 0 ? kOutputs : 0},
                   .data = bias_.data()});
  }

  std::string work_unit() const override { return "examples"; }
  std::vector<std::pair<std::string, double>> phase_bytes() override { return {}; }
  checkpoint::Registry& registry() override { return registry_; }
  void initialise() override {
    for (std::int64_t i = 0; i < rows_.size() * kInputs; ++i)
      weight_[static_cast<std::size_t>(i)] = number(1, static_cast<std::uint64_t>(rows_.begin * kInputs + i));
  }
  void resume_at(std::int64_t, const run::Cursor& cursor) override {
    if (!cursor.contains("example")) throw collective_error(ExitCode::io, "not a checkpoint of a linear regression");
    example_ = cursor.at("example");
  }
  run::Cursor cursor() const override { return {{"example", example_}}; }

  run::Step step() override {
    timers_.phase("gradient");
    std::vector<double> gradient(weight_.size()), own(static_cast<std::size_t>(2 * rows_.size()));
    for (std::int64_t n = 0; n < kBatch; ++n) {
      const std::vector<double> x = inputs(example_ + n);
      for (std::int64_t r = 0; r < rows_.size(); ++r) {
        const double error = output(r, x) - target(rows_.begin + r, x, example_ + n);
        own[static_cast<std::size_t>(2 * r)] += error / kBatch;
        own[static_cast<std::size_t>(2 * r + 1)] += error * error / kBatch;
        for (std::int64_t i = 0; i < kInputs; ++i)
          gradient[static_cast<std::size_t>(r * kInputs + i)] += error * x[static_cast<std::size_t>(i)] / kBatch;
      }
    }
    timers_.phase("exchange");
    gather(own);
    timers_.phase("update");
    for (std::size_t i = 0; i < weight_.size(); ++i) weight_[i] -= learning_rate_ * gradient[i];
    for (std::size_t r = 0; r < bias_.size(); ++r) bias_[r] -= learning_rate_ * rows_sums_[2 * r];
    timers_.stop();
    example_ += kBatch;
    return {.work = kBatch};
  }

  void wait() override {}
  run::Metrics metrics() override {
    std::vector<double> by_output;
    double loss = 0;
    for (std::size_t r = 0; r < bias_.size(); ++r) loss += by_output.emplace_back(rows_sums_[2 * r + 1]);
    return {{.name = "loss", .value = loss, .progress = "loss {:.3g}", .in_result = true},
            {.name = "output_loss", .value = by_output},
            {.name = "first_example", .value = example_ - kBatch, .progress = "from example {}"},
            {.name = "bias", .value = run::Metric::Group{{"first", bias_.front()}, {"last", bias_.back()}}}};
  }
  run::Communication communication() const override {
    return {.exchanges = exchanges_, .step_bytes_sent = step_bytes_, .step_exposed_seconds = 0};
  }
  run::Timers& timers() override { return timers_; }
  run::Metrics evaluate() override {
    return {{.name = "validation.loss", .value = validation_loss(), .compared = true}};
  }
  void conclude(Json& result) override { result["validation"] = {{"loss", validation_loss()}}; }

 private:
  double validation_loss() const {
    double sum = 0;  // examples that training never sees
    for (std::int64_t n = -kBatch; n < 0; ++n) {
      const std::vector<double> x = inputs(n);
      for (std::int64_t r = 0; r < rows_.size(); ++r) {
        const double error = output(r, x) - target(rows_.begin + r, x, n);
        sum += error * error / kBatch;
      }
    }
    grid_.world().sum(std::span<double>(&sum, 1));
    return sum;
  }
  double number(std::uint64_t purpose, std::uint64_t index) const {
    const kernels::Random4 random = kernels::philox(seed_, kernels::Purpose::test, purpose, index);
    return 2 * kernels::uniform_double(random.word[0], random.word[1]) - 1;
  }
  std::vector<double> inputs(std::int64_t example) const {
    std::vector<double> x;
    for (std::int64_t i = 0; i < kInputs; ++i)
      x.push_back(number(2, static_cast<std::uint64_t>(example * kInputs + i)));
    return x;
  }
  double output(std::int64_t local_row, const std::vector<double>& x) const {
    double y = bias_[static_cast<std::size_t>(rows_.begin + local_row)];
    for (std::int64_t i = 0; i < kInputs; ++i)
      y += weight_[static_cast<std::size_t>(local_row * kInputs + i)] * x[static_cast<std::size_t>(i)];
    return y;
  }
  /// A planted linear map and a little noise.
  double target(std::int64_t row, const std::vector<double>& x, std::int64_t example) const {
    double y = 0.5 * static_cast<double>(row) + 0.01 * number(4, static_cast<std::uint64_t>(example * kOutputs + row));
    for (std::int64_t i = 0; i < kInputs; ++i)
      y += number(3, static_cast<std::uint64_t>(row * kInputs + i)) * x[static_cast<std::size_t>(i)];
    return y;
  }
  /// Mean error and mean squared error of every output.
  void gather(const std::vector<double>& own) {
    std::vector<std::int64_t> bytes;
    for (std::int64_t rank = 0; rank < grid_.world().size(); ++rank)
      bytes.push_back(parallel::part(kOutputs, grid_.world().size(), rank).size() * 2 * 8);
    step_bytes_ = static_cast<std::int64_t>(own.size()) * 8 * (grid_.world().size() - 1);
    rows_sums_.resize(2 * kOutputs);
    const parallel::TimedExchange timed(exchanges_, "errors", step_bytes_);
    grid_.world().all_gather_uneven(own.data(), rows_sums_.data(), bytes);
  }

  const parallel::Grid& grid_;
  const parallel::Range rows_;
  const std::uint64_t seed_;
  const double learning_rate_;
  std::vector<double> weight_;  // [own rows, inputs]
  std::vector<double> bias_;    // [outputs]
  std::vector<double> rows_sums_;
  std::int64_t example_ = 0, step_bytes_ = 0;
  parallel::Exchanges exchanges_;
  run::Timers timers_;
  checkpoint::Registry registry_;
};

}  // namespace weft::testing
