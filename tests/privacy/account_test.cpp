// SPDX-License-Identifier: Apache-2.0
//
// The account of a run: what it plans, what it keeps in a checkpoint, and that its key stays secret.
#include "privacy/account.hpp"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/error.hpp"
#include "base/log.hpp"
#include "checkpoint/checkpoint_writer.hpp"
#include "checkpoint/resume.hpp"
#include "tests/scratch.hpp"

namespace weft::privacy {
namespace fs = std::filesystem;
using weft::testing::execution;

namespace {

const parallel::Communicator& ranks() { return weft::testing::world().all(); }
bool root() { return ranks().rank() == 0; }

constexpr double kRate = .02;
const Record kRecord = {.tokens = 129, .count = 4000};

Settings settings_of(double epsilon, double noise, KeySource key = KeySource::system) {
  Settings settings;
  settings.enabled = true;
  settings.epsilon = epsilon;
  settings.noise_multiplier = noise;
  settings.delta = 1e-5;
  settings.accountant = AccountantKind::rdp;
  settings.noise_key = key;
  return settings;
}

/// An account with the registry of its checkpoints.
struct Run {
  Account account;
  std::vector<float> weights = std::vector<float>(static_cast<std::size_t>(ranks().size()), 1.0f);
  checkpoint::Registry registry;

  explicit Run(const Settings& settings, double rate = kRate) : account(settings, rate, kRecord) {
    account.register_in(registry, root());
    const parallel::Range mine{ranks().rank(), ranks().rank() + 1};  // every rank has a shard
    registry.add({.name = "weights",
                  .shape = {ranks().size()},
                  .held = mine,
                  .owned = mine,
                  .data = &weights[static_cast<std::size_t>(ranks().rank())]});
  }
  void make(std::int64_t steps) {
    for (std::int64_t i = 0; i < steps; ++i) account.count_step();
  }
};

/// A directory of checkpoints that all ranks share. Collective.
struct Scratch : weft::testing::Scratch {
  void write(Run& run, std::int64_t step) const {
    checkpoint::Manifest manifest;
    manifest.step = step;
    checkpoint::Writer writer(ranks(), path, {}, run.registry, execution());
    REQUIRE(writer.start(manifest));
    const auto report = writer.finish();
    REQUIRE(report);
    REQUIRE(report->durable);
  }
  void load(Run& run) const {
    const auto found = checkpoint::find(ranks(), path, "auto", checkpoint::Verify::full);
    REQUIRE(found);
    checkpoint::load(ranks(), *found, run.registry, execution());
  }
};

std::string bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string failure_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const Error& failure) {
    CHECK(failure.known_to() == KnownTo::all_ranks);
    return failure.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a target gives the noise, and the guarantee after all steps is at most the target") {
  Run run(settings_of(3, 0));
  run.account.begin(1, 200, ranks());
  CHECK(run.account.noise_multiplier() == calibrate(AccountantKind::rdp, 3, 1e-5, kRate, 200));
  CHECK(run.account.guarantee(ranks()).epsilon == 0);  // nothing has been released
  run.make(199);
  const double almost = run.account.guarantee(ranks()).epsilon;
  run.make(1);
  const Guarantee guarantee = run.account.guarantee(ranks());
  CHECK(almost < guarantee.epsilon);
  CHECK(guarantee.epsilon <= 3);
  CHECK(guarantee.epsilon > 2.9);
  const Json json = to_json(guarantee);
  CHECK(json["epsilon"] == guarantee.epsilon);
  CHECK(json["delta"] == 1e-5);
  CHECK(json["noise_multiplier"] == run.account.noise_multiplier());
  CHECK(json["sample_rate"] == kRate);
  CHECK(json["steps"] == 200);
  CHECK(json["private"] == true);
  CHECK(!json.contains("history"));
  CHECK(json["protects"].get<std::string>().find("sequence of at most 129 tokens") != std::string::npos);
}

TEST_CASE("keys: of the system never the same, the same on all ranks; of a test from the seed, and not private") {
  Run first(settings_of(0, 1)), second(settings_of(0, 1));
  first.account.begin(1, 10, ranks());
  second.account.begin(1, 10, ranks());
  CHECK(first.account.key() != second.account.key());
  kernels::NoiseKey of_root = first.account.key();
  ranks().broadcast(of_root.data(), sizeof of_root);
  CHECK(first.account.key() == of_root);

  Run test(settings_of(0, 1, KeySource::test)), again(settings_of(0, 1, KeySource::test));
  std::vector<std::string> warnings;
  log::set_sink([&](log::Level level, std::string_view line) {
    if (level == log::Level::warning) warnings.emplace_back(line);
  });
  test.account.begin(7, 10, ranks());
  log::set_sink([](log::Level, std::string_view) {});
  again.account.begin(7, 10, ranks());
  CHECK(test.account.key() == again.account.key());
  again.account.begin(8, 10, ranks());
  CHECK(test.account.key() != again.account.key());
  CHECK(to_json(test.account.guarantee(ranks()))["private"] == false);
  CHECK(to_text(test.account.guarantee(ranks())).find("privacy: none") == 0);
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0].find("not private") != std::string::npos);
}

