// SPDX-License-Identifier: Apache-2.0
//
// The keys of Weft: that each is described, that the conditions between them hold, and what a resumed run may change.
#include "base/error.hpp"
#include "input/print.hpp"
#include "input/read.hpp"
#include "tests/test.hpp"
#include "transcoder/settings/settings_schema.hpp"

using namespace weft;
using transcoder::Configuration;

namespace {

Configuration values(const std::string& text) {
  Configuration configuration;
  input::read(transcoder::schema(configuration), text, "a.toml");
  return configuration;
}

std::string message(const std::string& text) {
  try {
    values(text);
  } catch (const Error& failure) {
    return failure.what();
  }
  return {};
}

}  // namespace

TEST_CASE("every key has help and accepts its own default") {
  Configuration configuration;
  const input::Schema schema = transcoder::schema(configuration);
  for (const input::Key& key : schema.keys()) CHECK_MESSAGE(key.help.size() > 10, key.path());
  for (const input::Table& table : schema.tables()) CHECK_MESSAGE(table.help.size() > 10, table.name);
  // Reading the template checks each default against its own range and all conditions.
  CHECK(message(input::defaults(schema)) == "");
}

TEST_CASE("bands about thresholds are listed by default where that is possible and lists have room for them") {
  const auto listed = [](const std::string& keys) {
    return transcoder::lists_bands(values("[transcoder]\nfeatures = 48\nactivation = 'jumprelu'\n" + keys).transcoder);
  };
  CHECK(listed("capacity = 9\nthreshold = 0.3\nbandwidth = 0.6\n"));
  CHECK(!listed("threshold = 0.3\nbandwidth = 0.6\n"));
  CHECK(!listed("capacity = 9\nthreshold = 0.3\nbandwidth = 0.7\n"));
  CHECK(!listed("capacity = 9\nthreshold = 0.3\nbandwidth = 0.2\nbandwidth_initial = 1\n"));
  CHECK(!listed("capacity = 9\nthreshold = 0.3\nbandwidth = 0.6\npreactivation_penalty = 0.1\n"));
  CHECK(!listed("capacity = 9\npseudo_derivative = 'goreg'\n"));
  CHECK(!listed("capacity = 9\nthreshold = 0.3\nbandwidth = 0.6\nthreshold_gradient = 'dense'\n"));
  CHECK(listed("threshold_gradient = 'listed'\n"));
  const auto refused = [](const std::string& keys) {
    return message("[transcoder]\nfeatures = 48\nthreshold_gradient = 'listed'\n" + keys);
  };
  CHECK(refused("activation = 'jumprelu'\npseudo_derivative = 'goreg'\n").find("take \"dense\"") != std::string::npos);
  CHECK(refused("activation = 'jumprelu'\npreactivation_penalty = 1\n").find("take \"dense\"") != std::string::npos);
  CHECK(refused("activation = 'topk'\n").find("leave it out") != std::string::npos);
}

