"""Where an input is chosen: a paper to draw on, an upload, or an image of the test set."""

from collections.abc import Callable, Sequence
from typing import Any

from bilens.data import ImageData
from bilens.explore.framework import gradio as gr
from bilens.explore.ink import drawn_input, read_data_address, read_picture, test_number
from bilens.explore.paper import paper
from bilens.explore.wiring import QUIET, guarded

__all__ = ["InputPanel"]


class InputPanel:
    """The controls of an input, whose short text is kept in `source`.

    Args:
        data: whose images a drawing is made to look like.
        start: the first input.
    """

    def __init__(self, data: ImageData, start: str) -> None:
        self.data = data
        self.source = gr.State(start)
        self.paper = paper()
        self.upload = gr.UploadButton(
            "Upload an image", file_types=["image"], type="binary", size="sm"
        )
        self.number = gr.Slider(
            0,
            len(data.test_images) - 1,
            value=test_number(start) or 0,
            step=1,
            label="or take an image of the test set",
            elem_id="test-image",
        )

    def connect(
        self,
        answer: Callable[..., list[Any]],
        controls: Sequence[Any],
        outputs: Sequence[Any],
    ) -> None:
        """Call `answer` with each new input and the values of the controls."""

        def on_paper(event: gr.EventData, *values: Any) -> list[Any]:
            return answer(drawn_input(read_data_address(event.drawing), self.data), *values)

        def on_upload(content: bytes, *values: Any) -> list[Any]:
            return answer(drawn_input(read_picture(content), self.data), *values)

        def on_number(number: int, *values: Any) -> list[Any]:
            return answer(f"test-{number}", *values)

        for event, given, handler in (
            (self.paper.input, [], on_paper),
            (self.upload.upload, [self.upload], on_upload),
            (self.number.input, [self.number], on_number),
        ):
            event(guarded(handler), [*given, *controls], outputs, **QUIET)
