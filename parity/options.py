"""Functions whose keywords are the fields of a record.

    @accept_fields(CaptureOptions)
    def capture_to(options: CaptureOptions) -> CaptureResult: ...

    capture_to("out", model="M", prompts="p.jsonl")     # makes the record, then calls with it

The record lists, documents and checks each option once; callers, type checkers and `help` see its fields as keywords.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

Fields = ParamSpec("Fields")
Options = TypeVar("Options")
Returned = TypeVar("Returned")


def accept_fields(
    record: Callable[Fields, Options],
) -> Callable[[Callable[[Options], Returned]], Callable[Fields, Returned]]:
    """Let a function of one options record be called with the record's fields.

    Args:
        record: the record's class, for example a frozen dataclass.

    Returns:
        A decorator. What it returns raises as the record and the function do; a keyword that is no field is
        the TypeError of the record's constructor.
    """

    def decorate(function: Callable[[Options], Returned]) -> Callable[Fields, Returned]:
        @wraps(function)
        def call_with_fields(*args: Fields.args, **kwargs: Fields.kwargs) -> Returned:
            return function(record(*args, **kwargs))

        returned = inspect.signature(function).return_annotation
        shown = inspect.signature(record).replace(return_annotation=returned)
        vars(call_with_fields)["__signature__"] = shown  # what `help` and `inspect.signature` report
        return call_with_fields

    return decorate
