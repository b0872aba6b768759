"""The tables of templates: what a generator, the tuner and the strategies find in them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import autofuse
from autofuse.codegen import templates
from autofuse.codegen.c.templates.registry import C_TEMPLATES
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.knobs import Knob, default_config
from autofuse.codegen.templates import (
    ATTENTION,
    CONVOLUTION,
    CONVOLUTION_BACKWARD,
    CONVOLUTION_ROWS,
    LOOP,
    MATMUL,
    Template,
    refusal,
    table,
    template_of,
)
from autofuse.codegen.triton.generator import TritonKernelGenerator
from autofuse.codegen.triton.templates.registry import TRITON_TEMPLATES
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm
from autofuse.strategies import enumeration
from tests.cases import CASES

FORM = CASES["add_bias_gelu"].form()


@pytest.mark.parametrize(
    ("found", "names"),
    [
        (C_TEMPLATES, (MATMUL, ATTENTION, CONVOLUTION, CONVOLUTION_ROWS, CONVOLUTION_BACKWARD, LOOP)),
        (TRITON_TEMPLATES, (MATMUL, ATTENTION, LOOP)),
    ],
    ids=["c", "triton"],
)
def test_tables_name_what_is_stored_and_end_with_loops(found: templates.Table[Any], names: tuple[str, ...]) -> None:
    assert tuple(found) == names and set(names) <= {
        "matmul",
        "attention",
        "convolution",
        "convolution_rows",
        "convolution_backward",
        "loop",
    }
    assert all(template.name == name for name, template in found.items())
    assert template_of(found, FORM).name == LOOP


def test_a_node_that_no_template_takes_is_refused_as_one_without_loops() -> None:
    form = next(case.form() for case in CASES.values())
    unknown = NodeForm.from_json(
        {**form.to_json(), "operations": [{**o, "target": "aten.sort.default"} for o in form.to_json()["operations"]]}
    )
    why = refusal(C_TEMPLATES[LOOP], unknown)
    assert why is not None and template_of(C_TEMPLATES, unknown).name == LOOP
    for generator in (FusionKernelGenerator(), TritonKernelGenerator()):
        with pytest.raises(LoweringError) as raised:
            generator.source(unknown, (), {})
        assert (raised.value.code, str(raised.value)) == why


@dataclass(frozen=True)
class Everything:
    """A template that takes every node."""

    text: str

    def knobs(self, form: NodeForm, values: Any, high: Any) -> tuple[Knob, ...]:
        return (Knob("depth", (1, 2), 2, ""),)

    def render(self, form: NodeForm, config: Any, constants: Any) -> str:
        return f"{self.text} {dict(config)} {dict(constants)}"


def test_a_template_in_the_table_is_all_that_a_generator_needs() -> None:
    own = Everything("mine")
    mine = Template("mine", lambda form: form, own.knobs, own.render)

    class Generator(FusionKernelGenerator):
        templates = table(mine, *C_TEMPLATES.values())

    generator = Generator()
    assert default_config(generator.knobs(FORM, None, {})) == (("depth", 2),)
    assert generator.source(FORM, (("depth", 1),), {"s0": 3}) == "mine {'depth': 1} {'s0': 3}"
    plain = FusionKernelGenerator()
    config = default_config(plain.knobs(FORM, None, {}))
    assert generator.source(FORM, config, {}, LOOP) == plain.source(FORM, config, {})


def test_a_template_in_the_table_of_gpus_prints_whole_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    assert enumeration.tiles_of(FORM) is None
    own = Everything("mine")
    mine = Template("mine", lambda form: form, own.knobs, own.render)
    monkeypatch.setattr(enumeration, "TRITON_TEMPLATES", table(mine, *TRITON_TEMPLATES.values()))
    monkeypatch.setattr(templates, "STORED_NAMES", (*templates.STORED_NAMES, "mine"))
    strategy = enumeration.strategies_of(FORM, has_tiles=True)[-1]
    assert (strategy.name, [part.printer for part in strategy.parts]) == (enumeration.TILED, ["mine"])
    assert type(strategy).from_json(strategy.to_json()) == strategy


def test_generators_alone_print_templates() -> None:
    """Whoever wants a kernel's text asks `SourceGenerator.source`, so what is tuned is what the public class gives."""
    package = Path(autofuse.__file__).parent
    calls = [
        str(path.relative_to(package))
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "render"
    ]
    assert [path for path in calls if not path.startswith("report/")] == ["codegen/templates.py"]
