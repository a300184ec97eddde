# SPDX-License-Identifier: Apache-2.0
"""Completion in bash, which the build writes from the options of the program.

completion_test.py SHARE     (build/<preset>/share)
"""
import subprocess
import sys
from pathlib import Path

SHARE = Path(sys.argv[1])


def bash_completions(*words):
    """What bash proposes for the last of the words; None: file names."""
    script = f"""
source {SHARE}/bash-completion/completions/weft
compopt() {{ files=no; }}    # outside of a completion bash refuses it
files=yes
COMP_WORDS=(weft {' '.join(f"'{word}'" for word in words)}) COMP_CWORD={len(words)}
_weft
[[ $files == yes && ${{#COMPREPLY[@]}} == 0 ]] && echo FILES
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, check=False)
    assert not done.stderr, (words, done.stderr)
    proposed = done.stdout.split()
    return None if proposed == ["FILES"] else proposed


def check_bash():
    assert "train" in bash_completions("") and "lm" in bash_completions("") and "--set" not in bash_completions("")
    assert bash_completions("tr") == ["train"]
    assert bash_completions("lm", "t") == ["train", "tokenize"]
    assert bash_completions("help", "syn") == ["synth"]
    assert bash_completions("help", "lm", "gen") == ["generate"]
    assert bash_completions("train", "--dr") == ["--dry-run"]
    assert bash_completions("train", "input.toml", "--res") == ["--resume"]
    assert bash_completions("lm", "generate", "--sam") == ["--samples"]
    assert bash_completions("train", "--resume", "n") == ["never"]
    assert bash_completions("export", "--to", "c") == ["circuit-tracer", "crosslayer-coding"]
    assert bash_completions("train", "") is None and bash_completions("evaluate", "--data", "") is None        # file names
    assert bash_completions("train", "--walltime", "") == []                                                    # nothing to propose
    assert bash_completions("evaluate", "--to") == []                                                           # of another command
    # An argument that is the name of a command is no command.
    assert "--walltime" in bash_completions("train", "inspect", "--")
    # Commands of the Python package.
    assert bash_completions("rep") == ["report"] and bash_completions("report", "") is None


check_bash()
print("completion is correct")
