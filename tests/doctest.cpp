// SPDX-License-Identifier: Apache-2.0
//
// The doctest library. It is defined by an include under this macro, so this file cannot use the precompiled headers.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>
