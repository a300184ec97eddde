// SPDX-License-Identifier: Apache-2.0
//
// Two models that training/ does not know: a transformer block, cut by rows and by columns over the tensor axis, and a
// factored decoder with a threshold vector, cut over the feature axis.
#include "model/parameters.hpp"

#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>

#include "base/error.hpp"
#include "checkpoint/checkpoint_writer.hpp"
#include "checkpoint/resume.hpp"
#include "kernels/bf16.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/optimize/adam.hpp"
#include "tests/checkpoint/sample.hpp"
#include "tests/scratch.hpp"

namespace weft::model {
namespace {

using kernels::Purpose;
using kernels::Scalar;
using kernels::StorageType;
using weft::testing::execution;

constexpr StorageType kPolicies[] = {StorageType::fp32, StorageType::bf16, StorageType::eight_bit};

std::vector<ParameterSpec> transformer_block(std::int64_t width = 24, std::int64_t d_mlp = 300,
                                             std::int64_t vocabulary = 37) {
  const Cut rows{0, parallel::kTensorAxis}, columns{1, parallel::kTensorAxis};
  const auto small = [](double divisor) { return normal(0.02 / divisor, Purpose::test); };
  const auto weight = [&](std::string name, std::int64_t out, std::int64_t in, Cut cut, double divisor = 1) {
    return ParameterSpec{
        .name = std::move(name), .shape = {out, in}, .cut = cut, .initial = small(divisor), .weight_decay = true};
  };
  std::vector<ParameterSpec> specs;
  specs.push_back(weight("embedding", vocabulary, width, rows));
  specs.push_back({.name = "block_0/norm", .shape = {width}, .update = Update::everywhere, .initial = constant(1)});
  for (const char* part : {"query", "key", "value"}) {
    specs.push_back(weight(std::string("block_0/") + part, width, width, rows));
    specs.back().group = "block_0/query_key_value";
  }
  specs.push_back(weight("block_0/attention_out", width, width, columns, std::sqrt(2.0)));
  specs.push_back(weight("block_0/up", d_mlp, width, rows));
  specs.push_back({.name = "block_0/up_bias", .shape = {d_mlp}, .cut = rows});
  specs.push_back(weight("block_0/down", width, d_mlp, columns, std::sqrt(2.0)));
  specs.push_back({.name = "block_0/down_bias", .shape = {width}, .update = Update::everywhere});
  number_elements(specs);
  return specs;
}

/// y_t = sum over s <= t of (a_s U_s) V_s[t]: U_s [F, rank] cut by features, V_s [rank, (L - s) * d] on every rank.
std::vector<ParameterSpec> factored_decoder(std::int64_t n_layers = 3, std::int64_t n_features = 29,
                                            std::int64_t rank = 5, std::int64_t d_model = 7) {
  const Cut by_feature{0, parallel::kFeatureAxis};
  std::vector<ParameterSpec> specs;
  for (std::int64_t s = 0; s < n_layers; ++s) {
    const std::string decoder = "decoder_" + std::to_string(s) + "/";
    specs.push_back({.name = decoder + "down",
                     .shape = {n_features, rank},
                     .cut = by_feature,
                     .initial = uniform(0.1, Purpose::test),
                     .weight_decay = true});
    specs.push_back({.name = decoder + "up",
                     .shape = {rank, (n_layers - s) * d_model},
                     .segment = d_model,
                     .initial = uniform(0.2, Purpose::test),
                     .weight_decay = true});
    specs.push_back({.name = "encoder_" + std::to_string(s) + "/threshold",
                     .shape = {n_features},
                     .cut = by_feature,
                     .initial = constant(0.03),
                     .group = "thresholds",
                     .row_state = {{"tokens_since_fired", Scalar::i64}}});
  }
  number_elements(specs);
  return specs;
}

struct Family {
  const char* name;
  std::string_view axis;  // the inner axis of its grid
  std::vector<ParameterSpec> specs;
};
std::vector<Family> families() {
  return {{"transformer block", parallel::kTensorAxis, transformer_block()},
          {"factored decoder", parallel::kFeatureAxis, factored_decoder()}};
}

parallel::GridShape grid_of(std::int64_t data, std::string_view axis, std::int64_t inner) {
  return parallel::GridShape({{std::string(parallel::kDataAxis), data}, {std::string(axis), inner}});
}

/// body(grid) for every grid of `ranks` ranks.
void for_each_grid(std::int64_t ranks, std::string_view axis,
                   const std::function<void(const parallel::GridShape&)>& body) {
  for (std::int64_t data = 1; data <= ranks; ++data)
    if (ranks % data == 0) body(grid_of(data, axis, ranks / data));
}

std::vector<std::byte> read(const checkpoint::Tensor& tensor, parallel::Range rows) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(rows.size() * tensor.row_bytes()));
  if (bytes.empty()) return bytes;
  const std::byte* from =
      static_cast<const std::byte*>(tensor.data) + (rows.begin - tensor.held.begin) * tensor.row_bytes();
  if (tensor.gather)
    tensor.gather(rows, bytes.data());
  else if (tensor.on_device)
    device::copy(execution(), bytes.data(), from, std::ssize(bytes), device::Direction::to_host);
  else
    std::memcpy(bytes.data(), from, bytes.size());
  kernels::fence(execution());
  return bytes;
}

