# SPDX-License-Identifier: Apache-2.0
"""Every shipped input: its comments, its values as parsed by Weft, and a short run.

inputs_test.py REPOSITORY [WEFT]      without WEFT: only the comments
"""
import json
import os
import re
import sys
import tempfile
import tomllib
from pathlib import Path

import program

# Overrides that make an input small enough for a test, in addition to steps and output, by input.
SHRINK = {
    "quickstart.toml": ["synthetic.tokens=4096", "synthetic.validation_tokens=1024"],
    "benchmark_cpu.toml": ["transcoder.features=512", "data.batch_tokens=256", "benchmark.warmup=1"],
    "benchmark_ranks_cpu.toml": ["benchmark.layers=3", "benchmark.d_model=64", "transcoder.features=256",
                                 "data.batch_tokens=128", "benchmark.warmup=1"],
    # Intended for a GPU: the first case alone, at a size suitable for a CPU.
    **{f"benchmark_{name}.toml": ["benchmark.layers=3", "benchmark.d_model=64", "transcoder.features=256",
                                  "data.batch_tokens=128", "benchmark.warmup=1", f'benchmark.cases=["{case}"]']
       for name, case in (("gpt2_small", "all together"), ("llama_3_2_1b", "8bit"), ("gemma_2_2b", "8bit"), ("ranks", "baseline"))},
    "olmo2_1b.toml": ["data.layers=3", "data.d_model=64", "transcoder.features=500", "data.batch_tokens=256",
                      "optimizer.warmup_steps=1"],
    "lm_character.toml": ["optimizer.warmup_steps=1", "data.batch_tokens=256", "language_model.layers=1", "log.sample_tokens=5"],
    "lm_private.toml": ["optimizer.warmup_steps=1", "data.batch_tokens=256", "data.micro_tokens=128", "log.sample_tokens=5"],
    # These begin with the model that lm_character.toml has left.
    "lm_lora.toml": ["optimizer.warmup_steps=1", "data.batch_tokens=256", "language_model.layers=1",
                     "language_model.initial=lm_character"],
    "lm_polychromic.toml": ["optimizer.warmup_steps=1", "data.batch_tokens=256", "language_model.layers=1",
                            "language_model.initial=lm_character", "polychromic.every=1",
                            "polychromic.samples=5", "polychromic.max_new_tokens=10", "polychromic.evaluation_prompts=2"],
    **{f"lm_polychromic_{name}.toml": ["optimizer.warmup_steps=1", "data.batch_tokens=256", "language_model.preset=gpt2",
                                       "language_model.layers=1", "language_model.heads=4", "language_model.d_model=128",
                                       "language_model.initial=lm_character", "data.train=inputs/text/genesis_to_ruth.txt",
                                       "data.tokens=character", "data.special=[]", "data.sequence=128", "data.validation_fraction=0.1",
                                       'polychromic.prompts_file=""', 'polychromic.reward="constant"', 'polychromic.reward_command=""',
                                       "polychromic.every=1", "polychromic.max_new_tokens=10", "polychromic.evaluation_prompts=2"]
       for name in ("lora", "smollm2")},
    "lm_parity_tiny.toml": ["optimizer.warmup_steps=1", "data.batch_tokens=256", "language_model.layers=1"],
    **{f"lm_parity_{name}.toml": ["optimizer.warmup_steps=1", "data.batch_tokens=512", "language_model.layers=1",
                                  "language_model.d_model=48", "language_model.d_mlp=64"] for name in ("gpt", "llama")},
}
# Language models whose input is for a GPU.
SHRINK.update({f"lm_{name}.toml": ["optimizer.warmup_steps=1", "data.batch_tokens=64", "data.micro_tokens=32", "data.sequence=16",
                                   "language_model.layers=1", "language_model.d_model=64", "language_model.heads=4",
                                   "language_model.kv_heads=2", "language_model.d_mlp=64", "log.sample_tokens=0"]
               for name in ("gpt2_small", "gpt2_medium", "gpt2_xl", "llama_1b", "character_85m")})
SHRINK["lm_benchmark_cpu.toml"] = ["optimizer.warmup_steps=1", "data.batch_tokens=64", "data.sequence=16", "language_model.layers=1",
                                   "language_model.d_model=64"]
SHRINK["lm_combined.toml"] = [*SHRINK["lm_benchmark_cpu.toml"], "language_model.heads=4"]
SHRINK["lm_generate_gpt2.toml"] = ["optimizer.warmup_steps=1", "data.batch_tokens=16", "data.sequence=16", "language_model.layers=1",
                                   "language_model.d_model=96", "benchmark.generate_prompt=4", "benchmark.generate_tokens=5"]
SHRINK["lm_harvest_gpt2.toml"] = ["optimizer.warmup_steps=1", "data.batch_tokens=64", "data.micro_tokens=32", "data.sequence=16",
                                  "language_model.layers=1", "language_model.d_model=96"]
