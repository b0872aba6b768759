"""Small scripts that must behave the same under ``python`` and under ``autofuse run``.

Each case: the files of a folder, and what follows ``python`` (or ``autofuse run``) on the command line.
A script prints what it sees of the interpreter to stdout; ``stderr_differs`` marks cases whose traceback python itself
spoils with frames of runpy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import dedent


@dataclass(frozen=True)
class Case:
    name: str
    files: dict[str, str | bytes]
    command: tuple[str, ...] = ("script.py",)
    stdin: str = ""
    stderr_differs: bool = False
    links: dict[str, str] = field(default_factory=dict)


def script(name: str, text: str, *arguments: str, **more: str) -> Case:
    """A case of one script, with further files named by keyword (``helper="..."`` makes helper.py)."""
    files: dict[str, str | bytes] = {"script.py": dedent(text)}
    files |= {f"{stem}.py": dedent(body) for stem, body in more.items()}
    return Case(name, files, ("script.py", *arguments))


# Everything that a program can see of how it was started.
PORTRAIT = dedent("""
    import os, sys, __main__
    print(sys.argv, sys.path[0], __name__, __file__, __package__, __doc__)
    print(repr(__spec__ and (__spec__.name, __spec__.origin, __spec__.parent)), type(__loader__).__name__)
    print(sorted(n for n in vars(__main__)), __main__ is sys.modules["__main__"], type(__builtins__).__name__)
    print(sys._getframe().f_code.co_filename, __cached__, os.getcwd(), sys.flags, sys.getrecursionlimit())
""")

ENDINGS = [
    script("falls off the end", "print('done')"),
    script("sys.exit()", "import sys; print('a'); sys.exit()"),
    script("sys.exit(0)", "import sys; sys.exit(0)"),
    script("sys.exit(3)", "import sys; sys.exit(3)"),
    script("sys.exit(True)", "import sys; sys.exit(True)"),
    script("sys.exit(-1)", "import sys; sys.exit(-1)"),
    script("sys.exit(256)", "import sys; sys.exit(256)"),
    # Newer pythons stumble over their own conversion, and say so.
    Case("sys.exit(huge)", {"script.py": "import sys; sys.exit(1 << 80)"}, stderr_differs=True),
    script("sys.exit(text)", "import sys; print('out'); sys.exit('something went wrong')"),
    script("sys.exit(1.5)", "import sys; sys.exit(1.5)"),
    script("sys.exit in excepthook", "import sys\nsys.excepthook = lambda *a: sys.exit(7)\n1/0"),
    script("raise SystemExit class", "raise SystemExit"),
    script("os._exit", "import os, sys; print('x', flush=True); os._exit(9)"),
    script(
        "what only a collection at the end finds",
        """
        import gc, weakref
        class Cycle:
            def __init__(self, name):
                self.me, self.file = self, open(name, "w")
                self.file.write("kept")
            def __del__(self):
                print("deleted", flush=True)
        first = Cycle("first.txt")
        weak = weakref.ref(first)
        del first
        print(weak() is None, gc.isenabled(), gc.get_threshold(), gc.collect() > 0, weak() is None)
        print(open("first.txt").read(), any(type(o) is Cycle for o in gc.get_objects()))
        left = Cycle("left.txt")
        print(any(o is left for o in gc.get_objects()))
        del left
        """,
    ),
    script(
        "uncaught exception",
        """
        def inner(x):
            return 1 / x
        print("before")
        inner(0)
        """,
    ),
    script("chained exceptions", "try:\n    {}['x']\nexcept KeyError as e:\n    raise ValueError('später') from e"),
    script("syntax error", "print('never')\ndef f(:\n"),
    script("error in an import", "import helper", helper="raise RuntimeError('while importing')"),
    script(
        "own excepthook",
        "import sys\nsys.excepthook = lambda t, v, tb: print('hook', t.__name__, v, tb.tb_lineno, tb.tb_next)\n1/0",
    ),
    script("broken excepthook", "import sys\nsys.excepthook = lambda t, v, tb: {}['no']\n1/0\n"),
    script("last exception is kept", "import atexit, sys\natexit.register(lambda: print(sys.last_type))\n1/0"),
    script("atexit runs once and in order", "import atexit\nfor i in range(3): atexit.register(print, 'bye', i)"),
    script("atexit after sys.exit", "import atexit, sys\natexit.register(print, 'bye')\nsys.exit(4)"),
    script("KeyboardInterrupt", "import atexit\natexit.register(print, 'bye')\nraise KeyboardInterrupt"),
    script("SIGTERM", "import os, signal; print('x', flush=True); os.kill(os.getpid(), signal.SIGTERM)"),
    script("SIGKILL", "import os, signal; print('x', flush=True); os.kill(os.getpid(), signal.SIGKILL)"),
    script("SIGINT from outside", "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"),
    script(
        "signal dispositions",
        "import signal\nprint([(s.name, str(signal.getsignal(s))[:24]) for s in sorted(signal.valid_signals()) "
        "if isinstance(s, signal.Signals)])",
    ),
    script(
        "non-daemon thread outlives main",
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()\nprint('main ends')",
    ),
    script("exception in a thread", "import threading\nt = threading.Thread(target=lambda: 1/0)\nt.start(); t.join()"),
    script(
        "forked child exits by itself",
        """
        import os, sys
        child = os.fork()
        if child == 0:
            sys.exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
    ),
]

