# SPDX-License-Identifier: Apache-2.0
"""Language models on one GPU with state and activations in host memory: the checkpoints are those of a run that keeps both on the device,
recorded or eager, also after a resume that moves the state; swapping is refused where recomputation costs less.

memory_test.py WEFT        the above
memory_test.py WEFT plan   the memory plans of a transcoder and of language models are what the driver shows; needs the GPU alone
"""
import sys

import files
import program

TEXT = "".join(f"The {animal} sat on the {place}; the {animal} did not see the {other}.\n"
               for animal in ("cat", "dog", "fox", "owl") for place in ("mat", "log", "hill") for other in ("moon", "river", "king"))
INPUT = """
[run]
steps = {steps}
[data]
train = "text.txt"
batch_tokens = 256
micro_tokens = 128
sequence = 32
[language_model]
layers = 5
heads = 2
d_model = 128
dropout = 0.1
[optimizer]
state = "{state}"
warmup_steps = 4
schedule_steps = 20
[device]
precision = "bf16"
[checkpoint]
every = 10
keep = 4
[log]
every = 1
"""
TRANSCODER = """
[synthetic]
output = "{folder}/data"
layers = 4
d_model = 208
features = 384
k = 8
tokens = 8192
validation_tokens = 1024
dtype = "bf16"
[run]
steps = 20
[data]
train = "{folder}/data/train"
validation = "{folder}/data/validation"
batch_tokens = 512
[transcoder]
features = 700
k = 8
[optimizer]
state = "8bit"
[device]
precision = "bf16"
"""

OFFLOAD, SWAP = "memory.offload_optimizer=true", ("memory.swap_activations=true", "memory.recompute=block")


def train(weft, name, *sets, state="fp32", steps=20, code=0):
    source = weft.folder / f"{name}.toml"
    source.write_text(INPUT.format(state=state, steps=steps))
    options = [option for each in sets for option in ("--set", each)]
    printed = weft.run("lm", "train", source, "--output", weft.folder / name, *options, code=code)
    return weft.folder / name, printed


def tensors(run, step=20):
    return files.read_tensors(run / "checkpoints" / f"step_{step:08d}")


def same_bits(a, b):
    first, second = tensors(a), tensors(b)
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert values.tobytes() == second[name].tobytes(), f"{name} differs between {a.name} and {b.name}"
    losses = [[line["loss"] for line in program.metrics(run)][-10:] for run in (a, b)]
    assert losses[0] == losses[1], losses


def check_bits(weft):
    for state in ("fp32", "bf16", "8bit"):
        resident, _ = train(weft, f"resident_{state}", state=state)
        for name, sets in (("offload", [OFFLOAD]), ("eager", [OFFLOAD, "device.graphs=false"]), ("both", [OFFLOAD, *SWAP])):
            run, printed = train(weft, f"{name}_{state}", *sets, state=state)
            same_bits(resident, run)
            assert "optimizer state in transit" in printed, printed
        # The first half with the state on the device, the second with the state on the host.
        moved, _ = train(weft, f"moved_{state}", state=state, steps=10)
        moved, _ = train(weft, f"moved_{state}", *([OFFLOAD] if state != "8bit" else [OFFLOAD, *SWAP]), state=state, steps=20)
        same_bits(resident, moved)
        print(f"{state}: the same bits with state and activations in host memory", flush=True)

    _, printed = train(weft, "refused", "memory.swap_activations=true", code=2)
    assert "costs more time than recomputation" in printed and 'take memory.recompute = "block"' in printed, printed


def check_plan(weft):
    text = TRANSCODER.format(folder=weft.folder)
    (weft.folder / "data.toml").write_text(text)
    weft.run("synth", weft.folder / "data.toml")
    runs = {"transcoder": weft.train(text, "transcoder")}
    large = ["language_model.layers=8", "language_model.heads=8", "language_model.d_model=1024", "data.sequence=1024",
             "data.batch_tokens=32768", "data.micro_tokens=16384", "data.tokens=bytes", "checkpoint.staging=chunked"]
    (weft.folder / "text.txt").write_text(TEXT * 20)
    for name, sets in (("resident", []), ("moved", [OFFLOAD, *SWAP])):
        runs[name], _ = train(weft, f"large_{name}", *large, *sets, steps=4)
    for name, run in runs.items():
        planned, peak, driver = (program.record(run)["device"][key] for key in ("planned_bytes", "peak_bytes", "driver_bytes"))
        print(f"{name}: planned {planned:,}, allocated {peak:,}, the driver shows {driver:,}", flush=True)
        # The context and the libraries are an estimate; the rest is counted.
        assert abs(planned - driver) <= 0.05 * driver, "the memory plan is more than 5 % off"


def check(weft):
    program.needs_gpu()
    (weft.folder / "text.txt").write_text(TEXT)
    if sys.argv[2:] == ["plan"]:
        check_plan(weft)
    else:
        check_bits(weft)


program.main(check)
