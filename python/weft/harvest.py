# SPDX-License-Identifier: Apache-2.0
"""Records MLP inputs and outputs of a Hugging Face model as activation files for `weft train`.

    weft harvest MODEL --text FILE... --output DIR

MODEL is a name on the hub or a directory: a causal language model, or an encoder such as MiniLM. Texts are plain files (one document
each), or .jsonl with a "text" in each line; --dataset reads a dataset from the hub instead (needs the package datasets). Each document
is cut into windows of at most --context tokens, the last of which may be short; --join first joins the documents by the end-of-text
token, so that only the last window of a file may be short. --split train and --split validation divide the documents by a hash of their
text. The files hold the token id of every row and the rows at which documents begin; vocabulary.json
holds the text of every id.

Values are stored exactly as computed by the model if --store is the type in which the model runs (--dtype; both default to
bf16). Every chunk_{i}.hdf5 depends only on model, texts and settings, so that any number of processes can share the work, each
writing its own files from its own part of the text: a document longer than a file is continued in the next one. An interrupted
harvest resumes when the same command is run again.

    torchrun --nproc-per-node 8 -m weft.harvest MODEL …     (or srun, mpirun: ranks are taken from the environment)

--device-map auto distributes a model that is larger than a GPU over all GPUs of one process (needs the package accelerate).

The hooks are recorded in the files. A hook is the name of a module inside a block of the model, followed by ".input" or
".output". The defaults are the input of the MLP (after the norm, in pre-norm models) and its output: mlp.input and mlp.output, in
encoders like BERT intermediate.input and output.dense.output. "--inputs ln_2.input" (GPT-2) or "--inputs
post_attention_layernorm.input" (Llama) select the residual stream instead: a transcoder trained on one cannot be used on the other.
Models that normalise the MLP's output (Gemma 2: post_feedforward_layernorm.output) add a different value to the residual stream than
mlp.output.

Needs PyTorch, transformers and h5py. Exit codes: 0 done, 2 usage error, 6 a file cannot be read or written, 1 any other failure.
"""
import argparse
import hashlib
import itertools
import json
import os
import struct
import sys
import time
from pathlib import Path

from weft.errors import USAGE, WeftError, run, write_atomically
from weft.harvest_text import characters_per_token, documents, of_split, parts, windows
from weft.text import decimal_bytes, duration

FORMAT, FORMAT_VERSION = "weft-activations", 2
VOCABULARY_FORMAT, VOCABULARY_VERSION = "weft-vocabulary", 1
CHUNK_ROWS = 1024       # rows of one HDF5 chunk
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


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


# --- Sizes ----------------------------------------------------------------------------------------------------------------


def bytes_of(rows, n_layers, width, store):
    """Size of the stored values: inputs and targets of all layers, and the id and the position of each row."""
    return rows * (2 * n_layers * width * (4 if store == "fp32" else 2) + 8)


# --- Hooks in the model -----------------------------------------------------------------------------------------------------


def blocks_of(model):
    """(path, modules) of the model's blocks: the outermost module list with one entry per hidden layer."""
    import torch
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == config.num_hidden_layers:
            return path, list(module)
    raise WeftError(USAGE, f"no list of {config.num_hidden_layers} blocks in {type(model).__name__}; is it a decoder-only model or an encoder?")


def default_hooks(block):
    """(inputs, targets) of the MLP of a block."""
    names = {name for name, _ in block.named_children()}
    if "mlp" not in names and {"intermediate", "output"} <= names:
        return "intermediate.input", "output.dense.output"      # BERT and its relatives
    return "mlp.input", "mlp.output"


class Hook:
    """Records one value of every block, for example "mlp.input" or "ln_2.output"."""

    def __init__(self, name, path, blocks):
        module, _, self.side = name.rpartition(".")
        if not module or self.side not in ("input", "output"):
            raise WeftError(USAGE, f"{name}: not a hook (a module of a block, followed by .input or .output); for example mlp.input")
        self.values = [None] * len(blocks)
        for layer, block in enumerate(blocks):
            try:
                found = block.get_submodule(module)
            except AttributeError:
                names = ", ".join(child for child, _ in block.named_children())
                raise WeftError(USAGE, f"{name}: block {layer} has no module {module} (it has {names}); name one of these") from None
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


