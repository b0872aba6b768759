"""Stores of one process that share what SQLAlchemy has compiled.

In: nothing. Out: each engine on SQLite has the dialect and the compiled statements of the first. An engine compiles a
statement when it first runs it, and thousands of tests open a store of their own: a fifth of the time of those that
trace a module was the compilation of the same fifty statements.
"""

from __future__ import annotations

import functools
from typing import Any

from sqlalchemy.engine import Engine
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.pool import Pool
from sqlalchemy.util import LRUCache

_MOST_STATEMENTS = 2_000


def install() -> None:
    """Once a process."""
    initialize = Engine.__init__
    compiled: LRUCache[Any, Any] = LRUCache(_MOST_STATEMENTS)
    first: dict[type, Dialect] = {}

    @functools.wraps(initialize)
    def shared(engine: Engine, pool: Pool, dialect: Dialect, *arguments: Any, **options: Any) -> None:
        is_sqlite = dialect.name == "sqlite"
        initialize(
            engine, pool, first.setdefault(type(dialect), dialect) if is_sqlite else dialect, *arguments, **options
        )
        if is_sqlite:
            engine._compiled_cache = compiled

    Engine.__init__ = shared  # type: ignore[method-assign]
