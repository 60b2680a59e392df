"""python -m tools: the project's commands.

A command NAME is the function `command` of tools/NAME.py, written for typer, its docstring the help; a line in COMMANDS
registers it. Only the module of the command that was asked for is imported, so start-up is fast and a broken command
breaks no other.
"""
import importlib
import sys
from pathlib import Path

import typer

COMMANDS = {
    "judge": "Is a method right, and how much faster than the eager baseline is it?",
    "sealed": "Two hundred cases of the judged family, from a seed that nobody has seen.",
    "bench": "The benchmark suite, saved, and held to the stored baseline of this device model.",
    "doctor": "What is here, which paths can run and why not, and whether each is right.",
    "ladder": "Every published step beside eager, and beside its published figure.",
    "inspect": "What Inductor made of a graph: kernels, fusions, bytes against the floor.",
    "resources": "Registers, spills and shared memory of every plan on every card, compiled without one.",
    "explain": "The plan for a problem: bytes, FLOP, expected time, and why.",
    "roofline": "Each path's share of the time that its bytes alone would take.",
    "table": "Reports of the judge as Markdown tables, printed or put into a file.",
}


def main() -> None:
    # The library as it lies in this tree, installed or not.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "methods" / "main"))
    app = typer.Typer(help="Judge, measure and explain gated long convolutions.", no_args_is_help=True,
                      add_completion=False, rich_markup_mode="markdown", pretty_exceptions_show_locals=False)
    app.callback()(lambda: None)    # keeps the command's name on the command line while there is only one
    wanted = sys.argv[1] if len(sys.argv) > 1 else None
    for name, summary in COMMANDS.items():
        if name == wanted:
            app.command(name)(importlib.import_module(f"tools.{name}").command)
        else:
            app.command(name, help=summary)(lambda: None)
    app()


if __name__ == "__main__":
    main()
