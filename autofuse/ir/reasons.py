"""Reason codes: why a module, a fusion, a kernel or a run went as it did, each with its words for people.

In: the code that a stage stores. Out: a member of one of these enums: the stored text itself, with ``words``.
Guarantee: the text of a member never changes, for stores hold it; a code of an older or newer version comes out
readable (`in_words`). ``tests/ir/test_reasons.py`` holds the literals of all stages against these lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Reason(StrEnum):
    """A code that is stored, and what it says to a person: a phrase without a capital letter and a full stop."""

    words: str

    def __new__(cls, code: str, words: str) -> Reason:
        member = str.__new__(cls, code)
        member._value_ = code
        member.words = words
        return member


class RootReason(Reason):
    """`RootRecord.reason`: why a module is captured, observed or in eager."""

    NOT_YET = "not_yet", "still observed: too short so far for its capture to pay"
    NOT_OBSERVED = "not_observed", "no step was observed in full yet"
    PAID_OFF = "paid_off", "the time spent in eager reached the cost of capture"
    AT_ONCE = "at_once", "captured at once, because the run waits for tuning"
    FIRST_CALL = "first_call", "captured at its first call, as asked for"
    KNOWN_TO_PAY = "known_to_pay", "captured at once: an earlier run found that it pays"
    KEPT_TRACE = "kept_trace", "captured at once, from the trace of an earlier run"
    ASKED_FOR = "asked_for", "captured because the script asked for it"
    TOO_SMALL = "too_small", "too fast per call for capture to gain"
    TOO_EXPENSIVE = "too_expensive", "capture would take longer than allowed"
    NOTHING_TO_RUN = "nothing_to_run", "no kernel is stored for its device, and none can be made"
    SEVERAL_RANKS = (
        "several_ranks",
        "several ranks compute the same values, which kernels that differ in the last bit would let drift apart; "
        "--strict fuses it",
    )
    CAPTURE_FAILED = "capture_failed", "could not be captured"
    NO_GRAPH = "no_graph", "no graph of it could be captured"
    BOOKKEEPING_FAILED = "bookkeeping_failed", "autofuse failed to watch it"
    CODE_REPLACED = "code_replaced", "its code was replaced after it was captured"
    KEPT_GRAPH_FAILED = (
        "kept_graph_failed",
        "the graph that an earlier run kept did not run; the next run traces it anew",
    )
    SLOWER_THAN_EAGER = "slower_than_eager", "released: captured steps were slower than eager"
    SLOWER_UNTUNED = (
        "slower_untuned",
        "released for this run: captured steps were slower than eager, not all kernels are tuned yet",
    )
    NO_GAIN = "no_gain", "released: captured steps were no faster than eager"


class RefusalReason(Reason):
    """`Refusal.code`: what became of a fusion. Where the lowering refused it, the code is a `LoweringReason`."""

    FUSED = "fused", "fused"
    GROUPED = "grouped", "several strategies can run it; they are measured"
    SIZE_LIMIT = "size_limit", "more operations than one kernel may have"
    CYCLE = "cycle", "fusing would make a cycle"
    LOOPS_DIFFER = "loops_differ", "the operations share no loop nest"
    NEEDS_WHOLE_REDUCTION = "needs_whole_reduction", "a value is needed before it is complete"
    PART_LEAVES = "part_leaves", "a part of the result is also needed by itself"
    BROADCAST_WORK = (
        "broadcast_work",
        "costly work on a tensor that is broadcast, which would be done once for each copy",
    )
    PATTERN_LOOPS_DIFFER = "pattern_loops_differ", "the pattern's operations share no loop nest"
    PATTERN_HAS_NO_KERNEL = "pattern_has_no_kernel", "the pattern has no kernel"
    GROUPS_IN_A_CIRCLE = "groups_in_a_circle", "groups that would wait for each other"
    KEPT_APART = "kept_apart", "one side is part of an attention, which may run as a whole"
    ATTENTION = "attention", "attention that no fused kernel computes"
    MATMUL_PRECISION = "matmul_precision", "matmuls that torch was asked to compute with fewer bits"
    MIXED_DEVICES = "mixed_devices", "tensors on several devices"
    UNFUSED_FORM = "unfused_form", "a library's operator that is not what its registered function computes"
    NO_WORK = "no_work", "nothing to compute"
    NOT_SOUND = "not_sound", "a node that cannot run as one, an error of autofuse"
    SINGLE_OP = "single_op", "one cheap operation gains nothing"
    SMALL_TENSORS = "small_tensors", "tensors too small to gain"
    LOW_BENEFIT = "low_benefit", "estimated gain too low"
    REPLAYED = "replayed", "launched as one CUDA graph, which is faster"
    NOT_REPLAYED = "not_replayed", "launched kernel by kernel, not as one CUDA graph"


class LoweringReason(Reason):
    """`LoweringError.code`: why no kernel can be generated for some operations, or none by one of the templates."""

    ANCHOR = "anchor", "not the operations that this kernel is made for"
    BATCH = "batch", "two matmuls of different batches"
    BATCH_NORM = "batch_norm", "a form of batch norm without a kernel"
    BETWEEN = "between", "other operations between the matmuls of an attention"
    BIAS = "bias", "a bias in a form without a kernel"
    CAUSAL = "causal", "a causal mask with more keys than queries"
    CONSTANT = "constant", "a constant that kernels do not know"
    DILATION = "dilation", "a dilation that is only known when it runs"
    DEVICE_BOUNDS = (
        "device_bounds",
        "writes by an index, or stages one after another, on a GPU, for which there is no kernel",
    )
    DIM = "dim", "a size that kernels cannot compute"
    DISJOINT = "disjoint", "parts that share no data"
    DIVISION = "division", "a divisor or rounding mode without a kernel"
    DROPOUT = "dropout", "a dropout inside of attention"
    DTYPE = "dtype", "a dtype that kernels do not compute with"
    EMPTY = "empty", "nothing to compute"
    FACTOR = "factor", "a matmul with factors that no kernel applies"
    HEAD = "head", "attention heads that are too wide, or whose width varies"
    INDEX = "index", "a matmul's result that is read at another place than where it is made"
    INDEXED = "indexed", "a tensor that is read by an index, beside a matmul's tiles"
    INDICES = "indices", "indices of a dtype or in a form that no kernel follows, or that are calculated"
    KIND = "kind", "a kind of convolution without a kernel"
    LAYOUT = "layout", "tensors in an order of dims that no kernel is made for"
    MASK = "mask", "an attention mask in a form without a kernel"
    NO_RULE = "no_rule", "no rule fuses these operators"
    NO_WAY = "no_way", "eager is faster in every part"
    OPERAND = "operand", "an operand that this kernel cannot read"
    OUTPUTS = "outputs", "results of attention that nobody reads"
    OVERLAP = "overlap", "a tensor that overlaps itself"
    PADDING = "padding", "a padding that is only known when it runs"
    POOLED_VALUE = "pooled_value", "a pooling of a value made in the same kernel, computed once for each window"
    POOLING = "pooling", "a pooling without a kernel"
    POW = "pow", "a power without a kernel"
    PROBABILITIES = "probabilities", "attention whose probabilities are also needed by themselves"
    RANDOM = "random", "a random operator, which keeps eager's random numbers"
    REDUCTION = "reduction", "a reduction without a kernel"
    REDUCTIONS = "reductions", "reductions over different dims"
    ROLL = "roll", "a shift that may be larger than the size"
    ROUND = "round", "a rounding to digits without a kernel"
    SCALE = "scale", "an attention scale that is not a number above 0"
    SCAN = (
        "scan",
        "a sum along a dim that is read in parts, or along several dims, or that this target has no kernel for",
    )
    SEVERAL_NESTS = (
        "several_nests",
        "the operations have loops of their own, which share a kernel only where all are element-wise",
    )
    SHAPE = "shape", "attention heads of different widths or numbers"
    SINK_REUSED = "sink_reused", "an output that is read again"
    SIZE = "size", "a weight whose size is only known when it runs"
    SIZES = "sizes", "sizes that do not fit one loop nest"
    SLICE = "slice", "a slice whose bounds are not known"
    SLICE_STEP = "slice_step", "a slice whose step does not divide the size"
    SOFTMAX = "softmax", "a softmax that is not over the keys"
    STRIDE = "stride", "a stride that is only known when it runs"
    STRIDES = "strides", "tensors in memory in a way that this kernel does not read or write"
    TABLE = "table", "a tensor that is read by an index, but would have to be made first"
    TARGET = "target", "targets of a dtype that eager refuses"
    UNREAD = "unread", "an index of which only a part would be looked at, where eager looks at all of it"
    UNUSED = "unused", "an output that does not depend on the matmul"
    VIEW = "view", "a view that kernels cannot follow"
    VIEWS = "views", "views that split each other without end"
    WEIGHT = "weight", "a weight that is not dense"
    WIDTH = "width", "attention heads whose width fills no whole vectors"
    WRITE = "write", "a value that is written to places which are data, and read before all of it is there"
    WINDOW = "window", "a window without a kernel, or an output that is a part of another tensor"


REFUSED = "refused:"  # begins the reason of a decision; a `LoweringReason` follows


class DecisionReason(Reason):
    """`Decision.reason`: why a node runs as it does; of nodes without a decision, where its request stands."""

    WON = "won", "faster than eager, checked against float64"
    BELOW_MARGIN = "below_margin", "no candidate beat eager by the margin"
    UNDECIDED = "undecided", "faster than eager in most rounds, which were too few or too uneven to be sure"
    NO_GAIN = "no_gain", "no candidate was faster than eager"
    DEVICE_SLOWER = "device_slower", "fewer launches, but more work for the device"
    SLOWER_LIVE = "slower_live", "faster in its race, but slower than eager in the script's own calls"
    NOT_BIT_EQUAL = "not_bit_equal", "faster than eager, but not equal to it bit by bit, which this strict run asks for"
    ALL_WRONG = "all_wrong", "no candidate was accurate enough"
    COMPILE_FAILED = "compile_failed", "no candidate compiled"
    DOES_NOT_FIT = "does_not_fit", "no candidate fits the device without spilling registers"
    CRASHED = "crashed", "every candidate crashed"
    TIMEOUT = "timeout", "every candidate ran out of time"
    OUT_OF_MEMORY = "out_of_memory", "the candidates ran out of memory"
    NO_CANDIDATES = "no_candidates", "no kernel can be generated for it"
    REFUSED = "refused", "no candidate applies to it"
    TOO_SMALL = "too_small", "too small to gain"
    WAITING = "waiting", "waits in the queue for tuning"
    TUNING = "tuning", "is being tuned now"
    FAILED = "failed", "tuning failed"
    NOT_ASKED = "not_asked", "not tuned yet: no run has asked for it"


class SettingReason(Reason):
    """`SettingTrial.reason`: why a setting of the whole process is on or off."""

    WON = "won", "faster by more than noise"
    BELOW_MARGIN = "below_margin", "not faster by the margin"


class NoticeKind(Reason):
    """`Event.kind` of what a run says once and keeps as a note: fallbacks to eager, trouble with the store."""

    CAPTURE_FAILED = "capture_failed", "capture failed"
    BOOKKEEPING_FAILED = "bookkeeping_failed", "not watched"
    CODE_REPLACED = "code_replaced", "code replaced"
    ROOT_UNKNOWN = "root_unknown", "module not watched"
    GRAPH_NOT_PLANNED = "graph_not_planned", "graph not planned"
    NODE_FAILED = "node_failed", "kernel failed"
    CHECK_FAILED = "check_failed", "wrong result"
    UNFUSED_REFUSED = "unfused_refused", "function not used"
    OWN_KERNEL = "own_kernel", "the script's own kernel"
    PATTERNS_UNUSABLE = "patterns_unusable", "patterns not read"
    GENERATOR_UNUSABLE = "generator_unusable", "random numbers from eager"
    RANDOM_UNKNOWN = "random_unknown", "random numbers unknown"
    RANDOM_DIFFERS = "random_differs", "random numbers differ"
    OPTIMIZER_UNKNOWN = "optimizer_unknown", "optimizer not routed"
    OPTIMIZER_FAILED = "optimizer_failed", "optimizer kernel failed"
    OPTIMIZER_LEFT = "optimizer_left", "optimizer left to torch"
    DEVICE_UNKNOWN = "device_unknown", "device not known"
    NO_COMPILER = "no_compiler", "no C compiler"
    NO_TRITON = "no_triton", "no Triton"
    NO_BACKEND = "no_backend", "device without kernels"
    NO_PEAKS = "no_peaks", "peak memory not measured"
    SLOW_LAUNCHER = "slow_launcher", "slow launcher"
    STORE_UNUSABLE = "store_unusable", "store not usable"
    KERNEL_UNUSABLE = "kernel_unusable", "kernel not loaded"
    KERNELS_REFUSED = "kernels_refused", "kernels refused"
    DAMAGED_KERNEL = "damaged_kernel", "damaged kernel"
    GRAPHS_NOT_KEPT = "graphs_not_kept", "graphs not kept"
    KEPT_GRAPH_REFUSED = "kept_graph_refused", "graph traced anew"
    KEPT_TRACE_REFUSED = "kept_trace_refused", "trace made anew"
    DAEMON_UNUSABLE = "daemon_unusable", "no tuning daemon"
    DAEMON_RESTARTED = "daemon_restarted", "daemon restarted"
    DAEMON_LOST = "daemon_lost", "daemon lost"
    TUNING_STOPPED = "tuning_stopped", "tuning stopped"
    BUDGET_SPENT = "budget_spent", "tuning budget spent"
    REPLAY_FAILED = "replay_failed", "no CUDA graph"
    FROZEN_MISS = "frozen_miss", "not tuned, frozen"
    SNAPSHOT = "snapshot", "decisions of the snapshot left out"


def words_of(*kinds: type[Reason]) -> dict[str, str]:
    """The words of all codes of these kinds."""
    return {str(reason): reason.words for kind in kinds for reason in kind}


def in_words(code: str, words: Mapping[str, str]) -> str:
    """A code that is not listed comes out readable."""
    return words.get(code, code.replace("_", " "))


def decision_words(code: str) -> str:
    """``refused:dtype``: no kernel can be generated for it: a dtype that kernels do not compute with."""
    if code.startswith(REFUSED):
        return f"no kernel can be generated for it: {in_words(code.removeprefix(REFUSED), words_of(LoweringReason))}"
    return in_words(code, words_of(DecisionReason))
