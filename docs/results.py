"""The pages of results and of the sources' claims: `python -m docs.results` writes them.

Do not edit the pages: numbers are of the files of `results/`, claims of `docs/sources.tsv`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from experiments.claims import beside_of, cells_of, claims, row_of, shown, verdict
from experiments.results import load_results
from experiments.verdicts import numbers_of_source

__all__ = [
    "DOCUMENTS",
    "GROUPS",
    "KINDS",
    "OF_THE_PROJECT",
    "pages",
    "place_of",
    "short",
    "sources_page",
]

DOCS = Path(__file__).parent
GROUPS = {
    "Images": [
        *("fig2", "fig3", "fig4", "noises", "fig5", "fig6", "fig9", "leading", "bonds", "masks"),
        *("case_digits", "case_svd", "case_sae", "case_pairs", "extrema", "small_layers"),
        "certify",
    ],
    "Language models": [
        *("stories", "grammar", "compare", "induction", "anneal", "linear_gates"),
        *("tensorise", "tensorise_own", "tensor_readings"),
    ],
    "Circuits and flows": ["coverage", "patching", "labels", "tuned"],
    "Exactness and speed": [
        *(
            "flow_memory",
            "flow_time",
            "attention",
            "large",
            "large_circuit",
            "large_diff",
            "device_map",
            "gpu",
        ),
        *("tasks", "unlike_lengths"),
    ],
}
"""Headings of the page, and the names of their files."""
OF_THE_PROJECT = (
    *("agreement", "bare", "cost", "directions", "families", "many", "size", "story", "users"),
    *("products", "quantised", "unseen_templates"),
)
"""Files that the page leaves out: about the project itself, or with their numbers elsewhere."""
PLACES = {"Images": "images", "Language models": "language", "Circuits and flows": "circuits"}
"""Pages of groups, by their headings; `speed` has the others."""
INTRODUCTION = """# Results

Each number with the command that measured it, its file in `results/` and the commit. Between *low*
and *high* are 95 %, or what the file's settings say. Columns named by a method, and *beside*, are
alternatives of the same run; *source* is the papers' number, judged as on [their page](sources.md);
… is as in the line above.
"""

DOCUMENTS = {
    "paper": "Pearce et al. 2024, *Weight-based Decomposition: A Case for Bilinear MLPs*",
    "study": "Pearce and Dooms 2024, *Bilinear Layers for Mech-Interp: an MNIST case study*",
    "post": "A post on tensor-transformer variants, and its comments",
    "processing": "Weight processing of TransformerLens",
}
CLAIMS_INTRODUCTION = """# What the sources claim

Each claim with the source's number and the number here, from the file of [results](results.md) that
is named. It held ("yes") if the interval here is wholly inside of the source's range, did not
("no") if it is wholly outside, and otherwise nobody can tell; a number without an interval is
judged alone. A number of the source is a range too: 0.3 points on both sides of an accuracy, 0.05
of another number up to 1, a tenth of a larger one. "Below", "above" and "equal" compare with what
is beside. What is *exact* is held by the tests that are named. The last column says why a claim was
*not tried*.

{counts}
"""
COLUMNS = (
    "claim",
    "source",
    "here",
    "low…high",
    "n",
    "beside",
    "held",
    "file",
    "where, or why not",
)
KINDS = ("number", "exact", "not a claim", "not tried")
"""A claim has a number in a file, or a test that holds it, or none of both."""


def pages(results: Mapping[str, Mapping[str, Any]]) -> dict[Path, str]:
    """Return the pages of results as Markdown, by their paths: what there is, and the groups."""
    index, found = [INTRODUCTION], {}
    for heading, names in GROUPS.items():
        path = Path("results") / f"{PLACES.get(heading, 'speed')}.md"
        index.append(f"## {heading}\n")
        parts = [f"# {heading}\n", "[What the columns are](../results.md).\n"]
        for name in names:
            index.append(f"- [{results[name]['title']}]({path.as_posix()}#{name})")
            parts.append(_section(name, results[name], _verdicts(name, results)))
        index.append("")
        found[path] = "\n".join(parts)
    return {Path("results.md"): "\n".join(index), **found}


def place_of(name: str) -> str:
    """Return the link to a file's table, from the folder of the pages."""
    heading = next(heading for heading, names in GROUPS.items() if name in names)
    return f"results/{PLACES.get(heading, 'speed')}.md#{name}"


def _verdicts(name: str, results: Mapping[str, Any]) -> dict[str, str]:
    """Return the verdict on each row of a file whose source's number is a claim."""
    found = {}
    for claim in claims():
        if claim["file"] == name and numbers_of_source(claim["source"]):
            found[claim["row"]] = verdict(claim, results)
    return found


