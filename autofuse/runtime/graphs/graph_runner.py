"""The runner of graphs in C, brought while a script runs: from the store, else compiled once.

In: a session with captured graphs or fused optimizer steps on a CPU, its store. Out: settled plans that run in C
(`wrapper.native_call`), and tensors of steps that are looked at in C (`optim.tensors`). Guarantee: the script waits for
none of it; where the runner cannot be made, or does not give Python's results, both go on in Python as before, and one
line of `AUTOFUSE_DEBUG` says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofuse.debug import Level, tell
from autofuse.runtime.kernels.device_kernels import DeviceKernels
from autofuse.runtime.optimizers.hook import OptimizerHook
from autofuse.runtime.run_context import RunContext

if TYPE_CHECKING:
    from autofuse.db.store import Store


class GraphRunner:
    """Of one session."""

    def __init__(self, context: RunContext, kernels: DeviceKernels, optimizers: OptimizerHook) -> None:
        self._context = context
        self._kernels = kernels
        self._optimizers = optimizers
        self._is_due = context.settings.run.graphs_in_c

    def bring(self, store: Store) -> None:
        """Load the runner, once there is a graph or a step for it. On the background thread."""
        has_graphs = any(router.program.native for router in list(self._context.routers))
        if not self._is_due or not (has_graphs or self._optimizers.has_fused_steps):
            return
        self._is_due = False
        try:
            self._load(store)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            tell(Level.ROUTES, lambda: f"graphs run in Python, without the runner in C: {problem}")
            return
        for router in list(self._context.routers):
            router.run_in_c()

    def _load(self, store: Store) -> None:
        from autofuse.wrapper import native_library  # graphs have imported it, and kernels of steps

        toolchain = self._kernels.catalogue.toolchain
        if toolchain is None:
            return
        runner = native_library.installed()  # of an earlier session
        if runner is None:
            record = store.kernels.get(native_library.runner_key(toolchain).digest)
            if record is None:
                record = native_library.compile_runner(toolchain)
                store.kernels.put(record)
            runner = native_library.load_runner(record.binary)
            native_library.install(runner)
        self._optimizers.run_in_c(runner)
