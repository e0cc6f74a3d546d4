"""What a process reads from its environment: ringdp's own variables, and the place in the job that its launcher set.

`variables` has the table of all ``RINGDP_*`` variables and reads them; `environments` knows the launchers.
"""

from ringdp.config.environments import LaunchEnvironment, launch_environment
from ringdp.config.parse import parse_rate
from ringdp.config.secret import read_secret
from ringdp.config.variables import (
    ADMITS_MARK,
    CHECKSUM_BY_DEFAULT,
    ELASTIC_MARK,
    FIRST_MARK,
    MEMBER_MARK,
    VARIABLES,
    RingConfig,
    apply_log_level,
    cuda_choice,
    ddp_environment,
    elastic,
    gradient_pool,
    has_own_agent,
    host_identity,
    joins,
    mark_rank,
    metrics_dir,
    reduce_alone,
    refuse_inside_rank,
    report_every,
    report_file,
    tensorboard,
    timeline_dir,
    unknown_variables,
    unmark_rank,
    visible_cuda_devices,
)

__all__ = [
    "ADMITS_MARK",
    "CHECKSUM_BY_DEFAULT",
    "ELASTIC_MARK",
    "FIRST_MARK",
    "MEMBER_MARK",
    "VARIABLES",
    "LaunchEnvironment",
    "RingConfig",
    "apply_log_level",
    "cuda_choice",
    "ddp_environment",
    "elastic",
    "gradient_pool",
    "has_own_agent",
    "host_identity",
    "joins",
    "launch_environment",
    "mark_rank",
    "metrics_dir",
    "parse_rate",
    "read_secret",
    "reduce_alone",
    "refuse_inside_rank",
    "report_every",
    "report_file",
    "tensorboard",
    "timeline_dir",
    "unknown_variables",
    "unmark_rank",
    "visible_cuda_devices",
]
