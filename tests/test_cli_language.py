"""The commands on language models, as a user meets them."""

import re
from html import unescape
from pathlib import Path

import pandas as pd
import pytest

from bilens.cli import main
from bilens.files import read_json, write_json
from bilens.shipped import STORY as SHIPPED
from tests.command_line import in_json, output_of, refusal

STORY = "once upon a time there was a {0} girl . she said , " + '"i like my {1} !" and ran home .'
WORDS = ("little", "happy", "young", "small", "dog", "ball", "cat", "kite", "hat", "bird")
SMALL = ["--d-model", "16", "--d-hidden", "24", "--n-heads", "2", "--n-ctx", "16"]
BRIEF = ["--vocab-size", "120", "--epochs", "2", "--batch-size", "4", "--device", "cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language")
    stories = [STORY.format(a, b) for a in WORDS for b in WORDS]
    (folder / "stories.txt").write_text("\n<|endoftext|>\n".join(stories), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(folder / "cache"))
        places = ["--data", str(folder / "stories.txt"), "--output", str(folder / "run")]
        main(["train", "language", *SMALL, *BRIEF, *places, "--clean", "tinystories"])
        yield folder / "run"


def shown(capsys, *args) -> str:
    """Return what a command prints, in one line."""
    return " ".join(output_of(capsys, *args).split())


def test_ngrams_are_printed_and_saved(run, tmp_path, capsys):
    text = shown(capsys, "ngrams", run, "--token", "girl", "--k", "4", "--output", tmp_path)
    assert "before girl" in text
    assert "head 1" in text
    frame = pd.read_csv(tmp_path / "after-girl.csv")
    assert len(frame) == 4
    assert frame.token[0] in text


def test_heads_are_printed_and_saved(run, tmp_path, capsys):
    options = ["--heads", "1", "--distance", "2", "--k", "3", "--components", "1"]
    text = shown(capsys, "heads", run, *options, "--output", tmp_path)
    for title in ("attends most", "attends least", "raises", "lowers", "components"):
        assert f"head 0.1 {title}" in text
    assert "head 0.0 attends" not in text
    assert "mlp 0 L" in text
    frame = pd.read_csv(tmp_path / "head-0.1-attends-most.csv")
    assert len(frame) == 3
    assert frame["query"][0] in text
    assert len(pd.read_csv(tmp_path / "head-0.1-components.csv")) == 3


def test_contexts_are_printed(run, capsys):
    options = ["--token", "girl", "--minus", "dog,cat", "--eigenvectors", "1", "--k", "2"]
    text = shown(capsys, "contexts", run, *options)
    assert text.count("λ = ") == 2
    assert len(re.findall(r"[+-]\d\S* ", text[text.index("λ = ") :])) == 2 + 4


def test_a_flow_is_printed_and_written(run, tmp_path, capsys):
    page = tmp_path / "flow.html"
    options = ["--prompt", "once upon a", "--token", "girl", "--minus", "dog,cat", "--shown", "8"]
    written = ["--ablate", "5", "--output", page, "--viewer", tmp_path / "graphs"]
    written += ["--figure", tmp_path / "graph.svg", "--figure", tmp_path / "graph.pdf"]
    text = shown(capsys, "flow", run, *options, *written)
    assert (tmp_path / "graph.svg").read_text().count("<text") > 9
    assert (tmp_path / "graph.pdf").read_bytes().startswith(b"%PDF")
    assert read_json(tmp_path / "graphs" / "flow.json")["nodes"]
    result = read_json(page.with_suffix(".json"))
    result |= result["page"]
    answer = f'"girl" minus "dog", "cat" {result["value"]:.4g}, probability of the token'
    for part in (answer, "The strongest nodes"):
        assert part in text
    assert len(result["nodes"]) == 9
    assert sum(node["measured"] is not None for node in result["nodes"]) == 5
    assert "How well it holds" in page.read_text()
    assert result["tokens"][-3:] == ["once", "upon", "a"]


def test_a_figure_has_a_width_in_points(run, tmp_path, capsys):
    options = ["--prompt", "once upon a", "--token", "girl", "--against", "once upon the"]
    figure = tmp_path / "circuit.svg"
    main(["circuit", str(run), *options, "--figure", str(figure), "--width", "240"])
    assert 'width="240pt"' in figure.read_text()
    # A page says which command made it, and when.
    page = tmp_path / "circuit.html"
    main(
        ["circuit", str(run), *options, "--level", "parts", "--keep", "0.7", "--output", str(page)]
    )
    about = f"bilens circuit {run} --prompt 'once upon a' --token girl --against 'once upon the'"
    assert unescape(page.read_text()).count(f"{about} --level parts --keep 0.7 · ") == 2
    command = ["circuit", str(run), *options, "--width", "240"]
    assert "--width=240 is that of a figure; add --figure" in refusal(capsys, *command)


