"""Attention's two operations, forward and backward: what measurements, records and reports must know of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.quantise import Quantised
from numdev.attention import cost
from numdev.attention.base import Backward, Implementation, Passes
from numdev.attention.cost import CostModel
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.groups import BACKWARD_GROUPS, GROUPS
from numdev.attention.kernels.launch import digest, interpreting, triton_version
from numdev.attention.naive import Naive
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import DISTRIBUTIONS, Problem, draw_do
from numdev.attention.recurrence import BACKWARD_COUNTERS, COUNTERS
from numdev.attention.tiling import KernelLaunch
from numdev.attention.vendor import dispatch
from numdev.measurement.operation import Beside, Cost, Inputs, Operation, Output, Workload
from numdev.results.record import Column
from numdev.settings import declared


@dataclass(frozen=True)
class AttentionWorkload(Workload):
    """Draws one group of heads and repeats it for the others.

    The time of a call does not depend on the numbers, but for the power that their bits take, and drawing every head would take
    longer than timing the call.
    """

    backward: ClassVar[bool] = False
    beside: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "prepare": "what a call in 8 bits includes before its kernel, quantising or laying out its inputs",
            "attend": "the kernel alone, on what that left",
        }
    )

    def sample(self, problem: Problem) -> Problem:
        """The problem of the first batch entry and the query heads that share one KV head."""
        return _of_one_head(problem, heads=problem.shape.heads // problem.shape.kv_heads)

    def held(self, problem: Problem, variant: Implementation, rounded: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Every head and batch entry, in a dtype that a call need not convert."""
        shape, dtype = problem.shape, variant.storage or rounded[0].dtype
        return tuple(tensor.to(dtype).repeat(shape.batch, shape.kv_heads, 1, 1) for tensor in rounded)

    def compared(self, problem: Problem, output: Tensor) -> Tensor:
        """The heads that golden has: all others see the same numbers."""
        return output[:1, : problem.shape.heads // problem.shape.kv_heads]

    def needed_bytes(self, problem: Problem, variant: Implementation) -> int:
        """q, k, v, what is returned, and S and P of an implementation that holds all scores; the backward pass needs more."""
        shape, model, tensors, scores = problem.shape, variant.cost_model(KernelLaunch()), *((4, 3) if self.backward else (2, 2))
        needed = (variant.storage or torch.float32).itemsize * tensors * (math.prod(shape.q) + math.prod(shape.kv))
        if model is not None and model.holds_scores:
            needed += scores * int(model.width.input) * shape.batch * shape.heads * shape.queries * shape.keys
        return needed

    def cost(self, problem: Problem, variant: Implementation, output: Any, device: torch.device) -> Cost:
        """By the variant's own model of the kernel that ran."""
        return _cost(problem, variant.cost_model(output.launch), device, backward=self.backward)

    def is_tf32(self, variant: Implementation) -> bool:
        return variant.is_tf32

    def bound(self, problem: Problem, variant: Any, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        return partial(variant.bare, *inputs, **problem.arguments())

    def calls_beside(self, problem: Problem, variant: Any, inputs: tuple[Tensor, ...], device: torch.device) -> dict[str, Beside]:
        """Of a call that includes something before its kernel."""
        arguments: dict[str, Any] = problem.arguments()
        stages = variant.stages(inputs, **arguments)
        if stages is None:
            return {}
        prepare, attend = stages
        made, cost = prepare(), self.cost(problem, variant, self.bound(problem, variant, inputs)(), device)
        return {"prepare": (prepare, Cost()), "attend": (lambda: attend(*made), cost)}

    def forget(self) -> None:
        """Releases the dense mask, which may be as large as the scores."""
        dispatch.dense.cache_clear()


@dataclass(frozen=True)
class BackwardWorkload(AttentionWorkload):
    """The backward pass alone is timed, from what one forward pass left; beside it the forward pass, and both together."""

    backward: ClassVar[bool] = True
    beside: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"forward": "the forward pass alone", "both": "the forward pass and then the backward pass"}
    )

    def bound(self, problem: Problem, variant: Backward, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        forward, backward = self._passes(problem, variant, inputs)
        return partial(backward, forward())

    def calls_beside(
        self, problem: Problem, variant: Backward, inputs: tuple[Tensor, ...], device: torch.device
    ) -> dict[str, Beside]:
        forward, backward = self._passes(problem, variant, inputs)
        output = forward()
        of_forward = _cost(problem, variant.forward_pass.cost_model(output.launch), device)
        of_backward = self.cost(problem, variant, backward(output), device)
        algorithm = of_forward.algorithm if of_forward.algorithm == of_backward.algorithm else ""
        both = Cost(of_forward.operations + of_backward.operations, algorithm, of_forward.model_bytes + of_backward.model_bytes)
        return {"forward": (forward, of_forward), "both": (lambda: backward(forward()), both)}

    def _passes(self, problem: Problem, variant: Backward, inputs: tuple[Tensor, ...]) -> Passes:
        q, k, v, do = inputs
        return variant.passes(q, k, v, do, problem.mask, problem.softmax_scale)


def _of_one_head(problem: Problem, **sizes: Any) -> Problem:
    """The problem of one batch entry and one KV head, with other sizes."""
    shape, mask = replace(problem.shape, batch=1, kv_heads=1, **sizes), problem.mask
    lengths = None if mask.key_lengths is None else (min(mask.key_lengths[0], shape.keys),)
    return replace(problem, shape=shape, mask=replace(mask, key_lengths=lengths))


def _cost(problem: Problem, model: CostModel | None, device: torch.device, *, backward: bool = False) -> Cost:
    """Of a pass by the model of an implementation, if it has one."""
    operations = (cost.backward_operations if backward else cost.operations)(problem)
    if model is None:
        return Cost(operations)
    return Cost(operations, model.algorithm.value, *cost.cost_of(problem, model, device, backward=backward))


def environment(device: torch.device) -> dict[str, str]:
    """Version of Triton and digest of the table of launches, where kernels can run."""
    if device.type == "cuda":
        return {"triton": triton_version(), "launch_table": digest()}
    return {"triton": f"{triton_version()} interpreted", "launch_table": digest()} if interpreting() else {}


Texts = dict[str, tuple[str, str]]  # unit and meaning, by the name of a column


def texts_of(*kinds: type, prefix: str = "") -> Texts:
    """The settings that dataclasses declare, by their columns."""
    return {f"{prefix}{one.column}": (one.unit, one.text) for kind in kinds for one in declared(kind) if one.column}


def _types(*places: str) -> Texts:
    return {
        f"{place}type": ("", f"class of numdev that {place[:-1] or 'it'} is, such as Tiled, Normal or Mask") for place in places
    }


def texts(*, backward: bool = False) -> tuple[Texts, Texts]:
    """Unit and meaning of every setting of a problem, and of a variant, by the columns in which a configuration has them.

    Of gradients the settings of the forward pass lie in `forward`.
    """
    from numdev.attention.captured import Captured  # late: nothing else needs every implementation
    from numdev.attention.tiled import Tiled, TiledBackward
    from numdev.attention.triton import Triton
    from numdev.attention.vendor.custom import Custom, CustomBackward
    from numdev.attention.vendor.flash_attn import FlashAttn, FlashAttnBackward
    from numdev.attention.vendor.sdpa import Sdpa, SdpaBackward

    groups = BACKWARD_GROUPS if backward else GROUPS
    problem = {
        **_types("", "source.", "shape.", "mask."),
        "source.kind": ("", "distribution of the entries of q, k and v: uniform in [0, 1), normal, ...; empty where captured"),
        **texts_of(*DISTRIBUTIONS, Captured, prefix="source."),
        "source.digest": ("", "SHA-256 of the file of captured tensors"),
        "mask.bias": ("", "SHA-256 of the tensor that is added to the scores, and hides keys; empty without"),
        "mask.dropout": ("", "probability of dropout, and SHA-256 of what it keeps; empty without"),
        **texts_of(groups["problem"]),
    }
    point = {
        "kind": ("", "of a point that cannot be measured as it is stated: which implementation it asks for"),
        "stated": ("", "of such a point: every setting that is stated, as on the command line"),
        "digest": ("", "SHA-256 of the sources of a function of one's own; of a kernel of a package the version of that"),
    }
    kernel = {
        "br": ("rows", "Br asked of a kernel, queries in one tile; empty for its own choice"),
        "bc": ("rows", "Bc asked of a kernel, keys in one tile; empty for its own choice"),
        "order": ("", "in which order a kernel is asked to meet the tiles; empty for its own"),
        "splits": ("count", "contiguous ranges of keys of a kernel, combined by their log-sum-exp; none: the kernel's own rule"),
        "split_size": ("count", "keys of each split of a kernel; none: not fixed"),
        "fmt": ("format", "q, k, v and what is returned, of an implementation that has no policy for each step"),
        "output": ("format", "O of a kernel of 8 bits"),
        "quantise": ("", "empty where the inputs of a kernel of 8 bits are numbers of that format themselves"),
    }
    forward = {
        **_types("", "tiling.", "softmax."),
        **{k: v for name in ("precision", "tiling", "softmax") for k, v in texts_of(GROUPS[name], prefix=f"{name}.").items()},
        **texts_of(Naive, Tiled, Triton, Sdpa, FlashAttn, Custom),
        **_types("quantise."),
        **texts_of(Quantised, prefix="quantise."),
        **kernel,
    }
    if not backward:
        return problem, forward | point
    variant = {
        **_types("", "tiling.", "recompute.", "turns."),
        **{k: v for name in ("precision", "tiling", "recompute") for k, v in texts_of(groups[name], prefix=f"{name}.").items()},
        "turns.unit": ("rows", "queries that a program visits at a step, from the last to the first"),
        **texts_of(TiledBackward, SdpaBackward, FlashAttnBackward, CustomBackward),
        **{name: said for name, said in kernel.items() if name not in ("splits", "split_size")},
        **point,
        "tf32": ("", "whether a kernel multiplies FP32 with operands of 10 fraction bits"),
        **texts_of(groups["forward_precision"], prefix="forward."),  # of untiled attention, whose forward pass is a policy
        **{f"forward.{name}": said for name, said in forward.items()},
    }
    return problem, variant


def settings(*, backward: bool = False) -> tuple[Column, ...]:
    """Every setting of a problem and of a variant."""
    return settings_of(*texts(backward=backward))


def settings_of(problem: Texts, variant: Texts) -> tuple[Column, ...]:
    """The columns of settings, as `Operation.settings` has them."""
    parts = {"problem": problem, "variant": variant}
    return tuple(Column(f"{part}.{name}", *text) for part, known in parts.items() for name, text in known.items())


def facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The implementation, the format of the output, the policy in a word and the area of a tile, as a configuration has them."""

    def at(path: str) -> Any:
        node: Any = config
        for name in path.split("."):
            node = node.get(name) if isinstance(node, Mapping) else None
        return node

    which = at("variant.backend") or at("variant.version") or at("variant.kernel")
    name = str(at("variant.kind") or at("variant.type") or "").lower()
    attention = f"{name} {which}" if which and which != "auto" else name
    output = at("variant.precision.output") or at("variant.fmt") or at("baseline.precision.output") or ""
    fmt, preset = str(output).partition(":")[0], str(at("variant.precision.name") or "")
    if attention == "vanilla":
        policy = "eager"
    elif at("variant.type") in ("Triton", "Sdpa", "Flex", "FlashAttn") or preset.startswith("kernel_"):
        policy = "kernel"
    else:
        policy = "uniform" if (preset and preset == fmt) or preset.startswith("uniform_") else preset
    br, bc = at("variant.tiling.br"), at("variant.tiling.bc")
    area = None if br is None else br * bc
    return {"attention": attention, "format": fmt, "policy": policy, "tiling.area": area}


SMALLER = "fewer queries, keys, heads or batch entries, or a smaller tiling.bc"
ATTENTION = Operation(
    name="attention",
    golden=Exact(),
    inputs=(Inputs(("q", "k", "v")),),
    outputs=(
        Output("out", "O, the softmax of the scaled scores times V"),
        Output("lse", "m + log l, the logarithm of the sum of exponentials of the scaled scores"),
    ),
    rows=dict.fromkeys(("q", "k", "v", "out", "lse"), 0),
    suffix=dict.fromkeys(("q", "out", "lse"), 2),
    steps=tuple(field.name for field in fields(Precision)),
    counters=tuple(Column(name, unit, text) for name, (unit, text) in COUNTERS.items()),
    settings=settings,
    facts=facts,
    environment=environment,
    workload=AttentionWorkload(),
    smaller=SMALLER,
)
"""Forward attention."""

ATTENTION_BACKWARD = Operation(
    name="attention_backward",
    golden=ExactBackward(),
    inputs=(Inputs(("q", "k", "v")), Inputs(("do",), draw_do)),
    outputs=(
        Output("dq", "dQ = scale dS K, the gradient by the queries", directed=True),
        Output("dk", "dK = scale dS^T Q, the gradient by the keys", directed=True),
        Output("dv", "dV = P^T dO, the gradient by the values", directed=True),
        Output("delta", "the sum over a row of dO * O, which is that of dP * P"),
    ),
    rows=dict.fromkeys(("q", "k", "v", "do", "dq", "dk", "dv", "delta"), 0),
    suffix=dict.fromkeys(("q", "do", "dq", "delta"), 2),
    steps=tuple(field.name for field in fields(BackwardPrecision)),
    counters=tuple(Column(name, unit, text) for name, (unit, text) in BACKWARD_COUNTERS.items()),
    settings=partial(settings, backward=True),
    facts=facts,
    environment=environment,
    workload=BackwardWorkload(),
    smaller=SMALLER,
)
"""The backward pass of attention, after a forward pass."""
