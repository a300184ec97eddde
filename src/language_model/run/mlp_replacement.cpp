// SPDX-License-Identifier: Apache-2.0
#include "language_model/run/mlp_replacement.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "base/format.hpp"
#include "base/progress.hpp"
#include "kernels/convert/affine.hpp"
#include "kernels/convert/convert_rows.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "language_model/run/text_evaluation.hpp"
#include "run/pass.hpp"

namespace weft::language_model {
namespace {

using kernels::AnyMatrix;
using kernels::Array;
using kernels::Scalar;

// Error terms restore each output but for one rounding of fp32. A selection near its threshold may then differ in a few
// rows: far less than this fraction of the loss.
constexpr double kErrorTolerance = 1e-3;

/// Array [columns] filled with one value, where the kernels run.
device::Buffer<float> filled(std::int64_t columns, float value, const kernels::Execution& execution) {
  const std::vector<float> host(static_cast<std::size_t>(columns), value);
  device::Buffer<float> buffer(columns);
  device::copy(execution, buffer.data(), host.data(), buffer.bytes(), device::Direction::to_device);
  kernels::fence(execution);
  return buffer;
}

/// The passes over one batch.
class Passes {
 public:
  Passes(std::int64_t rows, Scalar type, const ModelSettings& model, const Reconstruction& reconstruction,
         Transformer& transformer, Staging& staging, const kernels::Execution& execution)
      : reconstruction_(reconstruction),
        transformer_(transformer),
        staging_(staging),
        execution_(execution),
        width_(model.d_model),
        columns_(model.layers * model.d_model),
        type_(type),
        inputs_(rows * columns_ * kernels::bytes_of(type)),
        patched_(inputs_.size()),
        outputs_(rows * columns_),
        reconstructed_(outputs_.size()),
        errors_(outputs_.size()),
        current_(outputs_.size()),
        zeros_(filled(width_, 0, execution)),
        negative_(filled(columns_, -1, execution)) {}

  /// Loss of the unchanged model. Keeps inputs, their reconstructions, and the error terms.
  double original(const Tokens& tokens) {
    rows_ = tokens.rows();
    const double loss = pass(tokens, [&](std::int64_t layer, const AnyMatrix& input, const AnyMatrix& output) {
      kernels::copy_rows(execution_, input, of_layer(stored(inputs_), layer));
      kernels::affine_rows(execution_, output, {}, {}, {}, of_layer(whole(outputs_), layer));
    });
    reconstruction_.form(stored(inputs_), matrix(reconstructed_));
    kernels::affine_rows(execution_, whole(reconstructed_), negative_.array(), {}, whole(outputs_), whole(errors_));
    return loss;
  }
  double alone(const Tokens& tokens, std::int64_t only) {
    return pass(tokens, [&](std::int64_t layer, const AnyMatrix&, const AnyMatrix& output) {
      if (layer == only) kernels::affine_rows(execution_, of_layer(whole(reconstructed_), layer), {}, {}, {}, output);
    });
  }
  double together(const Tokens& tokens, bool with_errors) {
    kernels::copy_rows(execution_, stored(inputs_), stored(patched_));
    return pass(tokens, [&](std::int64_t layer, const AnyMatrix& input, const AnyMatrix& output) {
      kernels::copy_rows(execution_, input, of_layer(stored(patched_), layer));
      reconstruction_.form(stored(patched_), matrix(current_));
      kernels::affine_rows(execution_, of_layer(whole(current_), layer), {}, {},
                           with_errors ? of_layer(whole(errors_), layer) : AnyMatrix{}, output);
    });
  }
  /// Loss with the outputs of one layer (-1: of all) replaced by their mean, or by 0.
  double ablated(const Tokens& tokens, std::int64_t only, bool mean) {
    return pass(tokens, [&](std::int64_t layer, const AnyMatrix&, const AnyMatrix& output) {
      if (only >= 0 && layer != only) return;
      const Array<const float> of_mean{reconstruction_.mean.data + layer * width_, mean ? width_ : 0};
      kernels::affine_rows(execution_, of_layer(whole(outputs_), layer), zeros_.array(), of_mean, {}, output);
    });
  }

 private:
  /// The sum of the losses of a batch, in the order of its rows.
  double pass(const Tokens& tokens, Transformer::Tap tap) {
    note_progress();
    transformer_.tap(std::move(tap));
    transformer_.forward(tokens, nullptr);
    transformer_.losses(tokens, staging_.losses());
    transformer_.tap({});
    std::vector<float> host(static_cast<std::size_t>(tokens.rows()));
    device::copy(execution_, host.data(), staging_.losses().data, tokens.rows() * 4, device::Direction::to_host);
    kernels::fence(execution_);
    double sum = 0;
    for (const float loss : host) sum += static_cast<double>(loss);
    return sum;
  }
  AnyMatrix stored(const device::Buffer<std::byte>& buffer) const {
    return {buffer.data(), type_, rows_, columns_, columns_};
  }
  AnyMatrix whole(const device::Buffer<float>& buffer) const {
    return {buffer.data(), Scalar::fp32, rows_, columns_, columns_};
  }
  kernels::Matrix<float> matrix(const device::Buffer<float>& buffer) const { return buffer.matrix(rows_, columns_); }
  AnyMatrix of_layer(const AnyMatrix& all, std::int64_t layer) const {
    return all.columns_from(layer * width_, width_);
  }

