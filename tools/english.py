"""Check the English of docstrings, messages, identifiers and pages, and measure it per room.

`python -m tools.english` prints a table of all rooms and checks those that `clean_rooms.txt` lists.
`python -m tools.english src/bilens/tensor` lists the findings of any path, clean or not.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from inspect import cleandoc
from pathlib import Path

ROOT = Path(__file__).parent.parent
CLEAN = Path(__file__).with_name("clean_rooms.txt")
"""Paths that are checked, one a line."""

OPENINGS = frozenset(
    ("what", "whether", "of", "those", "as", "some", "who", "how", "which", "whose")
)
"""Words that begin no docstring: a clause would take the place of a noun."""

NAMES = frozenset(
    ("found", "some", "one", "own", "kept", "chosen", "whole", "rest", "said", "each", "mine")
)
"""Pronouns and participles that name no variable, parameter, field or function."""

LONGEST = {"docstring": 25, "page": 35}
"""Most words of a sentence."""


@dataclass(frozen=True)
class Word:
    """A word with its budget: how often it may occur in 1,000 words."""

    name: str
    pattern: re.Pattern[str]
    docstrings: float
    pages: float

    def allowed(self, kind: str, n_words: int) -> int:
        """Return how often the word may occur, once at least if it has a budget at all."""
        budget = self.pages if kind == "page" else self.docstrings
        return max(int(budget > 0), int(budget * n_words / 1000))


def _word(name: str, pattern: str, docstrings: float, pages: float) -> Word:
    return Word(name, re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE), docstrings, pages)


WORDS = (
    _word("what", "what", 1, 2),
    _word("where", "where", 3, 3),
    _word("there is", "there (?:is|are)", 0.5, 0.8),
    _word("of which", "(?:of|by|from) (?:which|whom|whose)", 0.6, 0.6),
    _word("give", "gives?", 0.3, 0.4),
    _word("stand", "stands?|stood", 0.1, 0.1),
    _word("alone", r"(?<!weights )alone", 0.1, 0.1),
    _word("behind", "behind", 0.1, 0.1),
    _word("in front of", "in front of", 0.1, 0.1),
    _word("all else", "all (?:else|that)", 0, 0),
    _word("so many", "so many", 0, 0),
    _word("take away", "tak(?:e|es|en|ing) away|took away", 0, 0),
    _word("go on", "(?:go|goes|going|gone|went) on|(?:hands?|handed) on", 0, 0),
    _word("look at", "look(?:s|ed|ing)? at", 0.1, 0.3),
    _word("by night", "by night", 0, 0),
)

_TOKEN = re.compile(r"[A-Za-z][A-Za-z'’-]+|[aAI]\b")
_SECTION = re.compile(r"(Args|Attributes|Examples?|Notes?|Raises|Returns|Yields|Warns):$")
_ENTRY = re.compile(r"[*\w., `]+(\([^)]*\))?: ")
_BULLET = re.compile(r"([-*+]|\d+[.)])\s+")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[A-Z\"'(*\d])")


@dataclass(frozen=True, order=True)
class Finding:
    """A place that breaks a rule."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Prose:
    """A docstring, the words of a message or a page: kind, path, first line and text."""

    kind: str
    path: str
    line: int
    text: str


@dataclass
class Measure:
    """Counts over the files of one path."""

    files: int = 0
    lines: int = 0
    comments: int = 0
    imports: int = 0
    n_words: dict[str, int] = field(default_factory=dict)
    """Words by kind of text."""
    uses: dict[tuple[str, str], list[Finding]] = field(default_factory=dict)
    """Places of each word of `WORDS`, by kind of text and name."""
    openings: list[Finding] = field(default_factory=list)
    sentences: list[Finding] = field(default_factory=list)
    names: list[Finding] = field(default_factory=list)

    def count(self, word: str, kind: str = "docstring") -> float:
        """Return how often a word occurs in 1,000 words of one kind."""
        return 1000 * len(self.uses.get((kind, word), ())) / max(1, self.n_words.get(kind, 0))

    def findings(self) -> list[Finding]:
        """List the places that break a rule or exceed a budget."""
        listed = [*self.openings, *self.sentences, *self.names]
        for (kind, name), uses in self.uses.items():
            word = next(word for word in WORDS if word.name == name)
            allowed = word.allowed(kind, self.n_words[kind])
            if len(uses) > allowed:
                listed += [
                    Finding(use.path, use.line, f'"{name}" {len(uses)} times, {allowed} allowed')
                    for use in uses
                ]
        return sorted(set(listed))


