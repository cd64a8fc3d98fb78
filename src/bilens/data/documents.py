"""Texts for a model that others trained: as they are written, in the model's own tokens."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bilens.data.arrow import open_rows, write_rows
from bilens.data.batches import batched
from bilens.data.cache import cache_folder, fingerprint, identity
from bilens.data.corpus import Corpus
from bilens.data.text import read_texts, text_files
from bilens.errors import DataError
from bilens.files import folder_written_whole

if TYPE_CHECKING:
    import transformers

__all__ = ["load_documents"]

_CACHE_VERSION = 1
_BATCH = 1000
_SHARES = 10_000


def load_documents(
    name: str | Path,
    tokenizer: "transformers.PreTrainedTokenizerFast",
    *,
    longest: int = 512,
    shortest: int | None = None,
    validation_share: float = 0.05,
    data_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
) -> Corpus:
    """Load texts in the tokens of a model that is trained already.

    Nothing is cleaned: the model knows text as it is written. Each text has the ends that its
    tokenizer gives it; where that gives none, an end of text follows. Of equal texts the first
    stays. Which texts are held out follows from the texts themselves, so that it is the same for
    every model. The result is kept in a cache.

    Args:
        name: what `bilens.data.read_texts` takes.
        tokenizer: of the model.
        longest: tokens of a row.
        shortest: of texts with so many tokens to `longest`, each is a row of its own, and others
            are left out. By default all are joined, and cut into rows of `longest`.
        validation_share: share of the texts that are held out.
        data_dir: as in `read_texts`.
        cache_dir: as in `load_corpus`.

    Raises:
        DataError: as in `read_texts`, an argument is out of range, or nothing is left for a split.

    Source:
        Pearce et al. 2024, appendix D, where texts have 384 to 512 tokens.
    """
    if longest < 2 or (shortest is not None and not 2 <= shortest <= longest):
        raise DataError(
            f"shortest={shortest}, longest={longest}: expected 2 <= shortest <= longest tokens"
        )
    if not 0 < validation_share < 1:
        raise DataError(
            f"validation_share={validation_share}, expected a share between 0 and 1, both excluded"
        )
    files = [identity(path) for path in text_files(name, data_dir)]
    key = fingerprint(
        _CACHE_VERSION,
        files or str(name),
        [longest, shortest, validation_share],
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.eos_token_id,
    )
    folder = cache_folder(cache_dir) / f"{Path(name).resolve().name}-documents-{key}"
    if not folder.is_dir():
        held_out = round(_SHARES * validation_share)
        with folder_written_whole(folder) as draft:
            for split in ("train", "validation"):
                texts = _split(read_texts(name, data_dir), split, held_out)
                rows = _rows(_tokens(texts, tokenizer), longest, shortest)
                if not write_rows(draft / f"{split}.arrow", rows):
                    raise DataError(
                        f"{name}: no text for {split} has {shortest or longest} to {longest} "
                        "tokens; give more text, or other lengths"
                    )
    return Corpus(
        str(name),
        tokenizer,
        open_rows(folder / "train.arrow"),
        open_rows(folder / "validation.arrow"),
    )


def _split(texts: Iterable[str], split: str, held_out: int) -> Iterator[str]:
    """The distinct texts of a split, which the digest of each decides."""
    seen: set[bytes] = set()
    for text in texts:
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if digest in seen:
            continue
        seen.add(digest)
        if (int.from_bytes(digest) % _SHARES < held_out) == (split == "validation"):
            yield text


def _tokens(
    texts: Iterable[str], tokenizer: "transformers.PreTrainedTokenizerFast"
) -> Iterator[list[int]]:
    bare = tokenizer("a")["input_ids"][0] != tokenizer.bos_token_id
    end = [tokenizer.eos_token_id] if bare and tokenizer.eos_token_id is not None else []
    for batch in batched(texts, _BATCH):
        # A text may spell a special token: there it is text.
        encoded = tokenizer(batch, split_special_tokens=True, verbose=False)
        for ids in encoded["input_ids"]:
            yield [*ids, *end]


def _rows(
    texts: Iterable[list[int]], longest: int, shortest: int | None
) -> Iterator[list[list[int]]]:
    if shortest is None:
        yield from batched(_joined(texts, longest), _BATCH)
    else:
        yield from batched((t for t in texts if shortest <= len(t) <= longest), _BATCH)


def _joined(texts: Iterable[list[int]], length: int) -> Iterator[list[int]]:
    """Cut the joined texts; what is left over at the end is dropped."""
    left_over: list[int] = []
    for text in texts:
        left_over += text
        while len(left_over) >= length:
            yield left_over[:length]
            left_over = left_over[length:]
