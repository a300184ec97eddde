# SPDX-License-Identifier: Apache-2.0
"""weft harvest: the files contain exactly the activations of the model, in the stored type.

harvest_test.py [WEFT]

Tiny randomly initialised GPT-2, Llama and BERT models are created here; nothing is downloaded. The expected values are recorded by
replacing the forward functions of the MLPs, not by the hooks that weft.harvest uses, and the files are read bit by bit through h5py.
Given the path of the program, `weft inspect` and a short training run read the files as well. Skipped without PyTorch or transformers.
"""
import contextlib
import importlib.util
import io
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

SKIPPED = 77
os.environ.setdefault("HF_HUB_OFFLINE", "1")
for stale in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
    os.environ.pop(stale, None)
try:
    import h5py
    import numpy as np
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
except ImportError as missing:
    print(f"skipped: {missing.name} is not installed (weft harvest needs PyTorch and transformers)")
    sys.exit(SKIPPED)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
from weft import harvest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONTEXT, BATCH, LAYERS, WIDTH = 16, 3, 3, 32


# --- Texts and models ----------------------------------------------------------------------------------------------------


def write_text(folder):
    """Two documents, one plain and one in JSON lines."""
    generator = random.Random(1)
    words = [f"w{i}" for i in range(40)]
    document = lambda n: " ".join(generator.choice(words) for _ in range(n))
    (folder / "a.txt").write_text(document(700))
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": document(90)}) + "\n" for _ in range(5)))
    return [folder / "a.txt", folder / "b.jsonl"]


