#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs the Python package of Weft (python/: weft report, sweep, serve, follow and harvest; import weft) into a virtual environment of its
# own. It takes the libraries of the system (scripts/setup.sh --tools: h5py, NumPy, matplotlib), then nothing is downloaded; pip downloads
# those that are missing. Running it again installs only what has changed. Another environment: pip install ./python.
#
#   bash scripts/python.sh [DIR]      default .deps/python, whose programs the env.sh of a build adds to PATH
#   WEFT_PYTHON=FILE                  the interpreter, 3.9 or later (default /usr/bin/python3, else python3)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[[ $# -le 1 && ${1:-} != -* ]] || { echo "python.sh: takes one argument, a directory" >&2; exit 2; }
place=${1:-$root/.deps/python}
python=${WEFT_PYTHON:-/usr/bin/python3}
[[ -x $python ]] || python=python3
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' ||
  { echo "python.sh: $python is no Python 3.9 or later; name one in WEFT_PYTHON" >&2; exit 2; }

source_digest() { find "$root/python" -type f -not -path '*/__pycache__/*' -print0 | sort -z | xargs -0 sha256sum | sha256sum; }
if [[ -x $place/bin/weft-report && $(source_digest) == $(cat "$place/weft_source" 2>/dev/null) ]]; then
  exit 0
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
log=$scratch/log
cp -r "$root/python" "$scratch/package"   # pip leaves files of its build where the package is
options=()
if "$python" -c 'import h5py, numpy, matplotlib, setuptools, wheel' 2>/dev/null; then
  options=(--no-index --no-build-isolation --no-deps)
fi
mkdir -p "$(dirname "$place")"
if ! { "$python" -m venv --clear --system-site-packages "$place" &&
       "$place/bin/python" -m pip install --quiet --disable-pip-version-check "${options[@]}" "$scratch/package"; } >"$log" 2>&1; then
  tail -n 15 "$log" >&2
  echo "python.sh: the Python package could not be installed (its last lines are above); bash scripts/setup.sh --tools installs what it needs" >&2
  exit 1
fi
source_digest >"$place/weft_source"
