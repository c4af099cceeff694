"""Operator calls on disk, and their replay: the same inputs to another implementation.

A difference between two captures can come from anywhere before the operator. Each call to the delta
rule and to the convolution is therefore recorded once, with its inputs, and replayed on every backend
that can run and on an fp64 recurrence: what differs now is the operator's own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from parity.errors import ParityError
from parity.model.target import golden
from parity.model.target.backends import Backend, OperatorCall, OperatorFunction

OUTPUT = "output"


def save_calls(calls: Sequence[OperatorCall], file: Path) -> None:
    """Write calls as one safetensors file: `INDEX/input/NAME`, `INDEX/output`; equal calls are written once."""
    tensors: dict[str, Tensor] = {}
    index: list[dict[str, Any]] = []
    seen: set[tuple[int, str, str]] = set()
    for call in calls:
        digest = call.digest()
        if (call.layer, call.operator, digest) in seen:
            continue
        seen.add((call.layer, call.operator, digest))
        number = len(index)
        index.append(
            {
                "layer": call.layer,
                "operator": call.operator,
                "function": call.function,
                "digest": digest,
                "options": dict(call.options),
            }
        )
        for name, value in call.inputs.items():
            tensors[f"{number}/input/{name}"] = value.cpu().contiguous().clone()
        tensors[f"{number}/{OUTPUT}"] = call.output.cpu().contiguous().clone()
    save_file(tensors, file, metadata={"calls": json.dumps(index)})


def load_calls(file: Path) -> list[OperatorCall]:
    """The calls of a file. Raises ParityError where it is no such file."""
    try:
        with safe_open(file, framework="pt") as reader:
            index = json.loads(reader.metadata()["calls"])
            names = list(reader.keys())
            return [_call(reader, names, number, entry) for number, entry in enumerate(index)]
    except Exception as error:
        raise ParityError(
            f"operator calls in {file}", f"no such file of ours ({error})", "record them again"
        ) from error


def _call(reader: safe_open, names: Sequence[str], number: int, entry: Mapping[str, Any]) -> OperatorCall:
    """Call number `number` of an open file; `entry` is what the index holds of it."""
    prefix = f"{number}/input/"
    inputs = {name.removeprefix(prefix): reader.get_tensor(name) for name in names if name.startswith(prefix)}
    return OperatorCall(
        layer=entry["layer"],
        operator=entry["operator"],
        function=entry["function"],
        inputs=inputs,
        options=entry["options"],
        output=reader.get_tensor(f"{number}/{OUTPUT}"),
    )


def replay_call(call: OperatorCall, backend: Backend) -> Tensor:
    """The output of one recorded call on another implementation. Raises ParityError where none is bound."""
    inputs, options = dict(call.inputs), dict(call.options)
    options.pop("output_final_state", None)
    if backend.delta == "golden":
        return _golden(call, inputs, options)
    result = _function(call)(**inputs, **options)
    return result[0] if isinstance(result, tuple) else result


def _golden(call: OperatorCall, inputs: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """The output of one recorded call, [rows, tokens, ...] in float64."""
    if call.operator == "delta":
        return golden.delta_operator(**inputs, **options)[0]
    if "state" in inputs:
        return golden.conv_update(**inputs, **options)
    return golden.conv_operator(**inputs, **options)


def _function(call: OperatorCall) -> OperatorFunction:
    """The modeling file's own function of that name: in this process it is bound to this backend."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    function: OperatorFunction = getattr(modeling_qwen3_5, call.function)
    if call.operator == "delta":
        return function

    def convolve(
        x: Tensor,
        weight: Tensor,
        state: Tensor | None = None,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        # By position: the implementations agree on the order of arguments, not on their names.
        if state is None:
            return function(x, weight, bias, activation=activation)
        return function(x, state, weight, bias, activation)

    return convolve


def replay(calls_file: Path, out: Path, backend: Backend) -> int:
    """Replay every call of a file and write the same file with this backend's outputs; returns how many."""
    with torch.inference_mode():
        replayed = [replace(call, output=replay_call(call, backend)) for call in load_calls(calls_file)]
    save_calls(replayed, out)
    return len(replayed)