  const Reconstruction& reconstruction_;
  Transformer& transformer_;
  Staging& staging_;
  const kernels::Execution execution_;
  const std::int64_t width_, columns_;
  const Scalar type_;
  // [rows, layers * C]: inputs of the model and of the replaced model; outputs of the model, reconstructions from its
  // inputs, what these leave, and reconstructions of the replaced model.
  const device::Buffer<std::byte> inputs_, patched_;
  const device::Buffer<float> outputs_, reconstructed_, errors_, current_;
  const device::Buffer<float> zeros_, negative_;
  std::int64_t rows_ = 0;
};

Json to_json(const ReplacedLosses& losses, double original) {
  return {{"loss", losses.replaced},
          {"loss_zero_ablated", losses.zero},
          {"loss_mean_ablated", losses.mean},
          {"recovered_from_zero", losses.recovered_from_zero(original)},
          {"recovered_from_mean", losses.recovered_from_mean(original)}};
}

}  // namespace

Json to_json(const ReplacementResult& result) {
  Json json = {{"tokens", result.tokens},
               {"loss_original", result.original},
               {"loss_with_error_terms", result.with_errors},
               {"all_layers", to_json(result.together, result.original)}};
  json["layers"] = Json::array();
  for (const ReplacedLosses& losses : result.alone) json["layers"].push_back(to_json(losses, result.original));
  return json;
}

std::string to_table(const ReplacementResult& result) {
  std::string text = fmt::format(
      "loss of the model {:.4f}, with error terms {:.4f} nats per token, {} tokens\n"
      "replaced      loss  zero-abl.  mean-abl.  recovered: zero   mean",
      result.original, result.with_errors, format::grouped(result.tokens));
  const auto line = [&](const std::string& name, const ReplacedLosses& losses) {
    text += fmt::format("\n{:<9} {:>8.4f}   {:>8.4f}   {:>8.4f}         {:>8.3f} {:>6.3f}", name, losses.replaced,
                        losses.zero, losses.mean, losses.recovered_from_zero(result.original),
                        losses.recovered_from_mean(result.original));
  };
  for (std::size_t layer = 0; layer < result.alone.size(); ++layer)
    line(fmt::format("layer {}", layer), result.alone[layer]);
  line("all", result.together);
  return text;
}

ReplacementResult evaluate_replaced(const dataset::Segments& segments, std::int64_t length, std::int64_t rows,
                                    const ModelSettings& model, Scalar type, const Reconstruction& reconstruction,
                                    Transformer& transformer, Staging& staging, const kernels::Execution& execution,
                                    const parallel::Communicator* ranks) {
  const std::int64_t windows = segments.count(length), together = std::max<std::int64_t>(1, rows / length);
  Passes passes(together * length, type, model, reconstruction, transformer, staging, execution);
  // The sums of a batch: of the model, of each layer alone, of all together, with error terms.
  const std::int64_t n_sums = 3 * model.layers + 5, batches = (windows + together - 1) / together;
  std::vector<double> sums(static_cast<std::size_t>(batches * n_sums));
  ReplacementResult result;
  result.alone.resize(static_cast<std::size_t>(model.layers));
  run::Pass pass("evaluation with replaced MLPs", batches, "batches");
  for (std::int64_t number = 0; number < batches; ++number) {
    if (!is_own_batch(number, ranks)) continue;
    const std::int64_t first = number * together;
    dataset::TokenBatch batch = staging.next(std::min(together, windows - first), length);
    segments.fill(first, batch);
    staging.send(batch);
    const Tokens tokens = staging.tokens(0, batch.sequences, length);
    result.tokens += batch.counted;
    double* sum = &sums[static_cast<std::size_t>(number * n_sums)];
    *sum++ = passes.original(tokens);
    for (std::int64_t layer = 0; layer < model.layers; ++layer) {
      *sum++ = passes.alone(tokens, layer);
      *sum++ = passes.ablated(tokens, layer, false);
      *sum++ = passes.ablated(tokens, layer, true);
    }
    *sum++ = passes.together(tokens, false);
    *sum++ = passes.ablated(tokens, -1, false);
    *sum++ = passes.ablated(tokens, -1, true);
    *sum++ = passes.together(tokens, true);
    pass.done(number + 1);
  }
  share(sums, ranks);
  if (ranks != nullptr) ranks->sum({&result.tokens, 1});
  for (const double* sum = sums.data(); sum < sums.data() + sums.size();) {
    const auto add = [&](ReplacedLosses& losses) {
      losses.replaced += *sum++;
      losses.zero += *sum++;
      losses.mean += *sum++;
    };
    result.original += *sum++;
    for (ReplacedLosses& losses : result.alone) add(losses);
    add(result.together);
    result.with_errors += *sum++;
  }
  const auto finish = [&](double& sum) {
    sum /= static_cast<double>(std::max<std::int64_t>(1, result.tokens));
    if (!std::isfinite(sum))
      throw collective_error(ExitCode::numeric,
                             "{}: a loss with replaced MLPs is not finite (the model or the transcoder has "
                             "weights that are not, or too large)",
                             segments.set().name());
  };
  const auto finish_all = [&](ReplacedLosses& losses) {
    finish(losses.replaced);
    finish(losses.zero);
    finish(losses.mean);
  };
  finish(result.original);
  finish(result.with_errors);
  finish_all(result.together);
  for (ReplacedLosses& losses : result.alone) finish_all(losses);
  if (std::abs(result.with_errors - result.original) > kErrorTolerance * result.original)
    throw collective_error(
        ExitCode::numeric,
        "{}: with error terms the loss is {:.6f}, that of the model {:.6f} (they are equal but for rounding); is "
        "the transcoder's selection unstable? Try --set device.precision=\"fp32\"",
        segments.set().name(), result.with_errors, result.original);
  return result;
}

}  // namespace weft::language_model
