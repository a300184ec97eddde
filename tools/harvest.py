#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Records MLP inputs and outputs of a Hugging Face causal language model as activation files for `weft train`.

    python3 tools/harvest.py MODEL --text FILE... --output DIR

MODEL is a name on the hub or a directory. Texts are plain files (one document each), or .jsonl with a "text" in each line;
--dataset reads a dataset from the hub instead (needs the package datasets). Documents are joined by the end-of-text token and cut
into windows of --context tokens; an incomplete last window is dropped. The files hold the token id of every row and the rows at
which documents begin; vocabulary.json holds the text of every id.

Values are stored exactly as computed by the model if --store is the type in which the model runs (--dtype; both default to
bf16). Every chunk_{i}.hdf5 depends only on model, texts and settings, so that any number of processes can share the work, each
writing its own files. An interrupted harvest resumes when the same command is run again.

    torchrun --nproc-per-node 8 tools/harvest.py MODEL …     (or srun, mpirun: ranks are taken from the environment)

The hooks are recorded in the files. A hook is the name of a module inside a block of the model, followed by ".input" or
".output". The defaults, mlp.input and mlp.output, are the input of the MLP (after the norm, in pre-norm models) and its output.
"--inputs ln_2.input" (GPT-2) or "--inputs post_attention_layernorm.input" (Llama) select the residual stream instead: a transcoder
trained on one cannot be used on the other. Models that normalise the MLP's output (Gemma 2: post_feedforward_layernorm.output) add
a different value to the residual stream than mlp.output.

Needs PyTorch, transformers and h5py. Exit codes: 0 done, 2 usage error, 1 any other failure.
"""
import argparse
import itertools
import json
import os
import struct
import sys
from pathlib import Path

FORMAT, FORMAT_VERSION = "weft-activations", 2
VOCABULARY_FORMAT, VOCABULARY_VERSION = "weft-vocabulary", 1
CHUNK_ROWS = 1024       # rows of one HDF5 chunk
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class UsageError(Exception):
    """problem (why) suggestion"""


# --- Ranks ----------------------------------------------------------------------------------------------------------------


def processes():
    """(rank, number of processes, index on this machine), from the environment of torchrun, Open MPI or Slurm."""
    # Not SLURM_NTASKS: in a batch script without srun it is the count of the job, although this is the only process.
    for rank, world, local in (("RANK", "WORLD_SIZE", "LOCAL_RANK"),
                               ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
                               ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")):
        if rank in os.environ and world in os.environ:
            return int(os.environ[rank]), int(os.environ[world]), int(os.environ.get(local, 0))
    return 0, 1, 0


# --- Text -> windows of tokens ----------------------------------------------------------------------------------------------


def documents(arguments):
    if arguments.dataset:
        import datasets
        loaded = datasets.load_dataset(arguments.dataset, arguments.dataset_config, split=arguments.split, streaming=True)
        for row in loaded:
            yield row[arguments.column]
        return
    for name in arguments.text:
        path = Path(name)
        if path.suffix == ".jsonl":
            with open(path, encoding="utf-8") as file:
                for line in file:
                    if line.strip():
                        yield json.loads(line)[arguments.column]
        else:
            yield path.read_text(encoding="utf-8")


def windows(texts, tokenizer, length, first):
    """(ids [length], positions in them at which documents begin): documents joined by the end-of-text token. `first`: an id
    prepended to each window, or None; it belongs to the document of the token after it."""
    end = tokenizer.eos_token_id
    before = first is not None
    body = length - before
    pending, starts = [], []
    for text in texts:
        if starts[-1:] != [len(pending)]:       # no document is empty
            starts.append(len(pending))
        pending.extend(tokenizer.encode(text, add_special_tokens=False))
        if end is not None:
            pending.append(end)
        whole = len(pending) // body * body
        for begin in range(0, whole, body):
            window = pending[begin:begin + body]
            inside = [start - begin + before if start > begin else 0 for start in starts if begin <= start < begin + body]
            yield [first, *window] if before else window, inside
        del pending[:whole]
        starts = [start - whole for start in starts if start >= whole]


# --- Hooks in the model -----------------------------------------------------------------------------------------------------


def blocks_of(model):
    """(path, modules) of the model's blocks: the outermost module list with one entry per hidden layer."""
    import torch
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == config.num_hidden_layers:
            return path, list(module)
    raise UsageError(f"no list of {config.num_hidden_layers} blocks in {type(model).__name__}; is it a decoder-only model?")


