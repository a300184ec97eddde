// SPDX-License-Identifier: Apache-2.0
//
// weft encode CHECKPOINT --data DIR --output DIR: the sparse activations of a dataset as files for other programs.
#include "base/format.hpp"
#include "base/log.hpp"
#include "commands/transcoder/loaded_transcoder.hpp"
#include "transcoder/features/encoded_files.hpp"

namespace weft::commands {

static int run_encode(const Request& request, const std::string& data, const parallel::World& world) {
  if (request.output.empty())
    throw collective_error(ExitCode::usage, "encode needs --output DIR (the activations are written there)");
  LoadedTranscoder loaded(request, data, world);
  transcoder::EncodedFiles files(request.output, loaded.found.path.string(), loaded.found.manifest.step,
                                 loaded.description, loaded.model, loaded.grid);
  transcoder::for_each_batch(loaded.description, loaded.forward, loaded.grid, loaded.execution(), loaded.batch_tokens(),
                             [&](const transcoder::SparseRows& rows) { files.append(rows); });
  files.finish();
  const std::int64_t rows = loaded.description.n_rows;
  const double per_token = static_cast<double>(files.entries()) / static_cast<double>(rows);
  print_written(request,
                fmt::format("{}: {} activations of {} tokens, {:.2f} per token", request.output,
                            format::grouped(files.entries()), format::grouped(rows), per_token),
                {{"output", request.output},
                 {"checkpoint", loaded.found.path.string()},
                 {"data", loaded.data},
                 {"tokens", rows},
                 {"activations", files.entries()},
                 {"activations_per_token", per_token}});
  return 0;
}

extern const Command encode_command =
    with_options({"encode", "CHECKPOINT", "sparse activations of a dataset, for other programs",
                  "Writes the active features of every row of a dataset as sparse matrices, for other programs."},
                 run_encode, [](Options& options, std::string& data) {
                   options.example("weft encode runs/quickstart --output encoded");
                   data_option(options, data).set().output("directory of the encoded files");
                 });

}  // namespace weft::commands
