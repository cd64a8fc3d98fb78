"""Parts of pages and figures of logits; text from outside stays text."""

import base64
import io
import re

import pandas as pd

from bilens.pages.page import contexts_html, table_html
from bilens.sections import ContextLine, ContextList, Table

EVIL = '<img src=x onerror="alert(1)">'


def test_a_table_comes_with_all_its_numbers():
    frame = pd.DataFrame({"token": [EVIL, "b"], "value": [1 / 3, -2.0]})
    page = table_html(Table(frame), "pairs")
    assert EVIL not in page
    assert "&lt;img" in page
    assert 'download="pairs.csv"' in page
    packed = re.search(r"base64,([^\"]+)", page).group(1)
    pd.testing.assert_frame_equal(pd.read_csv(io.BytesIO(base64.b64decode(packed))), frame)
    page = table_html(Table(pd.DataFrame({"a": []})), f'"><script>{EVIL}')
    assert "<script>" not in page
    assert EVIL not in page


def test_contexts_are_escaped_and_coloured():
    line = ContextLine(0.5, [(EVIL, 0.5), ("b", -0.25)], focal=0)
    page = contexts_html(ContextList(EVIL, [line]))
    assert EVIL not in page
    shares = re.findall(r'class="(up|down)" style="--share: ([\d.]+)"', page)
    assert shares == [("up", "1.000"), ("down", "0.500")]


def test_what_tokens_contribute_can_be_read_without_colours_and_without_a_mouse():
    line = ContextLine(-1e-4, [("a", 0.001), ("b", -0.25), ("c", 0.0)], focal=0)
    page = contexts_html(ContextList("one", [line]))
    # Opened by a tap or by the Enter key.
    assert "<details><summary><b>-0.000100</b>" in page
    assert page.count("<summary>") == page.count("</summary>") == 1
    assert page.endswith("</summary>\n<p>b&nbsp;-0.25 · a&nbsp;+0.001</p></details>\n</div>")
