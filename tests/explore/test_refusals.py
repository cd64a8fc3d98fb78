"""What the explorer refuses of addresses and of what is typed."""

from functools import cache
from unittest.mock import Mock

from PIL import Image

from bilens.explore import explorer
from bilens.explore.flows import FlowRequest
from bilens.explore.pages import LanguagePage
from bilens.explore.screen import StateError, read_address
from bilens.explore.sketchpad import read_sketch, unpack_input
from tests.explore.test_address import State
from tests.explore.test_sketchpad import sketch
from tests.models import digits, grammar_view, small_corpus
from tests.refusals import refused

TEXT = "once lily ate"


@cache
def page() -> LanguagePage:
    return LanguagePage(grammar_view(), small_corpus())


def asked(*question):
    return lambda flows: flows.check(FlowRequest(*question))


def state(*fields):
    return lambda: page().checked(type(page().start)(*fields))


def typed(*pairs):
    return lambda: page().checked(read_address(page().start, pairs))


def launched(**place):
    return lambda image_run: explorer(image_run).launch(**place, wait=False)


def launched_on_a_taken_port(image_run, monkeypatch):
    taken = Mock(side_effect=OSError("address already in use"))
    monkeypatch.setattr("gradio.Blocks.launch", taken)
    launched(port=80)(image_run)


TYPED = {
    "flow_token: expected a single token of the vocabulary": asked(TEXT, "lilly", ()),
    "flow_minus: expected a single token of the vocabulary": asked(TEXT, "lily", ("<b>",)),
    "flow_prompt: .*holds no token that the model knows": [asked("  "), state("lily", (), 0, "  ")],
    "flow_replace: .*'tom', which is not a word of": asked(TEXT, "", (), "", "tom=ben"),
    "flow_replace: replace='lily', expected words as keys=key": asked(TEXT, "", (), "", "lily"),
    "flow_replace: .*each name the second run": asked(TEXT, "", (), "once tom ate", "lily=ben"),
    "flow_against: .*each name the second run": asked(TEXT, "", (), "once tom ate", "", True),
    "flow_target: expected a second run": asked(TEXT, "", (), "", "", False, "probability"),
    "flow_target: loss is not one of logit, log-prob": typed(("flow_target", "loss")),
    "flow_prompt: .*has 30 tokens, expected up to 12": asked("once " * 30, "", ()),
    "token: expected a single token of the vocabulary; .*the nearest are lily": state("lilly"),
    "minus: expected a single token of the vocabulary": state("lily", ("<script>",)),
    "layer: 1 is not a whole number from 0 to 0": state("lily", (), 1),
    "neither a test image from 0 to 359 nor a drawing of 64": [
        lambda text=text: unpack_input(text, digits())
        for text in ("test-360", "test-²", "../../etc/passwd", "drawn-!!!", "drawn-AAAA")
    ],
    "saved: .* is not a whole number": [
        lambda number=number: read_address(State(), [("saved", number)])
        for number in ("", "x", "-1", "1e3", "٣", "1" * 5000)
    ],
    "input: the drawing is not a picture of up to 1024 pixels": [
        lambda sheet=sheet: read_sketch(sheet, digits())
        for sheet in (
            "data:image/png;base64,A",
            "data:image/png;base64,PHN2ZyBvbmxvYWQ9YWxlcnQoMSk+",
            sketch(Image.new("L", (20, 20)), "GIF"),
            sketch(Image.new("L", (1025, 1))),
        )
    ],
}
test_what_is_not_there_is_said_where_it_was_typed = refused(TYPED, StateError)
ADDRESSES = {
    "port=99999, expected a whole number, 1 to 65535": launched(port=99999),
    "port=0, expected a whole number, 1 to 65535": launched(port=0),
    "host=nope.invalid, port=None cannot be listened on: ": launched(host="nope.invalid"),
    "port=7999 cannot be listened": launched(host="203.0.113.1", port=7999),
    "port=80 cannot be listened on: address already in use. Another": launched_on_a_taken_port,
}
test_where_it_cannot_listen_it_says_so = refused(ADDRESSES)
