"""The two published trainings of ALBERT on many nodes, and their network at the scale of an emulated host.

Everything is scaled by one factor: how many micro-batches a host computes per second, over how many a node computed.
Where links have `factor` times the bandwidth too, both the computation and the exchange of a step take 1 / factor of
the time that they took, and efficiencies have to be the same. That a micro-batch of a host has fewer rows than one of a
node changes nothing in this: a step exchanges the same bytes however many rows it had.
"""

from typing import NamedTuple

from benchmarks.scaling.cluster import Network
from benchmarks.scaling.cost_model.exchange import Model

GBITS = 100.0  # of the link of a p3dn.24xlarge in each direction
# Of one TCP connection between nodes of one placement group ("Amazon EC2 instance network bandwidth", EC2 User Guide).
FLOW_GBITS = 10.0
LATENCY = 50e-6  # seconds one way; not published for these runs, usual between neighbours in a data centre
PARAMETERS = {"base": 11_813_810, "large": 17_847_474, "tiny": 574_690}  # of AlbertForPreTraining, V = 30,000


class System(NamedTuple):
    """A node of 8 V100s with mixed precision at 512 tokens, and how training scaled from one node to eight."""

    rows: int  # of a micro-batch of the node
    rate: float  # micro-batches per second of one node
    accumulate: int  # micro-batches of a step, on eight nodes
    efficiency: dict[bool, float]  # with and without accumulation, on eight nodes


# Training of AWS, 2020: p3dn.24xlarge nodes, Horovod, gradients in fp16. Steps of 4,096 rows: 8 nodes x 8 GPUs x 32
# rows x 2 micro-batches (large: 16 rows x 4). Efficiencies are the published ones. The rates are those that the head of
# models/nlp/albert/run_pretraining.py in github.com/aws-samples/deep-learning-models notes for one node, 1.82 and 0.63
# such steps a second; with those for eight, 1.72 and 0.60, they make 94.5 % and 95.2 %, and without accumulation (base,
# 3.51 and 3.13 steps a second) 89.2 %. The published 20 hours for 125,000 steps on eight nodes are 7,111 rows/s: 95.4 %
# of eight times the 932 rows/s of one node here.
SYSTEMS = {
    "base": System(8 * 32, 2 * 1.82, 2, {True: 0.95, False: 0.91}),
    "large": System(8 * 16, 4 * 0.63, 4, {True: 0.95, False: 0.85}),
}
SYSTEMS["tiny"] = SYSTEMS["base"]  # to try the scripts

# AWS and Hugging Face, 2022 ("Achieve 35% faster training with Hugging Face Deep Learning Containers"): ALBERT-base on
# masked words alone, the same 640,000 rows on every number of nodes with 16 rows a GPU, from 2,500 steps of 256 rows on
# two nodes to 313 of 2,048 on sixteen. Its nodes and their speed are taken to be those above.
EXAMPLES = 2500 * 256
NODE_ROWS = 8 * 16
GAINS = (1.14, 1.35)  # their collective library over DistributedDataParallel


def seconds_of_node(shape: str, rows: int | None = None) -> float:
    """Of a node's micro-batch of so many rows; None: as many as in the first system."""
    system = SYSTEMS[shape]
    return (rows or system.rows) / (system.rows * system.rate)


def scaled_network(scale: float, gbits: float, flow_gbits: float) -> Network:
    """Link, connection and delay at the scale of a host; `flow_gbits` 0: connections have the whole link."""
    return Network(1000 * gbits * scale, round(1e6 * LATENCY / scale), 1000 * flow_gbits * scale)


def bandwidth(network: Network, rings: int) -> float:
    """Bytes per second that an exchange on so many connections reaches on a host's link."""
    return 125_000 * min(network.rate, network.per_flow * rings or network.rate)


def cost_model(compute: float, network: Network, num_bytes: float, rings: int = 1) -> Model:
    """The model of `scaling/scaling.py` for micro-batches of so many seconds and gradients of so many bytes."""
    return Model(compute, network.delay / 1e6, 2 * num_bytes / bandwidth(network, rings))
