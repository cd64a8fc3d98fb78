"""What people type into the explorer stays, and both texts change together, in a browser."""

from collections.abc import Callable
from typing import Any

from tests.explore.browser import visiting

START = "?flow_prompt=once+lily+ate&flow_against=once+tom+ate&flow_token=kite&flow_minus=ball"
QUESTION = "document.querySelector('#flow-text h3')?.innerText ?? ''"
FIRST = {"prompt": "once lily ate", "against": "once tom ate", "token": "kite", "minus": "ball"}
Do = Callable[[Any], None]


def box(page: Any, name: str) -> Any:
    return page.locator(f"#flow-{name} textarea")


def write(name: str, text: str, *keys: str) -> Do:
    """Click into a box, replace its text key by key, and press keys."""

    def do(page: Any) -> None:
        box(page, name).click()
        page.keyboard.press("Control+A")
        page.keyboard.press("Delete")
        page.keyboard.type(text)
        for key in keys:
            page.keyboard.press(key)

    return do


def paste(name: str, text: str, *keys: str) -> Do:
    """Put a text in at once, as the clipboard does."""

    def do(page: Any) -> None:
        box(page, name).click()
        page.keyboard.press("Control+A")
        page.keyboard.insert_text(text)
        for key in keys:
            page.keyboard.press(key)

    return do


def compose(name: str, *states: str, end: str) -> Do:
    """Replace a text by an input method: its states under way, then the word that is chosen."""

    def do(page: Any) -> None:
        box(page, name).click()
        page.keyboard.press("Control+A")
        session = page.context.new_cdp_session(page)
        for state in states:
            ends = {"selectionStart": len(state), "selectionEnd": len(state)}
            session.send("Input.imeSetComposition", {"text": state, **ends})
            page.wait_for_timeout(150)
        session.send("Input.insertText", {"text": end})
        session.detach()

    return do


def press(*keys: str) -> Do:
    def do(page: Any) -> None:
        for key in keys:
            page.keyboard.press(key)

    return do


def click(selector: str) -> Do:
    return lambda page: page.locator(selector).click()


def pause(page: Any) -> None:
    """Wait for the answer of the server, as a reader does."""
    page.wait_for_timeout(700)


def check(page: Any) -> None:
    page.locator("#circuit input").click()