void write(const checkpoint::Tensor& tensor, parallel::Range rows, const std::vector<std::byte>& bytes) {
  if (bytes.empty()) return;
  std::byte* const to = static_cast<std::byte*>(tensor.data) + (rows.begin - tensor.held.begin) * tensor.row_bytes();
  if (tensor.scatter)
    tensor.scatter(rows, bytes.data());
  else if (tensor.on_device)
    device::copy(execution(), to, bytes.data(), std::ssize(bytes), device::Direction::to_device);
  else
    std::memcpy(to, bytes.data(), bytes.size());
  kernels::fence(execution());
}

/// Finite values that differ by tensor and element, the same on any grid.
std::vector<std::byte> sample(const checkpoint::Tensor& tensor, std::uint64_t stream, parallel::Range rows) {
  const std::int64_t width = kernels::bytes_of(tensor.type), per_row = tensor.row_bytes() / width;
  std::vector<std::byte> bytes(static_cast<std::size_t>(rows.size() * tensor.row_bytes()));
  for (std::int64_t i = 0; i < rows.size() * per_row; ++i) {
    const std::uint32_t word =
        kernels::philox(stream, Purpose::test, 0, static_cast<std::uint64_t>(rows.begin * per_row + i)).word[0];
    const float value = kernels::uniform_float(word);
    const kernels::bf16 narrow = kernels::to_bf16(value);
    const std::int64_t integer = word % 127;
    const void* from = tensor.type == Scalar::fp32   ? static_cast<const void*>(&value)
                       : tensor.type == Scalar::bf16 ? static_cast<const void*>(&narrow)
                                                     : static_cast<const void*>(&integer);
    std::memcpy(bytes.data() + i * width, from, static_cast<std::size_t>(width));
  }
  return bytes;
}

void fill(const checkpoint::Registry& registry) {
  std::uint64_t stream = 0;
  for (const checkpoint::Tensor& tensor : registry.tensors())
    write(tensor, tensor.held, sample(tensor, stream++, tensor.held));
}

bool is_filled(const checkpoint::Registry& registry) {
  std::uint64_t stream = 0;
  for (const checkpoint::Tensor& tensor : registry.tensors())
    if (read(tensor, tensor.held) != sample(tensor, stream++, tensor.held)) return false;
  return true;
}

