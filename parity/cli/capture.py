"""`parity capture`: one trace of one model, on one backend."""

from pathlib import Path
from typing import Annotated

import typer


def capture(
    model: Annotated[
        str, typer.Option(help="Name or path of the target; embedded:hybrid and embedded:dense are ours.")
    ],
    prompts: Annotated[
        Path, typer.Option(help="Text (a prompt a line) or JSON lines: prompt, messages or token_ids.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    backend: Annotated[
        str, typer.Option(help="torch, fla, fla-interpreted, fast, golden, or DELTA+CONV.")
    ] = "torch",
    taps: Annotated[
        list[str] | None,
        typer.Option(help="Tap or pattern, repeatable; by default the states, * is all."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")] = "auto",
    loader: Annotated[
        str, typer.Option(help="AutoModelForCausalLM, AutoModel or AutoModelForImageTextToText.")
    ] = "AutoModelForCausalLM",
    revision: Annotated[str | None, typer.Option(help="Revision on the hub.")] = None,
    device_map: Annotated[str | None, typer.Option(help="As in transformers: cuda, auto, ...")] = None,
    mode: Annotated[
        str, typer.Option("--as", help="prefill, decode (token by token) or blocks:N.")
    ] = "prefill",
    max_tokens: Annotated[
        int | None, typer.Option(help="Keep this many tokens of each request.", min=1)
    ] = None,
    complete_with: Annotated[
        str | None,
        typer.Option(metavar="URL", help="First complete each prompt with this OpenAI-compatible server."),
    ] = None,
    complete_model: Annotated[
        str | None, typer.Option(help="The model's name on that server; --model by default.")
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="How many tokens the server may add.", min=1)] = 64,
    local_from: Annotated[
        Path | None, typer.Option(help="Feed each layer this trace's input (local error).")
    ] = None,
    sketch: Annotated[
        bool, typer.Option("--sketch", help="Keep a norm and a projection a token: 60 times smaller.")
    ] = False,
    threads: Annotated[int, typer.Option(help="Threads of the worker.", min=1)] = 1,
) -> None:
    """Capture one trace: every tap of every request, with proof of who computed it. Resumable."""
    # Imported here: `parity --help` has to start without torch.
    from parity.capturing.client import WorkerCrash, capture_to

    try:
        result = capture_to(
            out,
            model=model,
            prompts=prompts,
            backend=backend,
            taps=taps,
            dtype=dtype,
            loader=loader,
            revision=revision,
            device_map=device_map,
            mode=mode,
            max_tokens=max_tokens,
            complete_with=complete_with,
            complete_model=complete_model,
            new_tokens=new_tokens,
            local_from=local_from,
            sketch=sketch,
            threads=threads,
        )
    except WorkerCrash as crash:
        typer.echo(f"{crash}\nthe last lines of its standard error:\n{crash.tail}", err=True)
        raise typer.Exit(1) from crash
    for line in result.lines():
        typer.echo(line)
    if not result.valid:
        raise typer.Exit(1)
