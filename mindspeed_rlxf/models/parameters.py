"""The parameter map: one table serves loading, export and weight transfer.

Each row lists the Hugging Face tensors making up a Megatron parameter, and its split over
tensor-parallel (tp) ranks. `shard_slices` returns the Hugging Face slices in a rank's shard;
reading joins them, export writes them back.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from mindspeed_rlxf.config.architecture import qkv_rows
from mindspeed_rlxf.config.schema import ArchitectureConfig


class Head(str, Enum):
    """Output layer kind, computing from the final hidden states."""

    LANGUAGE_MODEL = "language_model"  # logits over the vocabulary
    SCORE = "score"  # one number per token (AutoModelForSequenceClassification, num_labels=1)


class Split(Enum):
    """How a parameter is split over tensor-parallel ranks."""

    REPLICATED = "replicated"
    VOCAB = "vocab"  # rows, padded to a multiple of tp
    COLUMNS = "columns"  # second axis (row-parallel linear)
    QKV = "qkv"  # query, key and value rows interleaved by query group
    ROWS = "rows"  # an equal share of each source's rows, gate before up


@dataclass(frozen=True)
class StageParameter:
    """A Megatron parameter in one pipeline stage.

    Its name counts layers from 0 in the stage, and experts from 0 on the expert-parallel rank;
    sources have global numbers. The tables below have `{layer}` and `{expert}` for both.
    """

    name: str
    sources: tuple[str, ...]  # Hugging Face tensors
    split: Split
    expert: int | None = None  # global number; None = every expert-parallel rank has the parameter
    shape: tuple[int, ...] = ()  # of the source, if the architecture does not tell it

    @property
    def is_of_attention(self) -> bool:
        """Whether it is a weight, bias or norm within an attention layer."""
        return ".self_attention." in self.name

    @property
    def is_tied_output_layer(self) -> bool:
        """Whether this is the last stage's output layer, copying the embedding."""
        return self.name.endswith(OUTPUT_LAYER.name) and self.sources == EMBEDDING.sources

    def hf_shape(self, source: str, architecture: ArchitectureConfig) -> tuple[int, ...]:
        """Return the shape of one of the sources."""
        return self.shape or hf_shape(source, architecture)

    def is_first_copy(self, tp_rank: int, ep_rank: int = 0) -> bool:
        """Whether a rank has the first copy of the elements; export writes it."""
        replicated = self.split is Split.REPLICATED and tp_rank > 0
        shared = self.expert is None and ep_rank > 0
        return not (replicated or shared or self.is_tied_output_layer)


@dataclass(frozen=True)
class Slice:
    """Rows (dim 0) or columns (dim 1) [start, stop) in a Hugging Face tensor."""

    source: str
    dim: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of rows or columns."""
        return self.stop - self.start


EMBEDDING = StageParameter(
    "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Split.VOCAB
)
FINAL_NORM = StageParameter(
    "decoder.final_layernorm.weight", ("model.norm.weight",), Split.REPLICATED
)
OUTPUT_LAYER = StageParameter("output_layer.weight", ("lm_head.weight",), Split.VOCAB)
TIED_OUTPUT_LAYER = StageParameter("output_layer.weight", EMBEDDING.sources, Split.VOCAB)
SCORE_HEAD = StageParameter("score.weight", ("score.weight",), Split.REPLICATED)
# The reward head of MindSpeed-LLM's checkpoints: row-parallel, so split over the hidden size.
RM_HEAD = StageParameter("rm_head.weight", SCORE_HEAD.sources, Split.COLUMNS)

_MEGATRON_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."


def _layer(name: str, split: Split, *sources: str) -> StageParameter:
    return StageParameter(_MEGATRON_LAYER + name, tuple(_HF_LAYER + s for s in sources), split)


def _qkv_parameter(kind: str) -> StageParameter:
    sources = (f"self_attn.{name}_proj.{kind}" for name in "qkv")
    return _layer(f"self_attention.linear_qkv.{kind}", Split.QKV, *sources)


QKV_BIAS = (_qkv_parameter("bias"),)
QK_NORM = tuple(
    _layer(
        f"self_attention.{name}_layernorm.weight", Split.REPLICATED, f"self_attn.{name}_norm.weight"
    )
    for name in "qk"
)
ATTENTION = (
    _layer("input_layernorm.weight", Split.REPLICATED, "input_layernorm.weight"),
    _qkv_parameter("weight"),
    _layer("self_attention.linear_proj.weight", Split.COLUMNS, "self_attn.o_proj.weight"),
    _layer("pre_mlp_layernorm.weight", Split.REPLICATED, "post_attention_layernorm.weight"),
)
MLP = (
    _layer("mlp.linear_fc1.weight", Split.ROWS, "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    _layer("mlp.linear_fc2.weight", Split.COLUMNS, "mlp.down_proj.weight"),
)


def _moe(block: str, gate: str, up: str, down: str) -> tuple[tuple[StageParameter, ...], ...]:
    """Return parameters for a layer's router, and for each expert."""
    megatron = "mlp.experts.local_experts.{expert}"
    hf = block + ".experts.{expert}"
    fc1 = f"{hf}.{gate}.weight", f"{hf}.{up}.weight"
    return (_layer("mlp.router.weight", Split.REPLICATED, f"{block}.gate.weight"),), (
        _layer(f"{megatron}.linear_fc1.weight", Split.ROWS, *fc1),
        _layer(f"{megatron}.linear_fc2.weight", Split.COLUMNS, f"{hf}.{down}.weight"),
    )