def require_same(path, settings):
    """An existing chunk file must be the one that this harvest would write."""
    import h5py
    with h5py.File(path, "r") as file:
        made_with = json.loads(file.attrs.get("harvest", "{}"))
    differ = [f"{key} was {made_with.get(key)!r}, now {value!r}" for key, value in settings.items()
              if made_with.get(key) != value]
    if differ:
        raise WeftError(USAGE, f"{path}: belongs to another harvest ({'; '.join(differ)}); choose another --output")


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


def complete(directory, n_files, metadata, tokenizer):
    """Writes vocabulary.json, index.bin and metadata.json, which complete the dataset, if all chunk files exist; returns the number of
    rows, or None. Any process may do so."""
    import h5py
    if not all(chunk_path(directory, number).exists() for number in range(n_files)):
        return None
    index, first = b"", 0
    for number in range(n_files):
        with h5py.File(chunk_path(directory, number), "r") as file:
            rows, width = file["layer_0/inputs"].shape
        index += struct.pack("<iiq", number, rows, first)
        first += rows
    metadata = {**metadata, "d_model": width}
    vocabulary = {"format": VOCABULARY_FORMAT, "format_version": VOCABULARY_VERSION, "texts": token_texts(tokenizer)}
    write_atomically(directory / "vocabulary.json", json.dumps(vocabulary, ensure_ascii=False) + "\n")
    write_atomically(directory / "index.bin", index)
    write_atomically(directory / "metadata.json", json.dumps({**metadata, "total_tokens": first}, indent=2) + "\n")
    return first


# --- The harvest --------------------------------------------------------------------------------------------------------------


def loaded_in(dtype):
    """Argument of from_pretrained for the dtype of the model: renamed in transformers 4.56."""
    import torch
    import transformers
    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    return {"dtype" if (major, minor) >= (4, 56) else "torch_dtype": getattr(torch, DTYPES[dtype])}


def is_causal(config):
    """True for a language model that predicts the next token; else an encoder, loaded without a head."""
    return any(name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in config.architectures or [])


def load_model(arguments, device):
    """(tokenizer, model, causal)"""
    import transformers
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model, revision=arguments.revision)
    causal = is_causal(transformers.AutoConfig.from_pretrained(arguments.model, revision=arguments.revision))
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    spread = {"device_map": arguments.device_map} if arguments.device_map else {}
    model = kind.from_pretrained(arguments.model, revision=arguments.revision, **loaded_in(arguments.dtype), **spread).eval()
    return tokenizer, model if spread else model.to(device), causal


def first_token(tokenizer, choice):
    """(first id of each window or None, the mode used)"""
    begin = tokenizer.bos_token_id
    if choice == "auto":
        choice = "drop" if begin is not None and tokenizer.encode("")[:1] == [begin] else "none"
    if choice != "none" and begin is None:
        raise WeftError(USAGE, f"--bos {choice}: the tokenizer has no begin-of-text token; choose --bos none")
    return (None if choice == "none" else begin), choice


def added_ids(tokenizer):
    """Ids that the tokenizer puts (before, after) each text."""
    text = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    for begin in range(len(whole) - len(text) + 1 if text else 0):
        if whole[begin:begin + len(text)] == text:
            return whole[:begin], whole[begin + len(text):]
    raise WeftError(USAGE, "--bos: the tokens that the tokenizer adds to a text cannot be recognised; choose --bos none")


