#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the program with other compilers or libraries, warnings as errors, and runs a few quick tests of what depends on them: ranks,
# files, checkpoints, training, resuming. docs/development.md has the table of what was run.
#
#   bash scripts/versions.sh NAME [OPTION OF CMAKE]...      in build/version-NAME
#   bash scripts/versions.sh clang-14 -DCMAKE_C_COMPILER=clang-14 -DCMAKE_CXX_COMPILER=clang++-14
set -euo pipefail

name=${1:?usage: versions.sh NAME [OPTION OF CMAKE]...}
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=build/version-$name
programs=(communicator_test failure_test storage_files_test checkpoint_test dataset_loader_test select_test)
tests="^((communicator|failure|checkpoint|dataset_loader)_test_r[1-4]|storage_files_test|select_test|foreign_data|resume_r2|language_model_program|features)$"
launcher=()
command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_UNITY_BUILD=ON -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON \
  -DWEFT_ENABLE_TESTS=ON -DWEFT_WARNINGS_AS_ERRORS=ON "${launcher[@]}" "$@"
cmake --build "$build" --target weft "${programs[@]}"
"$build/weft" --version
ctest --test-dir "$build" --output-on-failure --no-tests=error --tests-regex "$tests"
