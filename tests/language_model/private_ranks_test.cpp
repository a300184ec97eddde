// SPDX-License-Identifier: Apache-2.0
//
// Private steps on several ranks, of the data axis, the tensor axis and both: the sum, and so the sensitivity, and the
// noise are those of one rank. Norms are not summed over ranks that hold different examples: that would raise the
// sensitivity to C (1 + sqrt(R - 1)). Those of parts of one example are: without the other parts they would be too
// small.
#include <algorithm>
#include <cstring>

#include "tests/language_model/private_run.hpp"
#include "tests/model/registry_bits.hpp"

namespace weft::language_model {
namespace {

using testing::private_configuration;
using testing::PrivateRun;

const std::vector<std::int64_t> kExamples = {0, 1, 4, 7, 8, 11, 12};

/// All gradients on every rank.
std::vector<float> all_gradients(const PrivateRun& run) {
  const model::Parameters& parameters = run.trainer.model().parameters();
  std::vector<float> all;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const model::ParameterSpec& spec = parameters.specs()[i];
    if (spec.frozen) continue;
    std::vector<double> values(static_cast<std::size_t>(spec.elements()));
    const kernels::Matrix<float> matrix = run.trainer.gradients().matrix(i);
    const kernels::Array<float> vector = run.trainer.gradients().vector(i);
    const std::vector<float> own = spec.is_matrix() ? testing::to_host(matrix.data, matrix.rows * matrix.columns)
                                                    : testing::to_host(vector.data, vector.size);
    const model::RowParts& parts = parameters.parts(i);
    // Of ranks with the same rows, one contributes them.
    if (parts.writes) std::copy(own.begin(), own.end(), values.begin() + parts.owned.begin * spec.columns());
    testing::world().all().sum(std::span<double>(values));
    for (const double value : values) all.push_back(static_cast<float>(value));
  }
  return all;
}

/// The numbers of ranks of the tensor axis that this job can have.
std::vector<std::int64_t> tensor_sizes() {
  std::vector<std::int64_t> sizes;
  for (std::int64_t size = 1; size <= testing::world().size(); size *= 2) sizes.push_back(size);
  return sizes;
}

/// With as many heads as the largest job has ranks. `model`: further keys of [language_model]; `more`: other tables.
Configuration configuration(const std::string& privacy, const std::string& model = "", const std::string& more = "") {
  return private_configuration("heads = 4\n" + model, privacy, more);
}

Configuration on_tensor(Configuration settings, std::int64_t tensor) {
  settings.parallel.tensor = tensor;
  return settings;
}

std::vector<float> sum_on_all(const Configuration& settings, const std::vector<std::int64_t>& examples,
                              std::optional<parallel::Range> of_rank = {}) {
  PrivateRun run(settings, testing::world().all());
  run.step(examples, of_rank);
  return all_gradients(run);
}

/// Gram norms are larger by the bound of their error (kernels::gram_error), which is less for the narrower matrices of
/// a rank of the tensor axis.
double tolerance_of(std::int64_t tensor) { return tensor == 1 ? 1e-6 : 1e-4; }

}  // namespace

TEST_CASE("the clipped sum is that of one rank, in every mode and on every grid") {
  struct Case {
    const char *privacy, *model = "", *more = "";
  };
  // Beside the modes: gains of heads and temperatures, of whose gradients each rank has a summand; a head of its own.
  for (const Case& one :
       {Case{"mode = \"two_pass\"\n"}, Case{"mode = \"book_keeping\"\n"}, Case{"mode = \"materialise\"\n"},
        Case{"algorithm = \"naive\"\n"}, Case{"mode = \"two_pass\"\nscheme = \"per_layer\"\n"},
        Case{"mode = \"book_keeping\"\n", "preset = \"llama\"\nqk_norm = \"head\"\n"},
        Case{"mode = \"materialise\"\n", "preset = \"llama\"\nqk_norm = \"head\"\n"},
        Case{"algorithm = \"naive\"\n", "preset = \"llama\"\nqk_norm = \"head\"\n"},
        Case{"mode = \"two_pass\"\n", "qk_norm = \"scaled\"\ntied = false\nnorm_position = \"post\"\n"},
        Case{"mode = \"book_keeping\"\nscheme = \"group\"\n"},
        Case{"mode = \"two_pass\"\n", "preset = \"llama\"\nqk_norm = \"head\"\n"},
        Case{"mode = \"materialise\"\nscheme = \"group\"\n", "tied = false\n"},
        Case{"mode = \"materialise\"\n", "tied = false\nmlp = \"relu2\"\n"},
        Case{"mode = \"book_keeping\"\nscheme = \"per_layer\"\nrelease = \"end\"\n",
             "preset = \"llama\"\nqk_norm = \"head\"\nlogit_softcap = 8\n"},
        Case{"algorithm = \"naive\"\n", "qk_norm = \"scaled\"\nnorm_position = \"both\"\n"},
        Case{"mode = \"book_keeping\"\n", "preset = \"llama\"\n", "[lora]\nrank = 2\n"},
        Case{"mode = \"materialise\"\nscheme = \"group\"\n", "tied = false\n", "[lora]\nrank = 2\nbase = \"bf16\"\n"},
        Case{"algorithm = \"naive\"\nscheme = \"per_layer\"\n", "", "[lora]\nrank = 2\n"}}) {
    const Configuration settings = configuration(one.privacy, one.model, one.more);
    const std::vector<float> expected = testing::clipped_sum(settings, kExamples);
    // Products over other numbers of rows round otherwise; an element of a stored gradient then rounds to 8 bits up
    // instead of down, now and then.
    const bool rounds = std::string(one.privacy).find("materialise") != std::string::npos;
    for (const std::int64_t tensor : tensor_sizes()) {
      CAPTURE(std::string(one.privacy));
      CAPTURE(std::string(one.model));
      CAPTURE(tensor);
      const double tolerance = rounds ? 1e-3 : tolerance_of(tensor);
      CHECK(testing::relative_error(sum_on_all(on_tensor(settings, tensor), kExamples), expected) < tolerance);
    }
  }
}