def blocks(text: str) -> Iterator[str]:
    """Yield paragraphs, list items and entries of sections, without code, formulas and tables."""
    block: list[str] = []
    section = bullet = fence = False
    for line in text.splitlines():
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if stripped.startswith(("```", "~~~")) or stripped == "$$":
            fence = not fence
            starts, stripped = True, ""
        elif fence or stripped.startswith(("|", "<", "#", "[^", "!!!", "???", "::", ">")):
            starts, stripped = True, ""
        elif _SECTION.match(stripped):
            section, starts, stripped = True, True, ""
        elif _BULLET.match(stripped):
            bullet, starts = True, True
            stripped = _BULLET.sub("", stripped, count=1)
        elif section and indent in (2, 4) and _ENTRY.match(stripped):
            starts, stripped = True, _ENTRY.sub("", stripped, count=1)
        elif indent >= 4 and not section and not bullet:
            starts, stripped = True, ""
        else:
            starts = not stripped
            if stripped and not indent:
                section = False
                bullet = bullet and bool(block)
        if starts and block:
            yield " ".join(block)
            block = []
        if stripped:
            block.append(stripped)
    if block:
        yield " ".join(block)


def plain(block: str) -> str:
    """Return a block with each code span and formula as the word Code, and links as their text."""
    block = re.sub(r"(`+).+?\1|\$[^$]+\$", "Code", block)
    block = re.sub(r"<[^>]+>", " ", block)
    return re.sub(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])?", r"\1", block)


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield every bare string: of modules, classes and functions, and after an attribute."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str()) as constant):
                yield constant
            case _:
                pass


def _messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the words of each raised message."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            parts = [
                part.value
                for part in ast.walk(node.exc)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
            yield node.lineno, " code ".join(parts)


def _stored_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield each name that the module binds, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.MatchAs(name=str(name)) | ast.ExceptHandler(name=str(name)):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.alias(asname=str(name)):
                yield node.lineno, name
            case _:
                pass


def _measure_prose(prose: Prose, measure: Measure) -> None:
    kind = prose.kind
    for block in blocks(prose.text):
        for sentence in _SENTENCE_END.split(plain(block)):
            n_words = len(_TOKEN.findall(sentence))
            measure.n_words[kind] = measure.n_words.get(kind, 0) + n_words
            for word in WORDS:
                uses = measure.uses.setdefault((kind, word.name), [])
                uses += [Finding(prose.path, prose.line, "")] * len(word.pattern.findall(sentence))
            longest = LONGEST.get(kind)
            beginning = " ".join(sentence.split()[:8])
            if longest is not None and n_words > longest:
                text = f"{n_words} words, {longest} allowed: {beginning} ..."
                measure.sentences.append(Finding(prose.path, prose.line, text))
            if kind == "docstring" and sentence.count(";") > 1:
                text = f"a chain of semicolons: {beginning} ..."
                measure.sentences.append(Finding(prose.path, prose.line, text))


def _measure_python(path: str, source: str, measure: Measure) -> None:
    tree = ast.parse(source)
    measure.lines += len(source.splitlines())
    measure.files += 1
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    for token in tokens:
        if token.type == tokenize.COMMENT and lines[token.start[0] - 1].lstrip().startswith("#"):
            measure.comments += 1
    for node in ast.walk(tree):
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        is_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        if (is_import or is_all) and isinstance(node, ast.stmt):
            measure.imports += (node.end_lineno or node.lineno) - node.lineno + 1
    for constant in _docstrings(tree):
        text = cleandoc(str(constant.value))
        opening = re.match(r"[A-Za-z]+", text)
        if opening and opening.group().lower() in OPENINGS:
            finding = f'a docstring begins with "{opening.group()}"'
            measure.openings.append(Finding(path, constant.lineno, finding))
        _measure_prose(Prose("docstring", path, constant.lineno, text), measure)
    for line, text in _messages(tree):
        _measure_prose(Prose("message", path, line, text), measure)
    for line, name in _stored_names(tree):
        if name.strip("_") in NAMES:
            measure.names.append(Finding(path, line, f'the name "{name}" says nothing'))