STARTS = [
    Case("portrait of a script", {"script.py": PORTRAIT}, ("script.py", "-x", "--tune", "--", "-m")),
    Case("portrait in a folder below", {"sub/script.py": PORTRAIT}, ("sub/script.py", "a b")),
    Case("portrait of a folder", {"app/__main__.py": PORTRAIT}, ("app", "-v")),
    Case("folder with a slash", {"app/__main__.py": PORTRAIT}, ("app/", "-v")),
    Case("portrait of a module", {"mod.py": PORTRAIT}, ("-m", "mod", "--flag", "-m")),
    Case("portrait of a package", {"pkg/__init__.py": "", "pkg/__main__.py": PORTRAIT}, ("-m", "pkg", "-q")),
    Case("module in a package", {"pkg/__init__.py": "", "pkg/part.py": PORTRAIT}, ("-m", "pkg.part", "-q")),
    Case(
        "package sees argv while imported",
        {
            "pkg/__init__.py": "import sys; print(sys.argv, sys.path[0])",
            "pkg/__main__.py": "from . import x",
            "pkg/x.py": "",
        },
        ("-m", "pkg", "--a"),
    ),
    Case("linked script", {"real/script.py": PORTRAIT}, ("link.py",), links={"link.py": "real/script.py"}),
    Case("linked folder", {"real/script.py": PORTRAIT}, ("there/script.py",), links={"there": "real"}),
    Case("roundabout path", {"sub/script.py": PORTRAIT, "a/x": ""}, ("./a/../sub//script.py",)),
    Case("roundabout folder", {"app/__main__.py": PORTRAIT}, ("./app/.",)),
    Case("script without suffix", {"tool": PORTRAIT}, ("tool", "x")),
    Case(
        "relative imports in a module",
        {"p/__init__.py": "", "p/a.py": "from .b import x; print(x)", "p/b.py": "x=1"},
        ("-m", "p.a"),
    ),
    Case("exception in a module", {"mod.py": "import sys\n1/0"}, ("-m", "mod"), stderr_differs=True),
    Case("error in a package", {"pkg/__init__.py": "1/0", "pkg/__main__.py": ""}, ("-m", "pkg"), stderr_differs=True),
    Case(
        "import error in a package",
        {"pkg/__init__.py": "import nosuch_thing", "pkg/__main__.py": ""},
        ("-m", "pkg"),
        stderr_differs=True,
    ),
    script("imports beside the script", "import helper; print(helper.x, helper.__file__)", helper="x = 1"),
    script("a module beside the script wins", "import click; print(click.x, click.__file__)", click="x = 'mine'"),
    script("future import does not leak", "def f(x: int): pass\nprint(f.__annotations__)"),
    Case("encoding cookie", {"script.py": "# coding: latin-1\nprint(ascii('ä'), 'ä')".encode("latin-1")}),
    Case("byte order mark", {"script.py": b"\xef\xbb\xbfprint(ascii('\xc3\xa4'))"}),
    Case("not UTF-8", {"script.py": b"print('\xe4')"}, stderr_differs=True),
    Case("standard input", {"script.py": "import sys; print(sys.stdin.read().upper(), input)"}, stdin="hello"),
    script("main guard", "if __name__ == '__main__':\n    print('main')"),
    script("docstring", "'''Words.'''\nprint(__doc__)"),
    script(
        "source in tracebacks", "import traceback\ntry:\n    1/0  # here\nexcept Exception:\n    traceback.print_exc()"
    ),
    script("inspect finds the source", "import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f))"),
    script("deep recursion", "def f(n):\n    return n and 1 + f(n - 1)\nprint(f(980))"),
    script(
        "environment", "import os; print(sorted(k for k in os.environ if k.startswith(('OMP', 'MALLOC', 'PYTHON'))))"
    ),
    script("threads and modules of ours stay hidden", "import threading; print(threading.current_thread().name)"),
    script(
        "pickle of a class of __main__",
        """
        import copy, pickle
        class Thing:
            def __init__(self, x): self.x = x
            def __reduce__(self): return Thing, (self.x,)
        data = pickle.dumps(Thing(5))
        print(b"__main__" in data, pickle.loads(data).x, type(pickle.loads(data)) is Thing, Thing.__module__)
        """,
    ),
    script(
        "multiprocessing spawn",
        """
        import multiprocessing as mp, sys
        class Thing:
            def __init__(self, x): self.x = x
        def work(t): return t.x * 2, __name__, sys.argv
        if __name__ == "__main__":
            with mp.get_context("spawn").Pool(1) as pool:
                print(pool.map(work, [Thing(1), Thing(2)]))
        """,
        "--flag",
    ),
    script(
        "multiprocessing fork",
        """
        import multiprocessing as mp
        def work(x): return x * 2
        if __name__ == "__main__":
            with mp.get_context("fork").Pool(1) as pool:
                print(pool.map(work, [1, 2, 3]))
        """,
    ),
    Case(
        "multiprocessing spawn in a module",
        {
            "p/__init__.py": "",
            "p/go.py": "import multiprocessing as mp\nfrom .work import f\nclass C: pass\n"
            "def g(x): return f(x), __name__, type(x).__module__\n"
            "if __name__ == '__main__':\n"
            "    with mp.get_context('spawn').Pool(1) as pool: print(pool.map(g, [C()]))\n",
            "p/work.py": "def f(x): return type(x).__name__",
        },
        ("-m", "p.go"),
    ),
    script(
        "subprocess of itself",
        "import subprocess, sys\nif len(sys.argv) > 1:\n    print('child', sys.argv)\nelse:\n"
        "    print(subprocess.check_output([sys.executable, __file__, 'x']))",
    ),
]

