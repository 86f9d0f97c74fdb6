"""Python's calls with keywords, alone or in a list (LFM2)."""

import ast
import json
from collections.abc import Mapping
from keyword import iskeyword
from typing import Any

from server.openai.dialects.dialect import Calls, Dialect, write_json
from server.openai.dialects.json_objects import read_json
from server.openai.dialects.parameters import Schemas

_PYTHON = {"true": True, "false": False, "null": None}


class _Names(ast.NodeTransformer):
    """Replaces the names `true`, `false` and `null` by their values."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_PYTHON[node.id]) if node.id in _PYTHON else node


def _read_python(text: str, schemas: Schemas, cut: bool) -> Calls:
    """Python's calls with keywords, alone or in a list (LFM2)."""
    inner = text.removeprefix("<|tool_call_start|>").removesuffix("<|tool_call_end|>").strip()
    try:
        tree = _Names().visit(ast.parse(inner, mode="eval").body)
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return [
            ("-".join([*before, ast.unparse(call.func)]), _keywords(call))
            for *before, call in map(_hyphenated, nodes)
            if isinstance(call, ast.Call)
        ]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return read_json(inner, schemas, cut)


def _hyphenated(node: ast.AST) -> list[Any]:
    """The parts of a name with hyphens, which Python takes for a difference, and the call with the last one."""
    return [ast.unparse(node.left).replace(" ", ""), node.right] if isinstance(node, ast.BinOp) else [node]


def _keywords(call: ast.Call) -> str:
    """The arguments as JSON text. Raises ValueError for arguments without a name, and lone surrogates."""
    given = {one.arg: ast.literal_eval(one.value) for one in call.keywords if one.arg is not None}
    if call.args or len(given) < len(call.keywords):
        raise ValueError
    text = json.dumps(given, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16")  # pairs of surrogates become characters


def _write_python(function: Mapping[str, Any]) -> str:
    given = function["arguments"]
    if not isinstance(given, dict) or not all(name.isidentifier() and not iskeyword(name) for name in given):
        return write_json(function)
    values = {k: json.dumps(v, ensure_ascii=False) if isinstance(v, str) else repr(v) for k, v in given.items()}
    keywords = ", ".join(f"{name}={value}" for name, value in values.items())
    return f"<|tool_call_start|>[{function['name']}({keywords})]<|tool_call_end|>"


LFM2 = Dialect(_read_python, (("<|tool_call_start|>", "<|tool_call_end|>"),), write=_write_python)
