"""Text in, blocks of tokens out: the data side of ``pretrain_gpt.py``.

Kept apart from the training script because it is an idea of its own: how documents become equally long blocks that
many processes can read at once without each holding a copy. Where it tokenises, packs, caches and deals out,
``lightning_megatron.data`` does the work. The route is

    documents -> split by document -> byte-level BPE -> token lists -> packed blocks -> Arrow files, memory-mapped

and everything left of the Arrow files happens once, on one process; a second run with the same text and the same
options finds the finished folder and starts training at once.
"""

import math
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import lightning as L
import torch
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader

from lightning_megatron import data

STANDARD_LIBRARY = "stdlib"
END_OF_TEXT = "<|endoftext|>"
TABLE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
# Of the standard library: what is not part of it, its tests, and folders of generated tables.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
FORMAT_VERSION = 2  # part of the cache key: raise it when the meaning of the stored blocks changes


@dataclass(frozen=True)
class Recipe:
    """Everything that decides which blocks come out; its hash names the cache folder.

    Attributes:
        source: ``"stdlib"`` (the Python standard library's own source files), a folder, a file, or a dataset's name
            on the Hugging Face hub, ``name`` or ``name:configuration``. Tables and hub datasets need a column "text".
        sequence: Length in tokens of what the model reads; a block holds one token more.
        vocabulary: Upper limit for the number of entries of the tokenizer, end-of-text included.
        validation_fraction: Part of the documents (not of the tokens) that is held out.
        seed: Decides which documents are held out.
    """

    source: str = STANDARD_LIBRARY
    sequence: int = 128
    vocabulary: int = 2048
    validation_fraction: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if self.vocabulary < 257:
            raise ValueError(f"`vocabulary={self.vocabulary}` is too small: 256 bytes and {END_OF_TEXT} need 257.")
        if self.sequence < 1:
            raise ValueError(f"`sequence={self.sequence}` must be at least 1.")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"`validation_fraction={self.validation_fraction}` must lie between 0 and 1.")

    def key(self) -> str:
        """Name of the cache folder: changes with the options and with any file's name, size or time of change."""
        return data.cache_key({**asdict(self), "format": FORMAT_VERSION}, find_files(self.source))


def find_files(source: str) -> list[Path]:
    """The files behind ``source``, sorted; an empty list when it names a dataset on the Hugging Face hub.

    Raises:
        ValueError: If ``source`` looks like a path and nothing is there.
    """
    if source == STANDARD_LIBRARY:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = (path for path in root.rglob("*.py") if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts))
        return sorted(files)
    path = Path(source).expanduser()
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    if path.is_file():
        return [path]
    if source.startswith((".", "/", "~")):
        raise ValueError(f"`--data {source}`: there is no such file or folder.")
    return []


def read_documents(files: list[str], by_paragraph: bool) -> Iterator[dict[str, str]]:
    """Yield ``{"text": ...}`` per document: one per file, or one per paragraph.

    Files that are not UTF-8 text (pictures, archives) are left out. ``datasets`` may hand over the files in portions.
    """
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        parts = text.split("\n\n") if by_paragraph else [text]
        yield from ({"text": part} for part in parts if part.strip())


def load_documents(source: str, scratch: Path, by_paragraph: bool = False) -> Dataset:
    """All documents behind ``source`` as a dataset with the single column "text", its Arrow files in ``scratch``.

    A folder has one document per file (or per paragraph, if asked for), a single file one per paragraph, a table or
    hub dataset one per row.
    """
    files = find_files(source)
    if not files:
        documents = load_from_hub(source)
    elif len(files) == 1 and files[0].suffix in TABLE_FORMATS:
        kind = TABLE_FORMATS[files[0].suffix]
        documents = load_dataset(kind, data_files=str(files[0]), split="train", cache_dir=str(scratch))
    else:
        arguments = {"files": [str(file) for file in files], "by_paragraph": by_paragraph or len(files) == 1}
        documents = Dataset.from_generator(read_documents, gen_kwargs=arguments, cache_dir=str(scratch))
    if "text" not in documents.column_names:
        raise ValueError(f"`--data {source}` has the columns {documents.column_names}; one named 'text' is needed.")
    return documents.select_columns(["text"])


def load_from_hub(source: str) -> Dataset:
    """The training split of ``name`` or ``name:configuration`` on the Hugging Face hub.

    Raises:
        ValueError: If there is no such dataset, or the hub cannot be reached.
    """
    name, _, configuration = source.partition(":")
    try:
        return load_dataset(name, configuration or None, split="train")
    except OSError as error:
        raise ValueError(
            f"`--data {source}` is no file or folder here, and as a dataset it could not be loaded: {error}"
        ) from error


