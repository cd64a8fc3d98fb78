"""Faults in what is read, asked and said: failing tests of each kind.

`python -m benchmarks.right` runs the tests that hold each kind of fault and prints how many fail;
`--write` also writes the numbers to results/right.json. Some minutes on one core.
"""

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from experiments.results import Recording, Row
from tests.explore.test_visitors import (
    CLICKS,
    VISITORS,
    expected_of,
    pages_of_a_model,
    wrong_clicks,
)

CIRCUITS, QUESTIONS = "circuits/test_circuit_reading", "flows/test_questions"
REFUSED = "flows/test_refusals"
TABLES, FOLDERS, PICTURES = "test_question_files", "convert/test_folders", "data/test_class_folders"
TOKENS, OPENED, REPORTS = "transformer/test_tokens", "test_isolation", "pages/test_report"
FRESH = (OPENED, "a_result_is_that_of_a_fresh_model_and_the_module_stays")
FIELDS = (QUESTIONS, "each_field_changes_the_result_or_is_refused_by_name")
CAPTIONS = ("test_analysis", "captions_name_tables_figures_and_files_and_none_is_lost")
IMAGES = ("data/test_refusals", "folders_without_classes_of_pictures_are_refused")
STANDING_IN = ("data/test_refusals", "what_stands_in_the_place_of_data_is_named")
Tests = tuple[tuple[str, ...], ...]
"""Each is a file and functions in it; all of the file without any."""
FAULTS: dict[int, Tests] = {
    1: (
        (OPENED, "other_threads_run_the_model_as_it_is_during_a_reading"),
        (OPENED, "two_readings_of_one_model_run_side_by_side"),
    ),
    2: ((FOLDERS, "a_revision_is_that_of_the_tokenizer_too"),),
    3: (FIELDS,),
    4: (FIELDS, ("circuits/test_recurring", "effects_are_exchanges_by_hand")),
    5: (("test_options", "names_of_tokens_are_read_from_a_text"),),
    6: (
        (
            "flows/test_sentences",
            "words_are_replaced_all_at_once",
            "a_permutation_of_words_is_undone_by_its_inverse",
            "exchanged_names_exchange_the_texts",
        ),
    ),
    7: ((CIRCUITS, "what_finds_does_not_measure", "tasks_do_not_measure_with_what_found_another"),),
    8: (FIELDS, (REFUSED, "what_cannot_be_patched_is_said")),
    9: (
        (
            OPENED,
            "a_model_is_opened_as_it_is",
            "a_stack_of_your_own_stays_as_it_is",
            "a_module_is_not_moved",
        ),
    ),
    10: (
        (REFUSED, "what_no_circuit_takes_is_refused_by_its_name"),
        (REFUSED, "what_is_no_field_is_refused_by_its_name"),
    ),
    11: (("images/test_own_stack", "no_analysis_reads_tensors_that_are_not_the_model"),),
    12: (CAPTIONS,),
    13: (CAPTIONS,),
    14: (("flows/test_weights", "a_head_of_differential_attention_has_its_outputs"),),
    15: ((OPENED, "layers_that_are_called_by_name_have_the_same_readings"),),
    16: (("test_analysis", "files_of_one_name_in_two_folders_are_two"),),
    17: (
        (REPORTS, "a_report_of_readings_refuses_all_but_the_path"),
        ("pages/test_refusals", "a_report_needs_readings"),
    ),
    18: ((OPENED, "passes_of_two_models_do_not_wait_for_each_other"),),
    19: (FRESH,),
    21: ((TABLES, "all_ways_to_write_a_file_are_one", "files_that_were_joined_have_marks_within"),),
    22: ((CIRCUITS, "a_second_run_without_a_text_has_a_name"),),
    23: ((CIRCUITS, "the_picture_measures_the_parts_of_the_circuit"),),
    24: (("flows/test_graph", "what_is_not_there_is_said"),),
    25: (("transformer/test_gemma",),),
    26: ((TOKENS, "a_token_that_only_the_tokenizer_has_is_refused_where_it_is_used"),),
    27: (
        ("transformer/test_gemma", "a_model_of_texts_and_images_opens_as_its_text_model"),
        ("transformer/test_refusals", "weights_that_cannot_be_read_are_refused"),
    ),
    28: (
        (
            TOKENS,
            "a_token_named_by_its_text_is_the_one_in_a_running_text",
            "each_token_has_a_name_by_which_it_is_found",
        ),
    ),
    29: ((TOKENS, "a_text_is_its_tokens_after_one_beginning_and_without_an_end"),),
    30: ((TOKENS, "a_text_is_its_tokens_after_one_beginning_and_without_an_end"),),
    31: (
        (
            "flows/test_sentences",
            "a_far_less_probable_token_than_with_a_space_has_a_hint",
            "circuits_patches_and_directions_have_the_hint",
        ),
        (
            CIRCUITS,
            "questions_that_the_model_answers_otherwise_are_left_out",
            "a_circuit_says_in_how_many_questions_its_answer_is_ahead",
        ),
        (REFUSED, "what_no_circuit_takes_is_refused_by_its_name"),
        (TABLES, "what_is_no_question_is_refused_with_its_line"),
    ),
    32: (("convert/test_gguf_tokenizer",),),
    33: (
        (
            PICTURES,
            "pictures_of_these_kinds_have_all_their_levels",
            "every_mode_of_pillow_is_read_whole_or_refused",
        ),
        IMAGES,
    ),
    34: ((PICTURES, "classes_have_any_names_and_may_be_links", "parquet_files_of_the_hub"), IMAGES),
    35: (("test_own_data",),),
    36: (
        (
            "test_own_data",
            "resumed_with_the_same_pictures_or_refused",
            "texts_are_found_compared_and_refused",
        ),
    ),
    37: (
        (FOLDERS, "a_folder_is_refused_with_the_cause", "adapters_around_a_model_are_merged_first"),
    ),
    38: ((TABLES,),),
    39: (
        (FOLDERS, "a_folder_is_refused_with_the_cause", "a_gguf_file_that_is_a_pointer"),
        STANDING_IN,
        IMAGES,
        ("data/test_refusals", "files_of_other_bytes_are_named"),
    ),
    # Any warning is an error of a test.
    40: (
        (CIRCUITS, "the_heading_asks_why_only_what_is_so"),
        ("nn/test_language", "a_cache_has_the_names_of_all_versions_of_transformers"),
    ),
    41: (
        (
            CIRCUITS,
            "questions_of_both_signs_end_and_say_so",
            "a_question_counts_by_its_absolute_change_whichever_text_is_first",
        ),
    ),
    42: (FIELDS,),
    43: (
        (
            "circuits/test_recurring",
            "directions_are_those_of_a_dense_reference",
            "flows_and_remainders_are_the_flow_through_the_mlp",
        ),
    ),
    44: (FRESH,),
    45: (
        (
            CIRCUITS,
            "what_finds_does_not_measure",
            "questions_that_are_spelled_in_another_way_are_the_same",
            "directions_are_not_measured_with_repeated_questions",
        ),
    ),
    46: (("circuits/test_interval",),),
    47: (("train/test_full_disk",),),
    48: (
        (REFUSED, "what_no_circuit_takes_is_refused_by_its_name"),
        (CIRCUITS, "questions_may_come_one_by_one"),
        (QUESTIONS, "questions_of_another_model_are_one_error"),
    ),
    49: (("train/test_kills", "a_kill_loses_nothing"), ("test_files", "an_error_leaves_no_folder")),
    50: (
        (CIRCUITS, "more_questions_than_fit_into_memory_are_refused_before"),
        ("test_memory",),
        ("data/test_texts", "a_text_is_never_held_that_is_too_long"),
    ),
    51: (
        (
            "transformer/test_model",
            "a_vocabulary_of_two_tokens",
            "weights_of_two_types_are_refused",
        ),
        (
            OPENED,
            "readings_under_inference_mode_are_the_same",
            "a_class_without_a_source_is_read_as_any_other",
        ),
        ("test_quick",),
    ),
    52: (
        ("explore/test_forms",),
        ("test_cli", "ctrl_c_is_not_lost"),
        (TOKENS, "a_tokenizer_that_stops_is_an_error_of_the_text_wherever_texts_are_read"),
        (TOKENS, "tokens_that_cannot_be_written_out_are_an_error"),
        (TOKENS, "all_texts_are_tokenized_and_written_out_in_one_place"),
        IMAGES,
    ),
    53: (("test_package", "every_extra_resolves_with_the_constraints"),),
}
"""The tests of each fault of the review of 0.4.0, by its number there; 32 as it was refused.

The code of 20, a singular form of facts, is gone."""
CLAIMS: dict[str, Tests] = {
    "extras that do not resolve with the constraints": FAULTS[53],
    "questions of both signs: levels that do not end or do not say so": (
        (CIRCUITS, "questions_of_both_signs_end_and_say_so"),
    ),
    "consumers of a question that neither obey nor refuse each field": (FIELDS,),
    "readings beside which another thread has wrong logits or an error": (
        (OPENED, "other_threads_run_the_model_as_it_is_during_a_reading"),
    ),
    "removals and directions, of mixtures too, against own passes: tests that fail": (
        ("transformer/test_experts", "choices_are_exchanged_as_in_own_passes"),
        ("flows/test_measure", "effects_are_those_of_own_passes"),
        ("circuits/test_recurring", "effects_are_exchanges_by_hand"),
    ),
    "Gemma in bfloat16 and its tokenizer: tests that fail, on random weights": FAULTS[25],
    "commands whose --json has a number in a text": (
        ("test_every_option", "no_number_of_a_record_is_a_text"),
    ),
    "own folder of pictures, from another working directory: tests that fail": FAULTS[35],
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


def main() -> None:
    """Run, print, and write if asked to."""
    recording = Recording() if "--write" in sys.argv else None
    every = [*FAULTS.values(), *CLAIMS.values()]
    counts = run(name for tests in every for name in names_of(tests))
    faults = {number: failures(tests, counts) for number, tests in FAULTS.items()}
    n_failing = sum(failed > 0 for failed, _ in faults.values())
    rows = [Row("faults of the review with a test that fails", n_failing, n=len(faults))]
    for claim, tests in CLAIMS.items():
        failed, ran = failures(tests, counts)
        rows.append(Row(claim, failed, n=ran))
    for number, (failed, ran) in faults.items():
        rows.append(Row(f"fault {number}: tests that fail", failed, n=ran))
    rows.append(visitors())
    for row in rows:
        print(f"{row.value} of {row.n}: {row.claim}")
    if recording is not None:
        recording.write(
            "right",
            title="Faults in what is read and said",
            command="python -m benchmarks.right --write",
            rows=rows,
            settings={
                "numbers": "failing tests of those that hold each kind",
                "faults": list(FAULTS),  # by their numbers in the review of 0.4.0
            },
        )


if __name__ == "__main__":
    main()
