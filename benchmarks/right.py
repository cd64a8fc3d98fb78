"""Faults in what is read, asked and said: the rows of the review of 0.5.0 that fail.

`python -m benchmarks.right` runs the tests that hold each row and prints how many rows fail;
`--write` also writes the numbers to results/right.json. Some minutes on one core. A row without a
test fails: whoever mends it names its test here.
"""

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from experiments.results import ROOT, Recording, Row
from tests.explore.test_visitors import (
    CLICKS,
    VISITORS,
    expected_of,
    pages_of_a_model,
    wrong_clicks,
)

SPELLED, FORMS = "flows/test_spelling", "flows/test_forms"
TABLES, ODD, EVERY = "test_question_files", "data/test_odd_files", "test_every_model"
PRECISION, CALLS = "flows/test_precision", "flows/test_calls"
CUTS, STAGES, RECIPES = "images/test_bonds", "circuits/test_stages", "experiments/test_recipes"
Tests = tuple[tuple[str, ...], ...]
"""Each is a file and functions in it; all of the file without any."""
ROWS: dict[str, Tests] = {
    # By reading.
    "2.1": (("explore/test_visitors",), ("test_caches",)),
    "2.2": ((SPELLED, "a_question_that_is_spelled_otherwise_is_the_same"),),
    "2.3": ((SPELLED, "the_same_texts_the_other_way_round_never_find_and_measure"),),
    "2.4": (),
    "2.5": (
        (CUTS, "a_cut_that_loses_more_is_promised_as_rarely_as_is_said"),
        (CUTS, "looking_often_costs_no_confidence"),
    ),
    "2.6": (("train/test_refusals",), ("test_before_data",)),
    "2.7": (
        (PRECISION, "what_is_read_wrongly_is_refused_in_every_type"),
        (PRECISION, "a_family_that_is_described_wrongly_is_refused_in_every_type"),
    ),
    "2.8": ((PRECISION, "only_experts_that_run_are_widened_once_each_way"),),
    "2.9": ((PRECISION, "no_pass_widens_a_table"),),
    "2.10": (),
    "2.11": (),
    "2.12": (("circuits/test_patching", "a_patch_in_a_padded_batch_is_that_of_the_text_alone"),),
    "2.12b": (("explore/test_space", "a_name_is_no_folder_of_this_name"),),
    "2.13": ((PRECISION, "numbers_are_moved_to_the_cpu_before_they_are_double"),),
    "2.14": ((SPELLED, "the_likeliest_token_is_that_of_a_float32_copy"),),
    "2.15": ((TABLES, "columns_may_be_left_out_or_skipped"),),
    "2.16": ((SPELLED, "a_token_or_an_answer_that_is_given_twice_counts_once"),),
    "2.17": ((SPELLED, "a_node_that_is_given_twice_counts_once"),),
    "2.18": ((PRECISION, "what_overflows_is_named"),),
    "2.19": ((CALLS, "tiny_vocabularies_of_unknown_families_open"),),
    "2.20": (("test_cli", "whole_numbers_are_exact"),),
    "2.21": (
        ("circuits/test_circuit_search", "a_size_that_misses_the_bounds_and_is_taken_is_said"),
    ),
    "2.22": ((SPELLED, "a_page_has_the_text_as_it_was_written"),),
    "2.23": ((SPELLED, "a_text_with_its_position_has_no_tokens_that_are_not_its_own"),),
    "2.24": ((SPELLED, "questions_are_equal_by_their_values"),),
    "2.25": (
        (SPELLED, "texts_that_are_joined_by_bars_are_read_back"),
        (SPELLED, "a_second_text_may_hold_a_bar"),
    ),
    "2.26": ((ODD, "all_white_space_parts_words"),),
    "2.27": (("explore/test_model_pages", "several_tokens_have_commas_between_them"),),
    "2.28": (("test_before_data", "no_more_texts_are_made_than_are_used"),),
    # After public reports of other tools.
    "3.1": ((CALLS, "each_call_is_the_models_own_or_refused_by_name_and_line"),),
    "3.2": ((CALLS, "each_call_is_the_models_own_or_refused_by_name_and_line"),),
    "3.3": ((CALLS, "each_call_is_the_models_own_or_refused_by_name_and_line"),),
    "3.4": ((PRECISION, "what_passes_in_float64_passes_in_float32"),),
    "3.5": (
        (ODD, "a_column_is_the_only_one_of_its_kind_and_whole"),
        (ODD, "no_split_is_left_out_in_silence"),
    ),
    "3.6": (
        (CALLS, "models_that_run_without_a_gradient_are_read"),
        (CALLS, "a_model_that_writes_into_its_buffers_is_refused_and_stays"),
        (CALLS, "patches_of_residuals_in_place_are_those_of_sums"),
    ),
    "3.7": ((CALLS, "each_attention_is_the_models_own_or_refused_by_name_and_line"),),
    "3.8": ((CALLS, "nodes_of_a_model_that_changes_the_stream_are_not_measured"),),
    "3.9": ((CALLS, "each_call_is_the_models_own_or_refused_by_name_and_line"),),
    "3.10": (
        (ODD, "no_story_holds_the_end_of_one_and_none_is_lost"),
        (ODD, "what_systems_leave_in_a_folder_is_not_read"),
        (ODD, "texts_of_jsonl_are_kept_as_they_are"),
    ),
    "3.11": ((ODD, "tiffs_have_their_levels_or_are_refused"),),
    "3.12": ((CALLS, "each_call_is_the_models_own_or_refused_by_name_and_line"),),
    "3.13": (("flows/test_kept",),),
    "3.14": (
        (TABLES, "columns_may_be_left_out_or_skipped"),
        (TABLES, "what_is_no_question_is_refused_with_its_line"),
    ),
    "3.15": (
        ("transformer/test_tokens", "padding_before_a_text_is_refused"),
        ("transformer/test_tokens", "logits_after_padding_are_those_of_the_text_alone"),
    ),
    "3, small: accents": ((ODD, "a_class_is_one_however_its_accents_are_stored"),),
    "3, small: tokens twice": ((SPELLED, "a_token_or_an_answer_that_is_given_twice_counts_once"),),
    # That new users met, by their number in their own list.
    "4: users 2 and 7": ((STAGES, "a_reading_has_stages_cuts_and_all_questions"),),
    "4: users 3": ((STAGES, "what_the_model_does_not_answer_is_said_first"),),
    "4: users 5": ((FORMS,), (EVERY,)),
    "4: users 9": (("test_cli", "what_does_not_share_its_work_refuses_several_processes"),),
    "4: users 11": ((EVERY, "every_command_reads_every_model_or_says_what_is_missing"),),
    "4: users 12": (("flows/test_summary", "a_run_is_measured_beside_its_own_log"),),
    "4: users 13": (
        ("test_tutorials", "the_first_cell_of_a_notebook_installs_what_exists"),
        ("test_results", "every_number_of_readme_is_in_one_of_its_files"),
        ("test_results", "every_number_beside_a_link_to_results_is_in_the_file_that_it_names"),
    ),
    "4: one seed": (
        (f"{RECIPES}_case_study", "recipes_run_from_one_seed_or_say_why_not"),
        (f"{RECIPES}_single_layer", "recipes_run_from_one_seed_or_say_why_not"),
    ),
    "4: a stopped autoencoder": (
        ("experiments/test_autoencoder", "a_training_that_is_killed_resumes_to_the_same_end"),
    ),
}
"""The tests that hold each row of the review, by section and number; a row without one fails."""
GONE = {"2.4": "def exchanges(", "2.10": "propose_questions", "2.11": "propose_questions"}
"""Rows whose feature is gone, and a text that the package has no more."""
CLAIMS: dict[str, Tests] = {
    "features times shipped and unknown models that neither work nor say what is missing": (
        (EVERY,),
    ),
    "numbers of a record that are texts: commands": (
        ("test_every_option", "no_number_of_a_record_is_a_text"),
    ),
    "extras that do not resolve with the constraints": (
        ("test_package", "every_extra_resolves_with_the_constraints"),
    ),
}


