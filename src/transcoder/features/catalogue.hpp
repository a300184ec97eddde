// SPDX-License-Identifier: Apache-2.0
//
// The features of one layer with everything that `weft features` writes about them, on rank 0: collected activations,
// contexts of examples, norms of the decoder rows, nearest rows, and effects on logits and on features of later layers.
// One layer at a time bounds the memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "dataset/activations/row_tokens.hpp"
#include "storage/hdf5.hpp"
#include "storage/json_file.hpp"
#include "storage/pending_output.hpp"
#include "transcoder/features/collection.hpp"
#include "transcoder/features/decoder_rows.hpp"

namespace weft::transcoder {

/// Sizes and sources of a catalogue, the same for all layers.
struct CatalogueFacts {
  std::string checkpoint, data, dataset_fingerprint, model;  ///< model: the model of the dataset; "" = unknown
  std::int64_t step = 0;
  std::int64_t tokens = 0;  ///< tokens of the dataset
  std::int64_t n_layers = 0, d_model = 0, n_features = 0;
  std::int64_t n_top = 0;     ///< strongest activations per feature
  std::int64_t context = 0;   ///< tokens before and after a token; 0 without token ids
  std::int64_t n_sample = 0;  ///< further activations per feature, drawn at random
  std::int64_t n_nearest = 0;
  std::int64_t n_logits = 0;      ///< tokens that a feature raises, and lowers, most; 0 without a language model
  std::int64_t n_downstream = 0;  ///< features of later layers that a feature excites most
  std::int64_t n_coactive = 0;    ///< features of the layer that fire most often at the same tokens
  bool has_tokens = false;

  std::int64_t window() const { return has_tokens ? 2 * context + 1 : 0; }
  std::int64_t n_examples() const { return n_top + n_sample; }
};

/// Values of the features of one layer, by feature. CatalogueFacts has the other sizes.
struct LayerCatalogue {
  std::int64_t layer = 0;
  std::int64_t targets = 0;             ///< target layers layer, layer + 1, ...
  std::vector<std::int64_t> fired;      ///< [F] number of tokens
  std::vector<double> mean;             ///< [F] mean of the activations > 0; 0 if there is none
  std::vector<std::int64_t> histogram;  ///< [F, kHistogramBins]
  // Examples (FeatureCollection): the strongest, then the sample.
  std::vector<float> value;            ///< [F, n_examples]; 0: fewer
  std::vector<std::int64_t> row;       ///< [F, n_examples] row of the dataset in stored order; -1: fewer
  std::vector<std::int64_t> position;  ///< [F, n_examples] of that row in its document; -1: fewer, or no token ids
  std::vector<std::int32_t> token;     ///< [F, n_examples, 2 * context + 1] ids; -1 outside the document
  std::vector<std::uint8_t> shade;     ///< [F, n_examples, 2 * context + 1] as Shades
  std::vector<double> share;           ///< [F, targets] part of the squared norm of the decoder row
  std::vector<std::int64_t> nearest;   ///< [F, n_nearest] feature of the layer; -1: fewer
  std::vector<float> cosine;           ///< [F, n_nearest]
  LargestEntries raised, lowered;      ///< [F, n_logits] token ids
  LargestEntries downstream;           ///< [F, n_downstream] layer * F + feature; -1: fewer
  LargestEntries coactive;             ///< [F, n_coactive] likewise
};

/// Label of a feature, by layer and feature.
using Labels = std::map<std::pair<std::int64_t, std::int64_t>, std::string>;
/// Reads lines {"layer": 3, "feature": 17, "label": "days of the week"}, one for each labelled feature; other members
/// are left out. Throws Error(data) that begins with path and line.
Labels read_labels(const std::string& path, std::int64_t n_layers, std::int64_t n_features);

/// What the catalogue is formed from. Null: not there.
struct CatalogueSources {
  const FeatureCollection& collection;
  const Shades* shades;        ///< with token ids
  dataset::RowTokens* tokens;  ///< with token ids
  const Model& model;
  const NormalisationOnDevice& normalisation;
  const RowBlocks* unembedding;  ///< with a language model: [vocabulary, d_model]
  const RowSample& drawn;        ///< for co-active features
};
/// Gathers a layer on rank 0; empty arrays elsewhere. Collective. Throws a collective Error(data) if the tokens cannot
/// be read.
LayerCatalogue gather_layer(const CatalogueFacts&, std::int64_t layer, const CatalogueSources&, const parallel::Grid&,
                            const kernels::Execution&);

/// Writes features.h5 (docs/file_formats.md), layer by layer; the file appears under its name when it is complete, in
/// place of an older one. Throws Error(io).
class CatalogueFile {
 public:
  CatalogueFile(const std::filesystem::path&, const CatalogueFacts&, const dataset::Vocabulary&, const Labels&);
  void add(const LayerCatalogue&);
  void finish();

 private:
  storage::PendingOutput output_;
  const CatalogueFacts facts_;
  storage::Handle file_;
};

/// Converts one feature to JSON; with texts where there is a vocabulary.
Json to_json(const CatalogueFacts&, const LayerCatalogue&, std::int64_t feature, const dataset::Vocabulary&,
             const Labels&);

}  // namespace weft::transcoder
