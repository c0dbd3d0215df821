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
    serves_users,
    serving_name,
)
from prodrl_operator.builders.network import network_policies
from prodrl_operator.builders.preview import preview
from prodrl_operator.builders.serving import engine_args, serving, serving_budget
from prodrl_operator.builders.steps import StepInputs, step_job

__all__ = [
    "Platform",
    "StepInputs",
    "engine_args",
    "gateway",
    "gateway_name",
    "job_name",
    "network_policies",
    "preview",
    "round_name",
    "round_object",
    "route_table",
    "routes_config_map",
    "routes_name",
    "serves_users",
    "serving",
    "serving_budget",
    "serving_name",
    "step_job",
]
