# ruff: noqa: ANN401  what the interpreter hands on is of no type that this file could name
"""``and``, ``or`` and ``not`` of blocks in Triton's interpreter: those of each element.

Compiled, ``rows and columns`` of two masks holds where both do (with a warning that ``&`` is
meant). The interpreter leaves it to Python, for which every block is true: of ``and`` the last
block is left, of ``or`` the first, and ``not`` is False, so that a masked store writes behind its
tensor. Found with the masks of vLLM's ``_downcast_to_mxfp``. Scalars stay Python's: compiled, both
sides are evaluated, and a load in the second one would end the process.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any

JOINED, NEGATED = "_kernelproof_joined", "_kernelproof_negated"
"""Names of the two functions among the globals of the interpreter, which its copies see."""


def join_blocks(interpreter: Any) -> None:
    """Let the interpreter, a module, take ``and``, ``or`` and ``not`` of blocks by element.

    A release of Triton that makes its copies in another way keeps Python's.
    """
    transformer = getattr(interpreter, "ASTTransformer", None)
    if transformer is None or hasattr(transformer, "visit_BoolOp"):
        return
    language = interpreter.tl

    def is_block(value: Any) -> bool:
        return isinstance(value, language.tensor) and value.type.is_block()

    def joined(word: str, *operands: Callable[[], Any]) -> Any:
        blocks, value, conjunction = [], None, word == "and"
        for operand in operands:
            value = operand()
            if is_block(value):
                blocks.append(value)
            elif bool(value) is not conjunction:
                return value
        join = language.tensor.logical_and if conjunction else language.tensor.logical_or
        return functools.reduce(join, blocks) if blocks else value

    def negated(value: Any) -> Any:
        return value == 0 if is_block(value) else not value

    setattr(interpreter, JOINED, joined)
    setattr(interpreter, NEGATED, negated)
    transformer.visit_BoolOp = _visit_bool_op
    transformer.visit_UnaryOp = _visit_unary_op
    interpreter.InterpretedFunction.rewritten_fn.clear()  # copies that Python decides


def _visit_bool_op(transformer: ast.NodeTransformer, node: ast.BoolOp) -> ast.expr:
    if any(isinstance(each, ast.NamedExpr) for each in ast.walk(node)):
        return node  # what it names would be a lambda's own
    transformer.generic_visit(node)
    no_parameters = ast.arguments(
        posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    operands = [ast.Lambda(args=no_parameters, body=each) for each in node.values]
    word = ast.Constant(value="and" if isinstance(node.op, ast.And) else "or")
    return _call(JOINED, [word, *operands], node)


def _visit_unary_op(transformer: ast.NodeTransformer, node: ast.UnaryOp) -> ast.expr:
    transformer.generic_visit(node)
    return _call(NEGATED, [node.operand], node) if isinstance(node.op, ast.Not) else node


def _call(name: str, arguments: list[ast.expr], at: ast.expr) -> ast.expr:
    function = ast.Name(id=name, ctx=ast.Load())
    return ast.copy_location(ast.Call(func=function, args=arguments, keywords=[]), at)