TEST_CASE("a preset fills in what the input does not give, and refuses what it cannot have") {
  const Configuration c =
      values("[transcoder]\nfeatures = 48\npreset = 'clt-forge'\nsparsity = 3\n[run]\nsteps = 2000\n");
  CHECK(c.data.normalise == dataset::Normalise::scalar);
  CHECK(c.transcoder.activation == transcoder::Activation::jumprelu);
  CHECK(c.transcoder.pseudo_derivative == transcoder::JumpForm::clt_forge);
  CHECK(c.transcoder.threshold == 0.03);  // of the pseudo-derivative
  CHECK(c.transcoder.error_reduction == transcoder::Reduction::tokens);
  CHECK(c.transcoder.decoder_bias == transcoder::DecoderBias::pair);
  CHECK(c.transcoder.sparsity == 3);  // as given
  CHECK(c.optimizer.clip_norm == 1);
  CHECK(c.optimizer.epsilon == 1e-8);
  // Without a preset, and with that of Weft, every key has its default.
  Configuration plain = values("[transcoder]\nfeatures = 48\n"),
                weft = values("[transcoder]\nfeatures = 48\npreset = 'weft'\n");
  CHECK(input::print(transcoder::schema(plain)) == input::print(transcoder::schema(weft)));
  // The resolved input names every value: it gives the same without the preset.
  for (const char* preset : {"crosslayer-coding", "eleuther", "goreg", "clt-forge", "openmoss", "anthropic"}) {
    Configuration first =
        values(std::string("[transcoder]\nfeatures = 48\npreset = '") + preset + "'\n[run]\nsteps = 2000\n");
    std::string text = input::print(transcoder::schema(first));
    const std::size_t at = text.find("preset = ");
    text.replace(at, text.find('\n', at) - at, "preset = \"weft\"");
    Configuration second = values(text);
    second.transcoder.preset = first.transcoder.preset;
    CHECK(input::print(transcoder::schema(first)) == input::print(transcoder::schema(second)));
  }
  // GoReg's penalties are those of its jumprelu.
  CHECK(values("[transcoder]\nfeatures = 48\npreset = 'goreg'\n").transcoder.sparsity == 7e-4);
  CHECK(values("[transcoder]\nfeatures = 48\npreset = 'goreg'\nactivation = 'topk'\n").transcoder.sparsity == 0);
  const auto refused = [](const char* preset, const char* activation) {
    return message(std::string("[transcoder]\nfeatures = 48\npreset = '") + preset + "'\nactivation = '" + activation +
                   "'\npreactivation_penalty = 0\nranking = 'value'\n[run]\nsteps = 2000\n")
               .find("is for transcoder.activation") != std::string::npos;
  };
  CHECK(refused("crosslayer-coding", "batch_topk"));
  CHECK(!refused("crosslayer-coding", "relu"));
  CHECK(refused("eleuther", "batch_topk"));
  CHECK(message("[transcoder]\nfeatures = 48\npreset = 'openmoss'\nactivation = 'jumprelu'\nranking = "
                "'value'\n[run]\nsteps = 2000\n")
            .find("those of Weft do not") != std::string::npos);
  CHECK(message("[transcoder]\nfeatures = 48\nauxk = 1\nerror = 'raw'\n").find("normalised space") !=
        std::string::npos);
  CHECK(message("[transcoder]\nfeatures = 48\nerror_reduction = 'tokens'\nerror = 'unexplained'\n")
            .find("variance of the targets") != std::string::npos);
  CHECK(message("[transcoder]\nfeatures = 48\nk_total = 9\nk_initial = 20\n").find("k_initial") != std::string::npos);
}

TEST_CASE("an input reaches the members") {
  const Configuration c = values(
      "[run]\nsteps = 10\nseed = 3\nnonfinite = 'skip'\n[data]\ntrain = 'd'\nnormalise = 'scalar'\ntargets = 'inputs'\n"
      "[transcoder]\nfeatures = 48\nactivation = 'topk'\nk = 4\nscope = 'all_layers'\ndecoder = 'per_layer'\n"
      "[optimizer]\nstate = '8bit'\nschedule = 'cosine'\nclip_mode = 'previous'\n[device]\nprecision = 'bf16'\nthreads "
      "= 2\n"
      "[checkpoint]\nverify = 'size'\nstaging = 'chunked'\n[parallel]\ndata = 2\n[log]\nevery = "
      "1\n[resume]\naccept_changed = true\n");
  CHECK(c.run.steps == 10);
  CHECK(c.run.seed == 3);
  CHECK(c.run.nonfinite == transcoder::NonFinite::skip);
  CHECK(c.data.train == "d");
  CHECK(c.data.normalise == dataset::Normalise::scalar);
  CHECK(c.data.targets == dataset::Targets::inputs);
  CHECK(c.transcoder.features == 48);
  CHECK(c.transcoder.activation == transcoder::Activation::topk);
  CHECK(c.transcoder.k == 4.0);
  CHECK(c.transcoder.scope == transcoder::Scope::all_layers);
  CHECK(c.transcoder.decoder == transcoder::Decoder::per_layer);
  CHECK(values("[transcoder]\nfeatures = 48\nskip = 'linear'\n").transcoder.skip == transcoder::Skip::linear);
  CHECK(c.optimizer.state == kernels::StorageType::eight_bit);
  CHECK(c.optimizer.schedule == optimizer::Schedule::cosine);
  CHECK(c.optimizer.clip_mode == optimizer::ClipMode::previous);
  CHECK(c.precision == transcoder::Precision::bf16);
  CHECK(c.device.threads == 2);
  CHECK(c.checkpoint.verify == checkpoint::Verify::size);
  CHECK(c.checkpoint.staging == checkpoint::Staging::chunked);
  CHECK(c.parallel.data == 2);
  CHECK(c.log.every == 1);
  CHECK(c.resume.accept_changed);
}

