// SPDX-License-Identifier: Apache-2.0
//
// Two ranks with a GPU each. An exchange that is aborted because a rank is lost must not let the steps that depend on
// it update anything. The last test of a process: what is aborted stays aborted.
#include "parallel/peers.hpp"

#include <vector>

#include "device/memory.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/optimize/adam.hpp"
#include "parallel/gpu_groups.hpp"
#include "tests/test.hpp"

namespace weft::parallel {
namespace {

template <class T>
T read(const device::Buffer<T>& buffer) {
  T value{};
  device::copy(testing::execution(), &value, buffer.data(), sizeof value, device::Direction::to_host);
  kernels::fence(testing::execution());
  return value;
}

template <class T>
void write(const device::Buffer<T>& buffer, const T& value) {
  device::copy(testing::execution(), buffer.data(), &value, sizeof value, device::Direction::to_device);
  kernels::fence(testing::execution());
}

kernels::AdamStep constants() {
  kernels::AdamStep step{};
  step.learning_rate = 0.1f;
  step.first_gain = step.second_gain = 1;
  step.first_correction = step.second_correction = step.gradient_scale = 1;
  step.step = 1;
  return step;
}

}  // namespace

TEST_CASE("an aborted exchange withholds the step, and does not let its peers pass") {
  const Communicator& all = testing::world().all();
  const kernels::Execution& execution = testing::execution();
  Peers* const peers = peers_of(all);
  if (peers == nullptr) {
    MESSAGE("skipped 1: these GPUs cannot access each other's memory, or ranks share one");
    return;
  }
  device::Buffer<kernels::AdamStep> step(1);
  device::Buffer<kernels::StepGuard> guard(1);
  device::Buffer<float> weight(1), first(1), second(1), gradient(1);
  write(step, constants());
  write(guard, kernels::StepGuard{0, kernels::kRuns});
  for (const device::Buffer<float>* one : {&weight, &first, &second}) write(*one, 0.0f);
  write(gradient, 1.0f);
  const auto update = [&] {
    kernels::adam_vector(execution, {weight.array(), first.array(), second.array()}, {gradient.data(), 1}, step.data());
  };
  Peers::withhold_when_aborted(step.data(), guard.data());
  Peers::Channel channel(*peers);

  // Undisturbed: nothing is withheld.
  channel.begin(execution);
  channel.end(execution);
  update();
  CHECK(read(step).withheld == 0);
  CHECK(read(guard).halted == kernels::kRuns);
  const float updated = read(weight);
  CHECK(updated != 0);
  all.barrier();

  // Rank 0 waits for rank 1, which does not come. The update is enqueued before the exchange is aborted.
  if (all.rank() == 0) {
    channel.begin(execution);
    update();
    Peers::abort_all();
    CHECK(read(step).withheld == 1);
    CHECK(read(guard).halted == kernels::kExchangeAborted);
    CHECK(read(weight) == updated);
    // A later step, with constants of its own.
    write(step, constants());
    channel.end(execution);
    update();
    CHECK(read(step).withheld == 1);
    CHECK(read(weight) == updated);
  }
  all.barrier();

  // Rank 0 reached `begin`, and did not complete its data: rank 1 must not get past `end`.
  if (all.rank() == 1) {
    channel.begin(execution);
    CHECK(read(step).withheld == 0);
    channel.end(execution);
    update();
    Peers::abort_all();
    CHECK(read(step).withheld == 1);
    CHECK(read(weight) == updated);
  }
  all.barrier();
  Peers::withhold_when_aborted(nullptr, nullptr);
}

}  // namespace weft::parallel
