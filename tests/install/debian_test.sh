#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# debian_test.sh REPOSITORY: container/debian.sh makes a root directory and its archive from Debian's packages; the program in it trains
# on two ranks and writes a report. Downloads a Debian and builds the program: only with WEFT_CONTAINER=1.
#
# Exit codes: 0 passed; 1 failed; 77 not wanted, not root, or no debootstrap
set -euo pipefail
repository=$1
skip() { echo "skipped: $*"; exit 77; }
[[ ${WEFT_CONTAINER:-} == 1 ]] || skip "it downloads Debian and builds the program in it; WEFT_CONTAINER=1 asks for it"
[[ $(id -u) -eq 0 ]] || skip "chroot needs root"
command -v debootstrap >/dev/null || skip "debootstrap is not installed"

scratch=$(mktemp -d)
trap 'rm -rf --one-file-system "$scratch"' EXIT
fail() { echo "$*" >&2; exit 1; }

mkdir "$scratch/taken"
if bash "$repository/container/debian.sh" "$scratch/taken" 2>"$scratch/message"; then fail "an existing directory was overwritten"; fi
grep -q "exists" "$scratch/message" || fail "an existing directory: $(<"$scratch/message")"

bash "$repository/container/debian.sh" "$scratch/root" "$scratch/weft.tar.zst" >"$scratch/build.log" 2>&1 || fail "$(tail -n 40 "$scratch/build.log")"
for left in "$scratch"/root.* "$scratch"/*.part; do [[ ! -e $left ]] || fail "left over: $left"; done
tar --zstd -tf "$scratch/weft.tar.zst" >"$scratch/names"
for name in ./usr/local/bin/weft ./usr/local/share/weft/inputs/quickstart.toml ./proc/ ./dev/; do
  grep -qxF "$name" "$scratch/names" || fail "the archive lacks $name"
done
if grep -q '^./dev/.' "$scratch/names"; then fail "the archive has devices"; fi

# inside COMMAND...
inside() { bash "$repository/container/debian.sh" --run "$scratch/root" "$@"; }
inside weft report --help >/dev/null
# shellcheck disable=SC2016   # the inner shell expands them
inside bash -c 'set -e
  cd /tmp
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  input=/usr/local/share/weft/inputs/quickstart.toml
  weft synth $input --set synthetic.tokens=3000 --set synthetic.validation_tokens=600
  mpirun --oversubscribe --bind-to none -n 2 weft train $input --set run.steps=20 --set data.batch_tokens=256 --output run
  weft inspect run
  weft report run
  test -s run/report.html' >"$scratch/train.log" 2>&1 || fail "$(<"$scratch/train.log")"
if inside false; then fail "the exit code of a command is lost"; fi
cat "$scratch/train.log"
