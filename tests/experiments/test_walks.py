"""Walks are the rooms that an object visits, each function once."""

import pytest
from benchmarks.walks import returns, walk

from bilens import files, options, sections

pytestmark = pytest.mark.long


def test_a_walk_has_the_rooms_of_functions_that_get_the_object():
    text = "one,two"

    def call():
        options.token_list(text)
        sections.distinct(["another"])
        for _ in range(2):  # a reader reads a function once
            sections.plain(text)
        files.file_names([text])
        sections.plain(text)

    rooms = walk(call, lambda value: value is text)
    assert rooms == ["options", "sections", "files", "sections"]
    assert returns(rooms) == 1
