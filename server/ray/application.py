"""The application for `serve run server.ray.application:app`: engines behind a router that matches prefixes."""

import argparse
import shlex
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from server.options import add_options, config_from
from server.ray.front import Front
from server.ray.replica import Replica


class Arguments(BaseModel):
    """The application's arguments, given as `NAME=VALUE` on Serve's command line."""

    model_config = ConfigDict(extra="forbid")

    options: str = Field("", description="options of `ramet serve` for every replica")
    replicas: int = Field(2, ge=1, description="number of engines; the minimum if `max_replicas` is given")
    max_replicas: int | None = Field(None, ge=1, description="most engines; None: always `replicas` engines")
    fronts: int = Field(1, ge=1, description="processes that tokenize and route")
    cpus: float = Field(1, ge=0, description="cores that Ray reserves for each process of an engine")
    gpus: float = Field(0, ge=0, description="GPUs that Ray reserves for each process of an engine")
    max_ongoing: int = Field(256, ge=1, description="most calls in a replica; more calls wait in the router")
    target_ongoing: float = Field(8, gt=0, description="calls per replica above which replicas are added")
    weight: float = Field(16, ge=0, description="a cached token of the prompt outweighs this many tokens of load")
    balance: float = Field(0.1, ge=0, description="a token of past work above the mean counts as this much load")

    @property
    def size(self) -> dict[str, Any]:
        """Serve's options for the number of replicas."""
        if self.max_replicas is None:
            return {"num_replicas": self.replicas}
        bounds = {"min_replicas": self.replicas, "max_replicas": self.max_replicas}
        return {"autoscaling_config": AutoscalingConfig(**bounds, target_ongoing_requests=self.target_ongoing)}


def app(given_arguments: Arguments | dict[str, Any]) -> Application:
    """Build the application for Serve, whose command line and configuration files pass a dictionary."""
    arguments = Arguments.model_validate(given_arguments)
    parser = argparse.ArgumentParser("options")
    add_options(parser)
    given = parser.parse_args(shlex.split(arguments.options))
    config, options = config_from(parser, given), vars(given)
    processes = config.model.tensor_parallel
    bundle = {"CPU": arguments.cpus}
    if arguments.gpus:
        bundle["GPU"] = arguments.gpus
    group: dict[str, Any] = {}
    if processes > 1:  # all processes of an engine must run on one machine
        group = {"placement_group_bundles": [bundle] * processes, "placement_group_strategy": "STRICT_PACK"}
    router = RequestRouterConfig(
        request_router_class="server.ray.router:PrefixRouter",
        request_router_kwargs={
            "block_size": config.cache.page_size,
            "weight": arguments.weight,
            "balance": arguments.balance,
        },
    )
    replicas = serve.deployment(
        Replica,
        name="replica",
        ray_actor_options={"num_cpus": arguments.cpus, "num_gpus": arguments.gpus},
        max_ongoing_requests=arguments.max_ongoing,
        graceful_shutdown_timeout_s=config.server.drain_time,
        health_check_period_s=2,
        request_router_config=router,
        **group,
        **arguments.size,
    ).bind(options)
    front = serve.deployment(
        Front,
        name="front",
        num_replicas=arguments.fronts,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=10_000,
    )
    return front.bind(options, replicas)
