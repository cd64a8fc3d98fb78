"""Model cards describe a model and its training, and open it by code that runs."""

import re
from pathlib import Path

from huggingface_hub import ModelCard

import bilens
from bilens.files import write_json
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.nn.card import model_card
from bilens.nn.language import LanguageModel
from bilens.train import ClassifierTraining, train_classifier
from tests.models import digits, random_model

CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def opened(folder: Path) -> str:
    """Return the text of a card, whose code has run."""
    card = ModelCard.load(folder / "README.md")
    assert "bilens" in card.data.tags
    assert "More Information Needed" not in card.text
    for code in CODE.findall(card.text):
        exec(code.replace("OWNER/NAME", str(folder)), {})
    return card.text


def test_a_run_has_a_card_and_hands_it_on(tmp_path):
    config = ClassifierConfig(64, 10, 8, 1, image_shape=(8, 8))
    model, history = train_classifier(config, digits(), ClassifierTraining(epochs=2), tmp_path)
    text = opened(tmp_path)
    accuracy = f"test_accuracy | {history[-1]['test_accuracy']:.5g}"
    for row in ("data | digits", "batch_size | 100", "d_model | 8", accuracy):
        assert f"| {row} |" in text
    bilens.load(tmp_path).save_pretrained(tmp_path / "loaded")
    model.save_pretrained(tmp_path / "kept")
    for copy in ("loaded", "kept"):
        assert opened(tmp_path / copy) == text


def test_what_was_not_trained_here_has_no_training(tmp_path):
    ImageClassifier(ClassifierConfig(64, 10, d_model=8)).save_pretrained(tmp_path)
    text = opened(tmp_path)
    assert "| d_model | 8 |" in text
    assert "Training" not in text


def test_no_folder_of_this_machine_is_shown(tmp_path):
    random_model().save_pretrained(tmp_path)
    record = {"data": "home/me/grammar", "epochs": 1, "model": {"a": 1}}
    write_json(tmp_path / "training.json", record)
    LanguageModel.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert "| data | grammar |" in opened(tmp_path / "again")


def test_a_card_that_is_there_stays(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    random_model().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_damaged_record_leaves_what_is_whole(tmp_path):
    (tmp_path / "training.json").write_text("[1]")
    (tmp_path / "metrics.jsonl").write_text('{"test_accuracy": 0.75}\n{"test_acc')
    card = model_card({"model_type": "image-classifier"}, tmp_path).text
    assert "## Training" not in card
    assert "| test_accuracy | 0.75 |" in card