/// All weights of a model that is spread over the ranks of a grid, as the checkpoint holds them: name -> bytes.
std::map<std::string, std::vector<std::byte>> initial_weights(const Family& family, StorageType storage,
                                                              const parallel::GridShape& grid) {
  std::map<std::string, std::vector<std::byte>> weights;
  for (std::int64_t rank = 0; rank < grid.ranks(); ++rank) {
    Parameters parameters(family.specs, storage, grid, rank, execution(), Moments::none);
    parameters.initialise(11);
    checkpoint::Registry registry;
    parameters.add_to(registry);
    for (const checkpoint::Tensor& tensor : registry.tensors()) {
      std::vector<std::byte>& whole = weights[tensor.name];
      whole.resize(static_cast<std::size_t>(tensor.shape[0] * tensor.row_bytes()));
      const std::vector<std::byte> held = read(tensor, tensor.held);
      std::copy(held.begin(), held.end(), whole.begin() + tensor.held.begin * tensor.row_bytes());
    }
  }
  return weights;
}

}  // namespace

TEST_CASE("the plan's bytes are the allocated bytes, on every rank of every grid") {
  for (const Family& family : families())
    for (const StorageType storage : kPolicies)
      for (const Moments moments : {Moments::held, Moments::none, Moments::on_host})
        for (const std::int64_t ranks : {1, 2, 4, 6})
          for_each_grid(ranks, family.axis, [&](const parallel::GridShape& grid) {
            CAPTURE(family.name);
            CAPTURE(grid.text());
            std::int64_t largest = 0;
            for (std::int64_t rank = 0; rank < ranks; ++rank) {
              const device::MemoryUse before = device::memory_use();
              const Parameters parameters(family.specs, storage, grid, rank, execution(), moments);
              const std::int64_t allocated = device::memory_use().device_bytes - before.device_bytes,
                                 host = device::memory_use().host_bytes - before.host_bytes;
              const StateBytes planned = state_bytes(family.specs, grid, rank, storage, execution().backend, moments);
              CHECK(planned == parameters.bytes());
              CHECK(planned.total() == allocated);
              CHECK(planned.host == host);
              CHECK((host > 0) == (moments == Moments::on_host && planned.total() > 0));
              largest = std::max(largest, allocated + host);
            }
            const StateBytes planned = largest_state_bytes(family.specs, grid, storage, execution().backend, moments);
            CHECK(planned.total() + planned.host == largest);
          });
}

TEST_CASE("frozen parameters have weights and no moments, in the plan, in memory and in checkpoints") {
  std::vector<ParameterSpec> specs = transformer_block(), trained;
  for (ParameterSpec& spec : specs) {
    spec.frozen = spec.name != "block_0/up" && spec.name != "block_0/up_bias";
    if (!spec.frozen) trained.push_back(spec);
  }
  CHECK(trained_elements_of(specs) == elements_of(trained));
  for (const StorageType storage : kPolicies) {
    const auto bytes = [&](std::span<const ParameterSpec> of) {
      return state_bytes(of, {}, 0, storage, execution().backend, Moments::held);
    };
    CHECK(bytes(specs).moments == bytes(trained).moments);
    CHECK(bytes(specs).weights == bytes(transformer_block()).weights);
    const Parameters parameters(specs, storage, {}, 0, execution(), Moments::held);
    CHECK(parameters.bytes() == bytes(specs));
    checkpoint::Registry registry;
    parameters.add_to(registry);
    std::vector<std::string> names;
    for (const checkpoint::Tensor& tensor : registry.tensors()) names.push_back(tensor.name);
    const auto has = [&](const std::string& name) {
      return std::find(names.begin(), names.end(), name) != names.end();
    };
    CHECK(has("embedding"));
    CHECK(!has("embedding.first_moment"));
    CHECK(!has("block_0/down_bias.second_moment"));
    CHECK(has("block_0/up.first_moment"));
    CHECK(has("block_0/up_bias.second_moment"));
    CHECK(registry.tensors().size() == tensors_of(specs, storage, Moments::held).size());
  }
}