# With a session these are captured at the first call of a module.
WITH_MODULES = [
    script(
        "what a called module's class holds",
        """
        import torch
        class Held:
            def __del__(self):
                print("deleted", flush=True)
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(4, 4)
            def forward(self, x):
                return self.linear(x).relu()
            def __del__(self):
                print(held is not None, flush=True)
        held, net = Held(), Net()
        for _ in range(3):
            net(torch.ones(2, 4)).sum().backward()
        """,
    ),
    script(
        "logs what all libraries say",
        """
        import logging, sys, torch
        logging.basicConfig(level=logging.INFO, stream=sys.stdout)
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
        for _ in range(3):
            net(torch.ones(2, 4)).sum().backward()
        ours = [name for name in logging.root.manager.loggerDict if name.startswith("autofuse")]
        print(any(logging.getLogger(name).isEnabledFor(logging.INFO) for name in ours))
        """,
    ),
    script(
        "waits for all threads but its own",
        """
        import threading, time, torch
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
        seen = set()
        def work():
            for _ in range(3):
                net(torch.ones(2, 4)).sum().backward()
        for _ in range(2):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        end = time.monotonic() + 2.5  # in which the background thread has done all that it does
        while time.monotonic() < end:
            seen.update(threading.enumerate())
            time.sleep(0.01)
        print(seen == {threading.main_thread()}, threading.active_count())
        """,
    ),
]

CASES = ENDINGS + STARTS