def _section(name: str, result: Mapping[str, Any], of_sources: Mapping[str, str]) -> str:
    together = _baselines(result["rows"])
    ordered = by_claim(result["rows"])
    rows = [cells_of(row, together) for row in ordered]
    for row, cells in zip(ordered, rows, strict=True):
        # Of sources one rule decides; what a recipe noted has other rules.
        if row["source"] is not None or row["claim"] in of_sources:
            cells["held"] = of_sources.get(row["claim"], "")
    for row, claim in zip(rows, short([row["claim"] for row in rows]), strict=True):
        row["claim"] = claim
    columns = [key for key in rows[0] if any(row[key] for row in rows)]
    machine = "" if "no GPU" in result["machine"] else f", {result['machine']}"
    lines = [
        # Anchors are names of files, which stay when a title is worded anew.
        f"## {result['title']} {{#{name}}}\n",
        f"`{result['command']}`, {name}.json, {result['commit']}{machine}\n",
        *([f"{result['note']}\n"] if "note" in result else []),
        "|".join(columns),
        "|".join("---" for _ in columns),
    ]
    lines += ["|".join(row[column] for column in columns).rstrip("|") + "|" for row in rows]
    return "\n".join(lines) + "\n"


def by_claim(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return rows whose claims say the same after a colon together, where the first of them is."""
    places: dict[str, int] = {}
    for row in rows:
        places.setdefault(row["claim"].partition(": ")[2] or row["claim"], len(places))
    return sorted(rows, key=lambda row: places[row["claim"].partition(": ")[2] or row["claim"]])


def short(claims: Sequence[str]) -> list[str]:
    """Return claims without the half, before or after a colon, that the claim above has too."""
    shown, above = [], ("", "")
    for claim in claims:
        first, _, second = halves = claim.partition(": ")
        if second and first == above[0]:
            shown.append(f"… {second}")
        elif second and second == above[1]:
            shown.append(f"{first}: …")
        else:
            shown.append(claim)
        above = halves[0], second
    return shown


def _baselines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the baselines that most rows of a file have, which get columns."""
    counts = Counter(name for row in rows for name in row["baselines"])
    return [name for name, count in counts.items() if count > len(rows) / 2 and len(rows) > 1]


def sources_page(results: Mapping[str, Any]) -> str:
    """Return the page of the sources' claims as Markdown."""
    parts = [CLAIMS_INTRODUCTION.format(counts=counted(results))]
    for key, document in DOCUMENTS.items():
        lines = [f"## {document}\n", "|".join(COLUMNS), "|".join("---" for _ in COLUMNS)]
        for claim in claims():
            if claim["document"] == key:
                lines.append("|".join(_claimed(claim, results)) + "|")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def counted(results: Mapping[str, Any]) -> str:
    """Return how many claims there are of each kind, and how many held."""
    kinds = Counter(claim["kind"] for claim in claims())
    of_numbers = Counter(verdict(c, results) for c in claims() if c["kind"] == "number")
    text = (
        f"Of {kinds.total()} claims {kinds['number']} have a number here: {of_numbers['yes']} "
        f"held, {of_numbers['no']} did not, of {of_numbers['cannot tell']} nobody can tell, and "
        f"{of_numbers['']} have none in the source. {kinds['exact']} are exact, "
        f"{kinds['not tried']} were not tried, and {kinds['not a claim']} are none."
    )
    return fill(text, 100)


def _claimed(claim: Mapping[str, str], results: Mapping[str, Any]) -> tuple[str, ...]:
    if claim["kind"] != "number":
        tests = [name.partition("::")[2] for name in claim["file"].split()]
        shown_tests = ", ".join(f"`{name}`" for name in tests)
        blank = ("",) * 5
        return claim["claim"], *blank, claim["kind"], shown_tests, claim["where"]
    row, beside = row_of(claim, results), beside_of(claim, results)
    cells = cells_of(row, ())
    next_to = ""
    if beside is not None:
        next_to = f"{beside[0]}: {shown(*beside[1:])}"
    here, span, n = (cells[key] for key in ("number", "low…high", "n"))
    name = claim["file"]
    file = f"{name}.json" if name in OF_THE_PROJECT else f"[{name}]({place_of(name)})"
    held = verdict(claim, results)
    return claim["claim"], claim["source"], here, span, n, next_to, held, file, claim["where"]


if __name__ == "__main__":
    of_files = load_results()
    for path, text in pages(of_files).items():
        (DOCS / path).write_text(text, encoding="utf-8")
    (DOCS / "sources.md").write_text(sources_page(of_files), encoding="utf-8")
