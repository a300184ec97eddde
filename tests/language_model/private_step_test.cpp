// SPDX-License-Identifier: Apache-2.0
//
// Private steps of a language model: every mode forms the clipped sum of the naive oracle, which has the gradient of
// each example in memory; one example changes the sum by at most the clip bound; the noise is what the accountant
// counts on.
#include <algorithm>
#include <array>
#include <numeric>
#include <set>

#include "tests/language_model/private_run.hpp"

namespace weft::language_model {
namespace {

using testing::clipped_sum;
using testing::private_configuration;
using testing::PrivateRun;
using testing::relative_error;

const std::vector<std::int64_t> kExamples = {0, 1, 4, 7, 8, 11, 12};

struct Variant {
  const char *model, *data;
};
constexpr Variant kVariants[] = {
    {"", ""},  // gpt2: learned positions, tied, biases, gains with shifts
    {"", "document_mask = true\n"},
    {"tied = false\nmlp = \"relu2\"\nnorm_position = \"post\"\n", ""},
    {"preset = \"llama\"\nkv_heads = 1\nqk_norm = \"head\"\n", ""},
    {"position = \"rope\"\nrope_columns = 4\nresidual = \"parallel\"\nmlp = \"gelu_exact\"\ntied = false\n", ""},
    {"preset = \"llama\"\nkv_heads = 1\nbiases = [\"query\", \"key\", \"value\"]\n", ""},
    {"preset = \"llama\"\nqk_norm = \"width\"\nlogit_softcap = 8\n", ""},
    {"preset = \"llama\"\nqk_norm = \"scaled\"\nnorm_position = \"both\"\ntied = true\nbias = true\n"
     "embedding_scale = 3\n",
     ""},
};

/// Of a clipped sum from the naive one: other order of fp32 sums, and Gram norms that are larger by the bound of their
/// error (kernels::gram_error), 2e-5 for these widths.
constexpr double kTolerance = 1e-4;

}  // namespace

TEST_CASE("every mode forms the clipped sum of the naive oracle, for every kind of parameter") {
  for (const Variant& variant : kVariants) {
    CAPTURE(variant.model);
    CAPTURE(variant.data);
    // Norms are 1 to 30 here: some gradients are clipped, some are not.
    const auto sum = [&](const std::string& privacy) {
      return clipped_sum(private_configuration(variant.model, "clip = 4\n" + privacy, "", variant.data), kExamples);
    };
    const std::vector<float> naive = sum("algorithm = \"naive\"\n");
    for (const char* privacy :
         {"mode = \"two_pass\"\nalgorithm = \"input_length\"\n", "mode = \"two_pass\"\nalgorithm = \"width\"\n",
          "mode = \"book_keeping\"\n", "mode = \"book_keeping\"\ntile = 3\n",
          "mode = \"two_pass\"\nrelease = \"end\"\n", "mode = \"book_keeping\"\nrelease = \"end\"\n"}) {
      CAPTURE(privacy);
      CHECK(relative_error(sum(privacy), naive) < kTolerance);
    }
    // Each element is rounded to 8 bits: 2^-9 relative at most, twice for a tied matrix.
    CHECK(relative_error(sum("mode = \"materialise\"\n"), naive) < 4e-3);
  }
}

TEST_CASE("the clipped sum is that of the naive oracle with several blocks, recomputation and a head in chunks") {
  struct Case {
    const char *model, *more = "", *scheme = "";
  };
  for (const Case& one : {Case{"bias = true\n"}, Case{"preset = \"llama\"\nqk_norm = \"head\"\n"},
                          Case{"tied = false\nnorm_position = \"post\"\n", "[memory]\nhead_chunk = 20\n"},
                          Case{"preset = \"gpt2\"\n", "[memory]\nrecompute = \"block\"\n"},
                          Case{"preset = \"llama\"\n", "[memory]\nrecompute = \"activation\"\n"},
                          Case{"preset = \"llama\"\nqk_norm = \"scaled\"\nnorm_position = \"both\"\nbias = true\n"
                               "sparse_blocks = 1\n",
                               "[memory]\nrecompute = \"norm\"\n"},
                          Case{"preset = \"gpt2\"\n", "", "scheme = \"group\"\n"},
                          Case{"preset = \"llama\"\n", "", "scheme = \"per_layer\"\n"}}) {
    const auto sum = [&](const std::string& privacy) {
      Configuration settings =
          private_configuration(one.model, "clip = 4\n" + std::string(one.scheme) + privacy, one.more);
      settings.language_model.layers = 3;
      return clipped_sum(settings, kExamples);
    };
    CAPTURE(std::string(one.model));
    CAPTURE(std::string(one.more));
    CAPTURE(std::string(one.scheme));
    const std::vector<float> naive = sum("algorithm = \"naive\"\n");
    CHECK(relative_error(sum("mode = \"two_pass\"\n"), naive) < kTolerance);
    CHECK(relative_error(sum("mode = \"book_keeping\"\n"), naive) < kTolerance);
    CHECK(relative_error(sum("mode = \"materialise\"\n"), naive) < 4e-3);
  }
}

TEST_CASE("the clipped sum of adapters or trained parts is that of the naive oracle, for every frozen base") {
  struct Case {
    const char *lora, *scheme, *more = "", *model = "";
  };
  for (const Case& one : {Case{nullptr, "flat", "", "norm = \"layer\"\nbias = true\ntrain = [\"biases\"]\n"},
                          Case{nullptr, "flat", "", "train = [\"norms\", \"mlp\"]\n"},
                          Case{nullptr, "group", "", "tied = false\ntrain = [\"head\"]\n"}, Case{"", "flat"},
                          Case{"", "per_layer"}, Case{"base = \"bf16\"\n", "group"},
                          Case{"base = \"int8\"\ntargets = [\"query\", \"value\", \"down\"]\n", "flat",
                               "[memory]\nrecompute = \"block\"\n"},
                          Case{"base = \"nf4\"\n", "per_layer", "[memory]\nrecompute = \"activation\"\n"}}) {
    const std::string lora = one.lora != nullptr ? "[lora]\nrank = 3\n" + std::string(one.lora) : "";
    CAPTURE(lora);
    CAPTURE(std::string(one.model));
    CAPTURE(std::string(one.scheme));
    const auto sum = [&](const std::string& privacy) {
      Configuration settings =
          private_configuration("preset = \"llama\"\nkv_heads = 1\n" + std::string(one.model),
                                "clip = 2\nscheme = \"" + std::string(one.scheme) + "\"\n" + privacy, lora + one.more);
      settings.language_model.layers = 2;
      return clipped_sum(settings, kExamples);
    };
    const std::vector<float> naive = sum("algorithm = \"naive\"\n");
    CHECK(testing::norm_of(naive) > 1);
    for (const char* privacy : {"mode = \"two_pass\"\nalgorithm = \"input_length\"\n",
                                "mode = \"book_keeping\"\nalgorithm = \"input_length\"\n",
                                "mode = \"book_keeping\"\nalgorithm = \"input_length\"\nrelease = \"end\"\n"}) {
      CAPTURE(privacy);
      CHECK(relative_error(sum(privacy), naive) < 1e-5);
    }
    CHECK(relative_error(sum("mode = \"materialise\"\n"), naive) < 4e-3);
  }
}

TEST_CASE("gradients of the sequences of a record are added before they are clipped") {
  using Records = std::vector<std::vector<std::int64_t>>;
  const Records records = {{0, 1}, {4}, {7, 8, 11}, {12}, {2}, {3, 5}};
  constexpr double kClip = 3;
  struct Case {
    const char *model, *privacy = "", *more = "";
  };
  for (const Case& one :
       {Case{"preset = \"llama\"\nkv_heads = 1\nqk_norm = \"head\"\n", "", "[memory]\nhead_chunk = 20\n"},
        Case{"", "scheme = \"group\"\n"},
        Case{"preset = \"llama\"\n", "scheme = \"per_layer\"\n", "[lora]\nrank = 2\n"}}) {
    CAPTURE(std::string(one.model));
    const auto sum = [&](const std::string& unit, const std::string& mode, const Records& of) {
      return clipped_sum(
          private_configuration(one.model,
                                fmt::format("clip = {}\nunit = \"{}\"\n{}{}{}", kClip, unit,
                                            unit == "sequence" ? "" : "max_per_owner = 3\n", one.privacy, mode),
                                one.more),
          of);
    };
    const std::vector<float> naive = sum("document", "algorithm = \"naive\"\n", records);
    for (const char* mode :
         {"mode = \"two_pass\"\n", "mode = \"book_keeping\"\n", "mode = \"book_keeping\"\nrelease = \"end\"\n"})
      CHECK(relative_error(sum("example", mode, records), naive) < kTolerance);
    const std::string stored = "mode = \"materialise\"\n";
    const std::vector<float> all = sum("document", stored, records);
    CHECK(relative_error(all, naive) < 4e-3);
    // One record less changes the sum by at most C, whatever its number of sequences.
    for (std::size_t i = 0; i < records.size(); ++i) {
      Records without = records;
      without.erase(without.begin() + static_cast<std::ptrdiff_t>(i));
      CHECK(testing::norm_of(testing::difference(all, sum("document", stored, without))) <= kClip * (1 + 1e-5));
    }
    // With records of one sequence each, the sum is that of unit = "sequence"; norms are raised for more rows.
    const Records single = {{0}, {1}, {4}, {7}};
    CHECK(relative_error(sum("document", stored, single), sum("sequence", stored, single)) < 2e-5);
  }
}

TEST_CASE(
    "the sum over the records of a text is that of their gradients, each clipped; one less changes it by at most C") {
  constexpr double kClip = 2;
  using Stays = std::function<bool(std::int64_t document, std::int64_t owner)>;
  const Stays all = [](std::int64_t, std::int64_t) { return true; };
  struct Case {
    const char *keys, *mode;
  };
  for (const Case& one :
       {Case{"unit = \"document\"\nmax_per_owner = 2\n", "algorithm = \"naive\"\n"},
        Case{"unit = \"example\"\nmax_per_owner = 3\n", "mode = \"materialise\"\n"},
        Case{"unit = \"owner\"\nowner_field = \"user\"\nmax_per_owner = 3\n", "algorithm = \"naive\"\n"},
        Case{"unit = \"owner\"\nowner_field = \"user\"\nmax_per_owner = 2\n", "mode = \"two_pass\"\n"},
        Case{"unit = \"owner\"\nowner_field = \"user\"\nmax_per_owner = 3\n", "mode = \"materialise\"\n"}}) {
    CAPTURE(std::string(one.keys));
    CAPTURE(std::string(one.mode));
    const bool of_owners = std::string(one.keys).find("\"owner\"") != std::string::npos;
    const auto sum = [&](double clip, const std::string& mode, const Stays& stays) {
      const Configuration settings =
          private_configuration("preset = \"llama\"\n", fmt::format("clip = {}\n{}{}", clip, one.keys, mode));
      PrivateRun run(settings, testing::world().all());
      run.step_on(testing::owned_documents(stays), settings);
      return run.gradients();
    };
    const std::vector<float> whole = sum(kClip, one.mode, all);
    std::vector<float> expected(whole.size());
    for (std::int64_t record = 0; record < (of_owners ? 4 : 7); ++record) {
      const auto is = [&](std::int64_t document, std::int64_t owner) {
        return (of_owners ? owner : document) == record;
      };
      const std::vector<float> gradient = sum(1e6, "algorithm = \"naive\"\n", is);
      const double norm = testing::norm_of(gradient), factor = std::min(1.0, kClip / norm);
      for (std::size_t i = 0; i < expected.size(); ++i)
        expected[i] += static_cast<float>(factor * static_cast<double>(gradient[i]));
      const std::vector<float> without =
          sum(kClip, one.mode, [&](std::int64_t document, std::int64_t owner) { return !is(document, owner); });
      const double change = testing::norm_of(testing::difference(whole, without));
      CHECK(change <= kClip * (1 + 1e-5));
      CHECK(change >= 0.99 * std::min(kClip, norm));
    }
    CHECK(relative_error(whole, expected) <
          (std::string(one.mode).find("materialise") != std::string::npos ? 4e-3 : kTolerance));
  }
}

TEST_CASE("parts that are clipped by themselves need the rows of one block at a time") {
  const auto of_layers = [](const std::string& privacy, bool enabled = true) {
    const auto bytes = [&](std::int64_t layers) {
      Configuration settings = private_configuration("", privacy);
      settings.privacy.enabled = enabled;
      settings.language_model.layers = layers;
      settings.data.batch_tokens = settings.memory.micro_tokens = 960;
      return static_cast<double>(measure_step(settings, {settings.language_model, testing::kPrivateVocabulary, 16},
                                              single_process(), testing::execution().backend)
                                     .device_bytes());
    };
    return bytes(10) - bytes(2);
  };
  const double open = of_layers("", false), parts = of_layers("mode = \"book_keeping\"\nscheme = \"group\"\n"),
               whole = of_layers("mode = \"book_keeping\"\n");
  // Of eight blocks: gradients of the vectors of each record; otherwise output gradients of all rows as well.
  CHECK(whole > open);
  CHECK(parts - open < 0.5 * (whole - open));
}

TEST_CASE("the plan states the algorithm of each product") {
  const auto norms = [&](const std::string& privacy) {
    const Configuration settings = private_configuration("", privacy);
    const Plan planned = plan(settings, {settings.language_model, testing::kPrivateVocabulary, 16}, 0);
    return to_text(planned, settings);
  };
  CHECK(norms("algorithm = \"input_length\"\n").find("128 x 32 input_length") != std::string::npos);
  CHECK(norms("algorithm = \"width\"\n").find("128 x 32 width") != std::string::npos);
}

TEST_CASE("parts of the parameters are clipped by themselves, to C together") {
  for (const char* keys : {"scheme = \"per_layer\"\nclip_function = \"abadi\"\n",
                           "scheme = \"per_layer\"\nclip_function = \"indicator\"\n",
                           "scheme = \"group\"\nclip_function = \"automatic\"\n"}) {
    CAPTURE(keys);
    const auto sum = [&](const std::string& privacy, const std::vector<std::int64_t>& examples) {
      return clipped_sum(private_configuration("", "clip = 6\n" + std::string(keys) + privacy), examples);
    };
    const std::vector<float> naive = sum("algorithm = \"naive\"\n", kExamples);
    CHECK(testing::norm_of(naive) > 1);
    for (const char* mode : {"two_pass", "book_keeping"})
      CHECK(relative_error(sum(std::string("mode = \"") + mode + "\"\n", kExamples), naive) < kTolerance);
    CHECK(testing::norm_of(sum("mode = \"materialise\"\n", {4})) <= 6);
  }
}

TEST_CASE("micro-batches change the clipped sum by rounding only") {
  Configuration settings = private_configuration("", "mode = \"book_keeping\"\n", "[memory]\nhead_chunk = 20\n");
  const std::vector<float> three = clipped_sum(settings, kExamples);
  for (const std::int64_t micro : {16, 32, 96}) {
    settings.memory.micro_tokens = micro;
    CHECK(relative_error(clipped_sum(settings, kExamples), three) < 1e-6);
  }
  settings.memory.recompute = Recompute::block;
  CHECK(relative_error(clipped_sum(settings, kExamples), three) < 1e-6);
}

TEST_CASE("an example contributes at most the bound, and one example more changes the sum by no more") {
  for (const char* mode : {"two_pass", "book_keeping", "materialise", "auto"})
    for (const char* precision : {"fp32", "bf16"}) {
      CAPTURE(mode);
      CAPTURE(precision);
      const double clip = 0.7;
      const Configuration settings =
          private_configuration("", "clip = 0.7\nmode = \"" + std::string(mode) + "\"\n",
                                "[device]\nprecision = \"" + std::string(precision) + "\"\n");
      // Norms are far above the bound, which is then reached up to the margin of norms that are rounded up.
      const std::vector<float> one = clipped_sum(settings, {7});
      CHECK(testing::norm_of(one) <= clip);
      CHECK(testing::norm_of(one) > 0.99 * clip);
      std::vector<std::int64_t> fewer = kExamples;
      fewer.erase(fewer.begin() + 3);
      // The others keep their places in other micro-batches: sums of other order.
      const std::vector<float> change =
          testing::difference(clipped_sum(settings, kExamples), clipped_sum(settings, fewer));
      CHECK(testing::norm_of(change) <= clip * (1 + 1e-3));
      // Rounding to 8 bits is another one in another product.
      const bool rounds = std::string(mode) == "materialise" || std::string(precision) == "bf16";
      CHECK(relative_error(change, one) < (rounds ? 2e-2 : 1e-4));
    }
}

TEST_CASE("the loss of an example is the mean over its own targets") {
  // Example 1 has 6 targets of 16: unclipped, its gradient is that of a step on it alone.
  Configuration settings = private_configuration("", "clip = 1e6\nmode = \"two_pass\"\n");
  const std::vector<float> sum = clipped_sum(settings, {1, 3});
  std::vector<float> alone;
  for (const std::int64_t example : {1, 3}) {
    Configuration open = settings;
    open.privacy.enabled = false;
    open.data.batch_tokens = open.memory.micro_tokens = 16;
    PrivateRun run(open, testing::world().all());
    dataset::TokenBatch batch = run.trainer.next_batch();
    PrivateRun::fill_example(example, 0, batch);
    batch.counted = std::count_if(batch.targets.begin(), batch.targets.end(), [](int t) { return t >= 0; });
    run.trainer.step(batch);
    const std::vector<float> gradient = run.gradients();
    alone.resize(gradient.size());
    for (std::size_t i = 0; i < alone.size(); ++i) alone[i] += gradient[i];
  }
  CHECK(relative_error(sum, alone) < 1e-5);
}

TEST_CASE("an example without a finite gradient is left out, and the others are not changed") {
  for (const char* mode : {"two_pass", "book_keeping", "materialise"}) {
    CAPTURE(mode);
    const Configuration settings =
        private_configuration("tied = false\n", std::string("mode = \"") + mode + "\"\n", "", "");
    const auto sum = [&](const std::vector<std::int64_t>& examples) {
      PrivateRun run(settings, testing::world().all());
      const model::Parameters& parameters = run.trainer.model().parameters();
      // The embedding of a token that example 4 alone has.
      std::vector<float> values = run.get(parameters.index("embedding/tokens"));
      for (int c = 0; c < 32; ++c) values[20 * 32 + c] = std::numeric_limits<float>::infinity();
      run.set(parameters.index("embedding/tokens"), values);
      run.step(examples);
      return run.gradients();
    };
    // 0, 2, 4 in one micro-batch: only 4 has token 20.
    const std::vector<float> with = sum({0, 2, 4}), without = sum({0, 2});
    CHECK(std::isfinite(testing::norm_of(with)));
    CHECK(testing::norm_of(without) > 0);
    // Products of a batch of another size may be summed in another order; that of stored gradients can change the
    // rounding of an element to 8 bits.
    CHECK(relative_error(with, without) < (std::string(mode) == "materialise" ? 4e-3 : 1e-6));
  }
}

TEST_CASE("adaptive clipping: bound and sum of every step are those of a loop over the gradients of records") {
  const std::string adaptive = "clipping = \"adaptive\"\nclip_quantile = 0.6\nclip_rate = 0.5\n";
  // The norms of the records at the first weights, which stay: the learning rate is 0.
  std::vector<std::vector<float>> gradients;
  for (const std::int64_t example : kExamples)
    gradients.push_back(clipped_sum(private_configuration("", "clip = 1e6\n"), {example}));
  for (const char* mode :
       {"algorithm = \"naive\"\n", "mode = \"two_pass\"\n", "mode = \"book_keeping\"\n", "mode = \"materialise\"\n"})
    for (const char* function : {"", "clip_function = \"indicator\"\n"}) {
      CAPTURE(std::string(mode));
      Configuration settings = private_configuration("", "clip = 3\n" + adaptive + mode + function);
      settings.optimizer.learning_rate = 0;
      PrivateRun run(settings, testing::world().all());
      const privacy::Noise noise{.key = {1, 2, 3}, .multiplier = 0, .expected = 5, .count_deviation = 0.3};
      run.trainer.set_noise(noise);
      double bound = 3;
      std::set<double> counts;
      for (std::uint64_t step = 1; step <= 6; ++step) {
        run.step(kExamples);
        double within = 0;
        std::vector<double> sum(gradients[0].size());
        for (const std::vector<float>& gradient : gradients) {
          const double norm = testing::norm_of(gradient);
          const double factor = norm <= bound ? 1 : *function != 0 ? 0 : bound / norm;
          within += norm <= bound ? 1 : 0;
          for (std::size_t k = 0; k < sum.size(); ++k) sum[k] += factor * static_cast<double>(gradient[k]) / 5;
        }
        std::vector<float> expected(sum.begin(), sum.end());
        CHECK(testing::norm_of(testing::difference(run.gradients(), expected)) <= 1e-2 * testing::norm_of(expected));
        counts.insert(within);
        const kernels::NoiseStream stream =
            kernels::noise_stream(noise.key, step, 0, kernels::NoisePurpose::clip_bound);
        const double xi = kernels::noise_pair(kernels::chacha20(stream.key, stream.block(0)), 0).first;
        const double half = 0.5 * static_cast<double>(kExamples.size());
        bound *= std::exp(-0.5 * (0.5 + (within - half + 0.3 * xi) / 5 - 0.6));
        CHECK(run.trainer.metrics().clip_bound == doctest::Approx(bound).epsilon(1e-12));
      }
      CHECK(counts.size() >= 2);
    }
}

TEST_CASE("a step without examples adds noise, and noise has the deviation that is accounted for") {
  PrivateRun run(private_configuration("", "clip = 3\n"), testing::world().all());
  const privacy::Noise noise{.key = {1, 2, 3, 4, 5, 6, 7, 8}, .multiplier = 2, .expected = 5};
  run.trainer.set_noise(noise);
  run.step({});
  CHECK(run.trainer.steps_done() == 1);
  const std::vector<float> first = run.gradients();
  // 14,000 elements: the estimate of the deviation has a standard error of 0.6 %.
  const double deviation = testing::norm_of(first) / std::sqrt(static_cast<double>(first.size()));
  CHECK(deviation == doctest::Approx(2.0 * 3 / 5).epsilon(0.03));
  CHECK(std::abs(std::accumulate(first.begin(), first.end(), 0.0)) <
        5 * deviation * std::sqrt(static_cast<double>(first.size())));
  run.step({});
  const std::vector<float> second = run.gradients();
  // Independent: the difference has twice the variance.
  CHECK(relative_error(second, first) == doctest::Approx(std::sqrt(2.0)).epsilon(0.03));
  // With examples, the same noise on their sum.
  PrivateRun again(private_configuration("", "clip = 3\n"), testing::world().all());
  again.trainer.set_noise(noise);
  again.step(kExamples);
  std::vector<float> sum = clipped_sum(private_configuration("", "clip = 3\n"), kExamples);
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = sum[i] / 5 + first[i];
  CHECK(relative_error(again.gradients(), sum) < 1e-6);
}

namespace {

/// The passes of a run over two examples, whose rows the clipping gets through a `Through(sink)`.
template <class Through>
struct ChangedPasses final : privacy::Passes {
  using Make = std::function<Through(model::GradientSink&)>;
  ChangedPasses(PrivateRun& run_, const Make& make_) : run(run_), make(make_) {}

