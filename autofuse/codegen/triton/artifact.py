"""The compiled form of a node's Triton kernels: one blob that the store keeps and any process can launch.

In: a `TritonSource` and the images that the compiler made of it. Out: bytes, and back. Layout: magic, length of the
header (8 bytes, little endian), JSON header, images one after the other. The store checks the bytes' checksum;
`Artifact.unpack` refuses other bytes. Free of torch and of Triton: a script launches kernels without importing Triton.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autofuse.codegen.triton.machine_code import MachineCode
from autofuse.codegen.triton.resources import Resources
from autofuse.codegen.triton.source import Assumptions, TritonSource
from autofuse.errors import StoreError

MAGIC = b"autofuse-triton-1\n"


@dataclass(frozen=True)
class Image:
    """One compiled kernel: a pass of the source under some assumptions."""

    number: int  # of the pass
    function: str  # symbol in the image
    assumptions: Assumptions
    threads: int  # a program: block size along x
    shared_bytes: int  # dynamic shared memory of a launch
    resources: Resources
    image: bytes  # cubin or hsaco
    code: MachineCode | None = None  # what it does; None where nobody has read it


@dataclass(frozen=True)
class Artifact:
    """All images of a source for one target."""

    source: TritonSource
    target: str  # "cuda:90", "hip:gfx942"
    images: tuple[Image, ...]

    @property
    def assumptions(self) -> tuple[Assumptions, ...]:
        """The assumptions of the images, strongest first."""
        found = dict.fromkeys(image.assumptions for image in self.images)
        return tuple(sorted(found, key=lambda a: (-a.is_aligned, -len(a.divisible), a.divisible)))

    def best(self, is_aligned: bool, values: Mapping[str, int]) -> Assumptions | None:
        """The strongest assumptions among the images that hold for a call; None where none do."""
        return next((a for a in self.assumptions if a.hold(is_aligned, values)), None)

    def pack(self) -> bytes:
        header = {
            "source": self.source.to_json(),
            "target": self.target,
            "images": [
                {
                    "number": i.number,
                    "function": i.function,
                    "is_aligned": i.assumptions.is_aligned,
                    "divisible": list(i.assumptions.divisible),
                    "threads": i.threads,
                    "shared_bytes": i.shared_bytes,
                    "resources": asdict(i.resources),
                    "size": len(i.image),
                    **({} if i.code is None else {"code": i.code.to_json()}),
                }
                for i in self.images
            ],
        }
        text = json.dumps(header).encode()
        return b"".join([MAGIC, len(text).to_bytes(8, "little"), text, *(i.image for i in self.images)])

    @classmethod
    def unpack(cls, data: bytes) -> Artifact:
        """The artifact in bytes that `pack` has made. Raises StoreError for other bytes."""
        try:
            return cls._unpack(data)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise StoreError(f"expected a Triton artifact, found {len(data)} other bytes ({error})") from None

    @classmethod
    def _unpack(cls, data: bytes) -> Artifact:
        if not data.startswith(MAGIC):
            raise ValueError("it does not begin as one")
        at = len(MAGIC) + 8
        length = int.from_bytes(data[len(MAGIC) : at], "little")
        header = json.loads(data[at : at + length])
        at += length
        images = []
        for item in header["images"]:
            images.append(_image(item, data[at : at + item["size"]]))
            at += item["size"]
        if at != len(data):
            raise ValueError(f"its header speaks of {at} bytes")
        return cls(TritonSource.from_json(header["source"]), header["target"], tuple(images))


def _image(item: Mapping[str, Any], image: bytes) -> Image:
    assumptions = Assumptions(item["is_aligned"], tuple(item["divisible"]))
    resources = Resources(**item["resources"])
    return Image(
        number=item["number"],
        function=item["function"],
        assumptions=assumptions,
        threads=item["threads"],
        shared_bytes=item["shared_bytes"],
        resources=resources,
        image=image,
        code=MachineCode.from_json(item["code"]) if "code" in item else None,
    )


def merge(artifacts: Sequence[Artifact]) -> Artifact:
    """One artifact with the images of several of the same source and target."""
    first = artifacts[0]
    images = {(i.number, i.assumptions): i for a in artifacts for i in a.images}
    return Artifact(first.source, first.target, tuple(images.values()))