TEST_CASE("conditions between keys are reported with their position") {
  const std::string model = "[transcoder]\nfeatures = 8\n";
  CHECK(message(model + "k = 2.5\nactivation = 'topk'\n") ==
        "a.toml:3:1: transcoder.k = 2.5 must be whole (activation = \"topk\" counts the features of each token and "
        "layer); "
        "take 3 or activation = \"batch_topk\"");
  CHECK(message(model + "k = 2.5\n") == "");
  CHECK(message(model + "k = 9\n") ==
        "a.toml:3:1: transcoder.k = 9 is more than transcoder.features = 8 (k counts active features per token and "
        "layer); take a "
        "smaller k");
  CHECK(message(model + "k = 9\nactivation = 'relu'\n") == "");  // k has no part in it
  CHECK(message(model + "k = 4\nskip = 'linear'\n[data]\ntargets = 'inputs'\n")
            .find("transcoder.skip does not go with data.targets = \"inputs\"") != std::string::npos);
  CHECK(message(model + "k = 4\n[optimizer]\nwarmup_steps = 20\n[run]\nsteps = 10\n") ==
        "a.toml:5:1: optimizer.warmup_steps = 20 is more than run.steps = 10 (the learning rate would never be "
        "reached); shorten the "
        "warm-up");
  CHECK(message(model + "k = 4\n[data]\nbatch_tokens = 10\nmicro_tokens = 20\n")
            .starts_with("a.toml:6:1: data.micro_tokens = 20 is more than"));
  CHECK(message(model + "k = 4\n[data]\nblock_rows = 100\nwindow_rows = 250\n") ==
        "a.toml:6:1: data.window_rows = 250 is not a multiple of data.block_rows = 100 (a window consists of whole "
        "blocks); take 300");
  CHECK(message(model + "k = 4\n[run]\nwalltime = '1h'\n") ==
        "a.toml:5:1: run.walltime = \"1h\" is not a time (hours:minutes:seconds); write it as \"11:55:00\"");
  CHECK(message(model + "k = 4\n[run]\nwalltime = '0:00:00'\n")
            .starts_with("a.toml:5:1: run.walltime = \"0:00:00\" leaves no time"));
  CHECK(message(model + "k = 4\n[optimizer]\nbeta2 = 1\ndecay_begin = 1.1\n[checkpoint]\nkeep = 1\n") ==
        "3 problems in the input\n"
        "a.toml:5:9: optimizer.beta2 = 1.0 is out of range (allowed: at least 0, less than 1)\n"
        "a.toml:6:15: optimizer.decay_begin = 1.1 is out of range (allowed: at least 0, at most 1; unit: fraction of "
        "the schedule)\n"
        "a.toml:8:8: checkpoint.keep = 1 is out of range (allowed: at least 2)");
}

TEST_CASE("the decoder of low rank of earlier versions is an error, also in the input of a checkpoint") {
  const std::string model = "[transcoder]\nfeatures = 8\nk = 4\nrank = 0\n", decoder = "decoder = 'low_rank'\n";
  CHECK(message(model + decoder).find("a.toml:4:1: unknown key \"rank\" in [transcoder]") != std::string::npos);
  CHECK(message(model + decoder).find("take \"per_layer\"") != std::string::npos);
  Configuration configuration;
  const input::Schema schema = transcoder::schema(configuration);
  input::read(schema, model, "a.toml", {}, input::Writer::checkpoint);  // every earlier checkpoint has the rank
  CHECK_THROWS_AS(input::read(schema, model + decoder, "a.toml", {}, input::Writer::checkpoint), Error);
}

