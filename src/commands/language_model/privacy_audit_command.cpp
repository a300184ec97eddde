// SPDX-License-Identifier: Apache-2.0
//
// weft privacy audit RUN: a lower bound of the epsilon of a private run, from what its model reveals of its canaries
// (privacy/audit.hpp).
#include <algorithm>
#include <filesystem>

#include "commands/language_model/loaded_language_model.hpp"
#include "language_model/huggingface/peft.hpp"
#include "language_model/run/initial_model.hpp"
#include "language_model/run/private_plan.hpp"
#include "language_model/run/text_evaluation.hpp"
#include "parallel/watchdog.hpp"
#include "privacy/account.hpp"
#include "privacy/audit.hpp"

namespace weft::commands {
namespace {

struct AuditOptions {
  double confidence = 0.95;
  std::int64_t guesses = 0;  ///< 0: half of the canaries
};

/// The number of guesses, even, of a run with canaries.
std::int64_t guesses_of(const OpenedModel& opened, const AuditOptions& options) {
  const privacy::Settings& settings = opened.configuration().privacy;
  if (!opened.found || !settings.enabled || settings.canaries < 2)
    throw collective_error(
        ExitCode::usage,
        "{}: not a private run with canaries (an audit guesses which of them were trained on); train "
        "with privacy.canaries, for example 256",
        opened.name());
  const std::int64_t guesses =
      options.guesses > 0 ? options.guesses : std::max<std::int64_t>(2, settings.canaries / 4 * 2);
  if (guesses % 2 != 0 || guesses > settings.canaries)
    throw collective_error(ExitCode::usage, "--guesses {} is not an even number of at most privacy.canaries = {}",
                           guesses, settings.canaries);
  if (!(options.confidence > 0 && options.confidence < 1))
    throw collective_error(ExitCode::usage, "--confidence {} is not between 0 and 1", options.confidence);
  return guesses;
}

/// Replaces the weights by those that training began with. False, with nothing done, if they are not there any more.
bool load_first_weights(const language_model::Configuration& configuration, language_model::Model& model,
                        const parallel::World& world, const kernels::Execution& execution) {
  const std::string gone = world.on_root([&] {
    for (const std::string& path : {configuration.initial, configuration.lora.initial})
      if (!path.empty() && !std::filesystem::exists(path)) return path;
    return std::string();
  });
  if (!gone.empty()) return false;
  model.initialise(static_cast<std::uint64_t>(configuration.run.seed));
  if (!configuration.initial.empty())
    language_model::InitialModel(configuration, world).load(model.parameters(), world, execution);
  if (!configuration.lora.initial.empty())
    language_model::load_peft(model.parameters(), model.architecture(), execution, configuration.lora.initial);
  return true;
}

int run_privacy_audit(const Request& request, const AuditOptions& options, const parallel::World& world) {
  LoadedLanguageModel loaded(request, world);
  const std::int64_t n_guesses = guesses_of(loaded.opened, options);
  const language_model::Configuration& configuration = loaded.configuration();

  // 1. The account of the checkpoint: which canaries were records, and the guarantee.
  const double any_rate = 1 / static_cast<double>(configuration.privacy.bands);  // no step is added to the account
  privacy::Account account(configuration.privacy, any_rate,
                           {configuration.privacy.unit, configuration.data.sequence + 1});
  checkpoint::Registry registry;
  account.register_in(registry, world.is_root());
  checkpoint::load(world.all(), *loaded.opened.found, registry, loaded.execution(), checkpoint::Load::part);
  parallel::note_phase("computing epsilon");
  const privacy::Guarantee claim = account.guarantee(world.all());

  // 2. The score of a canary: by how much training has lowered its loss.
  const dataset::Segments canaries(language_model::canaries(configuration, loaded.architecture().vocabulary));
  const auto losses = [&] {
    ForwardOnly forward(loaded, configuration.micro_tokens());
    std::vector<double> sums;
    language_model::evaluate(canaries, configuration.data.sequence, forward.settings.rows, forward.transformer,
                             forward.staging, loaded.execution(), &loaded.part.ranks.peers, {}, &sums);
    return sums;
  };
  std::vector<double> scores = losses();
  for (double& score : scores) score = -score;
  const bool from_start = load_first_weights(configuration, loaded.part.model, world, loaded.execution());
  if (from_start) {
    const std::vector<double> first = losses();
    for (std::size_t i = 0; i < scores.size(); ++i) scores[i] += first[i];
  }

  // 3. The bound.
  const privacy::Guesses guesses = privacy::guess(scores, account.canaries(), n_guesses);
  const double bound = privacy::least_epsilon(guesses, claim.delta, options.confidence);
  print_result(
      request,
      fmt::format("{}: {} canaries, by {}\n{} of {} guesses are right: epsilon is at least {:.4g} at delta {:g}, with "
                  "confidence {:g}\nthe run states {:.4g} ({})",
                  loaded.opened.name(), guesses.canaries, from_start ? "the change of their loss" : "their loss",
                  guesses.right, guesses.made, bound, claim.delta, options.confidence, claim.epsilon,
                  privacy::name_of(claim.accountant)),
      {{"checkpoint", loaded.opened.found->path.string()},
       {"step", loaded.opened.found->manifest.step},
       {"canaries", guesses.canaries},
       {"score", from_start ? "loss_change" : "loss"},
       {"guesses", guesses.made},
       {"right", guesses.right},
       {"confidence", options.confidence},
       {"epsilon_lower", bound},
       {"epsilon", claim.epsilon},
       {"delta", claim.delta}});
  if (bound > claim.epsilon)
    throw collective_error(ExitCode::internal,
                           "{}: the guarantee does not hold: its model reveals more than epsilon {:.4g} allows, with "
                           "confidence {:g}; do not release it",
                           loaded.opened.name(), claim.epsilon, options.confidence);
  return 0;
}

}  // namespace

extern const Command privacy_audit_command = with_options(
    {"privacy audit", "CHECKPOINT", "lower bound of epsilon, from the canaries of a private run",
     "Guesses from the model of a private run which of its canaries (privacy.canaries) it was trained on, and prints "
     "the lower bound of epsilon that follows. Exit code 1 if it is more than the run states."},
    run_privacy_audit, [](Options& options, AuditOptions& own) {
      options.example("weft privacy audit runs/private --guesses 200");
      options.add("--confidence", own.confidence, "P", "probability with which the bound holds (default 0.95)");
      options.add("--guesses", own.guesses, "K",
                  "guesses, an even number; to be chosen before the result is known (default: half of the canaries)", 2,
                  1 << 16);
      options.set();
    });

}  // namespace weft::commands