TEST_CASE("every rank registers the tensors that the specs name, and each row is written once") {
  for (const Family& family : families())
    for (const StorageType storage : kPolicies)
      for (const std::int64_t ranks : {1, 2, 4, 6})
        for_each_grid(ranks, family.axis, [&](const parallel::GridShape& grid) {
          CAPTURE(family.name);
          CAPTURE(grid.text());
          const std::vector<checkpoint::TensorEntry> expected = tensors_of(family.specs, storage, Moments::held);
          std::vector<std::int64_t> rows(expected.size());
          std::int64_t bytes = 0;
          for (std::int64_t rank = 0; rank < ranks; ++rank) {
            const Parameters parameters(family.specs, storage, grid, rank, execution(), Moments::held);
            checkpoint::Registry registry;
            parameters.add_to(registry);
            REQUIRE(registry.tensors().size() == expected.size());
            for (std::size_t i = 0; i < expected.size(); ++i) {
              const checkpoint::Tensor& tensor = registry.tensors()[i];
              CHECK(tensor.name == expected[i].name);
              CHECK(tensor.type == expected[i].type);
              CHECK(tensor.shape == expected[i].shape);
              rows[i] += tensor.owned.size();
            }
            bytes += registry.bytes();
          }
          for (std::size_t i = 0; i < expected.size(); ++i) CHECK(rows[i] == expected[i].shape[0]);
          CHECK(bytes == checkpoint_bytes(family.specs, storage));
        });
}

TEST_CASE("names, shapes and types of a checkpoint") {
  std::vector<std::string> lines;
  for (const checkpoint::TensorEntry& tensor : tensors_of(factored_decoder(1), StorageType::eight_bit, Moments::held))
    lines.push_back(
        fmt::format("{} {} [{}]", tensor.name, checkpoint::name_of(tensor.type), fmt::join(tensor.shape, ", ")));
  CHECK(lines == std::vector<std::string>{
                     "decoder_0/down bf16 [29, 5]", "decoder_0/down.first_moment u8 [29, 5]",
                     "decoder_0/down.second_moment u8 [29, 5]", "decoder_0/down.first_scale fp32 [29, 1]",
                     "decoder_0/down.second_scale fp32 [29, 1]", "decoder_0/up bf16 [5, 7]",
                     "decoder_0/up.first_moment u8 [5, 7]", "decoder_0/up.second_moment u8 [5, 7]",
                     "decoder_0/up.first_scale fp32 [5, 1]", "decoder_0/up.second_scale fp32 [5, 1]",
                     "encoder_0/threshold fp32 [29]", "encoder_0/threshold.first_moment fp32 [29]",
                     "encoder_0/threshold.second_moment fp32 [29]", "encoder_0/tokens_since_fired i64 [29]"});
  // The output projection is cut by columns: stored as its transpose, rows are inputs.
  for (const ParameterSpec& spec : transformer_block(24, 300))
    if (spec.name == "block_0/down") CHECK(spec.stored_shape() == std::vector<std::int64_t>{300, 24});
}

TEST_CASE("initial values are the same on any grid and have the declared distribution") {
  for (const Family& family : families())
    for (const StorageType storage : {StorageType::fp32, StorageType::bf16}) {
      const auto expected = initial_weights(family, storage, grid_of(1, family.axis, 1));
      for (const std::int64_t ranks : {2, 4})
        for_each_grid(ranks, family.axis, [&](const parallel::GridShape& grid) {
          CAPTURE(grid.text());
          CHECK((initial_weights(family, storage, grid) == expected));
        });
    }
  const auto weights = initial_weights(families()[0], StorageType::fp32, grid_of(1, parallel::kTensorAxis, 1));
  const auto moments_of = [&](const std::string& name) {
    const std::vector<std::byte>& bytes = weights.at(name);
    std::vector<float> values(bytes.size() / 4);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    double sum = 0, squares = 0;
    for (const float value : values) sum += value, squares += static_cast<double>(value) * value;
    const double n = static_cast<double>(values.size());
    return std::pair(sum / n, std::sqrt(squares / n));
  };
  // 7,200 values: the mean is within 5 standard errors of 0, the deviation within 5 % of its value.
  CHECK(std::abs(moments_of("block_0/up").first) < 5 * 0.02 / std::sqrt(7200.0));
  CHECK(moments_of("block_0/up").second == doctest::Approx(0.02).epsilon(0.05));
  CHECK(moments_of("block_0/down").second == doctest::Approx(0.02 / std::sqrt(2.0)).epsilon(0.05));
  CHECK(moments_of("block_0/norm") == std::pair(1.0, 1.0));
  CHECK(moments_of("block_0/up_bias") == std::pair(0.0, 0.0));
}