TEST_CASE("a resumed run has the same key and noise, and ends with the same epsilon") {
  const Scratch scratch;
  Run whole(settings_of(3, 0));
  whole.account.begin(1, 200, ranks());
  whole.make(80);
  scratch.write(whole, 80);
  Run resumed(settings_of(3, 0));
  scratch.load(resumed);
  resumed.account.resume(1, 80, 200, false, ranks());
  CHECK(resumed.account.key() == whole.account.key());
  CHECK(resumed.account.noise_multiplier() == whole.account.noise_multiplier());
  whole.make(120);
  resumed.make(120);
  CHECK(resumed.account.guarantee(ranks()).epsilon == whole.account.guarantee(ranks()).epsilon);
  CHECK(resumed.account.guarantee(ranks()).history.size() == 1);
}

TEST_CASE("a run that is made longer keeps its target: later steps get more noise, or it is refused") {
  const Scratch scratch;
  Run first(settings_of(3, 0));
  first.account.begin(1, 200, ranks());
  first.make(100);
  scratch.write(first, 100);
  Run longer(settings_of(3, 0));
  scratch.load(longer);
  longer.account.resume(1, 100, 300, false, ranks());
  CHECK(longer.account.noise_multiplier() > first.account.noise_multiplier());
  longer.make(200);
  const Guarantee guarantee = longer.account.guarantee(ranks());
  CHECK(guarantee.epsilon <= 3);
  CHECK(guarantee.history.size() == 2);
  CHECK(to_json(guarantee)["history"].size() == 2);
  CHECK(to_json(guarantee)["steps"] == 300);

  Run stricter(settings_of(.5, 0));
  scratch.load(stricter);
  CHECK(failure_of([&] { stricter.account.resume(1, 100, 200, false, ranks()); }).find("the steps so far count too") !=
        std::string::npos);
  // Given noise and another sample rate: both kinds of steps are counted.
  Run other(settings_of(0, 2), 2 * kRate);
  scratch.load(other);
  other.account.resume(1, 100, 200, false, ranks());
  other.make(100);
  const std::vector<Phase> expected = {{kRate, first.account.noise_multiplier(), 100}, {2 * kRate, 2, 100}};
  CHECK(other.account.guarantee(ranks()).epsilon == epsilon(AccountantKind::rdp, expected, 1e-5));
}

TEST_CASE("the same noise never covers two gradients: steps that may have been made otherwise get a new key") {
  const Scratch scratch;
  Run run(settings_of(3, 0));
  run.account.begin(1, 200, ranks());
  run.make(100);
  scratch.write(run, 100);
  const auto key_after = [&](const Settings& settings, std::int64_t steps, bool changed) {
    Run resumed(settings);
    scratch.load(resumed);
    resumed.account.resume(1, 100, steps, changed, ranks());
    kernels::NoiseKey of_root = resumed.account.key();
    ranks().broadcast(of_root.data(), sizeof of_root);
    CHECK(resumed.account.key() == of_root);
    return resumed.account.key();
  };
  CHECK(key_after(settings_of(3, 0), 200, false) == run.account.key());
  // The input has changed, or the noise: a difference of two steps with the same noise would have no noise.
  CHECK(key_after(settings_of(3, 0), 200, true) != run.account.key());
  CHECK(key_after(settings_of(3, 0), 300, false) != run.account.key());
  CHECK(key_after(settings_of(3, 0), 200, true) != key_after(settings_of(3, 0), 200, true));
  // Of a test, repeatable.
  const Settings test = settings_of(3, 0, KeySource::test);
  CHECK(key_after(test, 200, true) == key_after(test, 200, true));
  Run first(test);
  first.account.begin(1, 200, ranks());
  CHECK(key_after(test, 200, true) != first.account.key());
}

