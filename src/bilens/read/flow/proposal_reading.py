"""A reading of proposed questions: the lines of a file, for a person who deletes some of them."""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from bilens.analysis import Reading, analysis
from bilens.checks import checked
from bilens.errors import BilensError
from bilens.lazy_imports import pd
from bilens.options import MinusNames
from bilens.question_files import written_names
from bilens.read.flow.proposals import Proposal, propose_questions
from bilens.read.flow.question import Question
from bilens.residual import ResidualModel
from bilens.sections import Fact
from bilens.settings import Count


@dataclass(frozen=True)
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

    def frame(self) -> "pd.DataFrame":
        """Return a row for each question, with the columns of a file of questions."""
        rows = []
        for proposal in self.proposals:
            question = proposal.question
            rows.append(
                {
                    "text": question.text,
                    "token": question.token,
                    "minus": written_names(question.minus),
                    "against": question.against,
                    "task": question.task,
                    "template": question.template,
                    "#first": round(proposal.ends[0], 2),
                    "#second": round(proposal.ends[1], 2),
                }
            )
        return pd.DataFrame(rows)


@analysis("questions")
@checked
def read_proposals(
    model: ResidualModel,
    prompt: str,
    token: str,
    *,
    minus: MinusNames,
    against: str,
    count: Count = 48,
    task: str = "",
) -> ProposalReading:
    """Propose further questions like a first one, for a file that `bilens circuit` reads.

        bilens questions model.gguf --prompt "The keys to the cabinet" --token " are" \
            --minus " is" --against "The key to the cabinet" --output questions.tsv

    Words are exchanged for those that the model finds alike or likely at their place, in the
    sentence as it is given and behind a few words. Kept is what the model answers as it answers
    the first. Read the file before you use it: some proposals are no good sentences, and answers
    that move with the words, as from France to Paris, are what the model says.

    Args:
        model: Any, with its tokenizer.
        prompt: The first text.
        token: The token that is predicted after it.
        minus: Tokens whose mean logit is subtracted.
        against: The second text, of as many tokens.
        count: Most questions, half of each template.
        task: A name for all questions.

    Raises:
        BilensError: `propose_questions` refuses the question, or the model proposes none.
    """
    question = Question(prompt, token, minus, against, task)
    proposals = propose_questions(model, question, count)
    if not proposals:
        raise BilensError(
            f"the model finds no other words for {prompt!r} and {against!r} after which its answer "
            "changes; ask about words that others can stand for, or write the questions yourself"
        )
    return ProposalReading(question, proposals)