class Hook:
    """Records one value of every block, for example "mlp.input" or "ln_2.output"."""

    def __init__(self, name, path, blocks):
        module, _, self.side = name.rpartition(".")
        if not module or self.side not in ("input", "output"):
            raise UsageError(f"{name}: not a hook (a module of a block, followed by .input or .output); for example mlp.input")
        self.values = [None] * len(blocks)
        for layer, block in enumerate(blocks):
            try:
                found = block.get_submodule(module)
            except AttributeError:
                names = ", ".join(child for child, _ in block.named_children())
                raise UsageError(f"{name}: block {layer} has no module {module} (it has {names}); name one of these") from None
            self.register(found, layer)
        self.path = f"{path}.{{}}.{name}"       # the same form as crosslayer-coding's templates

    def register(self, module, layer):
        def keep(value):
            # A copy: later operations of the block may change the tensor in place.
            self.values[layer] = (value[0] if isinstance(value, tuple) else value).detach().clone()

        if self.side == "input":
            module.register_forward_pre_hook(lambda _module, inputs: keep(inputs[0]))
        else:
            module.register_forward_hook(lambda _module, _inputs, output: keep(output))


# --- Files --------------------------------------------------------------------------------------------------------------------


def stored_type(name):
    """The HDF5 type: bf16 as a true 16-bit float (sign 15, exponent 7 to 14 with bias 127, mantissa 0 to 6)."""
    from h5py import h5t
    if name == "fp32":
        return h5t.IEEE_F32LE.copy()
    if name == "fp16":
        return h5t.IEEE_F16LE.copy()
    bf16 = h5t.IEEE_F32LE.copy()
    bf16.set_fields(15, 7, 8, 0, 7)
    bf16.set_precision(16)
    bf16.set_size(2)
    bf16.set_ebias(127)
    return bf16


def stored_words(tensor, store):
    """(stored form of the tensor as NumPy words, True if all are finite). NumPy has no bf16: its bits are passed as integers."""
    import torch
    tensor = tensor.to(getattr(torch, DTYPES[store])).contiguous()
    words = tensor.view(torch.int32 if store == "fp32" else torch.int16)
    return words.cpu().numpy(), bool(torch.isfinite(tensor).all())


class ChunkFile:
    """A new chunk file of a known number of rows, filled from the first. It is renamed to its final name when complete."""

    def __init__(self, path, rows, n_layers, width, store, attributes):
        import h5py
        self.path, self.partial = path, path.with_name(path.name + ".part")
        self.partial.unlink(missing_ok=True)     # of an interrupted harvest
        self.type, self.width, self.filled = stored_type(store), width, 0
        # Version bounds that every HDF5 library from 1.10 on reads; no time stamps: the same values give the same file.
        access, create_file = h5py.h5p.create(h5py.h5p.FILE_ACCESS), h5py.h5p.create(h5py.h5p.FILE_CREATE)
        access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_V110)
        create_group, create = h5py.h5p.create(h5py.h5p.GROUP_CREATE), h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        for properties in (create_file, create_group, create):
            properties.set_obj_track_times(False)
        self.file = h5py.File(h5py.h5f.create(os.fsencode(self.partial), h5py.h5f.ACC_TRUNC, create_file, access))
        for name, value in attributes.items():
            self.file.attrs[name] = value
        space = h5py.h5s.create_simple((rows, width))
        create.set_chunk((min(CHUNK_ROWS, rows), width))
        create.set_fill_time(h5py.h5d.FILL_TIME_ALLOC)      # padding of the last chunk is zero, not uninitialised memory
        self.sides = {}
        for layer in range(n_layers):
            group = h5py.h5g.create(self.file.id, f"layer_{layer}".encode(), gcpl=create_group)
            for side in ("inputs", "targets"):
                self.sides[layer, side] = h5py.h5d.create(group, side.encode(), self.type, space, create)
        self.tokens = self.file.create_dataset("tokens", (rows,), dtype="<i4", track_times=False)
        self.positions = self.file.create_dataset("positions", (rows,), dtype="<i4", track_times=False)
        self.documents = [0]        # the first row of a file always begins one

    def append(self, tokens, positions, documents, values):
        """tokens, positions [rows]; documents: those of the rows at which a document begins, ascending; values
        {(layer, side): words [rows, width]}"""
        import h5py
        begin, end = self.filled, self.filled + len(tokens)
        self.documents += [begin + row for row in documents if begin + row > 0]
        self.tokens[begin:end], self.positions[begin:end] = tokens, positions
        memory = h5py.h5s.create_simple((end - begin, self.width))
        for key, words in values.items():
            rows = self.sides[key].get_space()
            rows.select_hyperslab((begin, 0), (end - begin, self.width))
            self.sides[key].write(memory, rows, words, self.type)    # memory type = file type: no conversion
        self.filled = end

    def finish(self):
        self.sides.clear()
        self.file.create_dataset("documents", data=self.documents, dtype="<i8", track_times=False)
        self.file.close()
        with open(self.partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self.partial, self.path)