LONGER = "once lily saw the kite", "once tom saw the kite"
WAYS: dict[str, tuple[list[Do], dict[str, str], str]] = {
    # What is done; what the boxes hold after it; words of the question that is shown, and of a
    # message in a box.
    "first text, Enter": ([write("prompt", "once ben ate", "Enter")], {}, "once ben ate"),
    "second text, Enter": ([write("against", "once ben ate", "Enter")], {}, "once ben ate"),
    "first text, Show": (
        [write("prompt", "once ben ate"), click("#flow-show")],
        {},
        "once ben ate",
    ),
    "longer first text, Enter": (
        [write("prompt", LONGER[0], "Enter"), pause],
        {"prompt": LONGER[0], "against": "once tom ate"},
        "once lily ate",
    ),
    "longer second text, Enter": (
        [write("against", LONGER[1], "Enter"), pause],
        {"prompt": "once lily ate", "against": LONGER[1]},
        "once lily ate",
    ),
    "both longer, Enter after each": (
        [write("prompt", LONGER[0], "Enter"), pause, write("against", LONGER[1], "Enter")],
        {"prompt": LONGER[0], "against": LONGER[1]},
        LONGER[1],
    ),
    "both longer, second first": (
        [write("against", LONGER[1], "Enter"), pause, write("prompt", LONGER[0], "Enter")],
        {"prompt": LONGER[0], "against": LONGER[1]},
        LONGER[1],
    ),
    "both longer, Tab between": (
        [
            write("prompt", LONGER[0], "Tab"),
            press("Control+A"),
            lambda page: page.keyboard.type(LONGER[1]),
            press("Enter"),
        ],
        {"prompt": LONGER[0], "against": LONGER[1]},
        LONGER[1],
    ),
    "both longer, Show": (
        [write("prompt", LONGER[0]), write("against", LONGER[1]), click("#flow-show")],
        {"prompt": LONGER[0], "against": LONGER[1]},
        LONGER[1],
    ),
    "both pasted, no pause": (
        [paste("prompt", LONGER[0], "Enter"), paste("against", LONGER[1], "Enter")],
        {"prompt": LONGER[0], "against": LONGER[1]},
        LONGER[1],
    ),
    "Enter twice": (
        [write("prompt", LONGER[0], "Enter", "Enter"), pause],
        {"prompt": LONGER[0]},
        "once lily ate",
    ),
    "a word that the model does not know": (
        [write("prompt", "once zebra ate", "Enter"), pause],
        {"prompt": "once zebra ate"},
        "",
    ),
    "an unknown token": (
        [write("token", "zebra", "Enter"), pause],
        {"token": "zebra"},
        "once lily ate",
    ),
    "an unknown token, put right letter by letter": (
        [
            write("token", "balloon", "Enter"),
            pause,
            press(*["Backspace"] * 7),
            lambda page: page.keyboard.type("rice"),
            press("Enter"),
        ],
        {"token": "rice"},
        "rice",
    ),
    "a token to subtract that is the token": (
        [write("minus", "kite", "Enter"), pause],
        {"minus": "kite", "token": "kite"},
        "once lily ate",
    ),
    "both tokens exchanged": (
        [write("token", "ball", "Enter"), pause, write("minus", "kite", "Enter")],
        {"token": "ball", "minus": "kite"},
        "ball",
    ),
    "texts and token, one Enter": (
        [write("prompt", LONGER[0]), write("against", LONGER[1]), write("token", "rice", "Enter")],
        {"prompt": LONGER[0], "against": LONGER[1], "token": "rice"},
        "rice",
    ),
    "a token while the texts wait": (
        [write("prompt", LONGER[0], "Enter"), pause, write("token", "rice", "Enter"), pause],
        {"prompt": LONGER[0], "token": "rice"},
        "once lily ate",
    ),
    "the second text is emptied": (
        [write("against", "", "Enter")],
        {"prompt": "once lily ate", "against": ""},
        "after “once lily ate”?",
    ),
    "the first text is emptied": ([write("prompt", "", "Enter"), pause], {"prompt": ""}, ""),
    "an edit in the middle": (
        [
            click("#flow-prompt textarea"),
            press("End", *["ArrowLeft"] * 4),
            *[press("Backspace")] * 4,
            lambda page: page.keyboard.type("ben"),
            press("Enter"),
        ],
        {"prompt": "once ben ate"},
        "once ben ate",
    ),
    "undone": (
        [
            write("prompt", LONGER[0], "Enter"),
            pause,
            write("prompt", "once lily ate", "Enter"),
            pause,
        ],
        {"prompt": "once lily ate", "against": "once tom ate"},
        "once lily ate",
    ),
    "slowly, with a pause within a word": (
        [
            write("prompt", "once b"),
            pause,
            pause,
            lambda page: page.keyboard.type("en ate", delay=250),
            press("Enter"),
        ],
        {"prompt": "once ben ate"},
        "once ben ate",
    ),
    "wiped out by Backspace and typed anew": (
        [
            click("#flow-prompt textarea"),
            press("End", *["Backspace"] * len("once lily ate")),
            pause,
            lambda page: page.keyboard.type("once ben ate", delay=40),
            press("Enter"),
        ],
        {"prompt": "once ben ate"},
        "once ben ate",
    ),
    "by an input method": (
        [compose("prompt", "on", "once", "once be", end="once ben ate"), press("Enter")],
        {"prompt": "once ben ate"},
        "once ben ate",
    ),
    "by an input method, while the other box is computed": (
        [
            write("token", "ball"),
            write("minus", "kite", "Enter"),
            compose("prompt", "o", "once b", end="once ben ate"),
            pause,
            press("Enter"),
        ],
        {"prompt": "once ben ate", "token": "ball", "minus": "kite"},
        "once ben ate",
    ),
    "a word pasted into the middle": (
        [
            click("#flow-prompt textarea"),
            press("Home", *["ArrowRight"] * len("once "), *["Shift+ArrowRight"] * len("lily")),
            lambda page: page.keyboard.insert_text("ben"),
            press("Enter"),
        ],
        {"prompt": "once ben ate"},
        "once ben ate",
    ),
    "Enter is held down": (
        [write("against", "once ben ate", *["Enter"] * 6), pause],
        {"against": "once ben ate"},
        "once ben ate",
    ),
    "typed on after Enter": (
        [
            write("prompt", "once ben ate", "Enter"),
            lambda page: page.keyboard.type(" the", delay=120),
            pause,
        ],
        {"prompt": "once ben ate the", "against": "once tom ate"},
        "once ben ate",
    ),
    "a circuit is asked for while texts wait": (
        [write("prompt", LONGER[0], "Enter"), pause, check, pause],
        {"prompt": LONGER[0]},
        "once lily ate",
    ),
}
WAITING = {
    "longer first text, Enter": ("prompt", "The picture waits until both have as many"),
    "longer second text, Enter": (
        "against",
        "The first text has 3 tokens |once|lily|ate|, the second 5 tokens",
    ),
    "an unknown token": ("token", "single token"),
    "a token while the texts wait": ("token", "Waits until the other boxes fit"),
    "a token to subtract that is the token": ("minus", "the token 'kite' itself"),
}