TEST_CASE("views: held and owned rows, groups in one allocation") {
  const parallel::GridShape grid = grid_of(2, parallel::kTensorAxis, 2);
  const std::int64_t rank = 3;  // second part on both axes
  for (const StorageType storage : kPolicies) {
    Parameters parameters(transformer_block(), storage, grid, rank, execution(), Moments::held);
    const std::size_t down = parameters.index("block_0/down");
    const kernels::ParameterRows &all = parameters.matrix(down), &owned = parameters.owned_matrix(down);
    CHECK(all.rows == 150);
    CHECK(all.columns == 24);
    CHECK(all.first_row == 150);
    CHECK(all.first_moment == nullptr);  // only of the owned rows
    CHECK(owned.rows == 75);
    CHECK(owned.first_row == 225);
    CHECK(owned.global_element(0, 0) == all.global_element(75, 0));
    CHECK(owned.first_moment != nullptr);
    CHECK((owned.first_scale != nullptr) == (storage == StorageType::eight_bit));

    const kernels::AnyMatrix joined = parameters.group("block_0/query_key_value");
    CHECK(joined.rows == 3 * 12);
    CHECK(joined.columns == 24);
    for (int part = 0; part < 3; ++part)
      CHECK(joined.rows_from(12 * part, 12).data ==
            parameters.matrix(parameters.index("block_0/query") + static_cast<std::size_t>(part)).weight);

    const std::size_t bias = parameters.index("block_0/up_bias");
    CHECK(parameters.vector(bias).weight.size == 150);
    CHECK(parameters.owned_vector(bias).weight.data == parameters.vector(bias).weight.data + 75);
    CHECK(parameters.owned_vector(bias).first_moment.size == 75);
    const std::size_t norm = parameters.index("block_0/norm");
    CHECK(parameters.vector(norm).second_moment.size == 24);  // updated everywhere
  }
  const Parameters decoder(factored_decoder(), StorageType::bf16, grid_of(2, parallel::kFeatureAxis, 2), rank,
                           execution(), Moments::held);
  const kernels::AnyMatrix thresholds = decoder.group("thresholds");
  CHECK(thresholds.rows == 3);
  CHECK(thresholds.columns == 15);
  CHECK(decoder.group_state<std::int64_t>("thresholds", "tokens_since_fired").size == 3 * 8);
  CHECK_THROWS_WITH_AS(decoder.index("absent"), "this model has no parameter \"absent\"", Error);
  CHECK_THROWS_AS(decoder.group("absent"), Error);
}

TEST_CASE("a cut keeps the rows of a unit together: heads of 8 rows, 25 on 2 ranks are 12 and 13") {
  const parallel::GridShape grid = grid_of(1, parallel::kTensorAxis, 2);
  for (const int axis : {0, 1}) {
    ParameterSpec spec{.name = "a", .shape = {200, 200}, .cut = {axis, parallel::kTensorAxis, 8}};
    CHECK(row_parts(spec, grid, 0).held.begin == 0);
    CHECK(row_parts(spec, grid, 0).held.end == 96);
    CHECK(row_parts(spec, grid, 1).held.begin == 96);
    CHECK(row_parts(spec, grid, 1).held.end == 200);
    CHECK(most_held_rows(spec, grid) == 104);
  }
}