TEST_CASE("topk over all layers needs a whole budget per token") {
  Configuration c;
  c.transcoder.activation = transcoder::Activation::topk;
  c.transcoder.scope = transcoder::Scope::all_layers;
  c.transcoder.k = 2.5;
  CHECK_NOTHROW(transcoder::check_layers(c, 4));
  CHECK_THROWS_AS(transcoder::check_layers(c, 3), Error);
}

TEST_CASE("batch_topk keeps at least one feature of a batch") {
  CHECK(message("[transcoder]\nfeatures = 8\nk = 1e-4\n[data]\nbatch_tokens = 1000\n") ==
        "a.toml:3:1: transcoder.k = 0.0001 keeps no feature (k * 1000 tokens = 0.1 rounds to 0 active features per "
        "batch); "
        "take a k of at least 0.001");
  CHECK(message("[transcoder]\nfeatures = 8\nk = 5e-4\n[data]\nbatch_tokens = 1000\n") == "");
  // One budget for all layers: known with the data.
  Configuration c;
  c.transcoder.scope = transcoder::Scope::all_layers;
  c.transcoder.k = 1e-4;
  c.data.batch_tokens = 1000;
  CHECK_NOTHROW(transcoder::check_layers(c, 5));
  CHECK_THROWS_AS(transcoder::check_layers(c, 4), Error);
}

TEST_CASE("a learning rate or epsilon that trains nothing is noticed, and usual ones are not") {
  Configuration c;
  c.transcoder.features = 32768;
  CHECK(transcoder::idle_settings(c).empty());
  c.optimizer.learning_rate = 1e-6;  // 1000 steps move a weight by a fifth
  CHECK(transcoder::idle_settings(c).empty());
  c.optimizer.learning_rate = 1e-11;
  CHECK(transcoder::idle_settings(c).size() == 1);
  c.run.steps = 1'000'000'000;  // enough in sum, but each step is rounded away ...
  CHECK(transcoder::idle_settings(c).size() == 1);
  c.optimizer.state = kernels::StorageType::bf16;  // ... to nearest; not if it is rounded stochastically
  CHECK(transcoder::idle_settings(c).empty());
  c.optimizer.epsilon = 1e-2;
  CHECK(transcoder::idle_settings(c).size() == 1);
  c.optimizer.epsilon_scale = optimizer::EpsilonScale::loss;
  CHECK(transcoder::idle_settings(c).empty());
  c.optimizer.epsilon = 1e4;
  CHECK(transcoder::idle_settings(c).size() == 1);
}

TEST_CASE("times are read exactly or not at all") {
  CHECK(run::parse_walltime("00:00:01") == 1);
  CHECK(run::parse_walltime("1:02:03") == 3723);
  CHECK(run::parse_walltime("120:00:00") == 432000);
  for (const char* wrong :
       {"", ":", "::", "1:2", "1:2:3:4", "1:60:00", "1:00:60", "a:00:00", "-1:00:00", "1:00:00 ", "9999999:00:00"})
    CHECK_FALSE(run::parse_walltime(wrong));
}

TEST_CASE("what a resumed run may change") {
  Configuration c;
  const input::Schema schema = transcoder::schema(c);
  using input::Resume;
  const auto resume = [&](const char* path) { return schema.find(path)->resume; };
  for (const char* path : {"run.seed", "data.normalise", "data.targets", "data.window_rows", "transcoder.features",
                           "transcoder.decoder", "transcoder.skip", "optimizer.state"})
    CHECK_MESSAGE(resume(path) == Resume::fixed, path);
  for (const char* path : {"optimizer.learning_rate", "transcoder.k", "data.batch_tokens"})
    CHECK_MESSAGE(resume(path) == Resume::changeable, path);
  for (const input::Key& key : schema.keys())
    if (key.table == "log" || key.table == "checkpoint" || key.table == "parallel" || key.table == "device" ||
        key.path() == "run.steps")
      CHECK_MESSAGE(key.resume == Resume::free, key.path());
}
