"""The template's dataset format with one fault each, and the contract test that must fail."""

from __future__ import annotations

from source_mutants import SourceMutant

EXAMPLES = "test_rows_become_their_examples"
REASON = "test_a_bad_row_is_an_error_with_a_reason"
READ_ONLY = "test_the_row_is_read_only"
ALONE = "test_a_row_is_interpreted_by_itself"
LISTS = "test_lists_of_every_kind_are_taken"
COLUMNS = "test_other_columns_reach_the_rewards"
ODD = "test_odd_values_are_taken_or_refused"
MISSING = "test_missing_columns_are_taken_or_refused"
QUIET = "test_the_process_stays_as_it_was"
FORM = "test_is_a_format"
WELL_FORMED = "test_examples_are_well_formed"

PARSE = 'question, choices = row.get("question"), row.get("choices")'
TRUTH = 'ground_truth=right_letter(row.get("answer"), choices),'
ID = 'id=str(row["id"]) if row.get("id") is not None else None,'
OTHERS = 'columns={name: value for name, value in row.items() if name not in ("question", "id")},'
BAD_QUESTION = "raise DataError(f\"column 'question' is {question!r}; it must be a text\")"
BAD_CHOICES = "raise DataError(f\"column 'choices' is {choices!r:.80}; it must be a list of 2 to 26 texts\")"
IS_TEXTS = "return isinstance(value, Sequence) and not isinstance(value, str)"
BAD_ANSWER = "raise DataError(\n        f\"column 'answer'"
NO_ANSWER = "if answer is None:\n        return None"
CHECK_QUESTION = "if not isinstance(question, str) or not question.strip():"
CHECK_CHOICES = "if not is_texts(choices) or not 2 <= len(choices) <= len(ascii_uppercase):"
LINES = "lines = [question.strip(), *lettered]"
CACHED = "self.seen = getattr(self, 'seen', {}); row = self.seen.setdefault(str(question), row)"
SPOILED = "self.bad = getattr(self, 'bad', False) or len(choices or '') < 2"
KNOWN = "{'question', 'choices', 'answer', 'id', 'level'}"
DECLARED = '{"question", "choices", "answer"}'
ROLE = '{"role": "user", "content": "\\n".join(lines)}'


def _format(name: str, caught_by: str, old: str, new: str, file: str = "dataset.py") -> SourceMutant:
    return SourceMutant("dataset", name, file, old, new, caught_by)


