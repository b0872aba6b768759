"""The backend that ``torch.compile(model, backend="autofuse")`` finds by its name.

In: torch looks the name up before it traces anything. Out: `backend`. Guarantee: the session has begun by then, unless
it is switched off. A session puts its hook under all module calls, which Dynamo reads where a module has hooks of its
own; if it saw one value while it traced and another one when it made its guards, it would raise.
"""

from __future__ import annotations

from autofuse.pipeline import backend
from autofuse.sessions import current_session

__all__ = ["backend"]

current_session()
