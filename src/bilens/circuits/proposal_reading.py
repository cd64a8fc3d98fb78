"""A reading of proposed questions: the lines of a file, for a person who deletes some of them."""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from bilens.analysis import Reading
from bilens.circuits.proposals import Proposal
from bilens.flows.question import Question
from bilens.question_files import written_names
from bilens.sections import Columns, Fact


@dataclass(frozen=True, eq=False, repr=False)
class ProposalReading(Reading):
    """Questions that a model proposes, as lines of a file of questions."""

    first: Question
    proposals: tuple[Proposal, ...]

    explanation = (
        "Read the lines, and delete those that are no good sentences or have wrong answers. "
        "#first and #second are the differences of the two logits after the first and the second "
        "text; such columns are skipped by whoever reads the file."
    )
    formats: ClassVar[dict[str, str]] = {"#first": "+.1f", "#second": "+.1f"}

    @property
    def title(self) -> str:
        """What the questions are like."""
        return f"Questions like {self.first.text!r}"

    def facts(self) -> list[Fact]:
        """Return the number of questions of each template."""
        counts = Counter(proposal.question.template for proposal in self.proposals)
        return [("questions", len(self.proposals)), *counts.items()]

    def columns(self) -> Columns:
        """Return a row for each question, with the columns of a file of questions."""
        rows = []
        for proposal in self.proposals:
            question = proposal.question
            rows.append(
                {
                    "text": question.text,
                    "token": written_names(question.tokens),
                    "minus": written_names(question.minus),
                    "against": question.against,
                    "task": question.task,
                    "template": question.template,
                    "#first": round(proposal.ends[0], 2),
                    "#second": round(proposal.ends[1], 2),
                }
            )
        return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