TEST_CASE("a checkpoint whose key is of another generator is resumed with a new key, and says so") {
  const Scratch scratch;
  const Settings test = settings_of(3, 0, KeySource::test);
  Run run(test);
  run.account.begin(1, 200, ranks());
  run.make(100);
  // As version 0.1 wrote it: the key is "privacy/key".
  kernels::NoiseKey old = run.account.key();
  checkpoint::Registry earlier;
  for (const checkpoint::Tensor& tensor : run.registry.tensors()) {
    checkpoint::Tensor copy = tensor;
    if (copy.name == "privacy/chacha20_key") copy.name = "privacy/key", copy.data = old.data();
    earlier.add(copy);
  }
  run.registry = std::move(earlier);
  scratch.write(run, 100);
  Run resumed(test);
  scratch.load(resumed);
  std::string text;
  log::set_sink([&](log::Level, std::string_view line) { text += line; });
  resumed.account.resume(1, 100, 200, false, ranks());
  log::set_sink([](log::Level, std::string_view) {});
  CHECK(resumed.account.key() != old);
  CHECK(resumed.account.key() != kernels::NoiseKey{});
  if (root()) CHECK(text.find("no key of ChaCha20") != std::string::npos);
  // The steps so far still count.
  resumed.make(100);
  CHECK(steps_of(resumed.account.guarantee(ranks()).history) == 200);
}

TEST_CASE("a guarantee says that it does not cover the weights that training began with") {
  Account account(settings_of(0, 1), kRate, kRecord, "runs/public");
  account.begin(1, 10, ranks());
  account.count_step();
  const Guarantee guarantee = account.guarantee(ranks());
  CHECK(to_json(guarantee)["protects"].get<std::string>().find("(runs/public) are not covered") != std::string::npos);
  CHECK(to_text(guarantee).find("without the weights that training began with") != std::string::npos);
}

TEST_CASE("only the owner can read the shard with the key, and nothing else in the checkpoint has it") {
  const Scratch scratch;
  Run run(settings_of(0, 1));
  run.account.begin(1, 10, ranks());
  scratch.write(run, 10);
  ranks().barrier();
  if (!root()) return;
  const std::string secret(reinterpret_cast<const char*>(run.account.key().data()), sizeof run.account.key());
  int with_key = 0;
  for (const auto& entry : fs::recursive_directory_iterator(scratch.path)) {
    if (!entry.is_regular_file()) continue;
    struct stat status {};
    REQUIRE(::stat(entry.path().c_str(), &status) == 0);
    const bool has_key = bytes_of(entry.path()).find(secret) != std::string::npos;
    with_key += has_key;
    CAPTURE(entry.path().string());
    CHECK(has_key == (entry.path().filename() == "rank_00000.h5"));
    CHECK(has_key == ((status.st_mode & 0777) == 0600));
  }
  CHECK(with_key == 1);
}

TEST_CASE("an account that does not fit its checkpoint is refused") {
  const Scratch scratch;
  Run run(settings_of(0, 1));
  run.account.begin(1, 10, ranks());
  run.make(5);
  scratch.write(run, 6);
  Run other(settings_of(0, 1));
  scratch.load(other);
  CHECK(failure_of([&] { other.account.resume(1, 6, 10, false, ranks()); }).find("accounts for 5 private steps") !=
        std::string::npos);
  for (const double wrong : {-1.0, 2.0, 1e300}) {
    Run damaged(settings_of(0, 1));
    scratch.load(damaged);
    const checkpoint::Tensor* history = damaged.registry.find("privacy/history");
    REQUIRE(history != nullptr);
    static_cast<double*>(history->data)[wrong == 1e300 ? 2 : 0] = wrong;
    CHECK(failure_of([&] { damaged.account.resume(1, 5, 10, false, ranks()); }).find("is not an account") !=
          std::string::npos);
  }
}

