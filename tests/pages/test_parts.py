"""Texts of pages whose tokens are coloured; text from outside stays text."""

import re

from bilens.pages.page import render_page
from bilens.sections import ContextLine, ContextList, Section

EVIL = '<img src=x onerror="alert(1)">'


def page_of(line, title="one"):
    return render_page("", "", [], [Section("", rows=[[ContextList(title, [line])]])])


def test_contexts_are_escaped_and_coloured():
    line = ContextLine(0.5, [(EVIL, 0.5), ("b", -0.25)], focal=0)
    page = page_of(line, EVIL)
    assert EVIL not in page
    shares = re.findall(r'class="(up|down)" style="--share: ([\d.]+)"', page)
    assert shares == [("up", "1.000"), ("down", "0.500")]


def test_what_tokens_contribute_can_be_read_without_colours_and_without_a_mouse():
    line = ContextLine(-1e-4, [("a", 0.001), ("b", -0.25), ("c", 0.0)], focal=0)
    page = page_of(line)
    # Opened by a tap or by the Enter key.
    assert "<details><summary><b>-0.000100</b>" in page
    assert page.count("<summary>") == page.count("</summary>") == 1
    assert "</summary>\n<p>b&nbsp;-0.25 · a&nbsp;+0.001</p></details>\n</div>" in page
