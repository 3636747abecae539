"""The command ``nnx-probes``.

Exit codes: 0 nothing found, 1 something found, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nnx_probes import __version__
from nnx_probes.errors import ProbesError

__all__ = ["COMMANDS", "Command", "main"]

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C: 128 + SIGINT
EXIT_UNREAD = 141  # and for one whose output nobody reads any more: 128 + SIGPIPE


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand.

    Attributes:
      name: the word on the command line.
      help: one line for ``nnx-probes --help``.
      configure: adds the command's arguments to its parser; imports nothing heavy.
      execute: does the work and returns the exit code; imports what it needs.
    """

    name: str
    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    execute: Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
      arguments: the words after the program's name; by default those of this process.

    Raises:
      SystemExit: with code 2 for wrong usage, 0 after ``--help`` and ``--version``.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    command: Command = options.command
    try:
        return command.execute(options)
    except KeyboardInterrupt:
        print("nnx-probes: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Such as head, which has seen enough. What Python still holds back must not fail at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD
    except (ProbesError, OSError) as error:
        # A folder that cannot be written to, a file that is not there: the user's to mend, no traceback.
        print(f"nnx-probes {command.name}: error: {error}", file=sys.stderr)
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nnx-probes",
        description="Tells what is wrong with a Flax NNX training run.",
        epilog="Exit codes: 0 nothing found, 1 something found, 2 wrong usage.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.help,
            description=command.help,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.configure(subparser)
        subparser.set_defaults(command=command)
    return parser


def _count(text: str) -> int:
    """Returns `text` as a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


def _configure_demo(parser: argparse.ArgumentParser) -> None:
    from nnx_probes.demo.faults import FAULTS

    parser.add_argument("--fault", choices=FAULTS, metavar="NAME", help="build in one of the faults below")
    parser.add_argument("--steps", type=_count, default=150, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--every", type=_count, default=10, metavar="N", help="steps between two probes; default: %(default)s"
    )
    parser.add_argument("--logdir", metavar="DIR", help="default: a fresh folder runs/demo-NAME")
    width = max(map(len, FAULTS))
    parser.epilog = "faults:\n" + "\n".join(f"  {fault.name:{width}}  {fault.description}" for fault in FAULTS.values())


def _demo(options: argparse.Namespace) -> int:
    from nnx_probes.demo.run import run

    return run(fault=options.fault, steps=options.steps, every=options.every, logdir=options.logdir)


def _configure_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="the run's folder, or its probes.jsonl")
    parser.add_argument("--run", metavar="NAME", help="only this run, where the file holds several")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.epilog = (
        "The run's own rules judge the stored records again and print the alerts of the live run. No jax is needed.\n"
        "Exit codes: 0 no alert above INFO, 1 a warning or an error, 2 no file of a run."
    )


def _report(options: argparse.Namespace) -> int:
    from nnx_probes.host.alert import Level
    from nnx_probes.report import print_report, replay

    found = replay(options.folder, run=options.run)
    print_report(found, as_json=options.json)
    return int(found.level is not None and found.level >= Level.WARN)


def _configure_faults(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seeds", type=_count, default=3, metavar="N", help="runs of each program; default: %(default)s"
    )
    parser.add_argument("--only", nargs="+", default=(), metavar="PART", help="only what has one of these in its name")
    parser.add_argument("--every", type=_count, default=1, metavar="N", help="steps between two probes; default: 1")
    parser.add_argument("--workers", type=_count, metavar="N", help="processes; default: one a core")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", dest="form", action="store_const", const="json", help="print one JSON object")
    form.add_argument(
        "--markdown", dest="form", action="store_const", const="markdown", help="print the README's table"
    )
    parser.set_defaults(form="text")
    parser.epilog = (
        "Builds known faults into small real programs, and runs healthy ones that have unusual habits.\n"
        "Needs scikit-learn: pip install 'nnx-probes[faults]'. About 40 minutes on 2 cores; --seeds 1 --only nan takes one.\n"
        "Exit codes: 0 all harmful faults found and all healthy runs quiet, 1 otherwise, 2 wrong usage."
    )


def _faults(options: argparse.Namespace) -> int:
    from nnx_probes.faults.command import run

    return run(seeds=options.seeds, only=options.only, every=options.every, workers=options.workers, form=options.form)


def _configure_tune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="SCRIPT_OR_MODULE:function",
        help="a function that returns (train_step, model, optimizer, batches)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="of loop time, for all probing; default: %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.epilog = (
        "Runs 27 of your own steps, on copies, and times them with and without a probe.\n"
        "Exit codes: 0 an interval keeps to the budget, 1 none does, 2 wrong usage."
    )


def _tune(options: argparse.Namespace) -> int:
    import json

    from nnx_probes.errors import ArgumentError
    from nnx_probes.tuning import load, tune

    made = load(options.target)()
    if not isinstance(made, tuple) or len(made) != 4:
        raise ArgumentError(f"{options.target} returned no (train_step, model, optimizer, batches), but {made!r:.80}.")
    found = tune(*made, budget=options.budget)
    print(json.dumps(found.as_json(), indent=1) if options.json else found)
    return int(found.every is None)


COMMANDS = (
    Command("demo", "train a small language model, whole or with a known fault", _configure_demo, _demo),
    Command("report", "judge a stored run again: the alerts of its probes.jsonl", _configure_report, _report),
    Command("tune", "measure in your own loop what each interval costs", _configure_tune, _tune),
    Command("faults", "run the fault benchmark: known faults, and healthy programs", _configure_faults, _faults),
)

if __name__ == "__main__":
    sys.exit(main())