def chunk_path(directory, number):
    return directory / f"chunk_{number}.hdf5"


def require_same(path, settings, rows):
    """An existing chunk file must be the one that this harvest would write."""
    import h5py
    with h5py.File(path, "r") as file:
        made_with, found = json.loads(file.attrs.get("harvest", "{}")), len(file["layer_0/inputs"])
    differ = [f"{key} was {made_with.get(key)!r}, now {value!r}" for key, value in settings.items()
              if made_with.get(key) != value]
    if found != rows:
        differ.append(f"it has {found:,} rows, now {rows:,}")
    if differ:
        raise UsageError(f"{path}: belongs to another harvest ({'; '.join(differ)}); take another --output")


def write_atomically(path, content):
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def token_texts(tokenizer):
    """The text of every id: what decoding it alone gives. Bytes that are no UTF-8 alone are U+FFFD."""
    texts = []
    for token in range(len(tokenizer)):
        text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        # SentencePiece writes a space before a word as U+2581, and decoding drops the first one.
        if str(tokenizer.convert_ids_to_tokens(token)).startswith("\u2581") and not text.startswith(" "):
            text = " " + text
        texts.append(text)
    return texts


def complete(directory, rows_of_files, metadata, tokenizer):
    """Writes vocabulary.json, index.bin and metadata.json, which complete the dataset, if all chunk files exist. Any process may
    do so."""
    import h5py
    if not all(chunk_path(directory, number).exists() for number in range(len(rows_of_files))):
        return False
    with h5py.File(chunk_path(directory, 0), "r") as file:
        metadata = {**metadata, "d_model": file["layer_0/inputs"].shape[1]}
    index, first = b"", 0
    for number, rows in enumerate(rows_of_files):
        index += struct.pack("<iiq", number, rows, first)
        first += rows
    vocabulary = {"format": VOCABULARY_FORMAT, "format_version": VOCABULARY_VERSION, "texts": token_texts(tokenizer)}
    write_atomically(directory / "vocabulary.json", (json.dumps(vocabulary, ensure_ascii=False) + "\n").encode())
    write_atomically(directory / "index.bin", index)
    write_atomically(directory / "metadata.json", (json.dumps({**metadata, "total_tokens": first}, indent=2) + "\n").encode())
    return True


# --- The harvest --------------------------------------------------------------------------------------------------------------


def loaded_in(dtype):
    """Argument of from_pretrained for the dtype of the model: renamed in transformers 4.56."""
    import torch
    import transformers
    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    return {"dtype" if (major, minor) >= (4, 56) else "torch_dtype": getattr(torch, DTYPES[dtype])}


def load_model(arguments, device):
    import transformers
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model, revision=arguments.revision)
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, revision=arguments.revision,
                                                              **loaded_in(arguments.dtype))
    return tokenizer, model.eval().to(device)


def first_token(tokenizer, choice):
    """(first id of each window or None, the mode used)"""
    begin = tokenizer.bos_token_id
    if choice == "auto":
        choice = "drop" if begin is not None and tokenizer.encode("")[:1] == [begin] else "none"
    if choice != "none" and begin is None:
        raise UsageError(f"--bos {choice}: the tokenizer has no begin-of-text token; take --bos none")
    return (None if choice == "none" else begin), choice


