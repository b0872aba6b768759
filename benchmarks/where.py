"""Where the time of a model's step goes: a sampled profile of each contender of `models.py`.

    python benchmarks/where.py                            # the models whose step is matrix products for the most part
    python benchmarks/where.py --only "gpt2 train"        # by the beginning of their names
    python benchmarks/where.py --stores FOLDER            # keeps autofuse's stores there for a later run

Needs `perf` (Debian: linux-perf) and a kernel that lets a process be sampled. Each contender runs passes over its deck
while perf samples all of its threads; a sample belongs to the kind that its symbol and library tell. Milliseconds are
those of a deck of eight batches, by the thread that Python runs in: together they are the time that passes. "waiting"
is that of this thread; what the others wait while it runs alone, is counted apart.
"""

from __future__ import annotations

import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import arguments, chosen, commit, parse, save
from models import AUTOFUSE, EAGER, SAME, Contender
from models_cases import CASES, Case

NAMES = (EAGER, SAME, "compile", AUTOFUSE)
USUAL = "gpt2,llama,bert,vit,inception,recurrent"
SAMPLES_A_SECOND = 1999
ROUNDS = 6  # each is two passes over the deck, both of which are sampled

# The first line that fits, tells the kind of a sample: library, symbol.
KINDS: tuple[tuple[str, str, str], ...] = (
    ("packing operands of products", r"", r"mkl_\w*scopy|acopy|bcopy|jit_\w*copy_[ab]|brgemm_matmul_copy"),
    ("generated products", r"^af_product", r""),
    ("products and convolutions", r"", r"mkl_|gemm|gblock|dnnl::|jit_avx|jit_uni|brg_"),
    ("products and convolutions", r"jitted-|perf-\d+\.map|\[JIT\]|^anon|memfd", r""),
    ("generated kernels", r"^af_\w+\.so|^c[a-z0-9]{50,}.*\.so|libmvec", r""),
    ("waiting for other threads", r"libgomp|libiomp", r""),
    (
        "torch's kernels",
        r"libtorch|libc10",
        r"callback_fn|_kernel|Kernel|vec_|Vectorized|[Ss]leef|parallel_for|random64",
    ),
    ("torch's kernels", r"libtorch", r"RowwiseMoments|vectorized|cpu_flash|fill_stub|invoke_parallel|pool"),
    ("Python", r"libpython|^python3|libtorch_python|\.cpython-", r""),
    ("calls into torch, memory", r"libtorch|libc10|libc\.so|libstdc|ld-linux|libm\.so|libpthread", r""),
    ("operating system", r"kernel|vdso|\[k|vmlinux", r""),
)
OTHER = "other"


def kind_of(library: str, symbol: str) -> str:
    for kind, wanted_library, wanted_symbol in KINDS:
        if re.search(wanted_library, library) and re.search(wanted_symbol, symbol):
            return kind
    return OTHER


def samples(data: Path) -> Iterator[tuple[int, str, str]]:
    """Thread, library and symbol of each sample."""
    command = ["perf", "script", "-i", str(data), "-F", "tid,ip,sym,dso"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for line in text.splitlines():
        found = re.match(r"\s*(\d+)\s+[0-9a-f]+ (.*) \(([^()]*(?:\([^()]*\))?)\)\s*$", line)
        if found:
            yield int(found[1]), found[3].split("/")[-1], found[2]


def profile(name: str, case: Case, store: Path, folder: Path) -> dict[str, Any]:
    """Milliseconds of a deck by kind. The contender has its kernels and graphs before it is sampled."""
    if name == AUTOFUSE and not store.exists():
        Contender(name, case, store, False).close()
    contender = Contender(name, case, store, False)
    contender.round()
    data = folder / "perf.data"
    perf = subprocess.Popen(
        ["perf", "record", "-q", "-F", str(SAMPLES_A_SECOND), "-o", str(data), "-p", str(contender.pid)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    seconds = [contender.round()["seconds"] for _ in range(ROUNDS)]
    perf.send_signal(signal.SIGINT)
    _, error = perf.communicate()
    contender.close()
    if not data.exists():
        sys.exit(f"perf: expected samples of a process, found: {error.decode().strip()[-300:]}")
    kinds, elsewhere, inside = Counter[str](), Counter[str](), Counter[tuple[str, str]]()
    for thread, library, symbol in samples(data):
        kind = kind_of(library, symbol)
        (kinds if thread == contender.pid else elsewhere)[kind] += 1
        if thread == contender.pid:
            inside[kind, own_name(library, symbol)] += 1
    deck = statistics.median(seconds) * 1e3
    scale = deck / max(1, kinds.total())  # perf's first samples come late, so that shares are what is known
    return {
        "deck_ms": round(deck, 1),
        "samples": kinds.total(),
        "ms": {kind: round(count * scale, 1) for kind, count in kinds.most_common()},
        "other_threads_ms": {kind: round(count * scale, 1) for kind, count in elsewhere.most_common()},
        "most_ms": {
            f"{kind}: {what}": round(count * scale, 1)
            for (kind, what), count in inside.most_common(24)
            if count * scale >= deck / 500
        },
    }


def own_name(library: str, symbol: str) -> str:
    """The kernel of a generated library, else the symbol."""
    found = re.search(r"^(af_\w+?)(?:_[0-9a-f]{6,})?\.so", library)
    return found[1] if found else symbol.split("(")[0][:90]


def main() -> int:
    parser = arguments(__doc__, "where", quick="one model, the shortest", only="models")
    parser.add_argument("--stores", type=Path, help="folder in which autofuse's stores are kept, or found")
    options = parse(parser)
    if shutil.which("perf") is None:
        sys.exit("expected perf, found none; next: apt install linux-perf")
    wanted = chosen("mlp" if options.quick else options.only, [case.name for case in CASES], USUAL)
    rows = []
    with tempfile.TemporaryDirectory(prefix="autofuse-where-") as scratch:
        stores = (options.stores or Path(scratch)).resolve()
        stores.mkdir(parents=True, exist_ok=True)
        for case in (case for case in CASES if case.name in wanted):
            row: dict[str, Any] = {"model": case.name, "commit": commit(), "contenders": {}}
            for name in NAMES:
                found = profile(name, case, stores / f"{case.name.replace(' ', '_')}.sqlite3", Path(scratch))
                row["contenders"][name] = found
                parts = ", ".join(f"{kind} {ms:.0f}" for kind, ms in found["ms"].items() if ms >= 1)
                print(f"{case.name:16s} {name:22s} {found['deck_ms']:7.0f} ms: {parts}", flush=True)
            rows.append(row)
            save(options.out, "where", rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