MUTANTS = (
    # Examples
    _format("no_ground_truth", EXAMPLES, TRUTH, "ground_truth=None,"),
    _format("the_raw_answer", EXAMPLES, TRUTH, 'ground_truth=row.get("answer"),'),
    _format("the_first_choice", EXAMPLES, "return letters[answer]", "return letters[0]"),
    _format("a_numbered_prompt", EXAMPLES, 'f"{ascii_uppercase[i]}. {choice}"', 'f"{i}. {choice}"'),
    _format("no_instruction", EXAMPLES, "if self.options.instruction:", "if False:"),
    _format("a_system_prompt", EXAMPLES, '"role": "user"', '"role": "system"'),
    _format("no_id", EXAMPLES, ID, "id=None,"),
    _format("the_id_is_a_number", EXAMPLES, ID, 'id=row.get("id"),'),
    _format("ids_are_counted", EXAMPLES, ID, "id=str(random.getrandbits(30)),"),
    _format("a_source_of_its_own", EXAMPLES, ID, f'{ID} data_source="acme",'),
    _format("the_answer_is_also_imitated", EXAMPLES, ID, f'{ID} completion=str(row["answer"]),'),
    _format("choices_are_sorted", EXAMPLES, PARSE, f"{PARSE}; choices = sorted(choices or [])"),
    _format("messages_without_a_role", WELL_FORMED, ROLE, ROLE.replace('"role": "user", ', "")),
    _format("an_empty_prompt", WELL_FORMED, f"prompt=[{ROLE}]", "prompt=[]"),
    _format("ranks_without_completions", WELL_FORMED, ID, f"{ID} ranks=(1.0,),"),
    _format("labels_that_are_numbers", WELL_FORMED, ID, f'{ID} completions=("a",), labels=(1,),'),
    _format("ranks_and_labels", WELL_FORMED, ID, f'{ID} completions=("a",), ranks=(1.0,), labels=(True,),'),
    # Bad rows
    _format("bad_answers_are_taken", REASON, BAD_ANSWER, BAD_ANSWER.replace("raise DataError", "return str")),
    _format("one_choice_is_enough", REASON, "not 2 <= len(choices)", "not 1 <= len(choices)"),
    _format("a_bad_answer_is_none", REASON, BAD_ANSWER, f"return None\n    {BAD_ANSWER}"),
    _format("an_error_without_the_column", REASON, BAD_CHOICES, 'raise DataError("malformed")'),
    _format("another_error", REASON, BAD_CHOICES, 'raise ValueError("choices")'),
    _format("the_question_fails_otherwise", ODD, BAD_QUESTION, "raise TypeError(question)"),
    _format("the_question_is_not_checked", ODD, CHECK_QUESTION, "if False:"),
    _format("the_choices_are_not_checked", ODD, CHECK_CHOICES, "if not choices:"),
    _format("a_bad_question_is_no_example", ODD, BAD_QUESTION, "return None"),
    _format("columns_are_indexed", MISSING, 'row.get("question")', 'row["question"]'),
    _format(
        "the_answer_is_indexed",
        MISSING,
        'right_letter(row.get("answer"), choices)',
        'right_letter(row["answer"], choices)',
    ),
    _format(
        "a_default_answer", MISSING, NO_ANSWER, NO_ANSWER.replace("None", "letters[0]").replace("letters[0]", "None", 1)
    ),
    _format("answer_columns_are_not_listed", MISSING, 'answer_columns = ("answer",)', "answer_columns = ()"),
    _format("other_answer_columns", MISSING, 'answer_columns = ("answer",)', 'answer_columns = ("solution",)'),
    # State
    _format("the_row_is_changed", READ_ONLY, PARSE, f'{PARSE}; row.pop("level", None)'),
    _format("choices_are_changed", READ_ONLY, LINES, f"choices[:] = [c.upper() for c in choices]; {LINES}"),
    _format("the_prompt_is_the_row", EXAMPLES, f"prompt=[{ROLE}]", "prompt=choices"),
    _format("cached_by_question", ALONE, PARSE, f"{PARSE}; {CACHED}"),
    _format(
        "a_bad_row_spoils_the_next",
        ALONE,
        PARSE,
        f"{PARSE}; {SPOILED}\n        if self.bad: raise DataError('choices')",
    ),
    _format("lists_only", LISTS, IS_TEXTS, "return isinstance(value, list)"),
    _format("other_columns_are_lost", COLUMNS, OTHERS, "columns={},"),
    _format(
        "known_columns_only",
        COLUMNS,
        OTHERS,
        'columns={name: row[name] for name in ("answer", "level") if name in row},',
    ),
    _format(
        "unknown_columns_are_refused",
        COLUMNS,
        PARSE,
        f"{PARSE}\n        if set(row) - {KNOWN}: raise DataError('question')",
    ),
    _format("seeds_random", QUIET, PARSE, f"{PARSE}; random.seed(0)"),
    _format("draws_from_numpy", QUIET, PARSE, f"{PARSE}; np.random.rand()"),
    _format("prints", QUIET, PARSE, f"{PARSE}; print(question)"),
    _format("writes_a_file", QUIET, PARSE, f"{PARSE}; Path(tempfile.gettempdir(), 'acme.cache').write_text('')"),
    _format("a_list_of_columns", FORM, 'answer_columns = ("answer",)', 'answer_columns = ["answer"]'),
    _format("one_text_of_columns", FORM, "completion_columns = ()", 'completion_columns = "answer"'),
    _format("required_is_a_number", FORM, "answer_required = True", "answer_required = 1"),
    _format(
        "more_columns_declared",
        "test_declared_columns_are_those_of_its_rows",
        DECLARED,
        DECLARED.replace("}", ', "level"}'),
        "plugin.py",
    ),
)
