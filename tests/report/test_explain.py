"""``autofuse explain``: finding what a person means, and saying why a decision fell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_records import COLD, DEVICE, GELU, HOT, LOSS, NORM, ROOT, VERSIONS, decision, fill, key
from rich.console import Console

from autofuse.db.rows import NodeRow
from autofuse.db.store import Store
from autofuse.errors import UsageError
from autofuse.ir.buckets import exact_bucket
from autofuse.ir.records import (
    EAGER,
    IN_ONE,
    Candidate,
    CompileKey,
    DimHistogram,
    KernelRecord,
    Measurement,
    ObservedShape,
    RootRecord,
    RunStart,
    TuneRequest,
    make_config,
)
from autofuse.report.explain import candidate_text, operation_lines, render_explain, resource_line
from autofuse.report.find import NodeStory, RootStory, cut, find


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store.db") as opened:
        yield opened


def explain(store: Store, name: str | None = None, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), color_system=None)  # noqa: SIM115
    render_explain(store, console, name)
    text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    return " ".join(text.split())


@pytest.mark.parametrize(
    "name",
    [GELU[1], GELU[0], "af_pointwise", "aaaaaa", "a1b2c3", "af_point…a1b2c3", cut(GELU[1], 24)],
)
def test_ways_to_name_a_node(store: Store, name: str) -> None:
    fill(store)
    story = find(store, name)
    assert isinstance(story, NodeStory) and story.node.fusion_id == GELU[0]
    assert len(story.buckets) == 2 and len(story.uses) == 2


@given(st.text(st.sampled_from("ab_"), min_size=1, max_size=80).filter(lambda t: not t.endswith("_")))
def test_a_cut_label_keeps_its_ends(label: str) -> None:
    shown = cut(label, 24)
    head, _, tail = shown.partition("…")
    assert label.startswith(head) and label.endswith(tail)
    assert len(label) > 24 or shown == label


def test_unknown_and_ambiguous_names(store: Store) -> None:
    with pytest.raises(UsageError, match="found 'x' and a store without nodes; type: autofuse run"):
        find(store, "x")
    fill(store)
    with pytest.raises(UsageError, match=f"found 'af_nrm'; did you mean {NORM[1]}") as caught:
        find(store, "af_nrm")
    assert caught.value.exit_code == 2
    with pytest.raises(UsageError, match="found 'zzzz'; list them with: autofuse explain"):
        find(store, "zzzz")
    with pytest.raises(UsageError, match="expected the name of one node, found 3 for 'af_'"):
        find(store, "af_")
    with pytest.raises(UsageError):
        find(store, "")


@pytest.mark.parametrize("width", [80, 100])
def test_a_fused_node(store: Store, width: int) -> None:
    fill(store)
    text = explain(store, "a1b2c3", width)
    assert "train_lm.py:41 x = x + self.mlp(self.norm(x))" in text
    assert "v0 = add(i0, 0.5, s1) float32 [s0, s1, 256] v1 = gelu(v0, 0.5, s1)" in text
    assert "4,416 calls in all runs, 2,760 of them fused" in text
    assert "Decision: fused (C, fixed size, threads=2 unroll=4). Faster than eager, checked against float64." in text
    assert "2.16x (95 % interval 2.12 to 2.21): 151.2 µs in eager, 70.0 µs fused." in text
    assert "after 24 trials in 6.5 s." in text
    assert text.index("2.40x") < text.index("2.20x") < text.index("2.10x") < text.index("crashed")
    assert "signal 11" in text
    assert "Waits in the queue: 900 calls seen, expected gain 67.50 ms." in text


def test_a_fused_node_on_a_gpu_says_what_its_kernel_takes(store: Store) -> None:
    fill(store)
    assert "The kernel takes" not in explain(store, GELU[1])
    taken = {"target": "cuda:90", "registers": 28, "spill_bytes": 0, "shared_bytes": 2048, "threads": 128}
    kernel = KernelRecord(CompileKey("s", "triton 3.7.1", "{}", "cuda:90"), GELU[1], "def f(): ...", b"", taken)
    store.kernels.put(kernel)
    chosen = Candidate("triton_generic", make_config({"BLOCK": 1024}))
    store.results.put_decision(replace(decision(GELU, HOT, 2.2), candidate=chosen, compile_key=kernel.key.digest))
    text = explain(store, GELU[1])
    assert "Decision: fused (Triton, any size, BLOCK=1024)" in text
    takes = "The kernel takes 28 registers a thread, 128 threads and 2,048 bytes of shared memory a program"
    assert f"{takes}; nothing is spilled. A multiprocessor holds 64 of 64 warps." in text
    assert "Its code has" not in text  # a kernel of a version that did not read it
    code = {"instructions": 1286, "loads": {"4": 1, "16": 2}, "stores": {"16": 2}, "local": 3}
    code |= {"barriers": 5, "shuffles": 1, "special": 11, "matrix": 0}
    store.kernels.put(replace(kernel, resources={**taken, "code": code}))
    told = "Its code has 1,286 instructions, a loop's counted once: 2 loads of 16 bytes, 1 load of 4 bytes, "
    told += "2 stores of 16 bytes, 3 to or from memory of a thread's own, 5 barriers, 1 shuffle, 11 special functions."
    assert told in explain(store, GELU[1])
    assert "; 12 bytes a thread are spilled." in resource_line({**taken, "spill_bytes": 12})
    assert resource_line({**taken, "registers": 100}).endswith("holds 16 of 64 warps: registers allow no more.")
    assert resource_line({**taken, "target": "cuda:75"}).endswith("; nothing is spilled.")


@pytest.mark.parametrize(
    ("candidate", "shown"),
    [
        (Candidate("way", make_config({"way": "sdpa"})), ("strategy", "sdpa: scaled_dot_product_attention")),
        (Candidate("way:cut_3_exp"), ("strategy", "cut_3_exp: two kernels, cut before exp")),
        (Candidate("way", make_config({"way": "new", "split": 2})), ("strategy", "new; split=2")),
        (Candidate("way"), ("strategy", "")),
        (Candidate("c_generic", make_config({"threads": 2})), ("C, any size", "threads=2")),
        (Candidate("made_up"), ("made up", "")),
    ],
)
def test_candidates_in_words(candidate: Candidate, shown: tuple[str, str]) -> None:
    assert candidate_text(candidate) == shown


@pytest.mark.parametrize("width", [80, 100])
def test_a_way_says_what_it_runs_and_why_it_was_chosen(store: Store, width: int) -> None:
    fill(store)
    steps = "//   vendor.linear\n//   one kernel: mul + add\n\n"
    source = f"// onednn_linear: oneDNN's product with gelu inside\n{steps}// other\nint f;"
    kernel = KernelRecord(CompileKey("w", "way", "", "avx512"), "af_way_onednn_linear_w", source, b"")
    store.kernels.put(kernel)
    chosen = Candidate("way", make_config({"way": "onednn_linear"}))
    made = replace(decision(GELU, HOT, 1.4), candidate=chosen, compile_key=kernel.key.digest, detail="parts took 9 µs.")
    store.results.put_decision(made)
    text = explain(store, GELU[1], width)
    assert "Decision: fused (strategy, onednn_linear: oneDNN's matmul with the epilogue inside)." in text
    assert "It runs vendor.linear; then one kernel: mul + add. parts took 9 µs." in text
    assert "other" not in text.partition("Decided")[0].partition("parts took")[2]


def test_a_node_that_stays_eager(store: Store) -> None:
    fill(store)
    text = explain(store, LOSS[1])
    assert "Decision: stays eager. No candidate beat eager by the margin. Eager takes 151.2 µs a call." in text
    assert "The best candidate took 149.8 µs: 1.01x (0.97 to 1.06)." in text


def test_a_group_in_eagers_order_says_so(store: Store) -> None:
    fill(store)
    told = "The group runs eager's operations in their order, none of them in a kernel."
    assert told not in explain(store, LOSS[1])
    stays = replace(decision(LOSS, HOT, 1.01, EAGER, "below_margin"), candidate=Candidate(EAGER, IN_ONE))
    store.results.put_decision(stays)
    assert told in explain(store, LOSS[1])


def test_a_kernel_for_one_shape_that_lost_is_told(store: Store) -> None:
    """The job stores its measurement under the whole bucket, and a decision only where it won."""
    fill(store)
    tried = Measurement(Candidate("c_specialised"), "ok", (8, 200), 99.0, 151.25, 1.53, 1.5, 1.6)
    store.results.put_measurements(key(NORM, HOT), [tried])
    told = "A kernel for 8×200 alone (C, fixed size) lost: it did not clearly beat eager and this one."
    assert told in explain(store, NORM[1])
    store.results.put_decision(decision(NORM, exact_bucket((8, 200)), 1.7))
    assert "alone" not in explain(store, NORM[1])


def test_replaced_failed_and_repeated_decisions(store: Store) -> None:
    fill(store)
    store.results.put_decision(replace(decision(GELU, HOT, 1.9), detail="Measured again after a demotion."))
    text = explain(store, GELU[1])
    assert "1.90x" in text and "1 earlier decision replaced." in text and "Measured again after a demotion." in text
    taken = store.queue.take(DEVICE.key)
    assert taken is not None and "Is being tuned now" in explain(store, GELU[1])
    store.queue.finish(taken.key, "failed", "gcc died")
    assert "Tuning failed: gcc died. It runs on eager's kernels." in explain(store, GELU[1])


def test_a_missing_decision_says_where_the_nearest_one_differs(store: Store) -> None:
    fill(store)
    text = explain(store, GELU[1])
    assert text.count("The nearest decision of this node is for") == 1
    assert f"is for bucket {HOT.label} in place of {COLD.label}." in text
    elsewhere = replace(key(GELU, HOT), threads=8, versions="torch 9")
    asked = TuneRequest(elsewhere, GELU[3], HOT, (ObservedShape((8, 256), 900),), 900, 150.0, 2.0, 1)
    store.queue.add([asked])
    text = explain(store, GELU[1])
    assert f"is for threads 2 in place of 8; versions {VERSIONS} in place of torch 9." in text


def test_a_node_nobody_asked_for(store: Store) -> None:
    fill(store)
    run_id = store.runs.start(RunStart("x", DEVICE, VERSIONS, "off", 1))
    use = replace(store.nodes.uses(1)[0], fusion_id="d" * 64, label="")
    store.nodes.put_uses(run_id, [use])
    text = explain(store, "node_dddd")
    assert "Not tuned yet: no run has asked for it." in text
    store.results.put_measurements(
        replace(key(GELU, HOT), fusion_id="d" * 64), [store.results.measurements(GELU[0])[0].measurement]
    )
    assert "Not decided: it was measured, but no decision was stored." in explain(store, "node_dddd")


def test_a_root(store: Store) -> None:
    run_id = fill(store)
    store.profiles.put_dims(run_id, [DimHistogram(ROOT, "args[0]", 1, ((256, 254), (128, 127)), 3)])
    store.roots.put(run_id, replace(store.roots.known()[ROOT], state="eager", reason="slower_than_eager"))
    assert isinstance(find(store, "GPT"), RootStory)
    text = explain(store, "GPT")
    assert "State: eager. Released: captured steps were slower than eager." in text
    assert (
        "Capture: predicted 8.2 s, took 5.4 s (imports 1.1 s, tracing 4.2 s)." in text
        and "Dynamic: dim 1 of args[0]." in text
    )
    assert "256 (254), 128 (127), others (3)" in text
    assert "run 1: captured" in text and "run 1: eager" in text


def test_the_list(store: Store) -> None:
    text = explain(store)
    assert "knows no nodes yet" in text and "autofuse run SCRIPT.py" in text
    fill(store)
    text = explain(store)
    assert "add + gelu + mul" in text and "2.16x" in text and "Scale" in text
    store.roots.put(1, RootRecord("[b]X", "[b]X", "eager", "capture_failed", "a[int]"))
    assert "[b]X" in explain(store)


def test_odd_forms_are_printed_not_refused() -> None:
    assert list(operation_lines({})) == []
    form = {
        "operations": [
            {"name": "v0", "target": "strange", "args": [[{"ref": "i0", "index": 1}, None], {"float": "inf"}]}
        ],
        "outputs": [["v0", 1]],
    }
    assert list(operation_lines(form)) == ["v0 = strange((i0[1], None), inf)", "return v0[1]"]
    pair = [[["8"], "float32"], [["8"], "int64"]]
    several = {
        "operations": [
            {"name": "v0", "target": "aten.max.dim", "args": [{"ref": "i0", "index": 0}, 0], "outputs": pair},
            {"name": "v1", "target": "aten.neg.default", "args": [{"ref": "v0", "index": 0}], "outputs": pair[:1]},
        ],
        "outputs": [["v1", 0], ["v0", 0], ["v0", 1]],
    }
    assert list(operation_lines(several))[1:] == ["v1 = neg(v0[0])  float32 [8]", "return v1, v0[0], v0[1]"]
    many = {"operations": [{"name": f"v{i}", "target": "aten.add.Tensor"} for i in range(50)]}
    assert list(operation_lines(many))[-1] == "and 10 more operations"


def test_node_row_without_a_label_has_a_name() -> None:
    from autofuse.report.find import name_of

    assert name_of(NodeRow("e" * 64, "", "add", {}, "")) == "node_" + "e" * 12