def test_generate_goes_on_with_the_prompt(run, capsys):
    for temperature in ("0", "1e-300", "1"):
        text = shown(capsys, "generate", run, "--tokens", "5", "--temperature", temperature)
        assert text.startswith("once upon a time")


def test_the_report_of_a_language_model(run, capsys):
    main(["report", str(run), "--output", str(run / "page.html")])
    page = (run / "page.html").read_text()
    assert "<h2>Heads of layer 0</h2>" in page
    assert page.index("<h1>") < page.index("<h2>How well it holds</h2>")
    assert "(standard error over texts) nats a token" in page
    result = in_json(capsys, "report", run, "--token", "dog", "--minus", "cat,bird")
    assert result["report"] == str(run / "report.html")
    assert "Eigenvectors of dog minus cat, bird" in (run / "report.html").read_text()


@pytest.mark.long
def test_the_model_that_comes_with_bilens_has_its_name_alone(tmp_path, monkeypatch, capsys):
    """Without data, a network, and a place on this machine in any text."""
    monkeypatch.chdir(tmp_path)
    asked = ["--prompt", "The girl ran because", "--token", "she", "--minus", "he"]
    asked += ["--against", "The boy ran because"]
    place = Path("runs") / "report-story.html"
    assert in_json(capsys, "report", "story", *asked)["report"] == str(place)
    page = place.read_text()
    assert "after “The girl ran because”, and not after “The boy ran because”" in page
    assert "none were named (--data FILE.txt)" in page
    in_json(capsys, "flow", "story", *asked, "--output", "flow.html")
    assert in_json(capsys, "process", "story")["model"] == str(Path("runs") / "processed-story")
    in_json(capsys, "report", "story", "--token", "girl")  # of the sentence it begins with
    refused = refusal(capsys, "contexts", "story", "--token", "girl")
    assert "story does not say what it was trained on" in refused
    for text in (page, Path("flow.html").read_text(), refused):
        assert str(SHIPPED) not in text


FLOW = ["flow", "RUN", "--prompt", "the dog", "--token", "the"]
TRAIN = ["train", "language", "--device", "cpu"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([*FLOW, "--output", "a.txt"], "a.txt: expected PAGE.html, NUMBERS.json, TABLE.tsv"),
        (["report", "RUN", "--token", ""], "token='' is empty; leave it out"),
        (["report", "RUN", "--minus", ""], "minus='' is empty; leave it out"),
        (["report", "RUN", "--minus", "girl"], "--minus=girl is subtracted from a token"),
        (["report", "RUN", "--layer", "5"], "layer=5, expected 0 to 0"),
        ([*TRAIN, "--data", "nowhere.txt"], "nowhere.txt"),
        ([*TRAIN, "--preset", "huge"], "invalid choice 'huge'"),
    ],
)
def test_a_mistake_gets_one_message(run, command, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert message in refusal(capsys, *(run if part == "RUN" else part for part in command))


def test_a_tokenizer_of_another_model_is_refused(run, tmp_path, capsys):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    assert "the model came without a tokenizer: write the numbers" in refusal(
        capsys, "generate", tmp_path
    )
    settings = read_json(run / "tokenizer.json")
    settings["model"]["vocab"] |= {f"more{i}": 500 + i for i in range(200)}
    write_json(tmp_path / "tokenizer.json", settings)
    assert "they do not belong together" in refusal(capsys, "ngrams", tmp_path, "--token", "girl")


@pytest.mark.parametrize(
    ("option", "endings"), [("figure", ".png or .svg or .pdf"), ("save-graph", ".json")]
)
def test_an_ending_is_refused_before_the_model_is_opened(monkeypatch, capsys, option, endings):
    monkeypatch.setattr("bilens.models.load", lambda *args, **how: pytest.fail("opened"))
    command = f"flow m --prompt a --token b --{option} flow.txt"
    message = f"--{option}=flow.txt: expected a name that ends in {endings}"
    assert message in refusal(capsys, *command.split())
