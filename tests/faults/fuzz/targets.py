"""All fuzz targets by name."""

from faults.fuzz import (
    checkpoint_targets,
    config_targets,
    data_targets,
    http_targets,
    journal_targets,
)
from faults.fuzz.common import Target

MODULES = (config_targets, checkpoint_targets, journal_targets, data_targets, http_targets)
TARGETS: dict[str, Target] = {
    target.name: target for module in MODULES for target in module.TARGETS
}