# Cases of a language model's benchmark that are tried here; tests/end_to_end/language_benchmark_test.py tries all.
CASES = ["input", "baseline", "graphs", "all"]
# Text for inputs without data.train.
TEXT = ["data.train=inputs/text/genesis_to_ruth.txt", "data.tokens=bytes"]
# Synthetic data for inputs without a table [synthetic].
PLANT = {
    "olmo2_1b.toml": ["synthetic.layers=3", "synthetic.d_model=64", "synthetic.features=128", "synthetic.k=4",
                      "synthetic.tokens=2048", 'synthetic.dtype="bf16"'],
    "character_transcoder.toml": ["synthetic.layers=4", "synthetic.d_model=32", "synthetic.features=64", "synthetic.k=4",
                                  "synthetic.tokens=2048", "synthetic.validation_tokens=512"],
}
STEPS = 3
NEEDS_DATA = re.compile(r"\$\{WEFT_TEST_DATA\}")


def check_text(path):
    """The header states what is reproduced and needed; every key has a comment."""
    lines = path.read_text().splitlines()
    head = [line for line in lines[:10] if line.startswith("#")]
    assert any("Reproduces:" in line for line in head), f"{path.name}: its header does not state what it reproduces"
    assert any("Needs:" in line for line in lines[:12]), f"{path.name}: its header does not state what it needs"
    for number, line in enumerate(lines, 1):
        if re.match(r"\w+\s*=", line):
            assert "#" in line, f"{path.name}:{number}: no comment with unit and range"


def check_index(folder):
    """inputs/README.md has a line for every input, and for no other."""
    rows = re.findall(r"^\| \[(\S+)\]\((\S+)\) \| \S", (folder / "README.md").read_text(), flags=re.M)
    assert all(name == target for name, target in rows), rows
    listed, there = [name for name, _ in rows], {path.name for path in folder.glob("*.toml")}
    assert set(listed) == there and len(listed) == len(there), f"inputs/README.md: {set(listed) ^ there or listed}"


def is_language_benchmark(path):
    """Batches are in memory, and the cases are those of a language model."""
    given = tomllib.loads(path.read_text())
    return "benchmark" in given and "language_model" in given


def command_of(path):
    if path.name.startswith("lm_polychromic"):
        return ("lm", "polychromic")
    return ("benchmark",) if path.name.startswith("benchmark") or is_language_benchmark(path) else ("lm", "train") if path.name.startswith("lm_") else ("train",)


def check_values(weft, path):
    """The output of --print-config contains every value of the file (paths expanded), and loads back to itself."""
    given = tomllib.loads(path.read_text())
    command = command_of(path)
    printed = weft.run(*command, path, "--print-config")
    resolved = tomllib.loads(printed)
    for table, keys in given.items():
        for key, value in keys.items():
            found = resolved[table][key]
            if isinstance(value, str) and NEEDS_DATA.search(value):
                continue
            assert found == value, f"{path.name}: [{table}] {key} is {found!r}, the file has {value!r}"
    again = weft.folder / "again.toml"
    again.write_text(printed)
    assert weft.run(*command, again, "--print-config") == printed, f"{path.name}: --print-config does not load back to itself"


def check_run(weft, path):
    """A few steps, on synthetic or real data."""
    given = tomllib.loads(path.read_text())
    sets = [f"run.steps={STEPS}", *SHRINK.get(path.name, [])]
    sets += PLANT.get(path.name, [])
    if "synthetic" in given or path.name in PLANT:
        data = weft.folder / f"{path.stem}_data"
        sets += [f"synthetic.output={data}", f"data.train={data}/train"]
        if given["data"].get("validation"):
            sets += [f"data.validation={data}/validation"]
        weft.run("synth", path, *program.sets(*sets))
    options = program.sets(*sets)
    output = weft.folder / path.stem
    weft.run(*command_of(path), path, *options, "--dry-run", "--output", output)
    assert not (output / "checkpoints").exists(), f"{path.name}: a dry run left files"
    weft.run(*command_of(path), path, *options, "--output", output)
    result = program.record(output)
    assert result["exit"]["code"] == 0 and result["result"]["step"] == STEPS, json.dumps(result.get("exit"))


def check_plan(weft, path):
    """OLMo: 31 billion parameters fit on 8 GPUs of 141 GB, and on 2; 8 of 14 GB are refused. Without data."""
    weft.run("train", path, "--dry-run")   # as shipped; warns if this machine is too small
    for world in (8, 2):
        plan = weft.run("train", path, "--dry-run", "--set", f"parallel.world={world}")
        assert "31131.2 M parameters" in plan and "not there yet" in plan and f"grid 1 x {world}" in plan, plan
    refused = weft.run("train", path, "--dry-run", "--set", "parallel.world=8", "--set", "device.memory=14", code=2)
    assert "of device memory per rank, 13.0 GiB are available" in refused and "what fits: transcoder.features = " in refused, refused
    advised = weft.run("train", path, "--dry-run", "--set", "parallel.world=8", "--set", "parallel.data=2")
    assert "consider parallel.data = 1" in advised, advised
    weft.run("train", path, "--dry-run", "--set", "data.layers=0", code=2)
    weft.run("train", path, code=2)  # a run needs the data


