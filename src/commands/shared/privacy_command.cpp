// SPDX-License-Identifier: Apache-2.0
//
// weft privacy: the epsilon of a private training, or the noise that an epsilon needs, by each accountant.
#include <fmt/format.h>

#include <cmath>
#include <cstdio>

#include "base/format.hpp"
#include "base/log.hpp"
#include "bench/language_model/language_input.hpp"
#include "commands/commands.hpp"
#include "language_model/run/initial_model.hpp"
#include "language_model/run/private_plan.hpp"
#include "parallel/watchdog.hpp"
#include "privacy/account.hpp"
#include "privacy/accountant/accountant.hpp"
#include "storage/json_file.hpp"

namespace weft::commands {
namespace {

using privacy::AccountantKind;

template <class... Args>
Error wrong_use(fmt::format_string<Args...> format, Args&&... args) {
  return collective_error(ExitCode::usage, "{}; see weft privacy --help",
                          fmt::format(format, std::forward<Args>(args)...));
}

/// What is computed: options that were given, then those of the input. What is not given is 0, sample_rate and steps
/// -1.
struct PrivacyQuestion {
  double epsilon = 0, noise_multiplier = 0;  // exactly one is not 0
  double delta = 0, sample_rate = -1;
  std::int64_t steps = -1, bands = 0;  // 0: 1, or that of the input
  privacy::Truncation truncation = {};
  std::vector<AccountantKind> accountants = {};
  std::string of = {};  // what the input says; "" without one
};

struct PrivacyOptions {
  PrivacyQuestion question;
  std::string accountant;  ///< "" or prv | pld | rdp | gdp | all
  std::string input;       ///< "" or FILE
};

/// Adds the probability with which a record of the run is drawn for a step, and the parts of the question that the
/// command line does not give.
void add_input(PrivacyQuestion& question, const Request& request, const PrivacyOptions& options,
               const parallel::World& world) {
  bench::LanguageInput input;
  Request train = request;
  train.subject = options.input;
  train.input_text = world.on_root([&] { return input::load_text(train.subject); });
  const input::Schema schema = bench::language_training_keys(input);
  read_input(train, schema, world);
  const language_model::Configuration& run = input.configuration;
  const privacy::Settings& given = run.privacy;
  if (question.epsilon == 0 && question.noise_multiplier == 0) {
    if (!given.enabled)
      throw wrong_use(
          "{}: its training is not private (table [privacy] gives neither epsilon nor noise_multiplier); give "
          "--epsilon or --noise-multiplier",
          train.subject);
    question.epsilon = given.epsilon;
    question.noise_multiplier = given.noise_multiplier;
  }
  if (question.delta == 0) question.delta = given.delta;
  if (question.bands == 0) question.bands = given.bands;
  const bool by_epochs = question.steps < 0 && run.run.epochs > 0;
  const bool truncates = given.truncates() && question.truncation.most == 0;
  if (question.sample_rate < 0 || by_epochs || truncates) {
    const language_model::Corpus corpus =
        language_model::load_corpus(run, language_model::open_initial(run, world), world);
    const language_model::PrivateRecords records = language_model::private_records(run, corpus.train);
    if (by_epochs)
      run::use_epochs(input.configuration.run, schema, language_model::steps_per_epoch(run, corpus.segments));
    if (question.sample_rate < 0) question.sample_rate = records.rate();
    if (truncates) question.truncation = {records.count, given.most_records};
    question.of = fmt::format("{}: {:g} of {} {}s per step on average", train.subject, records.expected,
                              format::grouped(records.count), privacy::name_of(given.unit));
  }
  if (question.steps < 0) question.steps = run.run.steps;
  if (options.accountant.empty()) question.accountants = {given.accountant};
}

PrivacyQuestion question_of(const Request& request, const PrivacyOptions& given, const parallel::World& world) {
  PrivacyQuestion question = given.question;
  for (const AccountantKind kind : privacy::kAccountants)
    if (given.accountant.empty() || given.accountant == "all" || given.accountant == privacy::name_of(kind))
      question.accountants.push_back(kind);
  if (!given.input.empty()) add_input(question, request, given, world);
  if (question.bands == 0) question.bands = 1;
  if ((question.epsilon != 0) == (question.noise_multiplier != 0))
    throw wrong_use("weft privacy needs one of --epsilon and --noise-multiplier (the other is computed)");
  if (question.epsilon != 0 && !(question.epsilon > 0 && question.epsilon <= 1e3))
    throw wrong_use("--epsilon {} is out of range (more than 0, at most 1000)", question.epsilon);
  if (question.noise_multiplier != 0 && !(question.noise_multiplier >= 0.01 && question.noise_multiplier <= 1e6))
    throw wrong_use("--noise-multiplier {} is out of range (from 0.01 to 1e6)", question.noise_multiplier);
  if (!(question.delta > 0 && question.delta < 1))
    throw wrong_use("weft privacy needs --delta between 0 and 1 (less than 1 / number of records)");
  if (!(question.sample_rate >= 0 && question.sample_rate <= 1))
    throw wrong_use("weft privacy needs --sample-rate from 0 to 1 (records of a step on average / all records)");
  if (static_cast<double>(question.bands) * question.sample_rate > 1)
    throw wrong_use("--bands {} is out of range (a sample rate of {:g} has at most {:g})", question.bands,
                    question.sample_rate, std::floor(1 / question.sample_rate));
  if (question.steps < 0) throw wrong_use("weft privacy needs --steps, 0 or more");
  if (question.bands > 1 && question.truncation.most > 0)
    throw wrong_use(
        "weft privacy takes --bands or --most-records, not both (the account of bands is that of Poisson "
        "sampling)");
  if ((question.truncation.most > 0) != (question.truncation.records > 0))
    throw wrong_use("weft privacy needs --records with --most-records, and the reverse (a batch is truncated)");
  if (question.epsilon != 0 && (question.steps == 0 || question.sample_rate == 0))
    throw wrong_use("--epsilon has no noise multiplier as its answer where no record is used; give {}",
                    question.steps == 0 ? "--steps above 0" : "a --sample-rate above 0");
  return question;
}

struct AccountantRow {
  std::string text = {};
  Json document = {};
};

/// The steps as the tree of events that dp-accounting reads (DpEvent.from_named_tuple): names of class and module, and
/// its fields.
Json dp_event(const privacy::Phase& phase, const privacy::Truncation& truncation) {
  const auto event = [](const char* name, Json fields) {
    fields["module_name"] = "dp_accounting.dp_event";
    fields["class_name"] = name;
    return fields;
  };
  Json step = event("PoissonSampledDpEvent",
                    {{"sampling_probability", phase.sample_rate},
                     {"event", event("GaussianDpEvent", {{"noise_multiplier", phase.noise_multiplier}})}});
  if (truncation.most > 0)
    step = event("TruncatedSubsampledGaussianDpEvent", {{"dataset_size", truncation.records},
                                                        {"sampling_probability", phase.sample_rate},
                                                        {"truncated_batch_size", truncation.most},
                                                        {"noise_multiplier", phase.noise_multiplier}});
  return event("SelfComposedDpEvent", {{"count", phase.steps}, {"event", step}});
}

AccountantRow answer(const PrivacyQuestion& question, AccountantKind kind) {
  double noise = question.noise_multiplier;
  const privacy::Phase given{question.sample_rate, noise, question.steps};
  privacy::Phase phase = privacy::as_independent({&given, 1}, question.bands).front();
  if (noise == 0)
    noise = phase.noise_multiplier = privacy::calibrate(kind, question.epsilon, question.delta, phase.sample_rate,
                                                        phase.steps, {}, question.truncation);
  const privacy::History history(&phase, 1);
  AccountantRow row{.document = {{"accountant", privacy::name_of(kind)},
                                 {"noise_multiplier", noise},
                                 {"dp_event", dp_event(phase, question.truncation)}}};
  std::string note;
  double epsilon = 0;
  if (kind == AccountantKind::prv && question.truncation.most == 0) {
    const privacy::PrvEpsilon found = privacy::prv_epsilon(history, question.delta);
    epsilon = found.upper;
    row.document["epsilon"] = epsilon;
    row.document["lower"] = found.lower;
    note = fmt::format("an upper bound; the true value is at least {:.5g}", found.lower);
  } else if (kind == AccountantKind::rdp && question.truncation.most == 0) {
    const privacy::RdpEpsilon found = privacy::rdp_epsilon(history, question.delta, privacy::rdp_orders());
    epsilon = found.epsilon;
    row.document["epsilon"] = epsilon;
    row.document["order"] = found.order;
    note = fmt::format("an upper bound, of order {:g}", found.order);
  } else {
    epsilon = privacy::epsilon(kind, history, question.delta, question.truncation);
    row.document["epsilon"] = epsilon;
    note = kind == AccountantKind::gdp ? "an approximation, no bound" : "an upper bound";
  }
  row.text = fmt::format("  {:<12}{:<17.6g} {:<11.5g} {}\n", privacy::name_of(kind), noise, epsilon, note);
  return row;
}

int run_privacy(const Request& request, const PrivacyOptions& options, const parallel::World& world) {
  const PrivacyQuestion question = question_of(request, options, world);
  parallel::note_phase("computing epsilon");
  world.on_root([&] {
    Json document = {{"delta", question.delta}, {"sample_rate", question.sample_rate}, {"steps", question.steps}};
    if (question.epsilon > 0) document["target_epsilon"] = question.epsilon;
    if (question.truncation.most > 0)
      document.update({{"records", question.truncation.records}, {"most_records", question.truncation.most}});
    if (question.bands > 1) document["bands"] = question.bands;
    std::string text = question.of.empty() ? "" : question.of + "\n";
    text += fmt::format("{} steps at a sample rate of {:.6g}{}, delta {:g}; a record is added or removed\n",
                        question.steps, question.sample_rate,
                        question.bands > 1 ? fmt::format(", noise of {} bands", question.bands) : "", question.delta);
    text += fmt::format("  {:<12}{:<18}{}\n", "accountant", "noise multiplier", "epsilon");
    std::size_t failed = 0;
    for (const AccountantKind kind : question.accountants) {
      AccountantRow row;
      try {
        row = answer(question, kind);
      } catch (const Error& failure) {
        if (++failed == question.accountants.size()) throw;
        row = {fmt::format("  {:<12}{}\n", privacy::name_of(kind), failure.what()),
               {{"accountant", privacy::name_of(kind)}, {"problem", failure.what()}}};
      }
      text += row.text;
      document["accountants"].push_back(std::move(row.document));
    }
    text.pop_back();
    print_result(request, text, document);
  });
  return 0;
}

}  // namespace

extern const Command privacy_command = with_options(
    {"privacy", "", "epsilon of a private training, or its noise",

     "Computes the epsilon of a private training from its noise, or the noise that an epsilon needs, by "
     "each accountant (docs/privacy.md).",
     Needs::nothing},
    run_privacy, [](Options& options, PrivacyOptions& own) {
      options.example("weft privacy --epsilon 8 --delta 1e-5 --sample-rate 0.04 --steps 2250");
      options.add("--epsilon", own.question.epsilon, "E", "the target, or");
      options.add("--noise-multiplier", own.question.noise_multiplier, "S",
                  "standard deviation of the noise / largest norm of a record's gradient");
      options.add("--delta", own.question.delta, "D", "probability with which epsilon may not hold");
      options.add("--sample-rate", own.question.sample_rate, "Q", "probability with which a record joins a step");
      options.add("--steps", own.question.steps, "N", "updates of the model", 0, std::int64_t{1} << 50);
      options.add("--records", own.question.truncation.records, "N", "with --most-records: those of the training data",
                  1, std::int64_t{1} << 50);
      options.add("--most-records", own.question.truncation.most, "B",
                  "a step that draws more records takes a random choice of B (truncated Poisson sampling)", 1,
                  std::int64_t{1} << 50);
      options.add("--bands", own.question.bands, "B", "those of correlated noise (privacy.bands; default 1)", 1,
                  kernels::kMostBands);
      options.add("--accountant", own.accountant, "NAME", "prv, pld, rdp, gdp or all (default all)",
                  {"prv", "pld", "rdp", "gdp", "all"});
      options.add("--input", own.input, "FILE",
                  "an input of weft lm train: what is not given above is taken from it, also the accountant");
    });

}  // namespace weft::commands
