"""The changes that are tried: those of cosmic-ray that a wrong program could hold, and two more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import parso
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import OPERATOR_PROVIDERS

# A comparison becomes its opposite or moves its bound, arithmetic becomes its inverse. The others
# of cosmic-ray (`-` for `|`, `is` for `<`) fail wherever they run, or mean the same.
CHOSEN = re.compile(
    r"AddNot|NumberReplacer|ZeroIterationForLoop|ExceptionReplacer|ReplaceUnaryOperator_Delete_Not"
    r"|Replace(And|Or|True|False|Break|Continue)With\w+"
    r"|ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is|In_NotIn|NotIn_In"
    r"|Lt_(LtE|GtE)|LtE_(Lt|Gt)|Gt_(GtE|LtE)|GtE_(Gt|Lt))"
    r"|ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|BitOr_BitAnd|BitAnd_BitOr)"
)


class Ours(Operator):
    def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        yield from ((part.start_pos, part.end_pos) for part in self.parts(node))

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class DropKeyword(Ours):
    """A call goes without one of its keyword arguments."""

    def parts(self, node: Any) -> list[Any]:
        inside = node.children[1] if node.type == "trailer" and node.children[0] == "(" else node
        among = inside.children if inside.type == "arglist" else [inside]
        found = [a for a in among if a.type == "argument" and a.children[1] == "="]
        return found if inside is not node else []

    def mutate(self, node: Any, index: int) -> Any:
        gone = self.parts(node)[index]
        among = gone.parent.children
        at = among.index(gone)
        del among[at : at + (2 if gone.parent.type == "arglist" else 1)]
        return node


class DropStatement(Ours):
    """A call is not made for its effect; an attribute, an item or a sum is not set."""

    def parts(self, node: Any) -> list[Any]:
        what = node.children[0] if node.type == "simple_stmt" else node
        called = what.type == "atom_expr" and what.children[-1].type == "trailer"
        kept = what.type == "expr_stmt" and what.children[0].type == "atom_expr"
        summed = what.type == "expr_stmt" and what.children[1].type == "operator"
        summed = summed and what.children[1].value != "="
        return [what] if what is not node and (called or kept or summed) else []

    def mutate(self, node: Any, index: int) -> Any:
        node.children[0] = parso.parse(node.get_first_leaf().prefix + "pass")
        return node


def choose() -> None:
    core = OPERATOR_PROVIDERS["core"]
    OPERATOR_PROVIDERS["core"] = {n: core[n] for n in core if CHOSEN.fullmatch(n)}
    OPERATOR_PROVIDERS["ours"] = {c.__name__: c for c in (DropKeyword, DropStatement)}
