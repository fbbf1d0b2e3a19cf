"""Runs ``program.py`` inside the sandbox, and prints the value of its last expression. A script."""

from __future__ import annotations

import ast
import sys
import traceback
from typing import Any

SOURCE = "program.py"


def main() -> None:
    """Run the program; a traceback shows its own lines only."""
    with open(SOURCE, encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    space: dict[str, Any] = {"__name__": "__main__"}
    try:
        tree = ast.parse(source, SOURCE)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, SOURCE, "exec"), space)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), SOURCE, "eval"), space)
            if value is not None:
                print(repr(value))
    except Exception as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != SOURCE:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        sys.stdout.flush()
        sys.exit(1)


if __name__ == "__main__":
    main()