class Harvester:
    """A model with its hooks; converts windows of tokens to rows of chunk files."""

    def __init__(self, arguments, device):
        self.arguments, self.device = arguments, device
        self.tokenizer, self.model = load_model(arguments, device)
        path, self.blocks = blocks_of(self.model)
        self.hooks = {"inputs": Hook(arguments.inputs, path, self.blocks),
                      "targets": Hook(arguments.targets, path, self.blocks)}
        self.first, self.bos = first_token(self.tokenizer, arguments.bos)
        self.skip = 1 if self.bos == "drop" else 0      # positions of a window that are not stored
        self.rows_per_window = arguments.context - self.skip
        if self.rows_per_window < 1:
            raise UsageError(f"--context {arguments.context}: no token would be stored; choose a larger value")
        self.windows_per_file = max(1, arguments.rows_per_file // self.rows_per_window)
        self.settings = {
            "format_version": FORMAT_VERSION, "model": arguments.model,
            "revision": getattr(self.model.config, "_commit_hash", None) or arguments.revision,
            "dtype": arguments.dtype, "store": arguments.store, "inputs": self.hooks["inputs"].path,
            "targets": self.hooks["targets"].path, "context": arguments.context, "bos": self.bos,
            "windows_per_file": self.windows_per_file, "batch": arguments.batch,
            "source": arguments.dataset or [Path(name).name for name in arguments.text]}

    def attributes(self):
        import torch
        import transformers
        return {"format": FORMAT, "format_version": FORMAT_VERSION, "model": self.arguments.model,
                "hook_inputs": self.settings["inputs"], "hook_targets": self.settings["targets"],
                "software": f"weft tools/harvest.py, torch {torch.__version__}, transformers {transformers.__version__}",
                "harvest": json.dumps(self.settings)}

    def activations(self, ids):
        """{(layer, side): stored words [rows, width]} of one forward pass over ids [windows, context]."""
        import torch
        with torch.inference_mode():
            self.model.base_model(input_ids=ids, use_cache=False)
        values = {}
        for side, hook in self.hooks.items():
            for layer, value in enumerate(hook.values):
                rows = value[:, self.skip:].reshape(-1, value.shape[-1])
                words, finite = stored_words(rows, self.arguments.store)
                if not finite:
                    raise UsageError(f"{hook.path.format(layer)}: a value is not finite in {self.arguments.store} (too large "
                                     "for the type, or not finite in the model); take --store fp32 or another --dtype")
                values[layer, side] = words
        widths = {words.shape[1] for words in values.values()}
        if len(widths) > 1:
            raise UsageError(f"{self.settings['inputs']} and {self.settings['targets']} differ in width ({widths}; a transcoder "
                             "has one); choose other hooks")
        return values

    def write(self, path, file_windows, progress):
        """Runs the model over the windows of one file, in batches that start at its first window: always the same batches."""
        import torch
        file = None
        for begin in range(0, len(file_windows), self.arguments.batch):
            batch = file_windows[begin:begin + self.arguments.batch]
            ids = torch.tensor([window for window, _ in batch])
            values = self.activations(ids.to(self.device))
            if file is None:
                file = ChunkFile(path, len(file_windows) * self.rows_per_window, len(self.blocks),
                                 values[0, "inputs"].shape[1], self.arguments.store, self.attributes())
            tokens = ids[:, self.skip:].reshape(-1).numpy()
            documents = [number * self.rows_per_window + max(0, start - self.skip)
                         for number, (_, starts) in enumerate(batch) for start in starts]
            file.append(tokens, list(range(self.skip, self.arguments.context)) * len(ids), documents, values)
            progress.update(len(tokens))
        file.finish()


def harvest(arguments):
    import torch
    from tqdm import tqdm
    rank, world, local = processes()
    device = arguments.device
    if device == "auto":
        device = f"cuda:{local % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    harvester = Harvester(arguments, device)
    directory = Path(arguments.output)
    directory.mkdir(parents=True, exist_ok=True)

    # Every process reads the whole text to locate the windows; it runs the model only on those of its own files.
    source = windows(documents(arguments), harvester.tokenizer, arguments.context, harvester.first)
    wanted = arguments.tokens // harvester.rows_per_window if arguments.tokens else None
    if wanted == 0:
        raise UsageError(f"--tokens {arguments.tokens}: less than one window of {harvester.rows_per_window} rows; take more")
    rows_of_files, taken = [], 0
    on_terminal = sys.stderr.isatty()
    with tqdm(total=wanted and wanted * harvester.rows_per_window, unit=" tokens", unit_scale=True, file=sys.stderr,
              desc=f"process {rank} of {world}" if world > 1 else None, mininterval=0.5 if on_terminal else 30) as progress:
        while wanted is None or taken < wanted:
            size = harvester.windows_per_file if wanted is None else min(harvester.windows_per_file, wanted - taken)
            file_windows = list(itertools.islice(source, size))
            taken += len(file_windows)
            if wanted is not None and len(file_windows) < size:
                raise UsageError(f"the text ends after {taken * harvester.rows_per_window:,} of {arguments.tokens:,} tokens "
                                 "(whole windows); give more text, or omit --tokens")
            if not file_windows:
                break
            path, rows = chunk_path(directory, len(rows_of_files)), len(file_windows) * harvester.rows_per_window
            if path.exists():
                require_same(path, harvester.settings, rows)
                progress.update(rows)
            elif len(rows_of_files) % world == rank:
                harvester.write(path, file_windows, progress)
            else:
                progress.update(rows)       # another process writes it
            rows_of_files.append(rows)
    if not rows_of_files:
        raise UsageError(f"the text has less than one window of {arguments.context} tokens; give more text or a shorter --context")
    metadata = {"model_name": arguments.model, "dataset": str(harvester.settings["source"]), "split": arguments.split,
                "num_layers": len(harvester.blocks), "dtype": DTYPES[arguments.store],
                "chunk_tokens": harvester.windows_per_file * harvester.rows_per_window}
    if complete(directory, rows_of_files, metadata, harvester.tokenizer):
        print(f"{directory}: {sum(rows_of_files):,} rows of {len(harvester.blocks)} layers in {len(rows_of_files)} files, "
              f"{harvester.settings['inputs']} to {harvester.settings['targets']}, {arguments.store}")
    else:
        print(f"process {rank}: its files are written; others are missing (other processes write them, or run the command "
              "again)")


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="name on the hub, or a directory")
    parser.add_argument("--revision", help="commit or branch of the model on the hub")
    parser.add_argument("--text", nargs="+", default=[], metavar="FILE", help="text files, or .jsonl")
    parser.add_argument("--dataset", help="a dataset of the hub instead of files")
    parser.add_argument("--dataset-config", help="its configuration")
    parser.add_argument("--split", default="train", help="its split (default %(default)s)")
    parser.add_argument("--column", default="text", help="field or column with the text (default %(default)s)")
    parser.add_argument("--output", required=True, metavar="DIR", help="directory of the activations")
    parser.add_argument("--tokens", type=int, default=0, help="rows to store, whole windows (default: all of the text)")
    parser.add_argument("--context", type=int, default=512, help="tokens per window (default %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="windows per forward pass (default %(default)s)")
    parser.add_argument("--bos", choices=["auto", "none", "keep", "drop"], default="auto",
                        help="begin-of-text token before each window: none; keep or drop its row (default: drop where the "
                        "tokenizer adds one: its activations are outliers)")
    parser.add_argument("--inputs", default="mlp.input", metavar="HOOK", help="input of the transcoder (default %(default)s)")
    parser.add_argument("--targets", default="mlp.output", metavar="HOOK",
                        help="target of the transcoder (default %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="type in which the model runs (default %(default)s)")
    parser.add_argument("--store", choices=DTYPES, help="type in the files (default: the same, which is exact)")
    parser.add_argument("--rows-per-file", type=int, default=65536, help="approximate number of rows per file (default %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda:0 ... (default %(default)s)")
    given = parser.parse_args(arguments)
    given.store = given.store or given.dtype
    if bool(given.text) == bool(given.dataset):
        parser.error("give either --text or --dataset")
    for name in given.text:
        if not Path(name).is_file():
            parser.error(f"--text {name}: no such file")
    if min(given.context, given.batch, given.rows_per_file) < 1 or given.tokens < 0:
        parser.error("--context, --batch, --rows-per-file and --tokens must be positive")
    return given


def main(arguments=None):
    given = parse(arguments)
    try:
        harvest(given)
    except UsageError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as problem:
        print(f"error: {problem} (harvest.py needs torch, transformers, h5py; --dataset also datasets); install it",
              file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