QWEN_MOE = _moe("mlp", "gate_proj", "up_proj", "down_proj")
MIXTRAL_MOE = _moe("block_sparse_moe", "w1", "w3", "w2")


def padded_vocab_size(architecture: ArchitectureConfig, tp: int) -> int:
    """Return the vocabulary size rounded up to a multiple of tp."""
    return -(-architecture.vocab_size // tp) * tp


def equal_share(count: int, rank: int, ranks: int) -> range:
    """Return `rank`'s indices when `count` items are split evenly, in order, over `ranks`."""
    size = count // ranks
    return range(rank * size, (rank + 1) * size)


def stage_parameters(
    architecture: ArchitectureConfig,
    head: Head,
    pp_rank: int = 0,
    pp: int = 1,
    ep_rank: int = 0,
    ep: int = 1,
    layers: range | None = None,
) -> Iterator[StageParameter]:
    """Yield a pipeline stage's parameters, in the same order on every rank.

    The first stage has the embedding, the last the final norm and the head; a layer's experts
    follow its other parameters. Only a last stage that is not also the first has a tied head, as a
    copy of the embedding. Defaults to the whole model.

    Args:
        architecture: model sizes.
        head: model head.
        pp_rank: stage index.
        pp: number of stages.
        ep_rank: expert-parallel rank.
        ep: expert-parallel size; a rank has 1 / ep of each layer's experts.
        layers: the stage's global layer numbers; None = an equal share.
    """
    layers = equal_share(architecture.num_layers, pp_rank, pp) if layers is None else layers
    is_first = pp_rank == 0
    is_last = pp_rank == pp - 1
    tied = head is Head.LANGUAGE_MODEL and not architecture.untie_embeddings_and_output_weights
    router, experts = QWEN_MOE if architecture.qk_layernorm else MIXTRAL_MOE
    per_layer = ATTENTION + (MLP if architecture.num_experts is None else router)
    per_layer += QKV_BIAS if architecture.add_qkv_bias else ()
    per_layer += QK_NORM if architecture.qk_layernorm else ()
    if is_first:
        yield EMBEDDING
    for local, layer in enumerate(layers):
        for parameter in per_layer:
            yield _set_indices(parameter, local, layer)
        for index, expert in enumerate(equal_share(architecture.num_experts or 0, ep_rank, ep)):
            for parameter in experts:
                yield _set_indices(parameter, local, layer, index, expert)
    if is_last:
        yield FINAL_NORM
        if head is Head.SCORE:
            yield SCORE_HEAD
        elif not tied:
            yield OUTPUT_LAYER
        elif not is_first:
            yield TIED_OUTPUT_LAYER


def rank_parameters(
    architecture: ArchitectureConfig,
    head: Head,
    pp_rank: int,
    pp: int,
    chunks: int = 1,
    ep_rank: int = 0,
    ep: int = 1,
) -> Iterator[StageParameter]:
    """Yield the parameters in all model chunks on a pipeline rank.

    Chunk c on rank r is stage c * pp + r in a pipeline with chunks * pp stages (Megatron's virtual
    pipeline). With several chunks each name gets the prefix `{c}.`.
    """
    for chunk in range(chunks):
        position = (chunk * pp + pp_rank, chunks * pp, ep_rank, ep)
        for parameter in stage_parameters(architecture, head, *position):
            yield parameter if chunks == 1 else replace(parameter, name=f"{chunk}.{parameter.name}")


def _set_indices(
    parameter: StageParameter, local: int, layer: int, index: int = 0, expert: int | None = None
) -> StageParameter:
    return StageParameter(
        parameter.name.format(layer=local, expert=index),
        tuple(source.format(layer=layer, expert=expert) for source in parameter.sources),
        parameter.split,
        expert,
    )


def hf_shapes(architecture: ArchitectureConfig, head: Head) -> dict[str, tuple[int, ...]]:
    """Return every Hugging Face tensor's shape by name; tied: no `lm_head`."""
    shapes = {}
    for parameter in stage_parameters(architecture, head):
        for source in parameter.sources:
            shapes[source] = hf_shape(source, architecture)
    return shapes


def hf_shape(source: str, architecture: ArchitectureConfig) -> tuple[int, ...]:
    """Return the shape of Hugging Face tensor `source`. Raises KeyError if unknown."""
    return _shapes_by_ending(architecture)[source[source.rfind(".", 0, source.rfind(".")) + 1 :]]


@lru_cache(maxsize=16)
def _shapes_by_ending(architecture: ArchitectureConfig) -> dict[str, tuple[int, ...]]:
    a = architecture
    queries = a.num_attention_heads * a.head_dim
    keys = a.kv_heads * a.head_dim
    widens = (a.mlp_hidden_size, a.hidden_size)
    narrows = (a.hidden_size, a.mlp_hidden_size)
    norms = ("norm", "input_layernorm", "post_attention_layernorm")
    return {
        "embed_tokens.weight": (a.vocab_size, a.hidden_size),
        "lm_head.weight": (a.vocab_size, a.hidden_size),
        "score.weight": (1, a.hidden_size),
        "q_proj.weight": (queries, a.hidden_size),
        "k_proj.weight": (keys, a.hidden_size),
        "v_proj.weight": (keys, a.hidden_size),
        "q_proj.bias": (queries,),
        "k_proj.bias": (keys,),
        "v_proj.bias": (keys,),
        "q_norm.weight": (a.head_dim,),
        "k_norm.weight": (a.head_dim,),
        "o_proj.weight": (a.hidden_size, queries),
        "gate_proj.weight": widens,
        "up_proj.weight": widens,
        "down_proj.weight": narrows,
        "w1.weight": widens,
        "w3.weight": widens,
        "w2.weight": narrows,
        "gate.weight": (a.num_experts or 0, a.hidden_size),
        **dict.fromkeys((f"{norm}.weight" for norm in norms), (a.hidden_size,)),
    }


def shard_slices(
    parameter: StageParameter,
    architecture: ArchitectureConfig,
    tp_rank: int,
    tp: int,
    vocab_rows: int | None = None,
) -> list[Slice]:
    """Return the slices that, joined along their axis, are a rank's shard.

    They have no padding: on the last ranks a vocabulary shard may have fewer rows than the Megatron
    parameter, or none. `vocab_rows` are the embedding rows per rank; None = padded vocabulary / tp.
    """
    a = architecture
    sources = parameter.sources
    shape = parameter.hf_shape(sources[0], a)
    if parameter.split is Split.REPLICATED:
        return [Slice(sources[0], 0, 0, shape[0])]
    if parameter.split is Split.VOCAB:
        size = vocab_rows or padded_vocab_size(a, tp) // tp
        start = min(tp_rank * size, a.vocab_size)
        return [Slice(sources[0], 0, start, min(start + size, a.vocab_size))]
    if parameter.split is Split.COLUMNS:
        columns = equal_share(shape[1], tp_rank, tp)
        return [Slice(sources[0], 1, columns.start, columns.stop)]
    if parameter.split is Split.ROWS:
        rows = equal_share(shape[0], tp_rank, tp)
        return [Slice(source, 0, rows.start, rows.stop) for source in sources]
    return _qkv_slices(sources, a, tp_rank, tp)


def shard_shape(
    parameter: StageParameter,
    architecture: ArchitectureConfig,
    tp: int,
    vocab_rows: int | None = None,
) -> tuple[int, ...]:
    """Return the shard's shape on every tensor-parallel rank, with padding.

    `vocab_rows` are the embedding rows per rank; None = padded vocabulary / tp.
    """
    slices = shard_slices(parameter, architecture, 0, tp, vocab_rows)
    shape = list(parameter.hf_shape(parameter.sources[0], architecture))
    shape[slices[0].dim] = sum(piece.size for piece in slices)
    if parameter.split is Split.VOCAB and vocab_rows is not None:
        shape[0] = vocab_rows
    return tuple(shape)


def _qkv_slices(
    sources: tuple[str, ...], a: ArchitectureConfig, tp_rank: int, tp: int
) -> list[Slice]:
    """Return a rank's query, key and value slices (named by `sources`), in Megatron's row order.

    Per query group Megatron has its query heads, then its key head, then its value head. Each rank
    has an equal share of these rows, in order. If several ranks share a group, their rows begin and
    end anywhere in it, and the ranks gather their projections (megatron-core 0.16).
    """
    widths = (a.num_attention_heads // a.kv_heads * a.head_dim, a.head_dim, a.head_dim)
    rank_rows = equal_share(qkv_rows(a), tp_rank, tp)
    slices = []
    begin = 0  # of the head's rows among those of all groups
    for group in range(a.kv_heads):
        for source, width in zip(sources, widths, strict=True):
            start = max(rank_rows.start - begin, 0)
            stop = min(rank_rows.stop - begin, width)
            if start < stop:
                slices.append(Slice(source, 0, group * width + start, group * width + stop))
            begin += width
    return slices
