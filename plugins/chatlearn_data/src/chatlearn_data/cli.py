"""The command ``chatlearn data``: prepares datasets, and shows how a file's rows are interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chatlearn_core.exceptions import DataError
from chatlearn_core.printable import printable
from chatlearn_data import arithmetic
from chatlearn_data.output import check_suffix, write_records

if TYPE_CHECKING:
    from chatlearn_data.published import Recipe

app = typer.Typer(help="Prepare and show datasets.", no_args_is_help=True)
prepare = typer.Typer(help="Write a dataset in the format 'verifiable'.", no_args_is_help=True)
app.add_typer(prepare, name="prepare")

_SHOWN = 5
"""Number of bad rows that an error shows; all are counted."""

Input = Annotated[str, typer.Option("--input", "-i", help="Raw file, directory of files, or hub id.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="File to write: .jsonl or .parquet.")]
SplitName = Annotated[
    str | None, typer.Option(help="Part of the rows' ids, and split of a hub id; by default the file's stem.")
]
Instruction = Annotated[
    str | None, typer.Option(help="Instruction after each question; '' for none; by default the recipe's own.")
]
SkipBadRows = Annotated[bool, typer.Option("--skip-bad-rows", help="Skip bad rows and count them.")]


@prepare.command()
def gsm8k(
    input: Input,
    output: Output,
    split: SplitName = None,
    instruction: Instruction = None,
    skip_bad_rows: SkipBadRows = False,
) -> None:
    """Prepare GSM8K from the published file: question, answer ending in '#### NUMBER'."""
    _prepare_published("gsm8k", input, output, split, instruction, skip_bad_rows)


@prepare.command()
def math(
    input: Input,
    output: Output,
    split: SplitName = None,
    instruction: Instruction = None,
    skip_bad_rows: SkipBadRows = False,
) -> None:
    r"""Prepare MATH from the published file: problem, solution with \boxed{}, optionally answer."""
    _prepare_published("math", input, output, split, instruction, skip_bad_rows)


@prepare.command("arithmetic")
def prepare_arithmetic(
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for train, validation, heldout and sft.")],
    operations: Annotated[str, typer.Option(help="Comma-separated: add, subtract.")] = ",".join(arithmetic.OPERATIONS),
    min_operand: Annotated[
        int, typer.Option(min=0, help="Smallest operand, and smallest answer of a difference.")
    ] = 10,
    max_operand: Annotated[int, typer.Option(min=0, help="Largest operand.")] = 49,
    train: Annotated[int, typer.Option(min=0, help="Number of problems to train on.")] = 4000,
    validation: Annotated[int, typer.Option(min=0, help="Number of problems for validation.")] = 200,
    heldout: Annotated[int, typer.Option(min=0, help="Number of problems that are held out.")] = 200,
    demonstrations: Annotated[int, typer.Option(min=0, help="Number of worked answers to imitate.")] = 4000,
    seed: Annotated[int, typer.Option(help="Other seeds give other problems in each split.")] = 0,
    worked_shares: Annotated[
        str, typer.Option(help="How often demonstrations show their working, for each wording in turn.")
    ] = "1.0",
    answer_style: Annotated[str, typer.Option(help="Form of the final answer: boxed or hash.")] = "boxed",
    suffix: Annotated[str, typer.Option(help="Suffix of the files: .jsonl or .parquet.")] = ".jsonl",
) -> None:
    """Generate arithmetic word problems from a seed; the splits share no problem."""
    if answer_style not in ("boxed", "hash"):
        raise DataError(f"--answer-style is '{answer_style}'; it must be boxed or hash.")
    check_suffix(output / f"train{suffix}")
    names = [name.strip() for name in operations.split(",") if name.strip()]
    splits = arithmetic.split_problems(
        arithmetic.problems(names, max_operand, min_operand), validation=validation, heldout=heldout, seed=seed
    )
    try:
        shares = [float(share) for share in worked_shares.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0.0 <= share <= 1.0 for share in shares):
        raise DataError(f"--worked-shares is '{worked_shares}'; it must be comma-separated numbers from 0 to 1.")
    style: arithmetic.AnswerStyle = "hash" if answer_style == "hash" else "boxed"
    files = {
        "train": arithmetic.prompt_records(splits.train, "train", train, seed),
        "validation": arithmetic.prompt_records(splits.validation, "validation", validation, seed),
        "heldout": arithmetic.prompt_records(splits.heldout, "heldout", heldout, seed),
        "sft": arithmetic.demonstration_records(splits.train, "sft", demonstrations, seed, style, shares),
    }
    for name, records in files.items():
        path = output / f"{name}{suffix}"
        typer.echo(f"{path}: {write_records(path, records)} rows")
    typer.echo(
        f"{len(splits.train)} problems for training, {len(splits.validation)} for validation, "
        f"{len(splits.heldout)} held out; none in two of them"
    )


@app.command()
def show(
    path: Annotated[str, typer.Argument(help="A data file, directory or hub id.")],
    num: Annotated[int, typer.Option("-n", min=1, help="Rows to show.")] = 3,
    format: Annotated[str, typer.Option(help="A dataset format by name, or auto.")] = "auto",
    split: Annotated[str | None, typer.Option(help="Split of a hub dataset.")] = None,
    model: Annotated[str | None, typer.Option(help="Count rows that spell control tokens of this model.")] = None,
) -> None:
    """Show how the first rows of a dataset are interpreted."""
    from chatlearn_data.show import described_rows  # loads all plugins, which `prepare` does not need

    for text in described_rows(path, num, format, split, model):
        typer.echo(printable(text))


def _prepare_published(
    recipe: Recipe, input: str, output: Path, split: str | None, instruction: str | None, skip_bad_rows: bool
) -> None:
    from chatlearn_data.published import prepared_rows  # imports torch with the core's types; `arithmetic` does not

    check_suffix(output)
    name = split or Path(input).stem
    rows = list(prepared_rows(recipe, input, split=name, hub_split=split, instruction=instruction))
    if not rows:
        raise DataError(f"Data file '{input}' is empty: it has no row.")
    bad_rows = [f"  {row.place}: {row.error}" for row in rows if row.record is None]
    if bad_rows and (not skip_bad_rows or len(bad_rows) == len(rows)):
        more = [f"  ... and {len(bad_rows) - _SHOWN} more"] if len(bad_rows) > _SHOWN else []
        raise DataError(
            "\n".join(
                [
                    f"{len(bad_rows)} of {len(rows)} rows of '{input}' cannot be prepared as {recipe}:",
                    *bad_rows[:_SHOWN],
                    *more,
                    "  Correct them, or leave them out with --skip-bad-rows. Nothing was written.",
                ]
            )
        )
    count = write_records(output, (row.record for row in rows if row.record is not None))
    for bad_row in bad_rows:
        typer.echo(printable(f"skipped{bad_row[1:]}"), err=True)
    typer.echo(f"{output}: {count} rows" + (f", {len(bad_rows)} bad rows skipped" if bad_rows else ""))
