"""Manifests, pure: a run and a round in, dicts out. Called by ``controller``; applying twice changes nothing.

Commands are always explicit and results come back through the termination message file, so that the same manifests run
as pods from images and as processes of the local environment. Paths appear in arguments and environment only, never
inside a ConfigMap: the local environment translates mount paths there.
"""

from prodrl_operator.builders.gateway import gateway, route_table, routes_config_map
from prodrl_operator.builders.metadata import (
    Platform,
    gateway_name,
    job_name,
    round_name,
    round_object,
    routes_name,
    serving_name,
)
from prodrl_operator.builders.serving import engine_args, serving
from prodrl_operator.builders.steps import StepInputs, step_job

__all__ = [
    "Platform",
    "StepInputs",
    "engine_args",
    "gateway",
    "gateway_name",
    "job_name",
    "round_name",
    "round_object",
    "route_table",
    "routes_config_map",
    "routes_name",
    "serving",
    "serving_name",
    "step_job",
]
