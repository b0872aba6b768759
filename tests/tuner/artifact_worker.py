"""A worker that takes what a GPU's would be given, compiled artefacts, and interprets the source in them."""

from __future__ import annotations

import sys
from typing import Any

from autofuse.codegen.triton.artifact import Artifact
from autofuse.daemon.workers.cpu import main
from autofuse.daemon.workers.interpreter import Interpreted, InterpreterRunner


class ArtifactRig(InterpreterRunner):
    def load(self, digest: str, name: str, binary: bytes) -> Any:
        return Interpreted(Artifact.unpack(binary).source)


if __name__ == "__main__":
    main(lambda memory_bytes: ArtifactRig(), *(int(text) for text in sys.argv[1:3]))
