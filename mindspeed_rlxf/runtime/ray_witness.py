"""Looking at the workers of a run from beside them, on every node that has any."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mindspeed_rlxf.runtime.witness import Sighting, Subject, Watched, look

logger = logging.getLogger(__name__)

ANSWER_S = 30.0  # for a node: its process has to start first


def ask(workers: Sequence[Watched], stacks: bool) -> dict[tuple[str, int], Sighting]:
    """By (pool, rank), of those whose node answers in time. stacks: into their logs"""
    by_node: dict[str, list[Watched]] = defaultdict(list)
    for worker in workers:
        by_node[worker.place.node].append(worker)
    asked = {_task(node, found, stacks): found for node, found in by_node.items()}
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
    answers: dict[tuple[str, int], Sighting] = {}
    for ref, found in asked.items():
        try:
            told = ray.get(ref) if ref in ready else []
        except RayError:  # the node is gone, or cannot start a process
            told = []
        answers.update({(w.pool, w.rank): t for w, t in zip(found, told, strict=False)})
        if not told:
            host = found[0].place.host
            logger.warning("%s does not answer: no stacks and no logs of its ranks", host)
    return answers


def _task(node: str, workers: Sequence[Watched], stacks: bool) -> ray.ObjectRef:
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(look).options(num_cpus=0, max_retries=0, scheduling_strategy=where)
    return task.remote([Subject(w.rank, w.place.pid, w.log) for w in workers], stacks)
