"""What people type into the explorer stays, and both texts change together, in a browser."""

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.explore.browser import NODE, box

START = "?flow_prompt=once+lily+ate&flow_against=once+tom+ate&flow_token=kite&flow_minus=ball"
QUESTION = "document.querySelector('#flow-text h3')?.innerText ?? ''"
FIRST = {"prompt": "once lily ate", "against": "once tom ate", "token": "kite", "minus": "ball"}
Do = Callable[[Any], None]


def in_turn(*steps: Do) -> Do:
    def do(page: Any) -> None:
        for step in steps:
            step(page)

    return do


def press(*keys: str) -> Do:
    return in_turn(*(lambda page, key=key: page.keyboard.press(key) for key in keys))


def click(selector: str) -> Do:
    return lambda page: page.locator(selector).click()


def keys(text: str, delay: float = 0) -> Do:
    return lambda page: page.keyboard.type(text, delay=delay)


def insert(text: str) -> Do:
    """Put a text in at once, as the clipboard does."""
    return lambda page: page.keyboard.insert_text(text)


def choose(name: str) -> Do:
    """Click into a box and select its text."""
    return in_turn(click(f"#flow-{name} textarea"), press("Control+A"))


def write(name: str, text: str, *last: str) -> Do:
    """Replace the text of a box key by key, and press keys."""
    return in_turn(choose(name), press("Delete"), keys(text), press(*last))


def enter(name: str, text: str) -> Do:
    return write(name, text, "Enter")


def compose(name: str, *states: str, end: str) -> Do:
    """Replace a text by an input method: its states under way, then the word that is chosen."""

    def do(page: Any) -> None:
        choose(name)(page)
        session = page.context.new_cdp_session(page)
        for state in states:
            ends = {"selectionStart": len(state), "selectionEnd": len(state)}
            session.send("Input.imeSetComposition", {"text": state, **ends})
            page.wait_for_timeout(150)
        session.send("Input.insertText", {"text": end})
        session.detach()

    return do


def pause(page: Any) -> None:
    """Wait for the answer of the server, as a reader does."""
    page.wait_for_timeout(700)


ENTER, INTO_PROMPT, SHOW = press("Enter"), click("#flow-prompt textarea"), click("#flow-show")
CIRCUIT = click("#circuit input")
OLD, BEN = FIRST["prompt"], "once ben ate"
LONG, SECOND = "once lily saw the kite", "once tom saw the kite"


def row(*steps: Do, shown: str, **texts: str) -> Any:
    """Return what is done, words of the question that is shown, and texts of boxes after it."""
    return steps, shown, FIRST | texts