def files_in(path: Path) -> list[Path]:
    """Return the Python files and pages of a path."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in {".py", ".md"})


def measure_files(paths: Sequence[Path], root: Path = ROOT) -> Measure:
    """Measure the files of some paths together.

    Raises:
        FileNotFoundError: a path is neither a file nor a directory.
    """
    measure = Measure()
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"expected a file or directory, got {path}")
        for file in files_in(path):
            name = file.relative_to(root).as_posix() if file.is_relative_to(root) else str(file)
            source = file.read_text(encoding="utf-8")
            if file.suffix == ".py":
                _measure_python(name, source, measure)
            else:
                measure.files += 1
                measure.lines += len(source.splitlines())
                _measure_prose(Prose("page", name, 1, source), measure)
    return measure


def not_imperative(paths: Sequence[Path], root: Path = ROOT) -> list[Finding]:
    """Return the functions whose docstring begins with no imperative verb, by ruff's rule D401."""
    files = [str(file) for path in paths for file in files_in(path) if file.suffix == ".py"]
    if not files:
        return []
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select=D401"]
    result = subprocess.run(
        [*command, "--output-format=json", *files], capture_output=True, text=True, check=False
    )
    if result.returncode not in (0, 1):
        raise RuntimeError(f"ruff ended with {result.returncode}: {result.stderr}")
    return [
        Finding(
            Path(entry["filename"]).relative_to(root).as_posix()
            if Path(entry["filename"]).is_relative_to(root)
            else entry["filename"],
            entry["location"]["row"],
            entry["message"],
        )
        for entry in json.loads(result.stdout)
    ]


@cache
def rooms() -> dict[str, tuple[Path, ...]]:
    """Return the paths of each room, by its name in the table."""
    package = ROOT / "src" / "bilens"
    paths: dict[str, tuple[Path, ...]] = {}
    for directory in sorted(path for path in package.rglob("*") if (path / "__init__.py").exists()):
        paths[directory.relative_to(package).as_posix()] = tuple(sorted(directory.glob("*.py")))
    paths["top level"] = tuple(sorted(package.glob("*.py")))
    paths["package"] = (package,)
    for name in ("experiments", "benchmarks", "tests", "tools"):
        paths[name] = (ROOT / name,)
    docs = ROOT / "docs"
    for part in ("ideas", "howto", "tutorials"):
        paths[f"docs/{part}"] = tuple(sorted((docs / part).glob("*.md")))
    paths["docs"] = tuple(sorted(docs.rglob("*.md")))
    for name in ("README.md", "CONTRIBUTING.md"):
        paths[name] = (ROOT / name,)
    return paths


def table() -> str:
    """Return the table of all rooms: size, shares of lines, and counts of broken rules."""
    columns = "files,lines,a file,# %,imports %,openings,long,names,D401,words,what,others"
    heads = columns.split(",")
    rows = [f"{'room':<16}" + "".join(f"{head:>10}" for head in heads)]
    for name, paths in rooms().items():
        measure = measure_files(paths)
        kind = "page" if "page" in measure.n_words else "docstring"
        others = sum(measure.count(word.name, kind) for word in WORDS if word.name != "what")
        lines, files = max(1, measure.lines), max(1, measure.files)
        numbers = (
            f"{measure.files}",
            f"{measure.lines}",
            f"{measure.lines / files:.0f}",
            f"{100 * measure.comments / lines:.1f}",
            f"{100 * measure.imports / lines:.1f}",
            f"{len(measure.openings)}",
            f"{len(measure.sentences)}",
            f"{len(measure.names)}",
            f"{len(not_imperative(paths))}",
            f"{measure.n_words.get(kind, 0)}",
            f"{measure.count('what', kind):.1f}",
            f"{others:.1f}",
        )
        rows.append(f"{name:<16}" + "".join(f"{number:>10}" for number in numbers))
    return "\n".join(rows)


def check(paths: Sequence[Path], root: Path = ROOT) -> list[Finding]:
    """Return all findings of some paths; each has a budget of its own."""
    return sorted(
        {
            finding
            for path in paths
            for finding in [*measure_files([path], root).findings(), *not_imperative([path], root)]
        }
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and check the clean rooms, or check the paths that are named."""
    parser = argparse.ArgumentParser(prog="python -m tools.english", description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="files or directories to check")
    parser.add_argument("--quiet", action="store_true", help="check without a table")
    options = parser.parse_args(arguments)
    paths = [path.resolve() for path in options.paths]
    if not paths:
        paths = [ROOT / line for line in CLEAN.read_text(encoding="utf-8").split()]
        if not options.quiet:
            print(table())
    findings = check(paths)
    for finding in findings:
        print(finding)
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
