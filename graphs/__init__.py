"""How a forward pass is launched. Knows tensors, not requests."""

from .decode_graph import CapturablePlan, GraphSupport
from .forward_model import ForwardModel
from .graph import CaptureError, Graph, GraphPool
from .graph_runner import GraphMode, GraphOptions, GraphRunner, PreparedStep
from .region_compiler import RegionCompiler, RegionStatistics, compiler_refusal
from .step_statistics import Launch, StepStatistics

__all__ = [
    "CapturablePlan",
    "CaptureError",
    "ForwardModel",
    "Graph",
    "GraphMode",
    "GraphOptions",
    "GraphPool",
    "GraphRunner",
    "GraphSupport",
    "Launch",
    "PreparedStep",
    "RegionCompiler",
    "RegionStatistics",
    "StepStatistics",
    "compiler_refusal",
]
