"""Schemas of tools: what the model is told of a function, from its type hints and docstring."""

import inspect
from collections.abc import Callable
from typing import Any

PYTHON = "python"
"""The tool that runs programs in the sandbox; others are functions of files."""

PYTHON_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PYTHON,
        "description": "Run a Python program in a new process and return what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
        },
    },
}


def describe_tool(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's JSON schema, as chat templates take it.

    Keyword-only parameters are not in it: the row gives them, in its column `tools_kwargs`.

    Raises:
        ValueError: A parameter has no type hint, or no line under `Args:` in the docstring.
    """
    from transformers.utils import get_json_schema

    try:
        schema = get_json_schema(function)
    except Exception as error:  # several types, without a base class
        raise ValueError(
            "a tool must have type hints and a docstring with a line under Args: for each "
            f"parameter: {error}"
        ) from error
    parameters = schema["function"]["parameters"]
    for name in row_parameters(function):
        parameters["properties"].pop(name, None)
        if name in parameters.get("required", []):
            parameters["required"].remove(name)
    return dict(schema)


def row_parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