class Harvester:
    """A model with its hooks; converts windows of tokens to rows of chunk files."""

    def __init__(self, arguments, device):
        self.arguments = arguments
        self.tokenizer, self.model, self.causal = load_model(arguments, device)
        self.device = self.model.device if arguments.device_map else device
        path, self.blocks = blocks_of(self.model)
        inputs, targets = default_hooks(self.blocks[0])
        self.hooks = {"inputs": Hook(arguments.inputs or inputs, path, self.blocks),
                      "targets": Hook(arguments.targets or targets, path, self.blocks)}
        # Ids before and after each window. An encoder has its own ([CLS] and [SEP]); a causal model at most the begin-of-text token.
        if self.causal:
            first, self.bos = first_token(self.tokenizer, arguments.bos)
            self.before, self.after = ([] if first is None else [first]), []
        else:
            self.bos = "drop" if arguments.bos == "auto" else arguments.bos
            self.before, self.after = added_ids(self.tokenizer) if self.bos != "none" else ([], [])
        self.skip = self.bos == "drop"      # their rows are not stored
        self.length = arguments.context - len(self.before) - len(self.after)    # ids of the text in a window
        if self.length < 1:
            raise WeftError(USAGE, f"--context {arguments.context}: no token would be stored; choose a larger value")
        self.settings = {
            "format_version": FORMAT_VERSION, "model": arguments.model,
            "revision": getattr(self.model.config, "_commit_hash", None) or arguments.revision,
            "dtype": arguments.dtype, "store": arguments.store, "inputs": self.hooks["inputs"].path,
            "targets": self.hooks["targets"].path, "context": arguments.context, "bos": self.bos, "join": arguments.join,
            "split": arguments.split, "validation": arguments.validation, "tokens": arguments.tokens,
            "rows_per_file": arguments.rows_per_file, "batch": arguments.batch,
            "source": arguments.dataset or [Path(name).name for name in arguments.text]}

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    def windows(self, part):
        """[(ids, offsets of documents)] of a part: the offsets count stored rows."""
        found = windows(part, self.encode, self.length, self.arguments.join, self.tokenizer.eos_token_id)
        shift = 0 if self.skip else len(self.before)
        # The ids before a window belong to the document of its first token.
        return [(self.before + ids + self.after, [start + shift if start else 0 for start in starts]) for ids, starts in found]

    def stored(self, ids):
        """Positions of a window whose rows are stored."""
        return range(len(self.before), len(ids) - len(self.after)) if self.skip else range(len(ids))

    def attributes(self, text_digest):
        import torch
        import transformers
        return {"format": FORMAT, "format_version": FORMAT_VERSION, "model": self.arguments.model,
                "hook_inputs": self.settings["inputs"], "hook_targets": self.settings["targets"],
                "software": f"weft harvest, torch {torch.__version__}, transformers {transformers.__version__}",
                "harvest": json.dumps({**self.settings, "text": text_digest})}

    def activations(self, batch):
        """{(layer, side): stored words [rows, width]} of one forward pass over windows, padded to the longest of them."""
        import torch
        longest = max(len(ids) for ids in batch)
        padding = self.tokenizer.pad_token_id or 0
        ids = torch.tensor([window + [padding] * (longest - len(window)) for window in batch], device=self.device)
        keep = torch.tensor([[position in self.stored(window) for position in range(longest)] for window in batch])
        options = {"use_cache": False} if self.causal else {}
        if any(len(window) < longest for window in batch):
            options["attention_mask"] = torch.tensor([[position < len(window) for position in range(longest)] for window in batch],
                                                     dtype=torch.long, device=self.device)
        with torch.inference_mode():
            self.model.base_model(input_ids=ids, **options)
        values = {}
        for side, hook in self.hooks.items():
            for layer, value in enumerate(hook.values):
                words, finite = stored_words(value[keep.to(value.device)], self.arguments.store)
                if not finite:
                    raise WeftError(USAGE, f"{hook.path.format(layer)}: a value is not finite in {self.arguments.store} (too large "
                                     "for the type, or not finite in the model); take --store fp32 or another --dtype")
                values[layer, side] = words
        widths = {words.shape[1] for words in values.values()}
        if len(widths) > 1:
            raise WeftError(USAGE, f"{self.settings['inputs']} and {self.settings['targets']} differ in width ({widths}; a transcoder "
                             "has one); choose other hooks")
        return values

    def write(self, path, part, progress):
        """Runs the model over the windows of one file, in batches that start at its first window: always the same batches."""
        file, found = None, self.windows(part)
        if not found:
            raise WeftError(USAGE, f"{path.name}: its text has no tokens; give larger --rows-per-file")
        rows = sum(len(self.stored(ids)) for ids, _ in found)
        for begin in range(0, len(found), self.arguments.batch):
            batch = found[begin:begin + self.arguments.batch]
            values = self.activations([ids for ids, _ in batch])
            if file is None:
                file = ChunkFile(path, rows, len(self.blocks), values[0, "inputs"].shape[1], self.arguments.store,
                                 self.attributes(digest_of(part)))
            tokens, positions, starts = [], [], []
            for ids, inside in batch:
                starts += [len(tokens) + start for start in inside]
                tokens += [ids[position] for position in self.stored(ids)]
                positions += self.stored(ids)
            file.append(tokens, positions, starts, values)
            progress.update(len(tokens))
        file.finish()

    def speed(self, part):
        """Rows per second of a batch of this part, after one that is not timed."""
        batch = [ids for ids, _ in self.windows(part)[:self.arguments.batch]]
        self.activations(batch)
        begin = time.monotonic()
        self.activations(batch)
        return sum(len(self.stored(ids)) for ids in batch) / max(1e-9, time.monotonic() - begin)