  void pass(parallel::Range, model::GradientSink& sink) override {
    Transformer& transformer = run.trainer.transformer();
    const Tokens all = run.trainer.staging().tokens(0, 2, 16);
    Through changed = make(sink);
    transformer.prepare_weights();
    transformer.forward(all, nullptr);
    transformer.losses_and_gradient(all, losses.array(), changed);
    transformer.backward(all, nullptr, changed);
  }
  PrivateRun& run;
  const Make make;
  const device::Buffer<float> losses{32};
};

template <class Through>
void add_through(PrivateRun& run, const std::function<Through(model::GradientSink&)>& through) {
  Staging& staging = run.trainer.staging();
  dataset::TokenBatch batch = staging.next(2, 16);
  PrivateRun::fill_example(0, 0, batch);
  PrivateRun::fill_example(1, 1, batch);
  staging.send_examples(batch, std::array<std::int64_t, 2>{1, 1});
  const Tokens all = staging.tokens(0, 2, 16);
  ChangedPasses<Through> passes(run, through);
  run.trainer.private_steps().clear();
  run.trainer.private_steps().add({run.trainer.transformer().examples(all), all.ids}, passes);
}

struct Without final : model::GradientSink {
  Without(model::GradientSink& to_, std::size_t parameter_) : to(to_), parameter(parameter_) {}
  void take(const model::GradientRows& rows) override {
    if (rows.parameter != parameter) to.take(rows);
  }
  void complete_from(std::size_t first) override { to.complete_from(first); }
  model::GradientSink& to;
  std::size_t parameter;
};

/// Hands the last rows of a block over once more when the backward pass has left it.
struct Late final : model::GradientSink {
  explicit Late(model::GradientSink& to_) : to(to_) {}
  void take(const model::GradientRows& rows) override { to.take(last = rows); }
  void complete_from(std::size_t first) override {
    to.complete_from(first);
    to.take(last);
  }
  model::GradientSink& to;
  model::GradientRows last;
};

}  // namespace

TEST_CASE("a parameter whose rows do not come, or come after its factors, is refused") {
  for (const char* privacy : {"", "mode = \"book_keeping\"\nscheme = \"group\"\n"}) {
    CAPTURE(std::string(privacy));
    PrivateRun run(private_configuration("", privacy), testing::world().all());
    const model::Parameters& parameters = run.trainer.model().parameters();
    for (std::size_t parameter = 0; parameter <= parameters.size(); ++parameter) {
      const auto add = [&] {
        add_through<Without>(run, [&](model::GradientSink& sink) { return Without(sink, parameter); });
      };
      if (parameter == parameters.size()) {
        CHECK_NOTHROW(add());  // all are there
        continue;
      }
      const std::string& group = parameters.specs()[parameter].group;
      if (parameter > 0 && !group.empty() && group == parameters.specs()[parameter - 1].group) continue;
      CAPTURE(parameters.specs()[parameter].name);
      CHECK_THROWS_AS(add(), Error);
    }
    CHECK_THROWS_AS(add_through<Late>(run, [](model::GradientSink& sink) { return Late(sink); }), Error);
  }
}

TEST_CASE("the plan is what a private trainer allocates") {
  for (const char* privacy : {"mode = \"two_pass\"\n", "mode = \"book_keeping\"\n", "mode = \"materialise\"\n",
                              "algorithm = \"naive\"\n", "scheme = \"group\"\n"}) {
    CAPTURE(privacy);
    const Configuration settings = private_configuration("", privacy);
    const Architecture architecture{settings.language_model, testing::kPrivateVocabulary, 16};
    const Plan planned = plan(settings, architecture, 0);
    const kernels::Backend backend = device::planned_backend(device_settings(settings));
    const device::MemoryUse before = device::memory_use();
    const Trainer trainer(with_clipping_mode(settings, architecture, single_process(), backend), architecture,
                          parallel::Grid(testing::world(), single_process()), {backend, testing::execution().stream});
    std::int64_t expected = planned.device_total();
    for (const auto& [name, bytes] : planned.device)
      if (name == "CUDA context and libraries") expected -= bytes;
    CHECK(device::memory_use().device_bytes - before.device_bytes == expected);
  }
}

}  // namespace weft::language_model
