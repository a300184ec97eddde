// SPDX-License-Identifier: Apache-2.0
#include "language_model/settings/configuration.hpp"

#include <fmt/format.h>

#include "kernels/gemm/fp8.hpp"
#include "kernels/language/attention/attention.hpp"
#include "kernels/language/attention/attention_cudnn.hpp"
#include "language_model/blocks/activation_swap.hpp"
#include "language_model/blocks/architecture.hpp"
#include "language_model/blocks/model_parameters.hpp"
#include "language_model/settings/position_keys.hpp"

namespace weft::language_model {
namespace {

// Kernels compute in fp32: smaller numbers would be 0 or lose digits there, larger ones would be infinite.
constexpr double kSmallest = 1.2e-38;
constexpr double kSmallestCap = 1e-3;
constexpr double kMostCanaries = 1 << 16;

/// Width of the MLP that a preset has: 4 d_model, or 8/3 d_model in multiples of 64, which has as many parameters when
/// the activation is gated (Shazeer 2020).
std::int64_t usual_width(const ModelSettings& model) {
  if (!kernels::is_gated(model.mlp)) return 4 * model.d_model;
  return (8 * model.d_model / 3 + 63) / 64 * 64;
}

void add_keys(input::Schema& schema, ModelSettings& model) {
  const auto is_llama = [&model] { return model.preset == Preset::llama; };
  const std::string of_preset = "of the preset";
  schema.table("language_model", "The model: a decoder-only transformer.");
  schema.add("language_model.preset", model.preset, {{"gpt2", Preset::gpt2}, {"llama", Preset::llama}},
             "architecture that gives the defaults: gpt2 (LayerNorm, GELU, learned positions, biases, tied head) "
             "or llama (RMSNorm, SwiGLU, rotary positions, no biases, untied head)");
  schema.add("language_model.layers", model.layers, "transformer blocks").at_least(1).at_most(kMostLayers);
  schema.add("language_model.heads", model.heads, "attention heads").at_least(1).at_most(kMostWidth);
  schema
      .add("language_model.kv_heads", model.kv_heads,
           "heads of keys and values, a divisor of heads; fewer than heads: grouped-query attention")
      .at_least(1)
      .at_most(kMostWidth)
      .derived("heads", [&model] { return input::Value(model.heads); });
  schema.add("language_model.d_model", model.d_model, "width of the residual stream, a multiple of heads")
      .at_least(1)
      .at_most(kMostWidth);
  schema.add("language_model.head_size", model.own_head_size, "columns of a head; 0 = d_model / heads")
      .at_least(0)
      .at_most(kernels::kLargestHead);
  schema
      .add("language_model.norm", model.norm, {{"layer", Norm::layer}, {"rms", Norm::rms}},
           "normalisation: LayerNorm or RMSNorm")
      .derived(of_preset, [=] { return input::Value(is_llama() ? "rms" : "layer"); });
  schema
      .add("language_model.mlp", model.mlp,
           {{"gelu", MlpActivation::gelu},
            {"swiglu", MlpActivation::swiglu},
            {"geglu", MlpActivation::geglu},
            {"relu2", MlpActivation::relu2},
            {"gelu_exact", MlpActivation::gelu_exact}},
           "activation of the MLP: gelu has the tanh form, gelu_exact the error function; swiglu and geglu have a "
           "gate, a third matrix")
      .derived(of_preset, [=] { return input::Value(is_llama() ? "swiglu" : "gelu"); });
  schema.add("language_model.d_mlp", model.d_mlp, "width of the MLP")
      .at_least(1)
      .at_most(8 * kMostWidth)
      .derived("4 d_model; with a gate 8/3 d_model, in multiples of 64",
               [&model] { return input::Value(usual_width(model)); });
  schema
      .add("language_model.position", model.position, {{"learned", Position::learned}, {"rope", Position::rope}},
           "positions: a learned embedding, or rotary (the halves of a head are rotated)")
      .derived(of_preset, [=] { return input::Value(is_llama() ? "rope" : "learned"); });
  add_rotary_keys(schema, model);
  schema.add("language_model.qk_norm", model.qk_norm,
             {{"none", QueryKeyNorm::none},
              {"head", QueryKeyNorm::head},
              {"width", QueryKeyNorm::width},
              {"scaled", QueryKeyNorm::scaled}},
             "norm of queries and keys: RMSNorm of each head, of all heads together, or unit length with a learned "
             "temperature");
  schema.add("language_model.norm_position", model.norm_position,
             {{"pre", NormPosition::pre}, {"post", NormPosition::post}, {"both", NormPosition::both}},
             "a block normalises the inputs of its sublayers, their outputs before they are added, or both");
  schema
      .add("language_model.residual", model.residual,
           {{"sequential", Residual::sequential}, {"parallel", Residual::parallel}},
           "what the MLP of a block reads: the residual stream after the attention, or (parallel) that before it, as "
           "the attention does")
      .not_with("language_model.norm_position", {"post"}, "the MLP would have no memory of its input");
  schema.add("language_model.tied", model.tied, "the head is the token embedding").derived(of_preset, [=] {
    return input::Value(!is_llama());
  });
  schema.add("language_model.bias", model.bias, "biases of products, and of norms if norm = \"layer\"")
      .derived(of_preset, [=] { return input::Value(!is_llama()); });
  schema.add("language_model.biases", model.biases,
             "which of query, key, value (all three or none), output, gate and up (both or none), down have a bias; [] "
             "= as language_model.bias");
  schema
      .add("language_model.train", model.train,
           "what is trained: embedding, attention, mlp, norms, biases, head, block_0, …; the rest is frozen. [] = all")
      .not_with("lora.rank", {}, "adapters are trained, and all of the model is frozen");
  schema
      .add("language_model.dropout", model.dropout,
           "probability with which an element of the embedding and of each sublayer's output is dropped in training")
      .at_least(0)
      .at_most(0.99)
      .not_with(
          "privacy.enabled", {},
          "masks are drawn by the place in the batch, so that one record more would change the gradients of the others")
      .changeable();
  schema
      .add("language_model.attention_dropout", model.attention_dropout,
           "probability with which an attention probability is dropped in training (on a GPU the portable kernel)")
      .at_least(0)
      .at_most(0.99)
      .not_with(
          "privacy.enabled", {},
          "masks are drawn by the place in the batch, so that one record more would change the gradients of the others")
      .changeable();
  schema.add("language_model.logit_softcap", model.logit_softcap, "logits z become c tanh(z / c); 0 = no cap")
      .at_least(0)
      .at_most(kLargest);
  schema.add("language_model.attention_softcap", model.attention_softcap, "scores s become c tanh(s / c); 0 = no cap")
      .at_least(0)
      .at_most(kLargest);
  schema
      .add("language_model.attention_scale", model.attention_scale,
           "factor of the products of queries and keys; 0 = 1 / sqrt(head_size)")
      .at_least(0)
      .at_most(kMostScale);
  schema.add("language_model.embedding_scale", model.embedding_scale, "factor of the embedding")
      .more_than(0)
      .at_most(kMostScale);
  schema.add("language_model.window", model.window, "positions that a query reads, its own included; 0 = all before it")
      .in("tokens")
      .at_least(0)
      .at_most(kMostRows);
  schema
      .add("language_model.full_every", model.full_every,
           "every full_every-th block reads all positions before it; 0 = none")
      .in("blocks")
      .at_least(0)
      .at_most(kMostLayers)
      .only_with("language_model.window", {}, "all blocks read all positions");
  schema
      .add("language_model.rope_window_base", model.rope_window_base,
           "rope_base of the blocks with a window, whose wavelengths rope_factor does not change; 0 = as in the others")
      .at_least(0)
      .at_most(kLargest)
      .only_with("language_model.window", {}, "no block has one");
  schema
      .add("language_model.sparse_blocks", model.sparse_blocks,
           "sparse attention: earlier blocks of 64 keys that a block of 64 queries reads, those with the largest "
           "product of mean query and mean key; 0 = all (dense)")
      .in("blocks")
      .at_least(0)
      .at_most(kMostRows)
      .changeable();
  schema
      .add("language_model.sparse_local", model.sparse_local,
           "sparse attention: last blocks that are always read, the queries' own included")
      .in("blocks")
      .at_least(1)
      .at_most(kMostRows)
      .only_with("language_model.sparse_blocks", {}, "dense attention; a block is 64 tokens of language_model.window")
      .changeable();
  schema.add("language_model.norm_epsilon", model.norm_epsilon, "added to the variance in norms")
      .at_least(kSmallest)
      .at_most(1);
}

void add_keys(input::Schema& schema, MemorySettings& memory) {
  schema
      .add("data.micro_tokens", memory.micro_tokens,
           "tokens of a micro-batch, a multiple of sequence; a step adds up the gradients of its micro-batches; 0 "
           "= the largest that fits into memory and divides the sequences of a rank, kept by a resumed run (weft "
           "benchmark: one micro-batch)")
      .in("tokens")
      .at_least(0)
      .at_most(kMostRows)
      .free();
  schema.table("memory", "What is kept for the backward pass.");
  schema
      .add("memory.recompute", memory.recompute,
           {{"none", Recompute::none},
            {"activation", Recompute::activation},
            {"norm", Recompute::norm},
            {"block", Recompute::block}},
           "what the backward pass recomputes: nothing; outputs of the MLP's activation; these and outputs of "
           "norms; all of a block but its input. The same bits in all cases")
      .free();
  schema
      .add("memory.offload_optimizer", memory.offload_optimizer,
           "optimizer state of matrices (moments, and the low halves of fp32 weights) in page-locked host memory, "
           "copied to the GPU block by block in the update. The same bits; for models whose state does not fit")
      .free();
  schema
      .add("memory.swap_activations", memory.swap_activations,
           "activations for the backward pass, except those of two blocks, are kept in page-locked host memory. "
           "The same bits; an error if recompute = \"block\" costs less time")
      .free();
  schema
      .add("memory.head_chunk", memory.head_chunk,
           "rows whose logits are in memory at a time; 0 = as many as fit into 256 MiB")
      .in("tokens")
      .at_least(0)
      .at_most(kMostRows)
      .free();
}

void add_initial_key(input::Schema& schema, Configuration& configuration) {
  schema
      .add("language_model.initial", configuration.initial,
           "run, checkpoint or directory of Hugging Face with the initial weights; the keys of this table must be "
           "those of its model, which weft inspect prints (of a directory they are the defaults); \"\" = random "
           "weights")
      .path_name()
      .free();
}

void add_parallel_keys(input::Schema& schema, parallel::Settings& parallel) {
  schema.table("parallel", "The processes of the run.");
  parallel::add_timeout_key(schema, parallel);
  schema
      .add("parallel.tensor", parallel.tensor,
           "ranks that divide every matrix and compute on the same tokens, for models that do not fit one GPU; a "
           "divisor of the number of ranks. They exchange in every layer and belong on one node")
      .in("ranks")
      .at_least(1)
      .at_most(1 << 10)
      .not_with("language_model.qk_norm", {"width"}, "its norm is over all heads, which are on several ranks")
      .free();
  schema
      .add("parallel.shard", parallel.shard, {std::begin(parallel::kShards), std::end(parallel::kShards)},
           "what ranks that divide the batch also divide: optimizer state (state); gradients too, exchanged in every "
           "micro-batch (gradients); or also the weights of matrices, gathered block by block in every pass (full)")
      .not_with("privacy.algorithm", {"naive"}, "which forms the gradients of all parameters for each record")
      .free();
  using parallel::Division;
  schema
      .add("parallel.plan", parallel.plan, {{"given", Division::given}, {"auto", Division::automatic}},
           "auto: the program sets parallel.tensor and parallel.shard, for the shortest expected step among "
           "those that fit into memory; a resumed run with as many ranks keeps them")
      .free();
  parallel::add_world_key(schema, parallel);
  schema.add("parallel.node", parallel.node, "ranks of a node, of a plan for parallel.world ranks")
      .in("ranks")
      .at_least(1)
      .at_most(1 << 10)
      .free();
}

void add_device_keys(input::Schema& schema, Configuration& configuration) {
  using kernels::AttentionImplementation;
  device::add_keys(
      schema, configuration.device, configuration.precision,
      {{"fp32", Precision::fp32}, {"tf32", Precision::tf32}, {"bf16", Precision::bf16}, {"fp16", Precision::fp16}},
      "type of activations, their gradients and logits; sums are fp32 in all. tf32: fp32 whose products round their "
      "operands to TF32, on a GPU; fp16: with dynamic loss scaling");
  schema
      .add("device.fp8", configuration.fp8,
           "steps multiply in 8 bits in all blocks but the first and the last: e4m3, and e5m2 for gradients, with "
           "scales from the largest values of the step before; evaluation and generation multiply in bf16")
      .only_with("device.precision", {"bf16"}, "all other operations compute in it")
      .not_with("parallel.tensor", {}, "the ranks would have to agree on scales in each layer")
      .not_with("parallel.shard", {"full"}, "every rank would keep all weights in 8 bits")
      .not_with("lora.rank", {}, "no gradients of the weights are formed, and adapters read rows in bf16")
      .not_with("memory.swap_activations", {}, "blocks would have to have the same activations")
      .not_with("privacy.enabled", {}, "gradients of single records are formed from rows in bf16")
      .free();
  schema.retired("device.fp8_forward", "device.fp8 multiplies in 8 bits in both passes; take it or leave it out");
  schema
      .add("device.attention", configuration.attention_kernels,
           {{"auto", AttentionImplementation::recorded},
            {"own", AttentionImplementation::own},
            {"cudnn", AttentionImplementation::cudnn}},
           "attention kernels on a GPU: those that device.algorithms names, else Weft's own (auto); or always "
           "Weft's own, or cuDNN's")
      .free();
  schema.rule({"device.attention", "device.precision", "device.backend"}, [&configuration]() -> std::string {
    if (configuration.attention_kernels != AttentionImplementation::cudnn) return {};
    if (!kernels::kCudnnBuild)
      return "device.attention = \"cudnn\" is not available (built without cuDNN); take \"auto\", or build with "
             "WEFT_ENABLE_CUDA and the headers of cuDNN (scripts/setup.sh --cuda)";
    if (device::is_wide(configuration.precision) || configuration.device.backend == "portable")
      return "device.attention = \"cudnn\" without the CUDA kernels in 16 bits (cuDNN computes attention in them "
             "alone); take device.precision = \"bf16\", or attention = \"auto\"";
    return {};
  });
}

void add_keys(input::Schema& schema, SampleSettings& sample) {
  schema
      .add("log.sample_tokens", sample.tokens,
           "length of the text that the model writes after each evaluation; 0 = none")
      .in("tokens")
      .at_least(0)
      .at_most(1 << 16)
      .not_with("language_model.sparse_blocks", {},
                "which chooses keys for blocks of queries, which do not exist yet while a text is written")
      .not_with("parallel.shard", {"full"},
                "all weights would be gathered for each token; weft lm generate reads any checkpoint")
      .free();
  schema
      .add("log.sample_temperature", sample.temperature,
           "sampling temperature of that text; 0 = always the most probable token")
      .at_least(0)
      .at_most(100)
      .free();
}

/// Adds the conditions between keys.
void add_rules(input::Schema& schema, const Configuration& configuration) {
  const ModelSettings& model = configuration.language_model;
  schema.rule(
      {"language_model.head_size", "language_model.d_model", "language_model.heads"}, [&model]() -> std::string {
        if (model.own_head_size == 0 && model.d_model % model.heads != 0)
          return fmt::format(
              "language_model.d_model = {} is no multiple of language_model.heads = {} (all heads have one size); take "
              "d_model = {}",
              model.d_model, model.heads, (model.d_model / (8 * model.heads) + 1) * 8 * model.heads);
        const std::int64_t size = model.head_size();
        if (size % 8 == 0 && size <= kernels::kLargestHead) return {};
        if (model.own_head_size > 0)
          return fmt::format("language_model.head_size = {} is not a multiple of 8; take {}", size, (size / 8 + 1) * 8);
        return fmt::format(
            "language_model.d_model = {} and language_model.heads = {} give heads of {} (the size of a head is a "
            "multiple of 8, at most {}); change the number of heads",
            model.d_model, model.heads, size, kernels::kLargestHead);
      });
  schema.rule({"language_model.kv_heads", "language_model.heads"}, [&model]() -> std::string {
    if (model.heads % model.kv_heads == 0) return {};
    return fmt::format(
        "language_model.kv_heads = {} does not divide language_model.heads = {} (each key head serves as many query "
        "heads); take a divisor",
        model.kv_heads, model.heads);
  });
  schema.rule({"language_model.biases"}, [&model] { return biases_problem(model); });
  schema.rule({"language_model.train"}, [&model] { return train_problem(model); });
  schema.rule({"language_model.logit_softcap", "language_model.attention_softcap"}, [&model]() -> std::string {
    for (const auto& [name, cap] :
         {std::pair{"logit_softcap", model.logit_softcap}, std::pair{"attention_softcap", model.attention_softcap}})
      if (cap > 0 && cap < kSmallestCap)
        return fmt::format(
            "language_model.{} = {} leaves nothing (logits and scores of usual size are 1 to 100); "
            "take 0 for none, or a larger one",
            name, cap);
    return {};
  });
  add_rotary_rules(schema, model);
  schema.rule({"data.sequence_start", "log.sample_tokens", "language_model.rope_method"},
              [&configuration]() -> std::string {
                const kernels::RopeScaling& scaling = configuration.language_model.rope_scaling;
                const bool starts_shorter = configuration.data.shortest() != configuration.data.sequence;
                if (!scaling.depends_on_length() || configuration.data.sequence <= scaling.length ||
                    (!starts_shorter && configuration.sample.tokens == 0))
                  return {};
                return fmt::format(
                    "{} with language_model.rope_method = \"{}\" and data.sequence = {} above rope_length = {} "
                    "(wavelengths follow data.sequence, and shorter texts have others); leave it out",
                    starts_shorter ? "data.sequence_start" : "log.sample_tokens",
                    scaling.method == kernels::RopeMethod::dynamic ? "dynamic" : "longrope",
                    configuration.data.sequence, scaling.length);
              });
  schema.rule({"memory.offload_optimizer", "memory.swap_activations"}, [&configuration]() -> std::string {
    const MemorySettings& memory = configuration.memory;
    if (kernels::kCudaBuild || (!memory.offload_optimizer && !memory.swap_activations)) return {};
    return fmt::format(
        "memory.{} = true has no effect without a GPU (this program is built without CUDA: everything is in host "
        "memory); leave it out",
        memory.offload_optimizer ? "offload_optimizer" : "swap_activations");
  });
  schema.rule({"memory.swap_activations", "language_model.layers"}, [&configuration]() -> std::string {
    if (!configuration.memory.swap_activations || configuration.language_model.layers > kResidentBlocks) return {};
    return fmt::format(
        "memory.swap_activations = true has no effect with language_model.layers = {} (activations of {} blocks stay "
        "on the device); leave it out",
        configuration.language_model.layers, kResidentBlocks);
  });
  schema.rule({"device.precision"}, [&configuration]() -> std::string {
    if (configuration.precision != Precision::tf32 || kernels::kCudaBuild) return {};
    return "device.precision = \"tf32\" needs a GPU (TF32 is a format of its matrix units, and this program was built "
           "without CUDA); take \"fp32\"";
  });
  schema.rule({"lora.base", "device.precision"}, [&configuration]() -> std::string {
    if (configuration.lora.packing() == kernels::Packing::none) return {};
    if (configuration.precision == Precision::fp16)
      return "lora.base = \"int8\" or \"nf4\" with device.precision = \"fp16\" (packed weights are multiplied in "
             "bf16); take device.precision = \"bf16\", or lora.base = \"bf16\"";
    return {};
  });
  // Keys and values, in pairs of heads of a multiple of 8, have such widths together.
  schema.rule({"device.fp8", "language_model.d_model", "language_model.d_mlp", "language_model.head_size"},
              [&configuration, &model]() -> std::string {
                const std::int64_t queries = model.heads * model.head_size();
                if (!configuration.fp8 ||
                    (model.d_model % kernels::kCodedMultiple == 0 && model.d_mlp % kernels::kCodedMultiple == 0 &&
                     queries % kernels::kCodedMultiple == 0))
                  return {};
                return fmt::format(
                    "device.fp8 with language_model.d_model = {}, d_mlp = {} and {} columns of queries (products "
                    "in 8 bits take multiples of {}); change the sizes or leave it out",
                    model.d_model, model.d_mlp, queries, kernels::kCodedMultiple);
              });
  schema.rule({"device.fp8", "language_model.layers"}, [&configuration, &model]() -> std::string {
    constexpr std::int64_t kFewest = 3;
    if (!configuration.fp8 || model.layers >= kFewest) return {};
    return fmt::format(
        "device.fp8 with language_model.layers = {} (the first and the last block multiply in bf16); leave it out",
        model.layers);
  });
  schema.rule({"device.fp8", "data.sequence", "data.sequence_start"}, [&configuration]() -> std::string {
    const std::int64_t shortest = configuration.data.shortest();
    if (!configuration.fp8 || shortest % kernels::kCodedMultiple == 0) return {};
    return fmt::format(
        "device.fp8 with sequences of {} tokens (gradients are sums over the tokens of whole sequences, and products "
        "in "
        "8 bits take multiples of {}); take another length or leave it out",
        shortest, kernels::kCodedMultiple);
  });
  schema.rule({"data.micro_tokens", "data.sequence"}, [&configuration]() -> std::string {
    const std::int64_t micro = configuration.memory.micro_tokens, sequence = configuration.data.sequence;
    if (micro % sequence == 0) return {};
    return fmt::format(
        "data.micro_tokens = {} is not a multiple of data.sequence = {} (a micro-batch consists of whole sequences); "
        "take {}",
        micro, sequence, (micro / sequence + 1) * sequence);
  });
  schema.rule({"optimizer.warmup_steps", "run.steps"}, [&configuration]() -> std::string {
    if (configuration.run.epochs > 0 || configuration.optimizer.warmup_fraction > 0 ||
        configuration.optimizer.warmup_steps <= configuration.run.steps)
      return {};
    return fmt::format(
        "optimizer.warmup_steps = {} is more than run.steps = {} (the learning rate would never be reached); shorten "
        "the warm-up",
        configuration.optimizer.warmup_steps, configuration.run.steps);
  });
  schema.rule({"data.sequence_growth_steps", "data.curriculum_steps", "run.steps"}, [&configuration]() -> std::string {
    const dataset::TokenSettings& data = configuration.data;
    const std::int64_t steps = configuration.run.steps;
    if (configuration.run.epochs > 0) return {};  // converted into steps later
    if (data.sequence_growth_steps > steps)
      return fmt::format(
          "data.sequence_growth_steps = {} is more than run.steps = {} (sequences would never have their full length); "
          "take fewer",
          data.sequence_growth_steps, steps);
    if (data.curriculum_steps > steps)
      return fmt::format(
          "data.curriculum_steps = {} is more than run.steps = {} (the most difficult text segments would never be "
          "drawn); take fewer",
          data.curriculum_steps, steps);
    return {};
  });
  schema.rule({"device.attention", "language_model.attention_softcap", "language_model.attention_dropout",
               "language_model.sparse_blocks", "language_model.d_model", "language_model.heads", "data.document_mask"},
              [&configuration]() -> std::string {
                if (configuration.attention_kernels != kernels::AttentionImplementation::cudnn ||
                    library_attention(configuration))
                  return {};
                return "device.attention = \"cudnn\" with a cap, dropout, sparse blocks, a document mask or heads of "
                       "more than 128 (which its kernels do not have); take \"auto\"";
              });
  schema.rule({"parallel.shard", "device.precision", "memory.offload_optimizer"}, [&configuration]() -> std::string {
    if (configuration.parallel.shard != parallel::Shard::full || configuration.precision != Precision::fp16 ||
        !configuration.memory.offload_optimizer)
      return {};
    return "parallel.shard = \"full\" with device.precision = \"fp16\" and memory.offload_optimizer (exact weights are "
           "gathered, a part of which would be in host memory); take \"bf16\", or leave out offload_optimizer";
  });
  schema.rule({"parallel.plan"}, [&configuration]() -> std::string {
    if (configuration.parallel.plan == parallel::Division::given ||
        (configuration.parallel.tensor == 1 && configuration.parallel.shard == parallel::Shard::state))
      return {};
    return "parallel.plan = \"auto\" with parallel.tensor or parallel.shard (which it chooses); leave them out";
  });
  schema.rule({"parallel.tensor", "language_model.kv_heads", "language_model.d_mlp"}, [&configuration, &model] {
    return obstacle_to_division({.model = model}, configuration.parallel.tensor);
  });
  schema.rule({"run.stop_after", "checkpoint.keep_best", "data.validation_fraction"},
              [&configuration]() -> std::string {
                const bool stops = configuration.run.stop_after > 0, keeps = configuration.checkpoint.keep_best;
                if (!configuration.privacy.enabled || configuration.data.validation_fraction == 0 || !(stops || keeps))
                  return {};
                return fmt::format(
                    "{} with privacy.enabled and data.validation_fraction (the choice would follow the loss on a "
                    "part of the private text); give public validation data (data.validation), or leave it out",
                    stops ? "run.stop_after" : "checkpoint.keep_best");
              });
  schema.rule({"optimizer.clip_mode"}, [&configuration]() -> std::string {
    if (configuration.optimizer.clip_mode == optimizer::ClipMode::exact) return {};
    return "optimizer.clip_mode = \"previous\" is for transcoders (a language model has its gradient in memory before "
           "the update, so the exact norm costs no further pass); take \"exact\"";
  });
}

}  // namespace

bool library_attention(const Configuration& configuration) {
  const ModelSettings& model = configuration.language_model;
  return model.attention_softcap == 0 && model.attention_dropout == 0 && model.sparse_blocks == 0 &&
         !configuration.data.document_mask && model.head_size() <= kernels::cudnn::kLargestLibraryHead;
}

std::string obstacle_to_grid(const Configuration& configuration, const Architecture& architecture) {
  Configuration checked;
  const input::Schema schema = language_model::schema(checked);
  checked = configuration;
  for (const char* const key : {"parallel.tensor", "parallel.shard"})
    if (std::string why = schema.problem_of(key); !why.empty()) return why;
  return obstacle_to_division(architecture, configuration.parallel.tensor);
}

parallel::GridShape grid_shape(const Configuration& configuration) {
  return parallel::GridShape({{std::string(parallel::kDataAxis), configuration.parallel.data},
                              {std::string(parallel::kTensorAxis), configuration.parallel.tensor}});
}

parallel::GridShape one_copy(std::int64_t n_ranks) {
  Configuration configuration;
  configuration.parallel.tensor = n_ranks;
  return grid_shape(configuration);
}

parallel::GridShape single_process() { return one_copy(1); }

void require_groups(std::int64_t tensor, std::int64_t n_ranks) {
  if (n_ranks % tensor != 0)
    throw collective_error(ExitCode::usage,
                           "{} ranks do not divide into groups of parallel.tensor = {} (a group has one copy of the "
                           "model); start a multiple of {} ranks",
                           n_ranks, tensor, tensor);
}

void use_ranks(Configuration& configuration, std::int64_t n_ranks) {
  const std::int64_t sequences = configuration.data.batch_tokens / configuration.data.sequence,
                     tensor = configuration.parallel.tensor;
  require_groups(tensor, n_ranks);
  if (n_ranks / tensor > sequences)
    throw collective_error(ExitCode::usage,
                           "{} {} for the {} sequences of a step (data.batch_tokens = {}, data.sequence = {}: each "
                           "{} needs one); start fewer ranks",
                           n_ranks / tensor, tensor == 1 ? "ranks" : "groups of ranks", sequences,
                           configuration.data.batch_tokens, configuration.data.sequence,
                           tensor == 1 ? "rank" : "group");
  configuration.parallel.data = n_ranks / tensor;
}

Configuration::Configuration() {
  optimizer.learning_rate = 6e-4;
  optimizer.beta2 = 0.95;
  optimizer.weight_decay = 0.1;
  optimizer.clip_norm = 1.0;
  optimizer.schedule = optimizer::Schedule::cosine;
  optimizer.warmup_steps = 100;
  optimizer.decay_begin = 0;
  optimizer.final_fraction = 0.1;
}

input::Schema schema(Configuration& configuration) {
  input::Schema schema;
  run::add_keys(schema, configuration.run);
  dataset::add_keys(schema, configuration.data);
  add_keys(schema, configuration.language_model);
  add_initial_key(schema, configuration);
  optimizer::add_keys(schema, configuration.optimizer);
  optimizer::add_tuning_keys(schema, configuration.optimizer);
  optimizer::add_warmup_fraction(schema, configuration.optimizer);
  privacy::add_keys(schema, configuration.privacy);
  schema
      .add("privacy.canaries", configuration.privacy.canaries,
           "records of random ids that are added to those of the data, each with probability 1/2, by a secret coin: "
           "weft privacy audit guesses the coins from the model. 0 = none")
      .at_least(0)
      .at_most(kMostCanaries);
  add_keys(schema, configuration.lora, configuration.language_model);
  add_keys(schema, configuration.memory);
  add_parallel_keys(schema, configuration.parallel);
  add_device_keys(schema, configuration);
  checkpoint::add_keys(schema, configuration.checkpoint);
  run::add_keys(schema, configuration.log);
  add_keys(schema, configuration.sample);
  run::add_keys(schema, configuration.resume);
  privacy::add_rules(schema, configuration.privacy, configuration.precision);
  privacy::add_sequence_rules(schema, configuration.privacy);
  schema.at("optimizer.tuning")
      .not_with("privacy.enabled", {},
                "the learning rate would follow the loss on private data, to which no noise is added");
  add_rules(schema, configuration);
  return schema;
}

}  // namespace weft::language_model
