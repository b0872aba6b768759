"""Every reason code that the package uses is a member of an enum of `ir.reasons`, and every member is used.

The package is read, not run: `uses` yields what is given in each slot, such as the first argument of `LoweringError`.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import autofuse
from autofuse.ir import reasons
from autofuse.ir.reasons import (
    DecisionReason,
    LoweringReason,
    NoticeKind,
    Reason,
    RefusalReason,
    RootReason,
    SettingReason,
    decision_words,
    in_words,
    words_of,
)

PACKAGE = Path(autofuse.__file__).parent


class Slot(NamedTuple):
    """A place that takes codes: ``LoweringError(0)``, ``Trial(reason=)``, ``self.reason =``, ``return _why_not``."""

    name: str
    under: str = ""  # a folder or file of the package


SLOTS: dict[tuple[type[Reason], ...], tuple[Slot, ...]] = {
    (LoweringReason,): (Slot("LoweringError(0)"), Slot("pair_of(0)", "codegen/c/templates/")),
    (RefusalReason, LoweringReason): (
        *(Slot("Refusal(0)"), Slot("Refusal(code=)"), Slot("_refuse(0)", "fusion/analyzer.py")),
        *(Slot("return _why_not", "fusion/analyzer.py"), Slot("return _problem", "fusion/analyzer.py")),
        Slot("return _why_idle", "fusion/analyzer.py"),
    ),
    (RootReason,): (
        *(Slot("CaptureAdvice(1)"), Slot("return advise_release"), Slot("self.reason =", "runtime/")),
        *(Slot("_move(1)", "runtime/roots/life.py"), Slot("UNTUNED =")),
        Slot("return known_reason", "observer/capture_policy.py"),
    ),
    (DecisionReason,): (
        *(Slot("_give_up(0)", "tuner/"), Slot("stay_eager(0)", "tuner/"), Slot("_decision(3)", "tuner/")),
        *(Slot("return why_nothing_ran", "tuner/"), Slot("_REASONS =", "tuner/"), Slot("of(3)", "tuner/")),
        Slot("return why_eager", "tuner/"),
        *(Slot("_stay_eager(0)", "optim/"), Slot("_decide(2)", "optim/tune_step.py"), Slot("of(3)", "optim/")),
        *(Slot("NodeLine(reason=)"), Slot("replace(reason=)", "runtime/graphs/live_races.py")),
    ),
    (SettingReason,): (Slot("SettingTrial(reason=)"),),
    (NoticeKind,): (
        *(Slot("say_once(0)"), Slot("report_fallback(0)"), Slot("_report(0)"), Slot("report(0)", "capture/")),
        *(Slot("say(0)", "runtime/graphs/checking.py"), Slot("Event(0)", "runtime/"), Slot("Event(0)", "db/")),
        *(Slot("return problem", "runtime/"), Slot("self.problem =", "runtime/")),
    ),
}

# What hands on a code that comes from one of the slots, from the store, or is no code for people.
HANDED_ON = frozenset({
    *("code", "kind", "refusal[0]", "error.code", "known.reason", "advice.reason", "loss.reason", "UNTUNED"),
    "facts.known_reason",
    *("row.kind", "row.reason", "*problem", "backend.problem", "self.lowerable(node.form) if self.lowerable else None"),
    *("why_eager(last, self._margin)", "why_eager(lost, self._limits.margin)", "why_eager(seen, self._limits.margin)"),
    *("*self._verdicts.why_nothing_ran()", "GRAPH_METRICS", "PEAK_MEMORY", "STEP_RECORD", "LIVE_RACES"),
    *("name", "reason", "decision.reason", "None", "f'{REFUSED}{error.code}'"),
})  # fmt: skip


class Use(NamedTuple):
    where: str
    code: str
    is_literal: bool


def slots_of(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """What a module puts where."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            name = (
                called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
            )
            yield from ((f"{name}({number})", argument) for number, argument in enumerate(node.args))
            yield from ((f"{name}({keyword.arg}=)", keyword.value) for keyword in node.keywords)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from assigned(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield from assigned(node.target, node.value)
        elif isinstance(node, ast.FunctionDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    yield f"return {node.name}", inner.value


def assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its in zip(target.elts, value.elts, strict=True):
            yield from assigned(one, its)
    else:
        yield f"{ast.unparse(target)} =", value


def codes_in(value: ast.expr, tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """The literals that an expression can be, a name being all that its module gives it; else its text.

    The name of a parameter is not: whoever calls with a code has a slot of his own.
    """
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value, True
    elif isinstance(value, ast.IfExp) and not (isinstance(value.orelse, ast.Constant) and value.orelse.value is None):
        yield from codes_in(value.body, tree)
        yield from codes_in(value.orelse, tree)
    elif isinstance(value, ast.Dict):
        for item in value.values:
            yield from codes_in(item, tree)
    elif isinstance(value, ast.Subscript) and isinstance(value.value, ast.Dict):
        yield from codes_in(value.value, tree)
    elif isinstance(value, ast.Tuple):
        yield from codes_in(value.elts[0], tree)
    elif isinstance(value, ast.Name) and (given := local_values(value.id, tree)):
        for one in given:
            yield from codes_in(one, tree)
    else:
        yield ast.unparse(value), False


def local_values(name: str, tree: ast.Module) -> list[ast.expr]:
    if any(isinstance(node, ast.arg) and node.arg == name for node in ast.walk(tree)):
        return []
    return [value for slot, value in slots_of(tree) if slot == f"{name} =" and ast.unparse(value) != name]


@functools.cache
def uses() -> dict[tuple[type[Reason], ...], list[Use]]:
    found: dict[tuple[type[Reason], ...], list[Use]] = {kinds: [] for kinds in SLOTS}
    filled: set[Slot] = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name, tree = str(path.relative_to(PACKAGE)), ast.parse(path.read_text())
        by_name: dict[str, list[ast.expr]] = {}
        for slot, value in slots_of(tree):
            by_name.setdefault(slot, []).append(value)
        for kinds, slots in SLOTS.items():
            for wanted in slots:
                for value in by_name.get(wanted.name, ()) if name.startswith(wanted.under) else ():
                    filled.add(wanted)
                    where = f"{name}:{value.lineno}"
                    found[kinds] += [Use(where, code, literal) for code, literal in codes_in(value, tree)]
    assert filled == {slot for slots in SLOTS.values() for slot in slots}, "a slot that nobody fills any more"
    return found


@pytest.mark.parametrize("kinds", SLOTS, ids=lambda kinds: " or ".join(kind.__name__ for kind in kinds))
def test_every_code_is_a_member(kinds: tuple[type[Reason], ...]) -> None:
    known = words_of(*kinds)
    assert [use for use in uses()[kinds] if use.is_literal and use.code not in known] == []
    assert [use for use in uses()[kinds] if not use.is_literal and use.code not in HANDED_ON] == []


@pytest.mark.parametrize("kind", Reason.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_member_has_a_producer(kind: type[Reason]) -> None:
    made = {use.code for kinds, found in uses().items() if kind in kinds for use in found if use.is_literal}
    assert {str(reason) for reason in kind} - made == set()


def test_every_code_has_words_and_one_meaning() -> None:
    for kind in Reason.__subclasses__():
        for reason in kind:
            assert reason.words and "_" not in reason.words and not reason.words.endswith(".")
    assert not set(RefusalReason) & set(LoweringReason), "a refusal's code is either the planner's or the lowering's"


def test_words() -> None:
    assert decision_words("refused:dtype") == (
        "no kernel can be generated for it: a dtype that kernels do not compute with"
    )
    assert decision_words("won") == "faster than eager, checked against float64"
    assert decision_words("some_new_code") == "some new code"
    assert in_words("asked_for", words_of(RootReason)) == "captured because the script asked for it"
    assert RootReason("too_small") is RootReason.TOO_SMALL and f"{RootReason.TOO_SMALL}" == "too_small"
    assert reasons.REFUSED == "refused:"