TEST_CASE("sums that are exchanged while others are formed have the same bits") {
  for (const std::int64_t tensor : tensor_sizes())
    for (const std::string privacy : {"mode = \"two_pass\"\n", "mode = \"book_keeping\"\n", "mode = \"materialise\"\n",
                                      "mode = \"book_keeping\"\nscheme = \"group\"\n"}) {
      CAPTURE(tensor);
      CAPTURE(privacy);
      const auto sum = [&](bool overlap) {
        Configuration settings = on_tensor(configuration(privacy), tensor);
        settings.privacy.overlap = overlap;
        settings.language_model.layers = 2;
        return sum_on_all(settings, kExamples);
      };
      CHECK(sum(true) == sum(false));
    }
}

TEST_CASE("ranks may have different numbers of examples, and none") {
  const Configuration plain = configuration("mode = \"two_pass\"\n");
  const std::vector<float> expected = testing::clipped_sum(plain, kExamples);
  for (const std::int64_t tensor : tensor_sizes()) {
    CAPTURE(tensor);
    const Configuration settings = on_tensor(plain, tensor);
    // The tensor axis is the innermost.
    const std::int64_t group = testing::world().rank() / tensor, last = testing::world().size() / tensor - 1;
    // All examples in the last group: three micro-batches there, none elsewhere.
    const parallel::Range own{0, group == last ? std::ssize(kExamples) : 0};
    CHECK(testing::relative_error(sum_on_all(settings, kExamples, own), expected) < tolerance_of(tensor));
    // No examples at all: a sum of zeros.
    CHECK(testing::norm_of(sum_on_all(settings, {})) == 0);
  }
}

TEST_CASE("records of several sequences have the sum of one rank on every grid, with other micro-batches on each") {
  const dataset::TokenSet set = testing::owned_documents([](std::int64_t, std::int64_t) { return true; });
  for (const char* unit : {"unit = \"document\"\n", "unit = \"owner\"\nowner_field = \"user\"\n"}) {
    const Configuration plain = configuration("mode = \"book_keeping\"\nmax_per_owner = 2\n" + std::string(unit));
    const auto sum = [&](Configuration settings, const parallel::Communicator& ranks) {
      PrivateRun run(settings, ranks);
      run.step_on(set, settings);
      return ranks.size() == testing::world().size() ? all_gradients(run) : run.gradients();
    };
    const std::vector<float> expected = sum(plain, testing::world().all().split(testing::world().rank(), 0));
    CHECK(testing::norm_of(expected) > 1);
    for (const parallel::Shard shard : {parallel::Shard::state, parallel::Shard::gradients, parallel::Shard::full})
      for (const std::int64_t tensor : tensor_sizes()) {
        CAPTURE(std::string(unit));
        CAPTURE(static_cast<int>(shard));
        CAPTURE(tensor);
        Configuration settings = on_tensor(plain, tensor);
        settings.parallel.shard = shard;
        CHECK(testing::relative_error(sum(settings, testing::world().all()), expected) < tolerance_of(tensor));
      }
  }
}

TEST_CASE("what a record contributes does not depend on the ranks: it is an error if it does not fit a micro-batch") {
  for (const std::int64_t most : {2, 3, 4}) {
    Configuration settings = configuration("unit = \"document\"\nmax_per_owner = " + std::to_string(most) + "\n");
    use_ranks(settings, testing::world().size());
    // Micro-batches of 3 sequences; of the 6 sequences of a step, 3 or 2 on a rank.
    if (most <= (testing::world().size() < 4 ? 3 : 2))
      require_whole_records(settings);
    else
      CHECK_THROWS_WITH_AS(require_whole_records(settings), doctest::Contains("do not fit a micro-batch"), Error);
  }
}