def lost(page: Any, visit: Any, way: str) -> list[str]:
    """Go one way, and return what is not as it should be."""
    steps, boxes, shown = WAYS[way]
    for step in steps:
        step(page)
    visit.wait(f"({QUESTION}).includes({shown!r})")
    pause(page)
    faults = []
    for name, text in boxes.items():
        value = box(page, name).input_value()
        if value != text:
            faults.append(f"{way}: {name} is {value!r}, expected {text!r}")
    name, message = WAITING.get(way, ("prompt", ""))
    if message not in page.locator(f"#flow-{name}").inner_text():
        faults.append(f"{way}: {name} does not say {message!r}")
    if way == "undone" and "waits" in page.locator("#flow-prompt").inner_text():
        faults.append(f"{way}: a message stays")
    return faults


def begin_again(page: Any, visit: Any) -> None:
    """Write the first texts and tokens, and leave the circuit out."""
    if page.locator("#circuit input").is_checked():
        check(page)
    for name, text in FIRST.items():
        box(page, name).fill(text)
    box(page, "token").press("Enter")
    visit.wait(
        f"['kite', 'ball', 'once lily ate', 'once tom ate'].every((x) => ({QUESTION}).includes(x))"
    )
    pause(page)


def test_what_is_typed_stays_and_is_shown_when_it_fits(language_site, browser):
    with visiting(browser) as visit:
        page = visit.open(language_site + START + "&circuit=False", "#flow svg .node")
        faults = []
        for way in WAYS:
            faults += lost(page, visit, way)
            begin_again(page, visit)
    assert len(WAYS) >= 20
    assert faults == []


def test_a_circuit_is_that_of_the_texts_on_the_page(language_site, browser):
    with visiting(browser) as visit:
        page = visit.open(language_site + START + "&circuit=False", "#flow svg .node")
        write("prompt", LONGER[0], "Enter")(page)
        pause(page)
        check(page)
        pause(page)
        assert page.locator("#circuit-text").inner_text() == ""
        write("against", LONGER[1], "Enter")(page)
        visit.wait("document.querySelector('#circuit-text').innerText.includes('parts')")
        text = page.locator("#circuit-text").inner_text()
        assert LONGER[0] in text
        assert LONGER[1] in text


def test_the_picture_is_on_the_first_screen_of_a_phone(language_site, browser):
    with visiting(browser, width=390) as visit:
        page = visit.open(language_site + START + "&circuit=False", "#flow svg .node")
        page.set_viewport_size({"width": 390, "height": 844})
        pause(page)
        top = page.locator("#flow svg").bounding_box()["y"]
        assert top < 844 - 150, top
