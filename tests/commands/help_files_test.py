# SPDX-License-Identifier: Apache-2.0
"""Manual pages and completion in shells, which the build writes from the options of the program.

help_files_test.py SHARE     (build/<preset>/share)
"""
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

SHARE = Path(sys.argv[1])


def check_pages():
    pages = sorted((SHARE / "man" / "man1").glob("*.1"))
    assert {"weft.1", "weft-lm.1", "weft-train.1", "weft-lm-generate.1"} <= {page.name for page in pages} and len(pages) > 15
    for page in pages:
        text = page.read_text()
        for section in ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "SEE ALSO"):
            assert f".SH {section}\n" in text, (page, section)
        for other in re.findall(r"^\.BR (\S+) \(1\)", text, flags=re.M):
            assert (page.parent / (other.replace("\\-", "-") + ".1")).exists(), (page, other)
        if not shutil.which("groff"):
            continue
        shown = subprocess.run(["groff", "-man", "-Tascii", "-ww", "-P-cbou", page], capture_output=True, text=True, check=False)
        assert shown.returncode == 0 and not shown.stderr, (page, shown.stderr)
        assert all(len(line) <= 80 for line in shown.stdout.splitlines()), page
    if not shutil.which("groff"):
        return "groff"
    train = subprocess.run(["groff", "-man", "-Tascii", "-P-cbou", SHARE / "man/man1/weft-train.1"], capture_output=True, text=True,
                           check=True).stdout
    assert re.search(r"--resume auto\|never\|PATH\n +resume from the newest valid checkpoint", train), train
    return None


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
    assert "--walltime" in bash_completions("train", "report", "--")


def check_zsh():
    if not shutil.which("zsh"):
        return "zsh"
    done = subprocess.run(["zsh", "-n", SHARE / "zsh/site-functions/_weft"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return None


def check_fish():
    if not shutil.which("fish"):
        return "fish"
    path = SHARE / "fish/vendor_completions.d/weft.fish"
    for line, expected in (("weft tr", {"train"}), ("weft lm to", {"tokenize"}), ("weft train --dry", {"--dry-run"}),
                           ("weft help lm gen", {"generate"})):
        done = subprocess.run(["fish", "-N", "-c", f"source {path}; complete -C {json.dumps(line)}"], capture_output=True, text=True,
                              check=True)
        assert {proposed.split("\t")[0] for proposed in done.stdout.splitlines()} == expected, (line, done.stdout)
    return None


check_bash()
missing = [tool for tool in (check_pages(), check_zsh(), check_fish()) if tool]
print("pages and completion are correct" + (f"; not checked: {', '.join(missing)} not installed" if missing else ""))