def digest_of(part):
    digest = hashlib.sha256()
    for text, begins, ends in part:
        digest.update(f"{len(text)} {begins} {ends} ".encode() + text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]


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

    # Every process reads all text but tokenises only the parts of its own files: where they begin follows from characters.
    texts = lambda: of_split(documents(arguments), arguments.split, arguments.validation)
    length = characters_per_token(texts(), harvester.encode)
    rows_per_file = min(arguments.rows_per_file, arguments.tokens or arguments.rows_per_file)
    n_wanted = -(-arguments.tokens // rows_per_file) if arguments.tokens else None
    source = lambda: itertools.islice(parts(texts(), max(1, round(rows_per_file * length))), n_wanted)
    characters, n_files = 0, 0
    for part in source():
        characters += sum(len(text) for text, _, _ in part)
        n_files += 1
    rows = round(characters / length)
    if rank == 0:
        rate = harvester.speed(next(iter(source()))) * world
        width = next(iter(harvester.hooks["inputs"].values)).shape[-1]
        print(f"{directory}: about {rows:,} rows in {n_files} files, "
              f"{decimal_bytes(bytes_of(rows, len(harvester.blocks), width, arguments.store))}; at {rate:,.0f} rows/s"
              f"{f' on {world} processes' if world > 1 else ''} about {duration(rows / rate)} (h:mm:ss), writing not included", flush=True)
    if n_wanted is not None and rows < arguments.tokens - rows_per_file // 2 and rank == 0:
        print(f"the text ends after about {rows:,} of --tokens {arguments.tokens:,}", flush=True)
    on_terminal = sys.stderr.isatty()
    with tqdm(total=rows, unit=" tokens", unit_scale=True, file=sys.stderr,
              desc=f"process {rank} of {world}" if world > 1 else None, mininterval=0.5 if on_terminal else 30) as progress:
        for number, part in enumerate(source()):
            path = chunk_path(directory, number)
            if path.exists():
                require_same(path, {**harvester.settings, "text": digest_of(part)})
            elif number % world == rank:
                harvester.write(path, part, progress)
                continue
            progress.update(round(sum(len(text) for text, _, _ in part) / length))      # there, or another process writes it
    metadata = {"model_name": arguments.model, "dataset": str(harvester.settings["source"]), "split": arguments.split,
                "num_layers": len(harvester.blocks), "dtype": DTYPES[arguments.store], "chunk_tokens": rows_per_file}
    stored = complete(directory, n_files, metadata, harvester.tokenizer)
    if stored is not None:
        print(f"{directory}: {stored:,} rows of {len(harvester.blocks)} layers in {n_files} files, "
              f"{harvester.settings['inputs']} to {harvester.settings['targets']}, {arguments.store}")
    else:
        print(f"process {rank}: its files are written; others are missing (other processes write them, or run the command "
              "again)")


def parse(arguments):
    parser = argparse.ArgumentParser(prog="weft harvest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="name on the hub, or a directory")
    parser.add_argument("--revision", help="commit or branch of the model on the hub")
    parser.add_argument("--text", nargs="+", default=[], metavar="FILE", help="text files, or .jsonl")
    parser.add_argument("--dataset", help="a dataset of the hub instead of files")
    parser.add_argument("--dataset-config", help="configuration of the dataset")
    parser.add_argument("--dataset-split", default="train", help="split of the dataset (default %(default)s)")
    parser.add_argument("--split", choices=["all", "train", "validation"], default="all",
                        help="documents to process, divided by a hash of their text (default %(default)s)")
    parser.add_argument("--validation", type=float, default=0.1, metavar="FRACTION",
                        help="fraction of the documents in --split validation (default %(default)s)")
    parser.add_argument("--join", action="store_true",
                        help="join documents by the end-of-text token, so that windows span them (default: each by itself)")
    parser.add_argument("--column", default="text", help="field or column with the text (default %(default)s)")
    parser.add_argument("--output", required=True, metavar="DIR", help="directory of the activations")
    parser.add_argument("--tokens", type=int, default=0, help="approximate number of rows to store, in whole files (default: all of the text)")
    parser.add_argument("--context", type=int, default=512, help="tokens per window (default %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="windows per forward pass (default %(default)s)")
    parser.add_argument("--bos", choices=["auto", "none", "keep", "drop"], default="auto",
                        help="begin-of-text token before each window (of an encoder [CLS] and [SEP]): none; keep or drop its row "
                        "(default: drop, because its activations are outliers, if the tokenizer adds one)")
    parser.add_argument("--inputs", metavar="HOOK", help="input of the transcoder (default: that of the MLP)")
    parser.add_argument("--targets", metavar="HOOK", help="target of the transcoder (default: the output of the MLP)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="type in which the model runs (default %(default)s)")
    parser.add_argument("--store", choices=DTYPES, help="type in the files (default: the same, which is exact)")
    parser.add_argument("--rows-per-file", type=int, default=65536, help="approximate number of rows per file (default %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda:0 ... (default %(default)s)")
    parser.add_argument("--device-map", choices=["auto", "balanced", "sequential"],
                        help="distribute a model that is larger than a GPU over all GPUs (one process)")
    given = parser.parse_args(arguments)
    given.store = given.store or given.dtype
    if bool(given.text) == bool(given.dataset):
        parser.error("give either --text or --dataset")
    for name in given.text:
        if not Path(name).is_file():
            parser.error(f"--text {name}: no such file")
    if min(given.context, given.batch, given.rows_per_file) < 1 or given.tokens < 0:
        parser.error("--context, --batch, --rows-per-file and --tokens must be positive")
    if not 0 < given.validation < 1:
        parser.error(f"--validation {given.validation}: must be between 0 and 1")
    if given.device_map and processes()[1] > 1:
        parser.error("--device-map: one process uses all GPUs (several were started); start one")
    if given.device_map and given.device != "auto":
        parser.error("--device and --device-map exclude each other")
    return given


def command(arguments):
    try:
        harvest(parse(arguments))
    except ModuleNotFoundError as problem:
        raise WeftError(USAGE, f"{problem} (weft harvest needs torch, transformers, h5py; --dataset also datasets); install it") from None


def main(arguments=None):
    return run(command, arguments)


if __name__ == "__main__":
    sys.exit(main())
