// SPDX-License-Identifier: Apache-2.0
//
// Limits of the address space (ulimit -v). OpenBLAS tries to map its buffers until it succeeds: below a limit it would
// never return, and the first buffers are mapped before main.
#pragma once

namespace weft::device {

/// Ends the process with 2 and a message if its address space is too small for a command that computes. The smaller
/// space that every command needs is checked before the libraries start.
void require_address_space_to_compute();

}  // namespace weft::device
