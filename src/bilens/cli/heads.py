"""`bilens heads`: where heads look and what they say of it, from the weights."""

from dataclasses import dataclass
from pathlib import Path

from bilens.cli.console import RunDir
from bilens.cli.terminal import out

__all__ = ["Heads"]


@dataclass(frozen=True)
class Heads:
    """Print what the heads of a block do, from the weights: no text is read.

    For each head the pairs of tokens of which one looks at the other most and least, at a distance;
    the outputs that it raises and lowers when it looks at a token; and the singular components of
    the latter. At the end, how much of what heads and MLPs write is read by later ones.

    Attributes:
        run_dir: directory that `bilens train language` wrote.
        layer: number of the block, from 0.
        head: number of the head; all of the block by default.
        distance: how far back the token stands that is looked at.
        position: of the token that looks; only learned and shortformer positions ask for it.
        k: how many of each.
        components: how many singular components.
        output: folder to write the tables to as CSV.
    """

    run_dir: RunDir
    layer: int = 0
    head: int | None = None
    distance: int = 1
    position: int | None = None
    k: int = 10
    components: int = 2
    output: Path | None = None

    def run(self) -> None:
        """Read and print."""
        from bilens.cli.language import frame_table, open_language  # noqa: PLC0415
        from bilens.read.language import (  # noqa: PLC0415
            read_attention,
            token_components,
            token_outputs,
        )

        model, tokenizer = open_language(self.run_dir)
        found = read_attention(
            model,
            tokenizer,
            self.layer,
            heads=None if self.head is None else [self.head],
            k=self.k,
            distance=self.distance,
            position=self.position,
        )
        seen = None if self.position is None else self.position - self.distance
        frames = {}
        for reading in found.heads:
            name = f"head {self.layer}.{reading.head}"
            frames[f"{name} looks most"] = reading.looks.highest
            frames[f"{name} looks least"] = reading.looks.lowest
            if reading.outputs is not None:
                frames[f"{name} raises"] = reading.outputs.highest
                frames[f"{name} lowers"] = reading.outputs.lowest
                frames[f"{name} components"] = token_components(
                    token_outputs(model, self.layer, position=seen)[reading.head],
                    tokenizer,
                    sides=("key", "output"),
                    components=self.components,
                    k=self.k,
                )
        frames["composition"] = found.composition.frame(self.k)
        for name, frame in frames.items():
            out.print(frame_table(frame, name))
            if self.output:
                self.output.mkdir(parents=True, exist_ok=True)
                frame.to_csv(self.output / f"{name.replace(' ', '-')}.csv", index=False)
