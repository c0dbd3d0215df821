"""Configuration: what the operator writes and the runtime reads. Pydantic only, no torch, no I/O beyond ``read``.

One class a process: :class:`GatewayConfig`, :class:`RecorderConfig`, :class:`CollectConfig`,
:class:`TrainConfig`, :class:`ExportConfig`, :class:`EvaluateConfig`; the parts that several share are in
``common``. Results travel back through the classes of ``results`` (the termination message).
"""

from prodrl.config.common import PolicyRef, SamplingPolicy, StoreConfig
from prodrl.config.model import Config
from prodrl.config.results import (
    AgreementFigures,
    CollectResult,
    EvaluateResult,
    ExportResult,
    Failure,
    PairedFigures,
    TrainResult,
)
from prodrl.config.serving import GatewayConfig, RecorderConfig, Route, RouteTable
from prodrl.config.steps import (
    CollectConfig,
    CorrectionConfig,
    EvaluateConfig,
    EvaluationConfig,
    ExportConfig,
    FetchConfig,
    KlConfig,
    OptimizerConfig,
    TrainConfig,
)

__all__ = [
    "AgreementFigures",
    "CollectConfig",
    "CollectResult",
    "Config",
    "CorrectionConfig",
    "EvaluateConfig",
    "EvaluateResult",
    "EvaluationConfig",
    "ExportConfig",
    "ExportResult",
    "Failure",
    "FetchConfig",
    "GatewayConfig",
    "KlConfig",
    "OptimizerConfig",
    "PairedFigures",
    "PolicyRef",
    "RecorderConfig",
    "Route",
    "RouteTable",
    "SamplingPolicy",
    "StoreConfig",
    "TrainConfig",
    "TrainResult",
]
