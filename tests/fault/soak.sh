#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Kills training runs at random points on random ranks, starts them again until they end, and compares what they end with,
# bit for bit, with the runs that nobody disturbed.
#
#   bash tests/fault/soak.sh --rounds 200 --seed 7               a round: one run, two blows
#   bash tests/fault/soak.sh --rounds 200 --seed 7 --ranks 2     always two ranks, else 1 to 3
#   --weft PATH     the program (default build/cpu-release/weft)
#   --table FILE    also writes the table there
#
# Exit codes: 0 all rounds ended with the same bits; 1 one did not, or too few blows landed; 2 wrong usage.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
# Open MPI refuses to start as root unless told twice; waiting threads must not take the cores from the others.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive OMP_PROC_BIND=false PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=$PWD/tests/reference:$PWD/tests/end_to_end
python=${WEFT_PYTHON:-python3}
"$python" -c 'import numpy, h5py' 2>/dev/null || python=/usr/bin/python3
ulimit -c 0   # blows include segmentation faults
exec "$python" "$here/soak.py" "$@"
