"""The template's reader with one fault each, and the contract test that must fail."""

from __future__ import annotations

from source_mutants import SourceMutant

IS_READER = "test_is_a_reader"
ROWS = "test_files_give_their_rows"
FORM = "test_rows_are_mappings_or_located"
PLACES = "test_places_tell_rows_apart"
UNREADABLE = "test_unreadable_files_are_errors_that_name_them"
DAMAGED = "test_damaged_files_are_read_or_refused"
LAZY = "test_reading_is_lazy_and_closes_the_file"
TWICE = "test_a_file_may_be_read_twice"
SPLIT = "test_the_split_is_ignored_by_files"
AS_THEY_ARE = "test_files_are_left_as_they_are"

DEL_SPLIT = "del split  # of hub datasets"
OPEN = 'with Path(path).open("rb") as stream:'
PLACE = 'place = f"{path} line {number}"'
DECODE = 'line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\\r\\n")'
BAD_HEADER = 'raise DataError(f"{place}: {problem}") from error'
TWO_NAMES = 'raise DataError(f"{place}: the header names a column twice: {line!r:.80}")'
BAD_LINE = "yield LocatedRow(place, error=problem)"
ROW = "yield LocatedRow(place, dict(zip(header, values, strict=True)))"
SHORT = 'yield LocatedRow(place, error=f"has {len(values)} values for {len(header)} columns")'
HEADER = "header: list[str] = []"


def _reader(name: str, caught_by: str, old: str, new: str, file: str = "reader.py") -> SourceMutant:
    return SourceMutant("reader", name, file, old, new, caught_by)


MUTANTS = (
    # Rows
    _reader("the_mark_is_a_part_of_the_name", ROWS, '"utf-8-sig" if number == 1 else "utf-8"', '"utf-8"'),
    _reader("latin_text", ROWS, '"utf-8-sig" if number == 1 else "utf-8"', '"latin-1"'),
    _reader("returns_are_kept", ROWS, '.rstrip("\\r\\n")', '.rstrip("\\n")'),
    _reader("values_are_stripped", ROWS, '.rstrip("\\r\\n")', ".strip()"),
    _reader(
        "numbers_are_converted",
        ROWS,
        "dict(zip(header, values, strict=True))",
        "{n: int(v) if v.isdigit() else v for n, v in zip(header, values)}",
    ),
    _reader(
        "the_header_is_a_row",
        ROWS,
        "                    header = values\n",
        "                    header = values\n                    yield LocatedRow(place, dict(zip(header, values)))\n",
    ),
    _reader("short_rows_are_filled", ROWS, SHORT, "yield LocatedRow(place, dict(zip(header, values)))"),
    _reader("short_rows_are_skipped", ROWS, SHORT, "continue"),
    _reader("blank_lines_are_errors", ROWS, "elif line:", "else:"),
    _reader("a_short_row_ends_it", ROWS, SHORT, f"{SHORT}\n                    return"),
    _reader("a_short_row_raises", ROWS, SHORT, "raise DataError(place)"),
    _reader("bad_text_is_replaced", ROWS, '"utf-8").rstrip', '"utf-8", "replace").rstrip'),
    _reader("sorted_rows", ROWS, "enumerate(stream, start=1)", "enumerate([next(stream), *sorted(stream)], start=1)"),
    _reader(
        "empty_values_are_none",
        ROWS,
        "dict(zip(header, values, strict=True))",
        "{n: v or None for n, v in zip(header, values)}",
    ),
    _reader("rows_are_lists", FORM, "dict(zip(header, values, strict=True))", "list(values)"),
    _reader("places_without_the_file", FORM, PLACE, 'place = f"line {number}"'),
    _reader("errors_of_several_lines", FORM, BAD_LINE, "yield LocatedRow(place, error=problem + '\\nin ' + repr(raw))"),
    _reader("an_empty_error", FORM, BAD_LINE, "yield LocatedRow(place, error='')"),
    _reader("an_error_beside_a_row", FORM, BAD_LINE, "yield LocatedRow(place, {}, problem)"),
    _reader("one_place_for_all", PLACES, PLACE, "place = path"),
    # Errors
    _reader("a_bad_header_is_a_row", UNREADABLE, BAD_HEADER, BAD_LINE),
    _reader("a_bad_header_is_unicode_error", UNREADABLE, BAD_HEADER, "raise"),
    _reader("columns_twice", UNREADABLE, TWO_NAMES, "pass"),
    _reader("the_message_without_the_file", UNREADABLE, TWO_NAMES, "raise DataError('two columns of one name')"),
    _reader("text_errors_are_raised", ROWS, BAD_LINE, "raise"),
    _reader("an_empty_file_fails", DAMAGED, OPEN, f"assert Path(path).stat().st_size\n        {OPEN}"),
    _reader("a_zero_is_an_error", DAMAGED, DECODE, f"{DECODE}; assert chr(0) not in line"),
    # State
    _reader("the_file_stays_open", LAZY, OPEN, f"KEPT.append(open(path, 'rb'))\n        {OPEN}"),
    _reader(
        "opened_before_it_is_read",
        LAZY,
        "    def rows(self",
        "    def rows(self, path, split):\n        stream = open(path, 'rb')\n"
        "        KEPT.append(stream)\n        return self.later(path, split)\n\n    def later(self",
    ),
    _reader("one_header_for_all", TWICE, HEADER, "header: list[str] = self.header = getattr(self, 'header', [])"),
    _reader(
        "rows_are_one_dictionary",
        TWICE,
        ROW,
        "self.row = getattr(self, 'row', {}); self.row.clear(); "
        "self.row.update(zip(header, values)); yield LocatedRow(place, self.row)",
    ),
    _reader("rows_of_a_split", SPLIT, DEL_SPLIT, "if split == 'test':\n            return"),
    _reader("a_split_is_refused", SPLIT, DEL_SPLIT, "if split:\n            raise DataError(f'{path} has no split')"),
    _reader("an_index_beside_the_file", AS_THEY_ARE, DEL_SPLIT, "Path(path + '.idx').write_text('')"),
    _reader("the_file_is_touched", AS_THEY_ARE, DEL_SPLIT, "os.utime(path)"),
    _reader("prints", AS_THEY_ARE, DEL_SPLIT, "print(path)"),
    _reader("seeds_random", AS_THEY_ARE, DEL_SPLIT, "random.seed(0)"),
    # The record
    _reader("a_suffix_without_a_dot", IS_READER, '{".tsv"}', '{"tsv"}', "plugin.py"),
    _reader("a_suffix_in_capitals", IS_READER, '{".tsv"}', '{".TSV"}', "plugin.py"),
    _reader(
        "columns_of_a_format", IS_READER, "reads=", 'columns=frozenset({"prompt"}),\n            reads=', "plugin.py"
    ),
    _reader("rows_has_another_name", IS_READER, "def rows(", "def read("),
)
