// SPDX-License-Identifier: Apache-2.0
//
// What the cases of weft benchmark stand for, their batches, and the counted work of a step.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "base/error.hpp"
#include "bench/language_model/language_subject.hpp"
#include "bench/language_model/named_cases.hpp"
#include "bench/language_model/resident_tokens.hpp"
#include "input/read.hpp"
#include "language_model/run/pass_work.hpp"

namespace weft::language_model {
namespace {

Configuration configuration() {
  Configuration settings;
  settings.data.batch_tokens = 4096;
  settings.data.sequence = 256;
  settings.language_model.kv_heads = settings.language_model.heads;
  return settings;
}

bench::BenchmarkCase resolved(const std::string& name, std::int64_t batch_tokens = 0) {
  bench::BenchmarkCase one = bench::parse_case(name);
  bench::resolve(configuration(), batch_tokens, one);
  return one;
}

bool sets(const bench::BenchmarkCase& one, const std::string& text) {
  return std::find(one.sets.begin(), one.sets.end(), text) != one.sets.end();
}

}  // namespace

TEST_CASE("the baseline has every optimisation off, a toggle changes one key of it") {
  const bench::BenchmarkCase baseline = resolved("baseline");
  for (const char* text :
       {"data.batch_tokens=4096", "device.precision=fp32", "device.backend=portable", "benchmark.attention=matrix",
        "memory.head_chunk=4096", "memory.recompute=none", "optimizer.state=fp32", "memory.offload_optimizer=false",
        "memory.swap_activations=false", "device.graphs=false", "data.micro_tokens=0", "device.fp8=false"}) {
    CAPTURE(text);
    CHECK(sets(baseline, text));
  }
  CHECK(baseline.sets.size() == 12);
  CHECK(baseline.toggles.empty());
  for (const std::string& name : bench::default_cases()) {
    CAPTURE(name);
    const bench::BenchmarkCase one = resolved(name);
    if (one.obstacle.empty() && name != "input") CHECK(one.sets.size() == baseline.sets.size());
    if (one.toggles.size() != 1) continue;
    std::size_t changed = 0;
    for (const std::string& each : one.sets) changed += sets(baseline, each) ? 0 : 1;
    CHECK(changed == 1);
  }
  CHECK(sets(resolved("accumulation"), "data.micro_tokens=1024"));
  CHECK(resolved("input").sets.empty());
  CHECK(resolved("own: optimizer.state=bf16").sets == std::vector<std::string>{"optimizer.state=bf16"});
  CHECK(sets(resolved("all", 512), "data.batch_tokens=512"));
  CHECK(sets(resolved("all", 512), "data.micro_tokens=256"));
}

TEST_CASE("combinations name what is on, and what is not available with its reason") {
  const bench::BenchmarkCase safe = resolved("safe"), both = resolved("8-bit state + recompute blocks");
  CHECK(both.toggles == std::vector<std::string>{"8-bit state", "recompute blocks"});
  CHECK(sets(both, "optimizer.state=8bit"));
  CHECK(sets(both, "memory.recompute=block"));
  CHECK(std::find(safe.toggles.begin(), safe.toggles.end(), "flash attention") != safe.toggles.end());
  if (!kernels::kCudaBuild) {
    CHECK(safe.left_out.find("graphs (it needs a GPU") != std::string::npos);
    CHECK(safe.obstacle.empty());
    CHECK(resolved("graphs").obstacle.find("it needs a GPU") != std::string::npos);
    CHECK_FALSE(resolved("bf16 + hand-written kernels").obstacle.empty());
    CHECK(resolved("TF32").obstacle.find("it needs a GPU") != std::string::npos);
  }
  CHECK(resolved("fp8").obstacle.find("only with bf16") != std::string::npos);
  CHECK(resolved("bf16 + fp8").obstacle.empty());
  CHECK_THROWS_AS(resolved("bf16 + fp16"), Error);
}

TEST_CASE("a name that stands for nothing and optimisations that exclude each other are refused") {
  for (const char* name : {"bsaeline", "", "bf16 +", "8-bit state + bf16 state", "bf16 + bf16"}) {
    CAPTURE(name);
    CHECK_THROWS_AS(resolved(name), Error);
  }
}

TEST_CASE("batches are functions of the seed, with ids in range and targets one ahead") {
  const std::int64_t sequences = 3, length = 50, vocabulary = 17;
  dataset::TokenRows rows(sequences, length, true), again(sequences, length, true);
  bench::ResidentTokens tokens(2, sequences, length, vocabulary, 1.0, 5),
      same(2, sequences, length, vocabulary, 1.0, 5), other(2, sequences, length, vocabulary, 1.0, 6);
  const auto ids = [&](bench::ResidentTokens& from) {
    from.fill(rows.batch(), 0);
    return std::vector<std::uint32_t>(rows.batch().ids.begin(), rows.batch().ids.end());
  };
  const std::vector<std::uint32_t> first = ids(tokens), second = ids(tokens);
  CHECK(first != second);
  CHECK(ids(tokens) == first);  // in turn
  CHECK(ids(same) == first);
  CHECK(ids(other) != first);
  CHECK(*std::max_element(first.begin(), first.end()) < vocabulary);
  CHECK(std::set<std::uint32_t>(first.begin(), first.end()).size() > 10);
  tokens.fill(rows.batch(), 0);
  const dataset::TokenBatch& batch = rows.batch();
  CHECK(batch.counted == sequences * length);
  for (std::int64_t row = 0; row < batch.rows(); ++row) {
    const auto at = static_cast<std::size_t>(row);
    CHECK(batch.positions[at] == row % length);
    if ((row + 1) % length != 0) CHECK(batch.targets[at] == static_cast<std::int32_t>(batch.ids[at + 1]));
  }
  // zipf = 0: the ids that do not follow from others are equally frequent; zipf = 1: id 0 leads.
  bench::ResidentTokens equal(1, 40, 100, 1000, 0.0, 5), ranked(1, 40, 100, 1000, 1.0, 5);
  dataset::TokenRows many(40, 100, false);
  const auto count_zero = [&](bench::ResidentTokens& from) {
    from.fill(many.batch(), 0);
    return std::count(many.batch().ids.begin(), many.batch().ids.end(), 0u);
  };
  CHECK(count_zero(equal) < 30);
  CHECK(count_zero(ranked) > 100);  // 4000 / 2 / ln(1000) = 290 are expected
}

TEST_CASE("both conventions of the operations per token, GPT-2 124M at T = 1024") {
  Configuration small = configuration();
  const Architecture architecture{small.language_model, 50257, 1024};
  const bench::ModelFlops flops = bench::model_flops(architecture, 1024);
  CHECK(flops.causal == doctest::Approx(803.26e6).epsilon(1e-5));
  CHECK(flops.full == doctest::Approx(859.89e6).epsilon(1e-5));
}

TEST_CASE("the counted operations are those of the convention, and recomputation adds a third of the blocks' forward") {
  Configuration settings = configuration();
  settings.data.batch_tokens = 2048;
  settings.data.sequence = 1024;
  const Architecture architecture{settings.language_model, 50257, 1024};
  const auto total = [&] {
    double sum = 0;
    for (const auto& [phase, bytes] : phase_bytes(settings, architecture)) {
      const run::Work work = work_of(phase, settings, architecture);
      CHECK(work.bytes == bytes);
      CHECK(work.bytes > 0);
      sum += work.flops;
    }
    return sum;
  };
  // 6N counts embeddings of positions, biases and norms, which are in no product: 0.7 % of this model. Causal attention
  // takes 7 LCT operations, because the backward pass forms the scores again.
  const double attention = 12.0 * 768 * 1024;
  const double convention = bench::model_flops(architecture, 1024).causal + attention;
  CHECK(total() / 2048 == doctest::Approx(convention).epsilon(0.01));
  const double kept = total();
  settings.memory.recompute = Recompute::block;
  const double block = 2.0 * (4 * 768 * 768 + 4 * 768 * 768) + 2.0 * 768 * 1024;  // without the MLP's second matrix
  CHECK(total() - kept == doctest::Approx(2048 * 11 * block).epsilon(1e-9));
  // By pass: the sum of both is the phase; the forward pass computes nothing again.
  for (const std::string& phase : phases_of_both_passes()) {
    CAPTURE(phase);
    const run::Work both = work_of(phase, settings, architecture),
                    forward = work_of(phase + ", forward", settings, architecture),
                    backward = work_of(phase + ", backward", settings, architecture);
    CHECK(forward.bytes + backward.bytes == both.bytes);
    CHECK(forward.flops + backward.flops == both.flops);
    if (phase == "products")
      CHECK(backward.flops - forward.flops == doctest::Approx(2048 * 11 * 2.0 * 8 * 768 * 768).epsilon(1e-9));
  }
  double by_pass = 0, whole = 0;
  for (const auto& [phase, bytes] : phase_bytes(settings, architecture, true)) by_pass += bytes;
  for (const auto& [phase, bytes] : phase_bytes(settings, architecture)) whole += bytes;
  CHECK(by_pass == doctest::Approx(whole).epsilon(1e-12));
}

TEST_CASE("batches of a token set are its windows in order, from the beginning again where it ends") {
  std::vector<std::uint16_t> ids(35);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::uint16_t>(i);
  const dataset::TokenSet set("ids", ids, 40, 0);
  bench::ResidentTokens tokens(2, 2, 9, set);  // windows of 10 ids: three
  dataset::TokenRows rows(2, 9, false);
  tokens.fill(rows.batch(), 0);
  CHECK(rows.batch().ids[0] == 0);
  CHECK(rows.batch().ids[9] == 10);
  CHECK(rows.batch().targets[17] == 19);
  tokens.fill(rows.batch(), 0);
  CHECK(rows.batch().ids[0] == 20);
  CHECK(rows.batch().ids[9] == 0);
}

}  // namespace weft::language_model