new, waits = partial(row, shown=BEN, prompt=BEN), partial(row, shown=OLD, prompt=LONG)
both = partial(row, shown=SECOND, prompt=LONG, against=SECOND)
WAYS = {
    "first text, Enter": new(enter("prompt", BEN)),
    "second text, Enter": row(enter("against", BEN), shown=BEN, against=BEN),
    "first text, Show": new(write("prompt", BEN), SHOW),
    "longer first text, Enter": waits(enter("prompt", LONG), pause),
    "longer second text, Enter": row(enter("against", SECOND), pause, shown=OLD, against=SECOND),
    "both longer, Enter after each": both(enter("prompt", LONG), pause, enter("against", SECOND)),
    "both longer, second first": both(enter("against", SECOND), pause, enter("prompt", LONG)),
    "both longer, Tab between": both(
        write("prompt", LONG, "Tab"), press("Control+A"), keys(SECOND), ENTER
    ),
    "both longer, Show": both(write("prompt", LONG), write("against", SECOND), SHOW),
    "both pasted, no pause": both(
        choose("prompt"), insert(LONG), ENTER, choose("against"), insert(SECOND), ENTER
    ),
    "Enter twice": waits(write("prompt", LONG, "Enter", "Enter"), pause),
    "a word that the model does not know": row(
        enter("prompt", "once zebra ate"), pause, shown="", prompt="once zebra ate"
    ),
    "an unknown token": row(enter("token", "zebra"), pause, shown=OLD, token="zebra"),
    "an unknown token, put right letter by letter": row(
        *(enter("token", "balloon"), pause, press(*["Backspace"] * 7), keys("rice"), ENTER),
        shown="rice",
        token="rice",
    ),
    "a token to subtract that is the token": row(
        enter("minus", "kite"), pause, shown=OLD, minus="kite"
    ),
    "both tokens exchanged": row(
        *(enter("token", "ball"), pause, enter("minus", "kite")),
        shown="ball",
        token="ball",
        minus="kite",
    ),
    "texts and token, one Enter": both(
        *(write("prompt", LONG), write("against", SECOND), enter("token", "rice")),
        shown="rice",
        token="rice",
    ),
    "a token while the texts wait": waits(
        enter("prompt", LONG), pause, enter("token", "rice"), pause, token="rice"
    ),
    "the second text is emptied": row(
        enter("against", ""), shown="after “once lily ate”?", against=""
    ),
    "the first text is emptied": row(enter("prompt", ""), pause, shown="", prompt=""),
    "an edit in the middle": new(
        INTO_PROMPT, press("End", *["ArrowLeft"] * 4, *["Backspace"] * 4), keys("ben"), ENTER
    ),
    "undone": row(enter("prompt", LONG), pause, enter("prompt", OLD), pause, shown=OLD),
    "slowly, with a pause within a word": new(
        write("prompt", "once b"), pause, pause, keys("en ate", delay=250), ENTER
    ),
    "wiped out by Backspace and typed anew": new(
        INTO_PROMPT, press("End", *["Backspace"] * len(OLD)), pause, keys(BEN, delay=40), ENTER
    ),
    "by an input method": new(compose("prompt", "on", "once", "once be", end=BEN), ENTER),
    "by an input method, while the other box is computed": new(
        *(write("token", "ball"), enter("minus", "kite")),
        *(compose("prompt", "o", "once b", end=BEN), pause, ENTER),
        token="ball",
        minus="kite",
    ),
    "a word pasted into the middle": new(
        INTO_PROMPT,
        press("Home", *["ArrowRight"] * len("once "), *["Shift+ArrowRight"] * len("lily")),
        *(insert("ben"), ENTER),
    ),
    "Enter is held down": row(write("against", BEN, *["Enter"] * 6), pause, shown=BEN, against=BEN),
    "typed on after Enter": new(
        enter("prompt", BEN), keys(" the", delay=120), pause, prompt="once ben ate the"
    ),
    "a circuit is asked for while texts wait": waits(enter("prompt", LONG), pause, CIRCUIT, pause),
}
TOO_LONG = "The first text has 3 tokens"
MESSAGES = {
    "longer first text, Enter": ("prompt", "The picture waits until both have as many"),
    "longer second text, Enter": ("against", f"{TOO_LONG} |once|lily|ate|, the second 5 tokens"),
    "an unknown token": ("token", "single token"),
    "a token while the texts wait": ("token", "Waits until the other boxes fit"),
    "a token to subtract that is the token": ("minus", "the token 'kite' itself"),
}


def lost(page: Any, visit: Any, way: str) -> list[str]:
    """Go one way, and return what is not as it should be."""
    steps, shown, expected = WAYS[way]
    in_turn(*steps)(page)
    visit.wait(f"({QUESTION}).includes({shown!r})")
    pause(page)
    texts = {name: box(page, name).input_value() for name in FIRST}
    name, message = MESSAGES.get(way, ("prompt", ""))
    said = page.locator(f"#flow-{name}").inner_text()
    stays = way == "undone" and "waits" in said
    is_right = texts == expected and message in said and not stays
    return [] if is_right else [f"{way}: {texts} with {said!r} at {name}"]


def begin_again(page: Any, visit: Any) -> None:
    """Write the first texts and tokens, and leave the circuit out."""
    if page.locator("#circuit input").is_checked():
        CIRCUIT(page)
    for name, text in FIRST.items():
        box(page, name).fill(text)
    box(page, "token").press("Enter")
    visit.wait(f"{[*FIRST.values()]}.every((x) => ({QUESTION}).includes(x))")
    pause(page)


def test_what_is_typed_stays_and_is_shown_when_it_fits(language_site, visit):
    page = visit.open(language_site + START + "&circuit=False", NODE)
    faults = []
    for way in WAYS:
        faults += lost(page, visit, way)
        begin_again(page, visit)
    assert faults == []


def test_a_circuit_is_that_of_the_texts_on_the_page(language_site, visit):
    page = visit.open(language_site + START + "&circuit=False", NODE)
    in_turn(enter("prompt", LONG), pause, CIRCUIT, pause)(page)
    visit.wait("document.querySelector('#circuit-text').innerText === ''")
    enter("against", SECOND)(page)
    visit.shows("#circuit-text", "parts")
    text = page.locator("#circuit-text").inner_text()
    assert LONG in text
    assert SECOND in text


def test_the_picture_is_on_the_first_screen_of_a_phone(language_site, visit):
    visit.page.set_viewport_size({"width": 390, "height": 844})
    page = visit.open(language_site + START + "&circuit=False", NODE)
    pause(page)
    assert page.locator("#flow svg").bounding_box()["y"] < 844 - 150