TEST_CASE("adaptive clipping divides the noise between sum and count: the account is that of the multiplier") {
  Settings settings = settings_of(0, 1.5);
  settings.clipping = BoundRule::adaptive;
  Run run(settings), plain(settings_of(0, 1.5));
  run.account.begin(1, 200, ranks());
  plain.account.begin(1, 200, ranks());
  const Noise noise = run.account.noise(80);
  CHECK(noise.count_deviation == 4);
  // Sensitivities 1 of the sum in units of the bound, 1/2 of the count: together those of 1 at 1.5.
  CHECK(std::pow(noise.multiplier, -2) + std::pow(2 * noise.count_deviation, -2) ==
        doctest::Approx(std::pow(1.5, -2)).epsilon(1e-14));
  CHECK(noise.multiplier > 1.5);
  run.make(200);
  plain.make(200);
  CHECK(run.account.guarantee(ranks()).epsilon == plain.account.guarantee(ranks()).epsilon);
  CHECK(to_json(run.account.guarantee(ranks()))["clipping"] == "adaptive");
  CHECK(plain.account.noise(80).multiplier == 1.5);
  settings.count_noise = .75;  // half the multiplier: the gradient would need infinite noise
  Run little(settings);
  CHECK(failure_of([&] { little.account.begin(1, 200, ranks()); }).find("raise privacy.count_noise") !=
        std::string::npos);
}

TEST_CASE("truncated sampling: steps have at most so many records, and a resumed run the same account") {
  Settings settings = settings_of(3, 0, KeySource::test);
  settings.sampling = "truncated_poisson";
  settings.most_records = 150;
  const Scratch scratch;
  Run run(settings), plain(settings_of(3, 0, KeySource::test));
  run.account.begin(1, 200, ranks());
  plain.account.begin(1, 200, ranks());
  CHECK(run.account.noise_multiplier() >= plain.account.noise_multiplier());
  CHECK(run.account.draw(1, ranks()) == plain.account.draw(1, ranks()));  // 80 of 150
  run.make(80);
  scratch.write(run, 80);
  Run resumed(settings);
  scratch.load(resumed);
  resumed.account.resume(1, 80, 200, false, ranks());
  CHECK(resumed.account.noise_multiplier() == run.account.noise_multiplier());
  run.make(120);
  resumed.make(120);
  const Guarantee guarantee = resumed.account.guarantee(ranks());
  CHECK(guarantee.epsilon == run.account.guarantee(ranks()).epsilon);
  CHECK(guarantee.epsilon <= 3);
  CHECK(guarantee.epsilon > epsilon(AccountantKind::rdp, guarantee.history, 1e-5));
  CHECK(to_json(guarantee)["most_records"] == 150);
  // So many more steps that the batch is truncated too often.
  Run longer(settings);
  scratch.load(longer);
  CHECK(failure_of([&] { longer.account.resume(1, 80, 500'000'000, false, ranks()); }).find("most_records = ") !=
        std::string::npos);
  settings.most_records = 70;
  Run small(settings);
  CHECK(failure_of([&] { small.account.begin(1, 200, ranks()); }).find("truncated too often") != std::string::npos);
  // The draw is truncated before it is divided between the ranks.
  std::int64_t drawn = std::ssize(small.account.draw(1, ranks()));
  ranks().sum({&drawn, 1});
  CHECK(drawn <= 70);
}

TEST_CASE("noise that no accountant can count ends the run before its first step") {
  Settings settings = settings_of(0, 1);
  settings.accountant = AccountantKind::prv;
  Run run(settings, .001);
  CHECK(failure_of([&] { run.account.begin(1, 1'000'000'000'000, ranks()); }).find("take more noise") !=
        std::string::npos);
}

}  // namespace weft::privacy
