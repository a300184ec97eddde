#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Submits a chain of jobs of Slurm or PBS, for sites where a job may not submit or requeue itself, or to queue early where waits are long.
#   bash chain.sh [--dry-run] NAME LINKS SCRIPT [train | lm train | lm polychromic] INPUT RUN [options of the command, under Slurm]
# Edit: nothing here; SCRIPT (slurm.sbatch, pbs.pbs or a variant) holds the site's lines. --dry-run prints what it would submit.
#
# One link runs at a time and resumes from the checkpoint of the previous one. The chain ends on its own: the first link that
# finishes the run (0), makes no progress (93) or fails cancels the following ones. To end it early: scancel --name=NAME, or
# qdel $(qselect -N NAME).
set -euo pipefail

dry_run=''
if [[ ${1:-} == --dry-run ]]; then
  dry_run=yes
  shift
fi
if (($# < 5)) || [[ ! $2 =~ ^[1-9][0-9]*$ || ! -r $3 ]]; then
  echo "usage: bash chain.sh [--dry-run] NAME LINKS SCRIPT [train | lm train | lm polychromic] INPUT RUN [options of the command, under Slurm]" >&2
  exit 2
fi
name=$1 links=$2 script=$3
shift 3

if [[ $script == *.pbs ]]; then
  queued=(qselect -u "$(id -un)" -N "$name")
  case $1 in train) shift ;; lm) export WEFT_COMMAND="$1 $2" && shift 2 ;; esac
  if (($# != 2)); then
    echo "chain.sh: a PBS script takes INPUT and RUN and no options of the command; write them into INPUT" >&2
    exit 2
  fi
  export WEFT_CHAIN=$name WEFT_INPUT=$1 WEFT_RUN=$2
else
  queued=(squeue --noheader --user="$(id -un)" --name="$name")
fi
if [[ -n $("${queued[@]}") ]]; then
  echo "chain.sh: jobs named $name are in the queue already (a chain is known by its name); take another name, or cancel them" >&2
  exit 2
fi
previous=''
for ((link = 1; link <= links; ++link)); do
  if [[ $script == *.pbs ]]; then
    command=(qsub -N "$name" -v "WEFT_CHAIN,WEFT_INPUT,WEFT_RUN${WEFT_COMMAND:+,WEFT_COMMAND}${WEFT_NOTICE:+,WEFT_NOTICE}"
      ${previous:+-W "depend=afterany:$previous"} "$script")
  else
    # singleton: at most one job of this name at a time. A link lost with its node is not restarted: the next one resumes.
    command=(sbatch --job-name="$name" --dependency=singleton --no-requeue --export="ALL,WEFT_CHAIN=$name" "$script" "$@")
  fi
  if [[ -n $dry_run ]]; then
    printf '%q ' "${command[@]}"
    echo
    previous=JOB
  else
    previous=$("${command[@]}")
    echo "$previous"
  fi
done