TEST_CASE("specs that contradict each other are refused") {
  const auto refused = [](std::vector<ParameterSpec> specs) {
    try {
      Parameters(std::move(specs), StorageType::bf16, {}, 0, execution(), Moments::held);
    } catch (const Error& failure) {
      return std::string(failure.what());
    }
    return std::string("accepted");
  };
  CHECK(refused({{.name = "a", .shape = {3, 4}}}) == "accepted");
  CHECK(refused({{.name = "a", .shape = {3, 4}}, {.name = "b", .shape = {3, 4}}}).find("number_elements") !=
        std::string::npos);
  CHECK(refused({{.name = "a", .shape = {3, 4}, .segment = 3}}).find("segment") != std::string::npos);
  CHECK(refused({{.name = "a", .shape = {3}, .cut = {1, parallel::kTensorAxis}}}).find("does not exist") !=
        std::string::npos);
  CHECK(refused({{.name = "a", .shape = {3}, .cut = {0, parallel::kDataAxis}}}).find("data axis") != std::string::npos);
  CHECK(refused({{.name = "a", .shape = {3, 4}, .cut = {0, parallel::kTensorAxis, 2}}}).find("unit") !=
        std::string::npos);
  CHECK(refused({{.name = "a", .shape = {3}, .cut = {0, parallel::kTensorAxis}, .partial_gradient = true}})
            .find("vector without a cut") != std::string::npos);
  CHECK(refused({{.name = "a", .shape = {3}, .group = "g"}, {.name = "b", .shape = {3, 2}, .group = "g"}})
            .find("one group") != std::string::npos);
  CHECK(refused({{.name = "a", .shape = {2, 3, 4}}}).find("axis") != std::string::npos);
}

TEST_CASE("a checkpoint of n ranks is read by m ranks bit for bit") {
  const parallel::Communicator& world = weft::testing::world().all();
  const std::vector<int> counts = {1, 2, 4};
  for (const Family& family : families())
    for (const StorageType storage : kPolicies)
      for (const int n : counts) {
        if (n > world.size()) continue;
        for_each_grid(n, family.axis, [&](const parallel::GridShape& written) {
          CAPTURE(family.name);
          CAPTURE(written.text());
          const testing::Scratch scratch;
          const parallel::Communicator writers = world.split(world.rank() < n ? 0 : 1, world.rank());
          if (world.rank() < n) {
            const Parameters parameters(family.specs, storage, written, writers.rank(), execution(), Moments::held);
            checkpoint::Registry registry;
            parameters.add_to(registry);
            fill(registry);
            checkpoint::Writer writer(writers, scratch.path, checkpoint::Settings{}, registry, execution());
            REQUIRE(writer.start(checkpoint::testing::manifest_of(1)));
            REQUIRE(writer.finish()->durable);
          }
          world.barrier();
          for (const int m : counts) {
            if (m > world.size()) continue;
            const parallel::Communicator readers = world.split(world.rank() < m ? 0 : 1, world.rank());
            if (world.rank() >= m) continue;
            for_each_grid(m, family.axis, [&](const parallel::GridShape& read_by) {
              CAPTURE(read_by.text());
              // Wherever the optimizer state is: the checkpoint does not say.
              const Moments moments = n == m ? Moments::on_host : Moments::held;
              const Parameters parameters(family.specs, storage, read_by, readers.rank(), execution(), moments);
              checkpoint::Registry registry;
              parameters.add_to(registry);
              const auto found = checkpoint::find(readers, scratch.path, "auto", checkpoint::Verify::size);
              REQUIRE(found);
              checkpoint::load(readers, *found, registry, execution());
              CHECK(is_filled(registry));
            });
          }
        });
      }
}

}  // namespace weft::model
