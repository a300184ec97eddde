// SPDX-License-Identifier: Apache-2.0
//
// The recipe of training, the same for all model families: a family reads its input and its data and plans the memory,
// train_model does the rest.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "commands/command.hpp"
#include "device/runtime.hpp"
#include "run/loop.hpp"

namespace weft::commands {

/// Options of the commands that train.
struct TrainOptions {
  std::string device_memory;    ///< with --dry-run: "" or the memory of a GPU of another machine, as "141GB"
  std::string resume = "auto";  ///< auto | never | PATH
  std::string walltime;         ///< "" or hh:mm:ss
  std::string start_id;         ///< recorded in run.json as start_id
  bool take_over = false;       ///< take over the run directory from a run that may be active
};
void add_train_options(Options& options, TrainOptions& own);

/// A command that trains models of the family with this table. `command`: its help.
template <class Input>
Command training_command(Command command, std::string_view table, input::Schema (*keys)(Input&),
                         int (*run)(const Request&, const TrainOptions&, const parallel::World&)) {
  command.table = table;
  command.keys = [keys](std::string_view) { return keys_of(keys); };
  command.prints_result = false;
  return with_options(std::move(command), run, add_train_options);
}

/// Memory per rank, as --dry-run compares it, in bytes; available 0: not known. A run that does not fit ends with code
/// 2 before this (require_memory, micro_tokens_that_fit), but for a plan without its data.
struct MemoryNeed {
  std::int64_t device = 0, device_available = 0;
  std::int64_t host = 0, host_available = 0;
  std::string host_limit = {};    ///< what limits host memory
  std::int64_t micro_tokens = 0;  ///< data.micro_tokens with which the run fits; 0: as the input has it
};

Json to_json(const MemoryNeed& need);

/// `need` and the plan by purpose.
template <class Plan>
Json plan_document(const Plan& plan, const MemoryNeed& need) {
  Json document = to_json(need);
  for (const auto& [place, rows] : {std::pair("device", &plan.device), std::pair("host", &plan.host)}) {
    Json& purposes = document[place] = Json::object();
    for (const auto& [purpose, bytes] : *rows)
      if (bytes > 0) purposes[purpose] = bytes;
  }
  document["checkpoint_bytes"] = plan.checkpoint_bytes;
  document["disk_bytes"] = plan.disk_bytes;
  return document;
}

/// A model whose input and data have been read and whose memory is planned. References must outlive the training.
struct PlannedModel {
  const input::Schema& schema;
  run::LoopSettings settings;
  optimizer::Settings& optimizer;
  device::Settings device;
  parallel::GridShape grid;
  run::TrainingData data;    ///< the fingerprint may be set by `start`
  std::string summary = {};  ///< data and plan, as text
  MemoryNeed need = {};
  Json plan = {};  ///< `need` and the plan, for --dry-run
  std::int64_t device_bytes = 0;
  std::string_view tensor;      ///< a tensor that every checkpoint of the family has
  std::string next = {};        ///< the command that usually follows a finished run
  Json extra = Json::object();  ///< further entries of Manifest::extra
  /// Throws unless the run fits the device. Returns what the run needs and the model does not own.
  std::function<std::shared_ptr<void>(const device::Runtime&)> start = {};
  /// Takes from the checkpoint what the input leaves to the program; before inputs are compared.
  std::function<void(const checkpoint::Found&)> resume = {};
  /// `changed`: the steps from here on may not be those that the run would have made (check_same_run).
  std::function<std::unique_ptr<run::Trainable>(const run::OpenedRun&, bool changed, const parallel::Grid&,
                                                const device::Runtime&)>
      make = {};
};

/// Trains the model, or prints its plan with --dry-run, and returns the exit code. `begin`: of the command. Collective.
int train_model(const Request&, const TrainOptions&, const parallel::World&, PlannedModel&, Clock::time_point begin);

}  // namespace weft::commands