def split_documents(documents: Dataset, fraction: float, seed: int) -> DatasetDict:
    """Hold out ``fraction`` of the documents, at least one, so that no validation text was seen in training.

    Returns:
        The datasets "train" and "validation", whole documents in each.

    Raises:
        ValueError: If there are fewer than two documents.
    """
    if len(documents) < 2:
        raise ValueError(f"The corpus has {len(documents)} document(s); at least 2 are needed to hold one out.")
    held_out = min(max(1, round(fraction * len(documents))), len(documents) - 1)
    parts = documents.train_test_split(test_size=held_out, seed=seed)
    return DatasetDict(train=parts["train"], validation=parts["test"])


def train_tokenizer(documents: Dataset, vocabulary: int) -> Tokenizer:
    """Byte-level BPE (Sennrich et al., arXiv 1508.07909, on bytes as GPT-2 does): any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    batches = (batch["text"] for batch in documents.iter(batch_size=100))
    tokenizer.train_from_iterator(batches, trainer, length=len(documents))
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> int:
    """Number of the token that ends every document."""
    number = tokenizer.token_to_id(END_OF_TEXT)
    if number is None:
        raise ValueError(f"The tokenizer has no token {END_OF_TEXT}; train it with `train_tokenizer`.")
    return number


def make_blocks(recipe: Recipe, scratch: Path, result: Path) -> None:
    """Follow ``recipe`` from text to blocks; ``result`` gets ``tokenizer.json`` and the splits' Arrow files."""
    documents = split_documents(load_documents(recipe.source, scratch), recipe.validation_fraction, recipe.seed)
    tokenizer = train_tokenizer(documents["train"], recipe.vocabulary)
    end, files = end_of_text(tokenizer), {name: str(scratch / f"{name}.arrow") for name in documents}
    tokens = data.tokenise(documents, tokenizer, end=end, batch_size=100, cache_file_names=files)
    blocks = data.pack(tokens, recipe.sequence + 1, filler=end, cache_dir=str(scratch))
    blocks.select_columns(["input_ids"]).save_to_disk(str(result))
    tokenizer.save(str(result / "tokenizer.json"))


def unigram_entropy(tokens: torch.Tensor) -> float:
    """Entropy in nats of how often each token occurs: the best loss of a model that ignores all context.

    Args:
        tokens: Token numbers, any shape.
    """
    frequencies = torch.bincount(tokens.flatten()).double() / tokens.numel()
    return -sum(f * math.log(f) for f in frequencies.tolist() if f > 0)


class CorpusDataModule(L.LightningDataModule):
    """The packed blocks of a recipe as Lightning loaders; every batch is ``{"input_ids": [batch, sequence + 1]}``.

    ``prepare_data`` runs on one process and builds the cache, ``setup`` runs on all of them and maps it into memory.

    Args:
        recipe: Where the text comes from and how it is cut.
        cache: Folder that holds one subfolder per recipe.
        batch_size: Blocks per step, over all replicas.
        replicas: Data-parallel replicas that share them.
        validation_blocks: Upper limit for the blocks that a validation run reads; what is left over when they are dealt
            out to the replicas is left out, so that no block counts twice in the mean.
    """

    def __init__(self, recipe: Recipe, cache: Path, batch_size: int, replicas: int, validation_blocks: int) -> None:
        super().__init__()
        self.recipe = recipe
        self.folder = cache / recipe.key()
        self.batch_size = batch_size
        self.replicas = replicas
        self.validation_blocks = validation_blocks

    def prepare_data(self) -> None:
        if self.folder.is_dir():
            print(f"Corpus: blocks of an earlier run, {self.folder}")
        else:
            print(f"Corpus: building blocks from {self.recipe.source} into {self.folder}")
            data.build_once(self.folder, partial(make_blocks, self.recipe))

    def setup(self, stage: str) -> None:
        blocks = load_from_disk(str(self.folder)).with_format("torch")
        self.train_blocks = blocks["train"]
        held_out = min(self.validation_blocks, len(blocks["validation"]))
        held_out = held_out // self.replicas * self.replicas or held_out
        self.held_out = blocks["validation"].select(range(held_out))
        self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        if len(self.train_blocks) < self.batch_size:
            raise ValueError(
                f"The corpus makes {len(self.train_blocks)} blocks to train on, fewer than the {self.batch_size} of a "
                "batch; use more text, a smaller `--batch` or a smaller `--sequence`."
            )

    def train_dataloader(self) -> DataLoader:
        return data.deal(self.train_blocks, self.batch_size, self.trainer, shuffle=True, seed=self.recipe.seed)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, batch_size=max(1, self.batch_size // self.replicas))

    def held_out_entropy(self) -> float:
        """Unigram entropy, in nats, of exactly the tokens that the validation loss is the mean over."""
        return unigram_entropy(self.held_out[:]["input_ids"][:, 1:])
