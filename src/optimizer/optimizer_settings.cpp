// SPDX-License-Identifier: Apache-2.0
#include "optimizer/optimizer_settings.hpp"

#include <fmt/format.h>

#include "input/read.hpp"
#include "input/schema.hpp"

namespace weft::optimizer {

// Kernels compute in fp32: smaller numbers would be 0 or lose digits there, larger ones would be infinite.
constexpr double kSmallest = 1.2e-38, kLargest = 3e38;

using kernels::StorageType;

void add_keys(input::Schema& schema, Settings& adam, bool of_loss) {
  schema.table("optimizer", "How parameters are updated and stored.");
  schema.add("optimizer.name", adam.name, "the method: Adam with bias correction").one_of({"adam"});
  schema.add("optimizer.learning_rate", adam.learning_rate, "largest learning rate, reached after the warm-up")
      .at_least(kSmallest)
      .at_most(kLargest)
      .changeable();
  schema.add("optimizer.beta1", adam.beta1, "decay of the first moment").at_least(0).less_than(1).changeable();
  schema.add("optimizer.beta2", adam.beta2, "decay of the second moment").at_least(0).less_than(1).changeable();
  if (of_loss)
    schema
        .add("optimizer.epsilon_scale", adam.epsilon_scale,
             {{"none", EpsilonScale::none}, {"loss", EpsilonScale::loss}},
             "factor of epsilon: loss = 2 / (batch_tokens * d_model), the factor of all gradients; none = 1, as "
             "in earlier versions (with epsilon = 1e-8)")
        .derived("\"loss\"", [] { return input::Value("loss"); })
        .changeable();
  input::Key& epsilon = schema.add("optimizer.epsilon", adam.epsilon, "added to the root of the second moment")
                            .at_least(kSmallest)
                            .at_most(kLargest)
                            .changeable();
  if (of_loss)
    epsilon.derived(
        fmt::format("{:g} times the loss factor; {:g} with epsilon_scale = \"none\"", kEpsilonOfLoss, adam.epsilon),
        [&adam, unscaled = adam.epsilon] {
          return input::Value(adam.epsilon_scale == EpsilonScale::loss ? kEpsilonOfLoss : unscaled);
        });
  schema.add("optimizer.weight_decay", adam.weight_decay, "decoupled weight decay, weights only (not biases)")
      .at_least(0)
      .changeable();
  schema.add("optimizer.state", adam.state,
             {{"fp32", StorageType::fp32}, {"bf16", StorageType::bf16}, {"8bit", StorageType::eight_bit}},
             "storage of weights and moments: 12, 6 or 4 bytes per parameter");
  schema
      .add("optimizer.schedule", adam.schedule,
           {{"constant", Schedule::constant},
            {"linear", Schedule::linear},
            {"cosine", Schedule::cosine},
            {"step", Schedule::step},
            {"wsd", Schedule::wsd}},
           "how the learning rate falls after decay_begin; wsd: as 1 - sqrt(q), with q the elapsed fraction of "
           "the decay")
      .changeable();
  schema.add("optimizer.warmup_steps", adam.warmup_steps, "steps over which the learning rate rises linearly from zero")
      .in("steps")
      .at_least(0)
      .at_most(input::kMostSteps)
      .changeable();
  schema
      .add("optimizer.schedule_steps", adam.schedule_steps,
           "length of the schedule, also if the run is extended later; 0 = run.steps")
      .in("steps")
      .at_least(0)
      .at_most(input::kMostSteps)
      .free();
  schema
      .add("optimizer.decay_begin", adam.decay_begin,
           "where the learning rate begins to fall, not before the end of the warm-up")
      .in("fraction of the schedule")
      .at_least(0)
      .at_most(1)
      .changeable();
  schema.add("optimizer.final_fraction", adam.final_fraction, "learning rate at the end of the schedule")
      .in("fraction of learning_rate")
      .at_least(0)
      .at_most(1)
      .changeable();
  schema.add("optimizer.clip_norm", adam.clip_norm, "gradients are scaled down to this global norm; 0 = never")
      .at_least(0)
      .changeable();
  schema
      .add("optimizer.clip_mode", adam.clip_mode, {{"exact", ClipMode::exact}, {"previous", ClipMode::previous}},
           "clip by the norm of this step (one more pass) or of the previous step")
      .changeable();
}

bool keep_epsilon(const input::Schema& schema, Settings& adam, std::string_view recorded, const std::string& name) {
  const bool by_default = adam.epsilon_scale == EpsilonScale::loss && adam.epsilon == kEpsilonOfLoss;
  if (!by_default || recorded.find("\nepsilon_scale = ") != std::string_view::npos) return false;
  adam.epsilon_scale = EpsilonScale::none;
  adam.epsilon = std::get<double>(input::value_in(schema, "optimizer.epsilon", recorded, name));
  return true;
}

void add_warmup_fraction(input::Schema& schema, Settings& adam) {
  schema
      .add("optimizer.warmup_fraction", adam.warmup_fraction,
           "length of the warm-up as a fraction of the schedule; 0 = warmup_steps")
      .in("fraction of the schedule")
      .at_least(0)
      .at_most(1)
      .not_with("optimizer.warmup_steps", {}, "each is the length of the warm-up")
      .changeable();
  input::Key& steps = schema.at("optimizer.warmup_steps");
  if (steps.derive)
    steps.derived(steps.derivation, [&adam, derive = steps.derive, initial = steps.initial] {
      return adam.warmup_fraction > 0 ? initial : derive();
    });
}

void add_tuning_keys(input::Schema& schema, Settings& adam) {
  schema.add(
      "optimizer.tuning", adam.tuning,
      {{"none", Tuning::none}, {"range", Tuning::range}, {"plateau", Tuning::plateau}, {"greedy", Tuning::greedy}},
      "learning rate by the loss: found by a sweep before the first step (range); lowered when the loss stalls "
      "or jumps (plateau); raised and lowered with it (greedy: GreedyLR)");
  schema
      .add("optimizer.tuning_patience", adam.tuning_patience,
           "plateau, greedy: steps in a row without (with) a lower mean loss after which the learning rate changes")
      .in("steps")
      .at_least(1)
      .at_most(input::kMostSteps)
      .changeable();
}

}  // namespace weft::optimizer
