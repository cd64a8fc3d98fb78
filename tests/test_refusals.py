"""What the readers of names, numbers, questions and files refuse."""

import gzip
from pathlib import Path

import torch

from bilens.cli.commands import whole_number
from bilens.errors import CheckpointError
from bilens.files import write_text
from bilens.options import token_list
from bilens.question_files import read_lines
from bilens.transformer import ResidualModel
from tests.families import tiny
from tests.refusals import refused


def questions(content):
    def read(tmp_path):
        (tmp_path / "q.tsv").write_bytes(content)
        read_lines(tmp_path / "q.tsv")

    return read


TEXTS = {
    r"an empty name or an open quote; expected names .* \",\"": [
        lambda text=text: token_list(text)
        for text in ("b,,c", ",,", ", , .", "b,", ",b", '"b', '"b"c', '"",b', '".')
    ],
    "line 1 holds the byte 0x8b, expected text in UTF-8: save it so, not packed": questions(
        gzip.compress(b"a\tb\tc\n", mtime=0)
    ),
    "line 1 holds the byte 0x00, .* not as a spreadsheet": questions(b"PK\x03\x04\x14\0\0\0"),
    "line 1 holds the byte 0xff, expected text in UTF-8": questions("a\tb\tc\n".encode("utf-32")),
    "line 2 holds the byte 0x00": questions(b"a b c d e\tb\tc\nd\0\te\tf\n"),
    "a pointer of Git LFS": questions(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    ),
    "line 3 is the header again": questions(b"text\ttoken\na\tb\n\xef\xbb\xbfText\tToken\n"),
}
test_what_is_no_list_of_names_or_questions_is_named = refused(TEXTS)
NO_NUMBERS = ("", "many", "1.5", "1e6", "1MM", "0.0001K")
NUMBERS = [lambda text=text: whole_number(text) for text in NO_NUMBERS]
WHOLE = {"expected a whole number such as 1000000, 500K, 1M or": NUMBERS}
test_what_is_not_a_whole_number = refused(WHOLE, ValueError)


def write_into_a_circle(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    write_text(tmp_path / "a", "text")


def view_what_was_made_for_inference():
    with torch.inference_mode():
        model = tiny("llama")
    ResidualModel(model)


FILES = {
    "a could not be written: Too many levels of symbol": write_into_a_circle,
    r"^\. could not be written: ": lambda: write_text(Path(), "text"),
    r"weight was made under torch.inference_mode\(\)": view_what_was_made_for_inference,
}
test_files_and_weights_that_cannot_be_used_are_named = refused(FILES, CheckpointError)