def names_of(tests: Tests) -> list[str]:
    """Return the names of tests as pytest takes them."""
    named = []
    for file, *functions in tests:
        path = f"tests/{file}.py"
        named += [f"{path}::test_{function}" for function in functions] or [path]
    return named


def run(names: Iterable[str]) -> Counter[tuple[str, bool]]:
    """Run tests once; return how many of each function failed and passed, True for those."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-n", "0"]
        subprocess.run([*command, *dict.fromkeys(names)], check=False, stdout=subprocess.DEVNULL)
        counts = Counter[tuple[str, bool]]()
        for case in ElementTree.parse(report).iter("testcase"):
            file = case.attrib["classname"].replace(".", "/")
            name = f"{file}.py::{case.attrib['name'].partition('[')[0]}"
            ends = {part.tag for part in case}
            if "skipped" not in ends:
                counts[name, not ends & {"failure", "error"}] += 1
    return counts


def failures(tests: Tests, counts: Counter[tuple[str, bool]]) -> tuple[int, int]:
    """Return how many of some tests failed, and how many ran; each function has to have run."""
    failed, ran = 0, 0
    for named in names_of(tests):
        of = {key: n for key, n in counts.items() if named in (key[0], key[0].partition("::")[0])}
        if not of:
            raise SystemExit(f"no test ran of {named}")
        failed += sum(n for (_, passed), n in of.items() if not passed)
        ran += sum(of.values())
    return failed, ran


def visitors() -> Row:
    """Let four visitors of one explorer click side by side."""
    wrong = wrong_clicks(pages_of_a_model(), expected_of(pages_of_a_model()))
    claim = "clicks of four visitors of the explorer that fail or show another's text"
    return Row(claim, len(wrong), n=VISITORS * CLICKS)


def holds(row: str, counts: Counter[tuple[str, bool]]) -> bool:
    """Return whether a row has tests that all pass, or its feature is gone from the package."""
    if row in GONE:
        files = (ROOT / "src" / "bilens").rglob("*.py")
        return not any(GONE[row] in file.read_text("utf-8") for file in files)
    return bool(ROWS[row]) and not failures(ROWS[row], counts)[0]


def main() -> None:
    """Run, print, and write if asked to."""
    recording = Recording() if "--write" in sys.argv else None
    every = [*ROWS.values(), *CLAIMS.values()]
    counts = run(name for tests in every for name in names_of(tests))
    failing = [row for row in ROWS if not holds(row, counts)]
    rows = [Row("rows of the review that fail or have no test", len(failing), n=len(ROWS))]
    for claim, tests in CLAIMS.items():
        failed, ran = failures(tests, counts)
        rows.append(Row(claim, failed, n=ran))
    rows.append(visitors())
    for row in rows:
        print(f"{row.value} of {row.n}: {row.claim}")
    print("failing:", *failing)
    if recording is not None:
        recording.write(
            "right",
            title="Faults in what is read and said",
            command="python -m benchmarks.right --write",
            rows=rows,
            settings={"rows": list(ROWS), "failing": failing},
        )


if __name__ == "__main__":
    main()
