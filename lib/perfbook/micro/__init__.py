"""Micro-benchmarks of the devices that serve: memory bandwidth, matrix products, all-reduce.

They measure what a decode step is made of, in processes of their own: a setting's environment cannot leak into the
next measurement, a CUDA context does not outlive it, and a communication that hangs is ended by a deadline. On a GPU
everything is timed by events around a CUDA graph (at decode sizes a launch from Python would cost more than the
work), on a CPU by wall time.
"""

from perfbook.micro.allreduce import all_reduce
from perfbook.micro.device import measure_device, read_bench
from perfbook.micro.nccl_log import NcclLog, read_nccl_log
from perfbook.micro.results import AllReduce, Bandwidth, DeviceBench, Gemm, Message
from perfbook.micro.shapes import GemmShape, gemm_shapes

__all__ = [
    "AllReduce",
    "Bandwidth",
    "DeviceBench",
    "Gemm",
    "GemmShape",
    "Message",
    "NcclLog",
    "all_reduce",
    "gemm_shapes",
    "measure_device",
    "read_bench",
    "read_nccl_log",
]
