"""The ceiling: the floor under a decode step from measured bandwidth, all-reduce latency and bytes moved.
Pure, except for :func:`checkpoint_tensors`, which reads file headers.
"""

from perfbook.ceiling.floor import Floor, FloorPart, Machine, decode_floor, implied_bandwidth_bytes_s
from perfbook.ceiling.levers import Lever, Requirement, levers, to_reach
from perfbook.ceiling.shape import ModelShape, Tensor, checkpoint_tensors, distinct_experts, model_shape

__all__ = [
    "Floor",
    "FloorPart",
    "Lever",
    "Machine",
    "ModelShape",
    "Requirement",
    "Tensor",
    "checkpoint_tensors",
    "decode_floor",
    "distinct_experts",
    "implied_bandwidth_bytes_s",
    "levers",
    "model_shape",
    "to_reach",
]
