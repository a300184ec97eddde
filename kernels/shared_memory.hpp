// SPDX-License-Identifier: Apache-2.0
//
// Shared memory of a block: static (variables of the kernel) and dynamic (asked for at launch). Their sum is limited.
// More than 48 KB must be allowed for each kernel before its launch; `allow_shared_memory` is the only place that does.
//
// Kernels for every GPU keep to kSharedMemory on every GPU: one that needs more is an error at its first launch also
// where the GPU has more, so that the tests find it on any GPU.
#pragma once

#include <cstdint>
#include <string>

namespace weft::kernels::cuda {

/// Bytes of shared memory, static and dynamic, that a block may use on every GPU from compute capability 8.0 on: 8.6,
/// 8.9 and 12.x have no more.
constexpr std::int64_t kSharedMemory = 99 * 1024;
/// Most dynamic shared memory of a kernel for every GPU with at most kStaticSharedMemory of variables.
constexpr std::int64_t kStaticSharedMemory = 1024, kDynamicSharedMemory = kSharedMemory - kStaticSharedMemory;

/// Where a kernel runs: everywhere, or only where the GPU has as much shared memory as it takes.
enum class SharedMemoryOf { every_gpu, this_gpu };

/// "… bytes, this GPU has …" if a block of `variables` + `dynamic` bytes exceeds its limit, else "".
std::string shared_memory_obstacle(std::int64_t dynamic, std::int64_t variables, SharedMemoryOf where,
                                   std::int64_t of_device);

/// Before a launch of `kernel` with `dynamic` bytes: allows them. Throws Error(internal) if a block may not use them.
/// name: of the kernel, for the message. After the first call of a kernel it costs a look-up.
void allow_shared_memory(const void* kernel, std::int64_t dynamic, const char* name,
                         SharedMemoryOf where = SharedMemoryOf::every_gpu);

/// Most dynamic shared memory that a block of `kernel` can have on this GPU.
std::int64_t most_dynamic_shared_memory(const void* kernel);

}  // namespace weft::kernels::cuda