TEST_CASE("the plan is what the largest rank takes") {
  struct Case {
    const char *privacy, *more = "";
  };
  for (const Case& one : {Case{"mode = \"two_pass\"\n"}, Case{"mode = \"materialise\"\n"},
                          Case{"algorithm = \"naive\"\n"}, Case{"mode = \"book_keeping\"\n", "[lora]\nrank = 2\n"},
                          Case{"mode = \"materialise\"\n", "[lora]\nrank = 2\nbase = \"nf4\"\n"}})
    for (const std::int64_t tensor : tensor_sizes()) {
      CAPTURE(std::string(one.privacy));
      CAPTURE(std::string(one.more));
      CAPTURE(tensor);
      Configuration settings =
          on_tensor(configuration(one.privacy, "preset = \"llama\"\nqk_norm = \"head\"\n", one.more), tensor);
      use_ranks(settings, testing::world().size());
      const std::int64_t before = device::memory_use().device_bytes;
      const PrivateRun run(settings, testing::world().all());
      const Plan planned = plan(settings, run.architecture, 0);
      std::int64_t context = 0, taken = device::memory_use().device_bytes - before;
      for (const auto& [name, bytes] : planned.device)
        if (name == "CUDA context and libraries") context = bytes;
      testing::world().all().maximum({&taken, 1});
      CHECK(taken <= planned.device_total() - context);
      CHECK(static_cast<double>(taken) >= 0.95 * static_cast<double>(planned.device_total() - context));
    }
}

TEST_CASE("noise is that of one rank, drawn once per update, and all ranks keep the same parameters") {
  const privacy::Noise noise{.key = {9, 8, 7, 6, 5, 4, 3, 2}, .multiplier = 1, .expected = 4};
  const parallel::Communicator alone = testing::world().all().split(testing::world().rank(), 0);
  for (const std::int64_t tensor : tensor_sizes())
    for (const char* const model : {"", "preset = \"llama\"\nqk_norm = \"head\"\n"}) {
      CAPTURE(tensor);
      CAPTURE(std::string(model));
      const Configuration settings = configuration("", model);
      PrivateRun together(on_tensor(settings, tensor), testing::world().all());
      PrivateRun single(settings, alone);
      for (PrivateRun* run : {&together, &single}) {
        run->trainer.set_noise(noise);
        run->step({});
      }
      // No sums: the same bits.
      CHECK(all_gradients(together) == single.gradients());
      for (PrivateRun* run : {&together, &single}) {
        run->step(kExamples);
        run->step({1, 3});
      }
      CHECK(testing::relative_error(all_gradients(together), single.gradients()) < 10 * tolerance_of(tensor));
      together.trainer.transformer().prepare_weights();  // those of the other ranks arrive
      // What several ranks hold is the same bit for bit.
      const auto bits = testing::bits_of(together.trainer.registry());
      const model::Parameters& parameters = together.trainer.model().parameters();
      for (const model::ParameterSpec& spec : parameters.specs()) {
        CAPTURE(spec.name);
        const parallel::Communicator& holders =
            spec.cut.over.empty() ? testing::world().all() : together.grid.axis(parallel::kDataAxis);
        const std::vector<std::byte>& own = bits.at(spec.name);
        std::vector<std::byte> all(own.size() * static_cast<std::size_t>(holders.size()));
        holders.all_gather(own.data(), all.data(), std::ssize(own));
        for (std::int64_t rank = 0; rank < holders.size(); ++rank)
          CHECK(std::memcmp(all.data() + rank * std::ssize(own), own.data(), own.size()) == 0);
      }
    }
}

TEST_CASE("an adaptive bound has the same bits on every grid, and continues from its checkpoint") {
  const privacy::Noise noise{.key = {9, 8, 7}, .multiplier = 1, .expected = 4, .count_deviation = 1};
  const parallel::Communicator alone = testing::world().all().split(testing::world().rank(), 0);
  const auto bounds = [&](const Configuration& settings, const parallel::Communicator& ranks) {
    PrivateRun run(settings, ranks);
    const checkpoint::Tensor* const stored = run.trainer.registry().find("privacy/clip_bound");
    REQUIRE(stored != nullptr);
    run.trainer.set_noise(noise);
    std::vector<double> all;
    for (const std::vector<std::int64_t>& examples : {kExamples, {}, {1, 3}, kExamples}) {
      run.step(examples);
      all.push_back(run.trainer.metrics().clip_bound);
      CHECK(device::read(run.arithmetic, static_cast<const double*>(stored->data)) == all.back());
    }
    return all;
  };
  for (const char* mode : {"mode = \"materialise\"\n", "algorithm = \"naive\"\n"}) {
    const Configuration settings = configuration(std::string("clip = 3\nclipping = \"adaptive\"\n") + mode);
    const std::vector<double> expected = bounds(settings, alone);
    CHECK(expected.front() != expected.back());
    for (const std::int64_t tensor : tensor_sizes())
      CHECK(bounds(on_tensor(settings, tensor), testing::world().all()) == expected);
  }
}

}  // namespace weft::language_model
