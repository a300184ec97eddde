#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Kills training runs at random points on random ranks, starts two at once in one directory, loses nodes and disks, restarts until the
# runs complete, and compares the results bit for bit with those of undisturbed runs. Needs a C compiler (failing_disk.c).
#
#   bash tests/fault/soak.sh --rounds 200 --seed 7               a round: one run, two faults
#   bash tests/fault/soak.sh --rounds 200 --seed 7 --ranks 2     always two ranks, else 1 to 3
#   --weft PATH     the program (default build/cpu-release/weft)
#   --table FILE    also writes the table there
#
# Exit codes: 0 all rounds ended with the same bits; 1 one did not, or too few faults occurred; 2 wrong usage.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
# Open MPI refuses to run as root without these variables; waiting threads must not occupy cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive OMP_PROC_BIND=false PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=$PWD/tests/reference:$PWD/tests/end_to_end
python=${WEFT_PYTHON:-python3}
"$python" -c 'import numpy, h5py' 2>/dev/null || python=/usr/bin/python3
ulimit -c 0   # the faults include segmentation faults
exec "$python" "$here/soak.py" "$@"
