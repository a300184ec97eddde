#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Submits a chain of Slurm jobs, for sites where a job may not requeue itself, or to queue early where waits are long.
#   bash chain.sh [--dry-run] NAME LINKS SCRIPT [train | lm train | lm polychromic] INPUT RUN [options of the command]
# Edit: nothing here; SCRIPT (slurm.sbatch or a variant) holds the site's lines. --dry-run prints what it would submit.
#
# One link runs at a time and resumes from the checkpoint of the previous one. The chain ends on its own: the first link that
# finishes the run (0), makes no progress (93) or fails cancels the following ones. To end it early: scancel --name=NAME.
set -euo pipefail

submit() { "$@"; }
if [[ ${1:-} == --dry-run ]]; then
  submit() { printf '%q ' "$@"; echo; }
  shift
fi
if (($# < 5)) || [[ ! $2 =~ ^[1-9][0-9]*$ || ! -r $3 ]]; then
  echo "usage: bash chain.sh [--dry-run] NAME LINKS SCRIPT [train | lm train | lm polychromic] INPUT RUN [options of the command]" >&2
  exit 2
fi
name=$1 links=$2 script=$3
shift 3

if [[ -n $(squeue --noheader --user="$(id -un)" --name="$name") ]]; then
  echo "chain.sh: jobs named $name are in the queue already (a chain is known by its name); take another name, or" \
    "scancel --name=$name" >&2
  exit 2
fi
for ((link = 1; link <= links; ++link)); do
  # singleton: at most one job of this name at a time. A link lost with its node is not restarted: the next one resumes.
  submit sbatch --job-name="$name" --dependency=singleton --no-requeue --export="ALL,WEFT_CHAIN=$name" "$script" "$@"
done