def check_benchmark(weft, path):
    """Every case is measured, phase by phase."""
    output = weft.folder / path.stem
    sets = [f"benchmark.steps={STEPS}", *SHRINK[path.name]]
    options = program.sets(*sets)
    weft.run("benchmark", path, *options, "--dry-run", "--output", output)
    ranks = 2 if "ranks" in path.name else None
    weft.run("benchmark", path, *options, "--output", output, ranks=ranks)
    result = json.loads((output / "benchmark.json").read_text())
    cases = tomllib.loads(path.read_text())["benchmark"]["cases"]
    if any(each.startswith("benchmark.cases") for each in sets):
        cases = cases[:1]
    assert [case["name"] for case in result["cases"]] == [case.split(":")[0] for case in cases]
    assert result["machine"]["copy_gb_per_second"] > 0 and result["machine"]["gemm_gflops"] > 0
    for case in result["cases"]:
        assert case["peak_bytes"] > case["state_bytes"] > 0 and case["tokens_per_second"] > 0, case
        phases = {phase["name"]: phase["ms"] for phase in case["phases"]}
        # Their sum is not compared with the step: a sum of medians is not the median of the sum.
        assert all(phases.get(name, 0) > 0 for name in ("normalise", "encode", "decode", "encoder backward")), case
    if path.name != "benchmark_cpu.toml":
        return
    slower = dict(result, cases=[dict(case, ms_per_step=case["ms_per_step"] / 1000) for case in result["cases"]])
    for name, reference, code in (("slow", slower, 1), ("other", {"cases": []}, 2)):
        file = weft.folder / f"{name}.json"
        file.write_text(json.dumps(reference))
        weft.run("benchmark", path, *options, "--output", output, "--compare", file, code=code)
    weft.run("benchmark", path, *options, "--output", output, "--compare", output / "benchmark.json",
             "--set", "benchmark.compare_ratio=1000")
    weft.run("benchmark", path, "--tune", code=2)


def check_language_benchmark(weft, path):
    """The plan as shipped; some cases, or those of the input; then a few steps of training."""
    given = tomllib.loads(path.read_text())
    plan = weft.run("benchmark", path, "--dry-run")
    cases = given["benchmark"].get("cases")
    for name in [case.split(":")[0] for case in cases] if cases else ["input", "baseline", "safe", "all"]:
        assert f"{name}: " in plan, f"{path.name}: no plan of the case {name!r}:\n{plan}"
    sets = [f"benchmark.steps={STEPS}", "benchmark.warmup=1", "benchmark.batch_tokens=0", "benchmark.vocabulary=300",
            *SHRINK[path.name], *([] if cases else [f"benchmark.cases={json.dumps(CASES)}"])]
    options = program.sets(*sets)
    output = weft.folder / f"{path.stem}_benchmark"
    weft.run("benchmark", path, *options, "--output", output)
    result = json.loads((output / "benchmark.json").read_text())
    assert {case["name"] for case in result["cases"]} >= {"baseline"}, result
    for case in result["cases"]:
        # Cases with other tokens per step are not compared: null.
        assert case["valid"] is not False and case["peak_bytes"] > case["state_bytes"] > 0 and case["tokens_per_second"] > 0, case
    sets = [f"run.steps={STEPS}", *SHRINK[path.name], *([] if "train" in given["data"] else TEXT)]
    options = program.sets(*sets)
    output = weft.folder / path.stem
    weft.run("lm", "train", path, *options, "--output", output)
    result = program.record(output)
    assert result["exit"]["code"] == 0 and result["result"]["step"] == STEPS, json.dumps(result.get("exit"))


def main():
    repository = Path(sys.argv[1])
    inputs = sorted((repository / "inputs").glob("*.toml"))
    assert inputs, f"no inputs under {repository}"
    check_index(repository / "inputs")
    for path in inputs:
        check_text(path)
        tomllib.loads(path.read_text())
    if len(sys.argv) < 3:
        return
    with tempfile.TemporaryDirectory(prefix="weft_test_") as folder:
        weft = program.Program(sys.argv[2], folder)
        (weft.folder / "inputs").symlink_to(repository.resolve() / "inputs")  # paths of texts are relative
        absent = []
        for path in inputs:
            if NEEDS_DATA.search(path.read_text()) and not os.environ.get("WEFT_TEST_DATA"):
                absent.append(path.name)
                continue
            check_values(weft, path)
            if path.name == "olmo2_1b.toml":
                check_plan(weft, path)
            check = check_benchmark if path.name.startswith("benchmark") else check_run
            (check_language_benchmark if is_language_benchmark(path) else check)(weft, path)
            print(f"{path.name}: runs")
        if absent:
            program.skip(f"{', '.join(absent)}: WEFT_TEST_DATA is not set (the others ran)")


if __name__ == "__main__":
    main()
