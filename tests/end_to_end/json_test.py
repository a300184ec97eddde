# SPDX-License-Identifier: Apache-2.0
"""--json: every command prints one JSON document on standard output and nothing else there; with --quiet standard error is empty too.
Commands without --json have no new output.

json_test.py WEFT
"""
import json
import subprocess

import program

INPUT = program.SYNTHETIC + """\
[run]
steps = 4
[data]
train = "{folder}/data/train"
validation = "{folder}/data/validation"
batch_tokens = 64
block_rows = 16
window_rows = 64
[transcoder]
features = 40
k = 3
[benchmark]
steps = 1
warmup = 0
cases = ["input"]
layers = 2
d_model = 16
"""
LANGUAGE = """\
[run]
steps = 4
[data]
train = "{folder}/text.txt"
tokens = "character"
validation_fraction = 0.2
sequence = 16
batch_tokens = 64
[language_model]
layers = 1
d_model = 16
heads = 2
d_mlp = 32
[optimizer]
warmup_steps = 1
[log]
sample_tokens = 0
"""


def check(weft):
    (weft.folder / "input.toml").write_text(INPUT.format(folder=weft.folder))
    (weft.folder / "language.toml").write_text(LANGUAGE.format(folder=weft.folder))
    (weft.folder / "text.txt").write_text("In the beginning was the word, and the word was long enough.\n" * 60)

    def document(*arguments, quiet=True):
        command = [str(weft.binary), *map(str, arguments), "--json", *(["--quiet"] if quiet else [])]
        done = subprocess.run(command, cwd=weft.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.returncode, done.stderr)
        if quiet:
            unexpected = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
            assert not unexpected, (command, unexpected)
        parsed = json.loads(done.stdout)
        assert isinstance(parsed, dict), command
        covered.add(" ".join(str(a) for a in (arguments[:2] if arguments[0] == "lm" else arguments[:1])))
        return parsed, done.stderr

    (weft.folder / "texts.txt").write_text("a short answer\nanother answer\n")
    covered = set()
    assert document("synth", "input.toml")[0]["layers"] == 2
    assert document("train", "input.toml", "--dry-run")[0]["fits"] is True
    run, messages = document("train", "input.toml", "--output", "run", quiet=False)
    assert run["exit"]["code"] == 0 and run["result"]["step"] == 4 and "trained 4 steps" in messages, (run, messages)
    again = document("train", "input.toml", "--output", "run")[0]        # complete: nothing to do
    assert again["result"] == run["result"], again
    evaluated = document("evaluate", "run", "--output", "evaluation")[0]
    assert evaluated == json.loads((weft.folder / "evaluation" / "evaluation.json").read_text())
    assert len(document("features", "run", "--feature", "0:1", "--feature", "1:2")[0]["features"]) == 2
    assert document("encode", "run", "--output", "encoded")[0]["tokens"] == 100
    converted = document("convert", "run", "--output", "converted")[0]
    assert converted["output"] == "converted" and converted["after"]["nmse_mean"] > 0
    assert document("inspect", "run")[0]["kind"] == "checkpoint"
    assert document("inspect", "data/train")[0]["rows"] == 2000
    assert document("export", "converted", "exported", "--to", "circuit-tracer")[0]["activation"] == "jumprelu"
    assert document("inspect", "exported")[0]["kind"] == "weights"
    assert document("import", "exported", "--output", "imported")[0]["output"] == "imported"
    assert document("benchmark", "input.toml", "--dry-run")[0]["cases"][0]["measured"]
    assert document("benchmark", "input.toml", "--output", "measured")[0] == json.loads(
        (weft.folder / "measured" / "benchmark.json").read_text())
    assert document("lm", "train", "language.toml", "--dry-run")[0]["fits"] is True
    assert document("lm", "train", "language.toml", "--output", "words")[0]["result"]["step"] == 4
    assert document("lm", "evaluate", "words")[0]["validation"]["loss"] > 0
    assert document("lm", "harvest", "words", "--tokens", 64, "--output", "harvested")[0]["rows"] == 64
    assert document("init", "--model", "words", "--text", "text.txt")[0]["sequence"] > 0
    document("train", "input.toml", "--output", "of_words", "--set", "data.train=harvested", "--set", "data.validation=harvested")
    graph = document("attribute", "words", "--transcoder", "of_words", "--prompt", "In the", "--output", "graph.json", "--check", 1)[0]["graphs"][0]
    assert graph["tokens"] == 6 and len(graph["check"]) == 1, graph
    assert document("attribute", "words", "--transcoder", "of_words", "--prompt", "In the", "--output", "graph.json", "--dry-run")[0]["device"]["transcoder"]
    changed = document("lm", "evaluate", "words", "--transcoder", "of_words", "--set-feature", "0:1=0")[0]
    assert changed["interventions"]["changes"] == ["--set-feature 0:1=0"], changed
    assert document("lm", "export", "words", "--output", "directory")[0]["family"] == "gpt2"
    document("lm", "train", "language.toml", "--output", "adapted", "--set", "language_model.initial=words", "--set", "lora.rank=2")
    assert document("lm", "export", "adapted", "--adapters", "--output", "adapters")[0]["rank"] == 2
    assert "step_" in document("lm", "merge", "adapted", "--output", "merged")[0]["checkpoint"]
    assert document("inspect", "directory")[0]["kind"] == "huggingface"
    generated = document("lm", "generate", "words", "--prompt", "In", "--samples", 2, "--max-new-tokens", 5)[0]
    assert [text["tokens"] for text in generated["texts"]] == [5, 5], generated
    assert document("lm", "tokenize", "text.txt", "--tokens", "bytes", "--output", "tokens")[0]["documents"] == 1
    assert document("inspect", "tokens")[0]["kind"] == "tokens"

    assert document("lm", "diversity", "texts.txt")[0]["unit"] == "words"
    tuned = document("lm", "polychromic", "language.toml", "--output", "tuned", "--set", "language_model.initial=words", "--set",
                     "polychromic.every=2", "--set", "polychromic.prompts=1", "--set", "polychromic.samples=3", "--set",
                     "polychromic.set_size=2", "--set", "polychromic.max_new_tokens=4", "--set", "polychromic.prompt_tokens=4")[0]
    assert tuned["result"]["step"] == 4, tuned
    calculated = document("privacy", "--noise-multiplier", 1, "--delta", 1e-5, "--sample-rate", 0.01, "--steps", 10, "--accountant", "rdp")[0]
    assert calculated["accountants"][0]["epsilon"] > 0, calculated
    # --quiet keeps results.
    text = subprocess.run([weft.binary, "inspect", "run", "--quiet"], cwd=weft.folder, capture_output=True, text=True, check=True)
    assert "run/checkpoints" in text.stdout and text.stderr == "", text

    # Every command of the program is above; tests/python has those of the package.
    commands = {line.split()[1] for line in weft.run("--help").partition("\nOf the Python package")[0].splitlines() if line.startswith("weft ")} - {"lm", "help"}
    commands |= {"lm " + line.split()[2] for line in weft.run("lm", "--help").splitlines() if line.startswith("weft lm ")}
    assert commands == covered, commands ^ covered

    # An error leaves standard output empty.
    failed = subprocess.run([weft.binary, "evaluate", "nowhere", "--json"], cwd=weft.folder, capture_output=True, text=True, check=False)
    assert failed.returncode == 2 and failed.stdout == "" and failed.stderr.startswith("error: "), failed


program.main(check)