def write_model(folder, kind):
    """A model with random weights, and a tokenizer of whole words. Llama's prepends <s> to each text, GPT-2's nothing, that of the encoder
    puts it between [CLS] and [SEP]."""
    special = {"llama": ["<s>", "</s>", "<unk>"], "gpt2": ["<|endoftext|>"], "bert": ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]}[kind]
    tokenizer = Tokenizer(models.WordLevel(unk_token=special[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([" ".join(f"w{i}" for i in range(40))], trainers.WordLevelTrainer(special_tokens=special))
    if kind == "llama":
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>",
                                                    unk_token="<unk>")
    elif kind == "bert":
        # The class of BERT knows where its special tokens go, as MiniLM's does.
        (folder / "own").mkdir(parents=True)
        (folder / "own" / "vocab.txt").write_text("\n".join([*special, *(f"w{i}" for i in range(40))]) + "\n")
        fast = transformers.BertTokenizerFast(vocab_file=str(folder / "own" / "vocab.txt"))
    else:
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[0],
                                                    unk_token=special[0])
    torch.manual_seed(7)
    vocabulary = len(fast)
    if kind == "llama":
        config = transformers.LlamaConfig(vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=LAYERS,
                                          num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
        model = transformers.LlamaForCausalLM(config)
    elif kind == "bert":
        config = transformers.BertConfig(vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=LAYERS,
                                         num_attention_heads=2, max_position_embeddings=64)
        model = transformers.BertModel(config)
    else:
        config = transformers.GPT2Config(vocab_size=vocabulary, n_embd=WIDTH, n_layer=LAYERS, n_head=2, n_positions=64)
        model = transformers.GPT2LMHeadModel(config)
    # Initial weights are small: larger ones give activations of usual magnitude, negative and positive.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


# --- Independent record of the values -------------------------------------------------------------------------------------


def recorded(model, blocks, name):
    """[(input, output)] of module `name` of each block in later forward passes, by replacing its forward function."""
    calls = [None] * len(blocks)
    for layer, block in enumerate(blocks):
        module = block.get_submodule(name)

        def forward(value, *more, _forward=module.forward, _layer=layer, **named):
            before = value.clone()
            result = _forward(value, *more, **named)
            calls[_layer] = (before, result.clone())
            return result

        module.forward = forward
    return calls


def bits(tensor):
    return tensor.detach().contiguous().cpu().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).numpy()


def stored_bits(dataset):
    """The bytes of a dataset as stored in the file: memory type = file type."""
    words = np.empty(dataset.shape, np.int32 if dataset.id.get_type().get_size() == 4 else np.int16)
    space = h5py.h5s.create_simple(dataset.shape)
    dataset.id.read(space, space, words, dataset.id.get_type())
    return words


def read(directory):
    """{name: words} of all chunk files joined, with tokens and positions."""
    parts = {}
    for number in range(len(list(directory.glob("chunk_*.hdf5")))):
        with h5py.File(directory / f"chunk_{number}.hdf5", "r") as file:
            for name in ("tokens", "positions"):
                parts.setdefault(name, []).append(file[name][:])
            for layer in range(LAYERS):
                for side in ("inputs", "targets"):
                    parts.setdefault(f"layer_{layer}/{side}", []).append(stored_bits(file[f"layer_{layer}/{side}"]))
    return {name: np.concatenate(pieces) for name, pieces in parts.items()}


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# --- Tests ----------------------------------------------------------------------------------------------------------------


def run(*arguments, code=0):
    """Output of weft harvest; fails unless its exit code is `code`."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        found = harvest.main([str(argument) for argument in arguments])
    assert found == code, f"{' '.join(map(str, arguments))} ended with {found}, expected {code}:\n{said.getvalue()}"
    return said.getvalue()


def windows_of(file):
    """[(begin, end)] of the rows of each window: positions ascend within one."""
    positions = file["positions"][:]
    begins = [0, *(row for row in range(1, len(positions)) if positions[row] <= positions[row - 1])]
    return list(zip(begins, [*begins[1:], len(positions)]))


def check_exact(model_folder, directory, text, dtype, module, sides, join=False):
    """Compares every stored bit with the model, run here over the stored tokens in the same batches. `module` per side, and whether
    its input (0) or output (1) was recorded."""
    config = transformers.AutoConfig.from_pretrained(model_folder)
    kind = transformers.AutoModel if config.model_type == "bert" else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(model_folder, **harvest.loaded_in(dtype)).eval().to(DEVICE)
    blocks = {"gpt2": lambda: model.transformer.h, "llama": lambda: model.model.layers, "bert": lambda: model.encoder.layer}[config.model_type]()
    taken = {side: recorded(model, blocks, module[side]) for side in ("inputs", "targets")}
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    before, after = {"gpt2": ([], []), "llama": ([tokenizer.bos_token_id], []),
                     "bert": ([tokenizer.cls_token_id], [tokenizer.sep_token_id])}[config.model_type]
    stored = read(directory)

    # The tokens are those of the text, document after document; joined, with an end-of-text token after each.
    expected, begins = [], []
    for path in text:
        pieces = [json.loads(line)["text"] for line in path.read_text().splitlines()] if path.suffix == ".jsonl" \
            else [path.read_text()]
        for piece in pieces:
            begins.append(len(expected))
            expected += tokenizer.encode(piece, add_special_tokens=False) + ([tokenizer.eos_token_id] if join else [])
    rows = len(stored["tokens"])
    # A document that is continued in the next file ends there once: its end-of-text token comes with its end.
    assert stored["tokens"].tolist() == expected and rows > 0, (rows, len(expected))
    vocabulary = json.loads((directory / "vocabulary.json").read_text())
    assert vocabulary["format"] == "weft-vocabulary" and vocabulary["format_version"] == 1
    assert vocabulary["texts"] == [tokenizer.decode([i]) for i in range(len(tokenizer))]

    negatives, at = 0, 0
    for number in range(len(list(directory.glob("chunk_*.hdf5")))):
        with h5py.File(directory / f"chunk_{number}.hdf5", "r") as file:
            found, count = windows_of(file), len(file["tokens"])
            assert file.attrs["format_version"] == 2 and file["documents"].dtype == np.dtype("<i8")
            assert file["documents"][:].tolist() == [0, *(begin - at for begin in begins if at < begin < at + count)], number
        longest_body = CONTEXT - len(before) - len(after)
        assert max(end - begin for begin, end in found) == longest_body
        if not join:        # no window spans two documents
            assert not [begin for begin in begins for first, end in found if first < begin - at < end], number
        for first in range(0, len(found), BATCH):
            batch = found[first:first + BATCH]
            ids = [[*before, *stored["tokens"][at + begin:at + end].tolist(), *after] for begin, end in batch]
            longest = max(map(len, ids))
            mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in ids])
            more = {"attention_mask": mask.to(DEVICE)} if int(mask.min()) == 0 else {}
            with torch.inference_mode():
                model(torch.tensor([one + [tokenizer.pad_token_id or 0] * (longest - len(one)) for one in ids]).to(DEVICE), **more)
            for side in ("inputs", "targets"):
                for layer in range(LAYERS):
                    value = taken[side][layer][sides[side]]
                    own = torch.cat([value[row, len(before):len(one) - len(after)] for row, one in enumerate(ids)])
                    words = stored[f"layer_{layer}/{side}"][at + batch[0][0]:at + batch[-1][1]]
                    assert np.array_equal(words, bits(own)), f"{directory.name}: layer {layer} {side} from row {at + batch[0][0]}"
                    negatives += int((words < 0).sum())
        at += count
    assert at == rows
    assert negatives > rows, "no negative activations: this test would not detect lost signs"


def check_model(kind, folder, text, weft):
    model = write_model(folder / kind, kind)
    common = ("--text", *text, "--context", CONTEXT, "--batch", BATCH, "--rows-per-file", 11 * CONTEXT, "--device", DEVICE)
    mlp, taken = {"inputs": "mlp", "targets": "mlp"}, {"inputs": 0, "targets": 1}
    if kind == "bert":
        mlp = {"inputs": "intermediate", "targets": "output.dense"}
    hooks = ("intermediate.input", "output.dense.output") if kind == "bert" else ("mlp.input", "mlp.output")

    # bf16, computed and stored.
    whole = folder / f"{kind}_whole"
    said = run(model, *common, "--output", whole)
    assert f"{hooks[0]} to" in said and (whole / "metadata.json").exists(), said
    assert "about" in said and "rows/s" in said and "(h:mm:ss)" in said, said
    check_exact(model, whole, text, "bf16", mlp, taken)
    with h5py.File(whole / "chunk_0.hdf5", "r") as file:
        place = {"gpt2": "transformer.h.{}", "llama": "model.layers.{}", "bert": "encoder.layer.{}"}[kind]
        assert file.attrs["format"] == "weft-activations" and file.attrs["hook_inputs"] == f"{place}.{hooks[0]}"
        assert file.attrs["hook_targets"] == f"{place}.{hooks[1]}"
        # h5py converts a 16-bit float type to float32: the same values without bit manipulation.
        words = stored_bits(file["layer_1/targets"])
        assert np.array_equal(file["layer_1/targets"][:].astype(np.float32),
                              (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32))
    reference = contents(whole)
    assert len(list(whole.glob("chunk_*.hdf5"))) > 2

    # Complete: no file is modified. Interrupted: only missing files are written again, with the same content.
    times = {path.name: path.stat().st_mtime_ns for path in whole.iterdir()}
    for lost in ("chunk_1.hdf5", "index.bin", "metadata.json"):
        (whole / lost).unlink()
    (whole / "chunk_1.hdf5.part").write_bytes(b"torn")
    run(model, *common, "--output", whole)
    for path in whole.glob("chunk_*"):
        assert path.name == "chunk_1.hdf5" or path.stat().st_mtime_ns == times[path.name], path
    assert contents(whole) == reference
    # Files of another harvest are refused.
    said = run(model, *common, "--output", whole, "--batch", BATCH + 1, code=2)
    assert "belongs to another harvest (batch was 3, now 4)" in said, said

    # Two processes, one after the other: each writes its own files, the last one completes the dataset.
    shared = folder / f"{kind}_shared"
    for rank, complete in ((1, False), (0, True)):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        said = run(model, *common, "--output", shared)
        assert (shared / "metadata.json").exists() == complete, said
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    assert contents(shared) == reference

    # Two sides, which have every document once between them.
    sides = {}
    for split in ("train", "validation"):
        run(model, *common, "--output", folder / f"{kind}_{split}", "--split", split, "--validation", 0.4)
        sides[split] = read(folder / f"{kind}_{split}")["tokens"]
    assert sorted(np.concatenate(list(sides.values()))) == sorted(read(whole)["tokens"]) and min(map(len, sides.values())) > 0
    # About as many rows as are wanted.
    run(model, *common, "--output", folder / f"{kind}_few", "--tokens", 300)
    assert 250 < len(read(folder / f"{kind}_few")["tokens"]) < 400
    if kind == "bert":
        return
    run(model, *common, "--output", folder / f"{kind}_joined", "--join")
    check_exact(model, folder / f"{kind}_joined", text, "bf16", mlp, taken, join=True)

    # The residual stream before the norm instead, computed and stored in fp32.
    norm = "ln_2" if kind == "gpt2" else "post_attention_layernorm"
    residual = folder / f"{kind}_residual"
    run(model, *common, "--output", residual, "--inputs", f"{norm}.input", "--dtype", "fp32")
    check_exact(model, residual, text, "fp32", {"inputs": norm, "targets": "mlp"}, taken)

    if weft:
        said = subprocess.run([weft, "inspect", whole], capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stdout + said.stderr
        for words in ("Weft's own layout", f"{place}.{hooks[0]}", f"{LAYERS} layers, d_model {WIDTH}, ", "rows, bf16",
                      "ids of all rows", "vocabulary.json", "all values finite"):
            assert words in said.stdout, (words, said.stdout)
        source = folder / f"{kind}.toml"
        source.write_text(f'[run]\nsteps = 3\n[data]\ntrain = "{whole}"\nbatch_tokens = 64\n[transcoder]\nfeatures = 64\nk = 4\n')
        trained = subprocess.run([weft, "train", source, "--output", folder / f"{kind}_run"], capture_output=True, text=True,
                                 check=False)
        assert trained.returncode == 0, trained.stdout + trained.stderr


def check_messages(folder, text):
    model, common = folder / "gpt2", ("--text", text[0], "--context", CONTEXT, "--device", DEVICE, "--output", folder / "no")
    for arguments, words in ((("--inputs", "mlp"), "mlp: not a hook"),
                             (("--inputs", "feed_forward.input"), "block 0 has no module feed_forward (it has ln_1"),
                             (("--targets", "mlp.c_fc.output"), "differ in width"),
                             (("--context", "1", "--bos", "keep", "--tokens", "1"), "no token would be stored")):
        assert words in run(model, *common, *arguments, code=2), arguments
    assert not (folder / "no" / "metadata.json").exists()
    assert "the text ends after about" in run(model, *common[:-1], folder / "short", "--tokens", "1000000")


def check_device_map(folder, text):
    """Spread by accelerate, here over one device: the same file."""
    if importlib.util.find_spec("accelerate") is None:
        print("--device-map: skipped (the package accelerate is not installed)")
        return
    common = ("--text", text[0], "--context", CONTEXT, "--dtype", "fp32")
    for name, where in (("placed", ("--device", DEVICE)), ("spread", ("--device-map", "auto"))):
        run(folder / "gpt2", *common, *where, "--output", folder / name)
    placed, spread = ((folder / name / "chunk_0.hdf5").read_bytes() for name in ("placed", "spread"))
    assert placed == spread


def main():
    weft = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(prefix="weft_harvest_") as name:
        folder = Path(name)
        text = write_text(folder)
        for kind in ("gpt2", "llama", "bert"):
            check_model(kind, folder, text, weft)
        check_messages(folder, text)
        check_device_map(folder, text)
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(f"every stored bit is the model's: GPT-2, Llama and BERT, bf16 and fp32, on {where}; torch {torch.__version__}, "
          f"transformers {transformers.__version__}, h5py {h5py.__version__}, HDF5 {h5py.version.hdf5_version}"
          + ("; weft reads the files" if weft else ""))


main()
