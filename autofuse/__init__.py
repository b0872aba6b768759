"""autofuse: profile-guided optimisation for PyTorch.

observe   a dispatch-mode hook samples which operators a script runs on which shapes
capture   modules worth it become aten graphs, through Dynamo and AOTAutograd
plan      operators that can share one loop nest become fusion nodes
generate  each node becomes C, for all shapes or for one
tune      a daemon measures fused against unfused, Optuna searches the configurations
route     the running script switches to the winners between two calls; eager keeps the rest
report    what was gained, what it cost, and why

The names below load what they need at first use, so that the command line starts without torch.
"""

import logging
from importlib import import_module
from typing import Any

from autofuse import dynamo_skip

dynamo_skip.install(__path__[0])  # before any other module of ours

from autofuse.preserve_rng import untouched as _untouched  # noqa: E402

__version__ = "0.1.0"

# A script that logs what all libraries say shall not log us; AUTOFUSE_DEBUG tells more than our lines here.
logging.getLogger(__name__).setLevel(logging.WARNING)

_HOME = {
    "optimize": "autofuse.api",
    "observe": "autofuse.api",
    "session": "autofuse.api",
    "explain": "autofuse.api",
    "FusionBenefit": "autofuse.fusion",
    "FusionCandidateAnalyzer": "autofuse.fusion",
    "FusionConfig": "autofuse.fusion",
    "FusionDetector": "autofuse.fusion",
    "FusionEngine": "autofuse.fusion",
    "FusionGraph": "autofuse.fusion",
    "FusionNode": "autofuse.fusion",
    "FusionOpportunity": "autofuse.fusion",
    "FusionOptimizer": "autofuse.fusion",
    "FusionPattern": "autofuse.fusion",
    "register_pattern": "autofuse.fusion",
    "register_unfused": "autofuse.library_operators",
    "SymbolicShape": "autofuse.fusion",
    "FusionKernelGenerator": "autofuse.codegen.generator",
    "TritonKernelGenerator": "autofuse.codegen.triton.generator",
    "RuntimeShapeInjector": "autofuse.runtime.graphs.injector",
}

__all__ = [*_HOME, "__version__"]


_HOOKS = {"load_ipython_extension": "autofuse.integrations.ipython"}  # names that others look for, not for people


def __getattr__(name: str) -> Any:
    home = _HOME.get(name) or _HOOKS.get(name)
    if home is None:
        raise AttributeError(f"module 'autofuse' has no attribute {name!r}; it has {', '.join(__all__)}")
    with _untouched():
        return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__
