"""Tasks of training: a model, its data by step and seed, its loss, and how its samples score; text to image, and language.

The models are a diffusion transformer under rectified flow, and a causal language model. Their attention is
`torch.nn.functional.scaled_dot_product_attention` alone, looked up at each call so that it can be exchanged. `route` and `scan`
can be exchanged as torch's own functions can: a `TorchFunctionMode` sees their calls.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import wrap_torch_function

from numdev.errors import BadInput
from numdev.settings import setting
from numdev.training.data import NULL, Folder, Purpose, Text, normal, stream
from numdev.training.scenes import Scenes

Batch = dict[str, Tensor]  # named tensors on the CPU, FP32 or int64, of one length in the first dimension


@dataclass(frozen=True)
class Samples:
    """The work of a trained model on held-out data."""

    score: float  # the share in [0, 1] that is right, as the task measures it; NaN where the data offers no measure
    pictures: Float[Tensor, "captions 3 height width"] | None = None  # in [-1, 1]


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A frozen dataclass of what is trained; `numdev.results.record.describe` makes its key of its fields."""

    learning_rate: float = setting(3e-3, "largest learning rate of AdamW")
    warmup: int = setting(30, "steps over which the learning rate rises")
    weight_decay: float = setting(0.01, "of AdamW")
    clip: float = setting(1.0, "largest norm of the gradient; 0 clips nothing")

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of training steps."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """Pictures or sequences of a step, over all ranks."""

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """The model in FP32 on the CPU; its weights are a function of the seed alone."""

    @abstractmethod
    def batch_of(self, step: int, seed: int) -> Batch:
        """Everything random of a step, the same in any order of calls."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over the batch, a scalar in FP32, on the device where the batch is."""

    @abstractmethod
    def held_out(self) -> Batch:
        """One fixed batch that no training step sees."""

    @abstractmethod
    def samples(self, model: nn.Module, seed: int) -> Samples:
        """The work of the model on held-out captions, with its score."""

    def __post_init__(self) -> None:
        self.check_at_least_one("steps", "batch")
        if not 0 < self.learning_rate < math.inf:
            raise BadInput("task.learning_rate", self.learning_rate, "use a number above 0")
        if not 0 <= self.warmup <= self.steps:
            raise BadInput("task.warmup", self.warmup, f"use 0 up to task.steps, {self.steps}")
        for name in ("weight_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BadInput(f"task.{name}", getattr(self, name), "use a number of at least 0")

    def check_at_least_one(self, *names: str) -> None:
        """Raise BadInput for the first of these fields that is below 1."""
        for name in names:
            if getattr(self, name) < 1:
                raise BadInput(f"task.{name}", getattr(self, name), "use at least 1")

    def replicates(self, seeds: int | None = None) -> int:
        """One unless told otherwise: each is a whole run, and one of its reference."""
        return 1 if seeds is None else seeds

    def rate_at(self, step: int) -> float:
        """The learning rate of a step: linear over the first `warmup` steps, then half a cosine down to a tenth at the last."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A module whose initial weights depend on the seed alone; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return make()


_HELD_OUT = 2**31  # seed of what a held-out batch draws; seeds of runs lie below
_BYTES = 256  # different tokens of a text
_WINDOWS = 32  # of held-out text


@dataclass(frozen=True)
class TextToImage(Task):
    """A small diffusion transformer that makes pictures of captions by rectified flow.

    The defaults are the small size, for a CPU: 0.95 million parameters. In 400 steps its held-out loss falls from 0.099 to 0.012,
    and 0.29 of its pictures of held-out captions have all shapes and colours right, of an untrained model's 0.02. `full` is the
    large size, for a GPU.
    """

    data: Scenes | Folder = field(default_factory=Scenes)
    steps: int = setting(350, "training steps")
    batch: int = setting(32, "pictures of a step, over all ranks")
    picture: int = setting(32, "height and width of a picture", "pixels")
    patch: int = setting(4, "height and width of what becomes one token", "pixels")
    width: int = setting(96, "of the tokens of the model")
    depth: int = setting(4, "blocks of the model")
    heads: int = setting(3, "heads of attention; width / heads is head_dim")
    qk_norm: bool = setting(True, "normalise q and k of each head by their root mean square")
    dropped: float = setting(0.1, "share of training captions left out, for guidance")
    guidance: float = setting(1.0, "weight of the caption when sampling; 1 is none")
    sampled: int = setting(64, "held-out captions that pictures are made for")
    euler_steps: int = setting(20, "steps of a sample from noise to picture")

    @classmethod
    def full(cls) -> TextToImage:
        """10.0 million parameters, 256 tokens, head_dim 64, for one GPU; scenes use all the room that there is."""
        large = cls(Scenes(1.0), steps=2000, batch=64, learning_rate=1e-3, warmup=100, patch=2, width=256, depth=7, heads=4)
        return replace(large, guidance=1.5, sampled=256, euler_steps=40)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_one("picture", "patch", "width", "depth", "heads", "sampled", "euler_steps")
        if self.picture % self.patch:
            raise BadInput("task.patch", self.patch, f"use a divisor of task.picture, {self.picture}")
        if self.width % self.heads or self.width % 4:
            raise BadInput("task.width", self.width, f"use a multiple of 4 and of task.heads, {self.heads}")
        if not 0 <= self.dropped < 1:
            raise BadInput("task.dropped", self.dropped, "use a share from 0 to below 1")
        if not math.isfinite(self.guidance):
            raise BadInput("task.guidance", self.guidance, "use a finite number; 1 is no guidance")
        self.data.held_out(1, self.picture)  # raises BadInput for an image that cannot be read, before anything is trained

    def model(self, seed: int) -> nn.Module:
        return seeded(lambda: DiffusionTransformer(self), seed)

    def batch_of(self, step: int, seed: int) -> Batch:
        """Pictures, tokens of captions (a share `dropped` of them all NULL), noise and times."""
        drawn = self.data.drawn(step, seed, self.batch, self.picture)
        dropped = stream(Purpose.DROPPED, seed, step).random(self.batch) < self.dropped
        tokens = torch.where(torch.from_numpy(dropped)[:, None], NULL, drawn.tokens)
        return self._batch(drawn.pictures, tokens, step, seed)

    def held_out(self) -> Batch:
        drawn = self.data.held_out(self.sampled, self.picture)
        return self._batch(drawn.pictures, drawn.tokens, 0, _HELD_OUT)

    def loss(self, model: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        return flow_loss(lambda x, time: model(x, time, batch["tokens"]), batch["noise"], batch["pictures"], batch["time"])

    def samples(self, model: nn.Module, seed: int) -> Samples:
        """Pictures for held-out captions by Euler's method, and what the data says of them."""
        captioned = self.data.held_out(self.sampled, self.picture)
        device = next(model.parameters()).device
        noise = normal(Purpose.SAMPLES, seed, 0, captioned.pictures.shape).to(device)
        tokens = captioned.tokens.to(device)

        def predicted(x: Tensor, time: Tensor) -> Tensor:
            """With classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598), the same for f as for v, linear in f."""
            picture: Tensor = model(x, time, tokens)
            if self.guidance == 1:
                return picture
            without: Tensor = model(x, time, torch.full_like(tokens, NULL))
            return without + self.guidance * (picture - without)

        with torch.no_grad():
            made = flowed(predicted, noise, self.euler_steps).clamp(-1, 1).float().cpu()
        return Samples(self.data.score(made, captioned.captions), made)

    def _batch(self, pictures: Tensor, tokens: Tensor, step: int, seed: int) -> Batch:
        time = stream(Purpose.TIMES, seed, step).random(len(pictures), dtype="float32")
        noise = normal(Purpose.NOISE, seed, step, pictures.shape)
        return {"pictures": pictures, "tokens": tokens, "noise": noise, "time": torch.from_numpy(time)}


@dataclass(frozen=True)
class Language(Task):
    """A small causal language model of the bytes of a text."""

    data: Text = field(default_factory=Text)
    steps: int = setting(300, "training steps")
    batch: int = setting(16, "sequences of a step, over all ranks")
    length: int = setting(128, "bytes that a sequence predicts from")
    width: int = setting(128, "of the tokens of the model")
    depth: int = setting(4, "blocks of the model")
    heads: int = setting(4, "heads of attention; width / heads is head_dim")
    qk_norm: bool = setting(True, "normalise q and k of each head by their root mean square")
    experts: int = setting(
        0,
        "experts of the second block, of which each token is routed to two, beside the gated delta rule in place of attention in "
        "the first; 0 has neither",
        "count",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_one("length", "width", "depth", "heads")
        if self.experts and (self.experts < 3 or self.depth < 2):
            raise BadInput("task.experts", self.experts, "give at least 3 and task.depth of at least 2, or 0")
        if self.width % self.heads:
            raise BadInput("task.width", self.width, f"use a multiple of task.heads, {self.heads}")
        self.data.ready(self.length + 1)

    def model(self, seed: int) -> nn.Module:
        return seeded(lambda: LanguageModel(self), seed)

    def batch_of(self, step: int, seed: int) -> Batch:
        return {"tokens": self.data.drawn(step, seed, self.batch, self.length + 1)}

    def held_out(self) -> Batch:
        return {"tokens": self.data.held_out(_WINDOWS, self.length + 1)}

    def loss(self, model: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        """Mean of -log p(token | those before it) over all tokens but the first of each sequence, in nats; FP32."""
        tokens = batch["tokens"]
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def samples(self, model: nn.Module, seed: int) -> Samples:
        """No text is kept; the score is the share of held-out bytes that are predicted."""
        tokens = self.held_out()["tokens"].to(next(model.parameters()).device)
        with torch.no_grad():
            right = model(tokens[:, :-1]).argmax(dim=-1) == tokens[:, 1:]
        return Samples(right.double().mean().item())


Tokens: TypeAlias = Float[Tensor, "batch tokens width"]


class RootMeanSquare(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) times a learned weight (Zhang and Sennrich 2019), in the dtype of x."""

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), 1e-6).to(x.dtype)


class Attention(nn.Module):
    """Attention of tokens to themselves, or to something of the width `context`.

    `qk_norm` normalises q and k of each head by their root mean square (Henry et al. 2020, arXiv 2010.04245; Dehghani et al.
    2023, arXiv 2302.05442), which bounds the logits and with them the growth that makes losses spike.
    """

    def __init__(self, width: int, heads: int, *, context: int = 0, qk_norm: bool = True, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(context or width, 2 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.q_norm, self.k_norm = (RootMeanSquare(width // heads) if qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tokens, context: Float[Tensor, "batch keys other"] | None = None) -> Tokens:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(x if context is None else context).unflatten(-1, (2, self.heads, -1)).transpose(1, 3).unbind(2)
        out = functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=self.causal)
        return self.out(out.transpose(1, 2).flatten(2))


def _mlp(width: int, times: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, times * width), nn.GELU(approximate="tanh"), nn.Linear(times * width, width))


def _wide(x: Tensor) -> Tensor:
    """In FP32, unless it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@wrap_torch_function(lambda x, w, k: (x, w))
def route(x: Float[Tensor, "*batch width"], w: Float[Tensor, "experts width"], k: int) -> Float[Tensor, "*batch experts"]:
    """Softmax of `x w^T` over the k experts of a token that score highest, 0 for others (Shazeer et al. 2017, section 2.1)."""
    top, places = _wide(x @ w.T).topk(k, -1)
    return x.new_zeros(*x.shape[:-1], len(w)).scatter(-1, places, top.softmax(-1).to(x.dtype))


@wrap_torch_function(lambda *inputs: inputs)
def scan(
    q: Float[Tensor, "heads tokens key"],
    k: Float[Tensor, "heads tokens key"],
    v: Float[Tensor, "heads tokens value"],
    g: Float[Tensor, "heads tokens"],
    beta: Float[Tensor, "heads tokens"],
) -> Float[Tensor, "heads tokens value"]:
    """The gated delta rule token by token: `o_t = S_t^T q_t`, `S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T`.

    a_t = exp(g_t) (Yang et al. 2024, arXiv 2412.06464, section 3.1).
    """
    state, a, outputs = q.new_zeros(len(q), q.shape[-1], v.shape[-1]), g.exp()[..., None, None], list[Tensor]()
    for t in range(q.shape[1]):
        state = a[:, t] * state
        row = k[:, t, :, None]
        state = state + row * (beta[:, t, None, None] * (v[:, t, None] - row.mT @ state))
        outputs.append(q[:, t, None] @ state)
    return torch.cat(outputs, 1)


class DeltaRule(nn.Module):
    """Linear attention by the gated delta rule, in place of attention; rows of q and k have length 1."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.gates = nn.Linear(width, 2 * heads)
        nn.init.constant_(self.gates.bias[:heads], 3.0)  # a_t = 0.95: the state lasts

    def forward(self, x: Tokens) -> Tokens:
        q, k, v = _wide(self.qkv(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2)
        g, beta = _wide(self.gates(x)).unflatten(-1, (2, self.heads)).permute(2, 0, 3, 1).flatten(1, 2)
        o = scan(functional.normalize(q, dim=-1), functional.normalize(k, dim=-1), v, functional.logsigmoid(g), beta.sigmoid())
        return self.out(o.unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2).to(x.dtype))


class Experts(nn.Module):
    """A mixture of MLPs of half the usual hidden width, of which each token is routed to two."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(experts, width) / math.sqrt(width))
        self.experts = nn.ModuleList(_mlp(width, 2) for _ in range(experts))

    def forward(self, x: Tokens) -> Tokens:
        tokens, weights = x.flatten(0, -2), route(x, self.router, 2).flatten(0, -2)
        out = torch.zeros_like(tokens)
        for weight, expert in zip(weights.unbind(-1), self.experts, strict=True):
            own = weight.nonzero().flatten()
            out = out.index_add(0, own, (weight[own, None] * expert(tokens[own])).to(out.dtype))
        return out.view_as(x)


class LanguageModel(nn.Module):
    """Pre-norm blocks of causal self-attention and an MLP, with learned positions (Radford et al. 2019).

    With `experts` the first block has the gated delta rule in place of attention, and the second so many experts in place of its
    MLP.
    """

    def __init__(self, task: Language) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_BYTES, task.width)
        self.places = nn.Parameter(torch.randn(task.length, task.width) * 0.02)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.Sequential(*(_CausalBlock(task) for _ in range(task.depth)))
        if task.experts:
            self.blocks[0].attention = DeltaRule(task.width, task.heads)
            self.blocks[1].mlp = Experts(task.width, task.experts)
        self.norm = RootMeanSquare(task.width)
        self.out = nn.Linear(task.width, _BYTES, bias=False)
        nn.init.zeros_(self.out.weight)

    def hidden(self, tokens: Int[Tensor, "batch tokens"]) -> Tokens:
        """The input of the head."""
        return self.norm(self.blocks(self.tokens(tokens) + self.places[: tokens.shape[1]]))

    def forward(self, tokens: Int[Tensor, "batch tokens"]) -> Float32[Tensor, "batch tokens vocabulary"]:
        """Logits of the token behind each; before training all are 0."""
        return self.out(self.hidden(tokens)).float()


class _CausalBlock(nn.Module):
    def __init__(self, task: Language) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RootMeanSquare(task.width), RootMeanSquare(task.width)
        self.attention = Attention(task.width, task.heads, qk_norm=task.qk_norm, causal=True)
        self.mlp = _mlp(task.width)

    def forward(self, x: Tokens) -> Tokens:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


Pictures: TypeAlias = Float[Tensor, "batch 3 height width"]
Times: TypeAlias = Float[Tensor, " batch"]
_WORD = 64  # width of a word's embedding
_WAVES = 128  # width of the embedding of time


class DiffusionTransformer(nn.Module):
    """The picture that a noisy one becomes, at a time and under a caption.

    The blocks are adaLN-zero (Peebles and Xie 2022, arXiv 2212.09748, section 3.2): time and caption make shift, scale and gate
    of self-attention and of the MLP. Between the two, patches attend to the caption's tokens. All gates, the projection behind
    cross-attention and the output start at zero: each block starts as the identity, and the picture as 0. Captions are padded
    with a learned token that is attended to like any other, so no call of attention has a mask.

    There is no host synchronisation and no shape that depends on data, so a CUDA graph can capture a step. Under autocast and
    with weights of a narrower dtype the picture is returned in FP32.
    """

    def __init__(self, task: TextToImage) -> None:
        super().__init__()
        self.patch, self.across = task.patch, task.picture // task.patch
        width, pixels = task.width, 3 * task.patch * task.patch
        self.into = nn.Linear(pixels, width)
        self.places = nn.Parameter(_waves_of_places(self.across, width))
        self.words = nn.Embedding(task.data.tokens, _WORD)
        self.order = nn.Parameter(torch.randn(task.data.length, _WORD) * 0.5)
        self.caption = nn.Linear(task.data.length * _WORD, width)
        self.time = nn.Sequential(nn.Linear(_WAVES, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(task) for _ in range(task.depth))
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.modulation = _zero(nn.Linear(width, 2 * width))
        self.out = _zero(nn.Linear(width, pixels))

    def forward(self, noisy: Pictures, time: Times, tokens: Int[Tensor, "batch length"]) -> Pictures:
        dtype, n, p = self.into.weight.dtype, self.across, self.patch
        x = self.into(functional.pixel_unshuffle(noisy, p).flatten(2).mT.contiguous().to(dtype)) + self.places
        words = self.words(tokens) + self.order
        state = functional.silu(self.time(waves(time).to(dtype)) + self.caption(words.flatten(1)))
        for block in self.blocks:
            x = block(x, words, state)
        shift, scale = self.modulation(state)[:, None].chunk(2, dim=-1)
        x = self.out(self.norm(x) * (1 + scale) + shift).float().reshape(-1, n, n, 3, p, p)
        return x.permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, n * p, n * p)


class Block(nn.Module):
    """Self-attention, cross-attention to the caption, and an MLP, each added to what comes in; starts as the identity."""

    def __init__(self, task: TextToImage) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(task.width, eps=1e-6, elementwise_affine=False)
        self.modulation = _zero(nn.Linear(task.width, 6 * task.width))
        self.attention = Attention(task.width, task.heads, qk_norm=task.qk_norm)
        self.cross = Attention(task.width, task.heads, context=_WORD, qk_norm=task.qk_norm)
        _zero(self.cross.out)
        self.mlp = _mlp(task.width)

    def forward(self, x: Tokens, words: Float[Tensor, "batch length word"], state: Float[Tensor, "batch width"]) -> Tokens:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(state)[:, None].chunk(6, dim=-1)
        x = x + gate * self.attention(self.norm(x) * (1 + scale) + shift)
        x = x + self.cross(self.norm(x), words)
        return x + mlp_gate * self.mlp(self.norm(x) * (1 + mlp_scale) + mlp_shift)


def waves(time: Times) -> Float[Tensor, "batch waves"]:
    """cos and sin of 1000 t at frequencies from 1 to 1 / 10,000, as the positions of Vaswani et al. 2017, section 3.5; FP32."""
    half = _WAVES // 2
    steps = torch.arange(half, device=time.device, dtype=torch.float32)
    angles = 1000 * time.float()[:, None] * torch.exp(-math.log(10_000) / half * steps)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _waves_of_places(across: int, width: int) -> Float[Tensor, "tokens width"]:
    """Initial embedding of patches: a half of the width waves over rows, the other half over columns.

    Their frequencies rise evenly to a half wave per patch, so that neighbours differ and any smooth kernel of the distance is an
    inner product of embeddings.
    """
    quarter = width // 4
    frequencies = torch.exp(-math.log(100) / quarter * torch.arange(quarter))
    angles = torch.cartesian_prod(torch.arange(across), torch.arange(across))[..., None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(1)


def _zero(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


Prediction = Callable[[Tensor, Tensor], Tensor]
"""f(x, t): the pictures [batch, ...] that noisy ones [batch, ...] at times [batch] become."""


def flow_loss(
    picture_of: Prediction, noise: Float32[Tensor, "batch ..."], picture: Float32[Tensor, "batch ..."], time: Times
) -> Float32[Tensor, ""]:
    """Mean of (1 - t)^2 || (X_1 - X_0) - v(X_t, t) ||^2, which is that of || X_1 - f(X_t, t) ||^2; FP32.

    Rectified flow minimises E || (X_1 - X_0) - v(X_t, t) ||^2 with X_t = (1 - t) X_0 + t X_1 from noise X_0 to a picture X_1
    (Liu, Gong and Liu 2022, arXiv 2209.03003, equation 1; Lipman et al. 2022, arXiv 2210.02747, equation 23 with sigma_min = 0).
    Here the model predicts the picture, f = X_t + (1 - t) v, which lies in far fewer dimensions than the velocity (Li and He
    2025, arXiv 2511.13720), and the weight (1 - t)^2 keeps the last details, where noise is nearly gone, from outweighing the
    rest. The minimum is the same at every weight: the mean of X_1 over all that pass X_t at t. Mean over batch and pixels.
    """
    t = time.reshape(-1, *[1] * (noise.dim() - 1))
    return (picture_of(torch.lerp(noise, picture, t.expand_as(noise)), time).float() - picture).square().mean()


def flowed(picture_of: Prediction, noise: Float[Tensor, "batch ..."], steps: int) -> Float[Tensor, "batch ..."]:
    """The picture at t = 1 to which dx/dt = v(x, t) = (f(x, t) - x) / (1 - t) leads from noise, by Euler's method in equal steps.

    Exact, but for rounding, where the flow is straight: v is then the same along the way.
    """
    x = noise
    for step in range(steps):
        time = x.new_full((len(x),), step / steps)
        velocity = (picture_of(x, time) - x) / (1 - time).reshape(-1, *[1] * (x.dim() - 1))
        x = x + velocity / steps
    return x
