"""A paper to draw on, which hands over what is on it while it is drawn."""

from pathlib import Path

from bilens.explore.framework import gradio as gr

__all__ = ["paper"]

SIDE = 280
PAPER = f"""
<canvas width="{SIDE}" height="{SIDE}" role="img" aria-label="paper to draw on"></canvas>
<button type="button">Clear the paper</button>
"""
LOOKS = """
canvas { display: block; width: 100%; max-width: 280px; aspect-ratio: 1; background: #fff;
  border: 1px solid var(--border-color-primary); border-radius: 8px; cursor: crosshair;
  touch-action: none; }
button { margin-top: 8px; padding: 4px 10px; border-radius: 6px; cursor: pointer;
  color: var(--button-secondary-text-color); background: var(--button-secondary-background-fill);
  border: 1px solid var(--border-color-primary); }
"""


def paper() -> gr.HTML:
    """The paper; its `input` event has the picture on it, as a data address, in `drawing`."""
    return gr.HTML(
        html_template=PAPER,
        css_template=LOOKS,
        js_on_load=Path(__file__).with_name("paper.js").read_text(encoding="utf-8"),
        label="Draw here",
        show_label=True,
        apply_default_css=False,
        container=True,
        padding=True,
        elem_id="paper",
    )
