"""`parity`: parses the command line, and turns what happened into an exit code.

    parity --help

Nothing heavy is imported here: `--help`, `probes` and `show` answer in a fraction of a second.
"""

import os
import sys
import traceback
from typing import Annotated

import typer

from parity.cli.capture import capture
from parity.cli.check import check
from parity.cli.compare import compare
from parity.cli.env import env
from parity.cli.eval import evaluate
from parity.cli.export import export
from parity.cli.gate import gate
from parity.cli.import_ import import_
from parity.cli.output import complain
from parity.cli.probes import probes
from parity.cli.show import show
from parity.cli.train import train
from parity.errors import ExitCode, ParityError, is_write_refused

app = typer.Typer(
    name="parity",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Proves that a speculative-decoding drafter is trained on what it will be served.",
    epilog="Exit codes: 0 pass or warn; 1 a finding is fail or error; 2 wrong use or unreadable input; "
    "3 nothing comparable; 4 a fault of parity's own.",
)
for command in (check, capture, compare, train):
    app.command()(command)
app.command("eval")(evaluate)
app.command("export")(export)
app.command("import")(import_)
for other in (gate, show, env, probes):
    app.command()(other)


INTERRUPTED = 130
GO_ON = "interrupted; run the same command again to go on"
MAKE_ROOM = "free some space or choose another --out; run the same command again, what is whole is kept"


def _version(wanted: bool) -> None:
    if wanted:
        from parity import __version__

        typer.echo(f"parity {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Proves that a speculative-decoding drafter is trained on what it will be served."""


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit with its code (see `parity.errors.ExitCode`)."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run one command; the exit code is returned, never raised."""
    try:
        result: object = app(args=arguments, prog_name="parity", standalone_mode=False)
        if result == INTERRUPTED:  # a command that was asked to stop, and did what it had to do first
            print(GO_ON, file=sys.stderr)
    except typer.Exit as stop:
        return stop.exit_code
    except (typer.Abort, KeyboardInterrupt):
        print(GO_ON, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (so that Python's own flush at exit is silent)
        return 141  # 128 + SIGPIPE, as a shell names it: the outcome was not told whole
    except ParityError as error:
        complain(str(error))
        return int(error.exit_code)
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # the parser's own usage errors
            error.show()
            return int(ExitCode.USAGE)
        if is_write_refused(error):
            complain(
                str(ParityError(f"what `parity {' '.join(arguments[:1])}` writes", str(error), MAKE_ROOM))
            )
            return int(ExitCode.USAGE)
        traceback.print_exc()
        complain("this is a fault of parity's own; please report it with the lines above")
        return int(ExitCode.OUR_BUG)
    return int(result) if isinstance(result, int) else int(ExitCode.OK)
