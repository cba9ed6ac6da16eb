"""How a Megatron checkpoint is split over ranks, and its parameter names."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_rlxf.config.architecture import possible_sizes, qkv_rows, whole_groups
from mindspeed_rlxf.config.problems import Problem, UserError, divisors, use
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import (
    RM_HEAD,
    SCORE_HEAD,
    Head,
    StageParameter,
    padded_vocab_size,
    stage_parameters,
)

RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
RANK_FILE = "model_optim_rng.pt"
TRACKER = "latest_checkpointed_iteration.txt"
TP, PP = "--target-tensor-parallel-size", "--target-pipeline-parallel-size"
EP, CHUNK = "--target-expert-parallel-size", "--num-layers-per-virtual-pipeline-stage"
ITERATION = 1  # of weights that come from Hugging Face


@dataclass(frozen=True)
class MegatronLayout:
    """A checkpoint's parallel layout."""

    tp: int
    ep: int
    stages: tuple[tuple[range, ...], ...]  # [pp][chunks], layers of each chunk of each rank
    vocab_multiple: int = 1  # rows of the embedding of each rank are a multiple of this

    @property
    def pp(self) -> int:
        """Pipeline-parallel size."""
        return len(self.stages)

    @property
    def chunks(self) -> int:
        """Model chunks per rank (virtual pipeline)."""
        return len(self.stages[0])

    def vocab_rows(self, architecture: ArchitectureConfig) -> int:
        """Return the embedding rows per tensor-parallel rank, with padding."""
        return padded_vocab_size(architecture, self.tp * self.vocab_multiple) // self.tp

    def rank_folder(self, tp_rank: int, pp_rank: int, ep_rank: int) -> str:
        """Return a rank's folder name as in Megatron, mp_rank_TT[_PPP][_EEE]."""
        pipeline = f"_{pp_rank:03d}" if self.pp > 1 else ""
        expert = f"_{ep_rank:03d}" if self.ep > 1 else ""
        return f"mp_rank_{tp_rank:02d}{pipeline}{expert}"

    def parameters(
        self, architecture: ArchitectureConfig, head: Head, pp_rank: int, chunk: int, ep_rank: int
    ) -> Iterator[StageParameter]:
        """Yield the parameters in a rank's model chunk, by GPTModel names."""
        layers = self.stages[pp_rank][chunk]
        stage = chunk * self.pp + pp_rank
        num_stages = self.chunks * self.pp
        for parameter in stage_parameters(
            architecture, head, stage, num_stages, ep_rank, self.ep, layers
        ):
            yield RM_HEAD if parameter == SCORE_HEAD else parameter

    def parameters_of_any_head(
        self, architecture: ArchitectureConfig, pp_rank: int, chunk: int, ep_rank: int
    ) -> list[StageParameter]:
        """Return the parameters in a rank's model chunk, with all heads."""
        by_name: dict[str, StageParameter] = {}
        for head in Head:
            for parameter in self.parameters(architecture, head, pp_rank, chunk, ep_rank):
                by_name[parameter.name] = parameter
        return list(by_name.values())


def make_layout(
    architecture: ArchitectureConfig,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    layers_per_chunk: int | None = None,
    layer_list: list[int] | None = None,
    vocab_multiple: int = 1,
) -> MegatronLayout:
    """Make a layout with these parallel sizes.

    `layers_per_chunk` is per virtual stage, `layer_list` per pipeline rank, `vocab_multiple`
    divides the embedding rows per rank.

    Raises:
        UserError: the sizes do not fit the model.
    """
    problems = [
        *_find_size_problems(architecture, tp, ep, vocab_multiple),
        *_find_layer_problems(architecture.num_layers, pp, layers_per_chunk, layer_list),
    ]
    if problems:
        raise UserError(problems)
    chunks = architecture.num_layers // (pp * layers_per_chunk) if layers_per_chunk else 1
    counts = layer_list or [architecture.num_layers // (pp * chunks)] * (pp * chunks)
    return layout_of(counts, tp, pp, ep, vocab_multiple)


def layout_of(counts: list[int], tp: int, pp: int, ep: int, vocab_multiple: int) -> MegatronLayout:
    """Make a layout from the layer count per pipeline stage, in model order, unchecked."""
    layers = []
    start = 0
    for count in counts:
        layers.append(range(start, start + count))
        start += count
    stages = tuple(tuple(layers[rank::pp]) for rank in range(pp))
    return MegatronLayout(tp, ep, stages, vocab_multiple)


def _find_size_problems(
    a: ArchitectureConfig, tp: int, ep: int, vocab_multiple: int
) -> Iterator[Problem]:
    """Yield problems with the tensor and expert parallel sizes and `vocab_multiple`."""
    sizes = {
        "attention heads": a.num_attention_heads,
        "rows of query, key and value": qkv_rows(a),
        "rows of the MLP": a.mlp_hidden_size,
        "hidden size": a.hidden_size,
    }
    for flag, value in ((TP, tp), (EP, ep), ("--make-vocab-size-divisible-by", vocab_multiple)):
        if value < 1:
            yield Problem(flag, "must be at least 1", value, "use 1 or more")
            return
    undivided = [f"{name} {size}" for name, size in sizes.items() if size % tp]
    if not whole_groups(a, tp):
        undivided.insert(0, f"query groups {a.kv_heads} (or be a multiple of them)")
    if undivided:
        legal_sizes = [n for n in possible_sizes(a) if a.hidden_size % n == 0]
        yield Problem(TP, f"must divide the model's {', '.join(undivided)}", tp, use(legal_sizes))
    if ep > 1 and (a.num_experts or 1) % ep:
        rule = f"must divide the model's {a.num_experts or 'one (dense)'} experts"
        yield Problem(EP, rule, ep, use(divisors(a.num_experts or 1)))


def _find_layer_problems(
    num_layers: int, pp: int, layers_per_chunk: int | None, layer_list: list[int] | None
) -> Iterator[Problem]:
    """Yield at most one problem with the flags distributing layers over the pipeline."""
    if pp < 1:
        yield Problem(PP, "must be at least 1", pp, "use 1 or more")
    elif layers_per_chunk is not None and layer_list is not None:
        yield Problem(
            "--num-layer-list", f"must not be given with {CHUNK}", remedy="remove one of them"
        )
    elif layer_list is not None:
        if len(layer_list) != pp or sum(layer_list) != num_layers or min(layer_list) < 1:
            numbers = f"{pp} positive numbers (one for each pipeline rank)"
            rule = f"must be {numbers} with the sum {num_layers}"
            value = ",".join(map(str, layer_list))
            yield Problem("--num-layer-list", rule, value, "correct it")
    elif layers_per_chunk is not None:
        if pp < 2:
            yield Problem(CHUNK, f"needs {PP} of at least 2, not {pp}", remedy="remove it")
        elif layers_per_chunk < 1 or num_layers % (pp * layers_per_chunk):
            rule = f"times {pp} pipeline ranks must divide the model's {num_layers} layers"
            legal_counts = divisors(num_layers // pp) if num_layers % pp == 0 else []
            yield Problem(CHUNK, rule, layers_per_chunk, use(legal_counts))
    elif num_layers % pp:
        remedy = f"{use(divisors(num_layers))}, or give --num-layer-list"
        yield Problem(PP, f"must divide the model's {num_layers} layers", pp, remedy)


def single_rank(architecture: ArchitectureConfig, vocab_multiple: int = 1) -> MegatronLayout:
    """Make the layout with the whole model on one rank."""
    return MegatronLayout(1, 1, ((range(architecture.num_layers),),), vocab_multiple)
