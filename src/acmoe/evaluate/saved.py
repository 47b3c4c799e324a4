"""RUN/evaluation-*.json: scores that `acmoe evaluate` leaves for `acmoe report`."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acmoe.storage.sealed import write_sealed
from acmoe.storage.strict_json import finite_or_null

EVALUATIONS = "evaluation*.json"

# Fields with results, or with what makes no other figure. All others are settings.
_RESULTS = ("figures", "folder", "dev_accuracies", "dev_accuracy", "test_accuracy", "majority")


def save_evaluation(folder: Path, document: Mapping[str, Any]) -> Path:
    """Write the JSON of a report, with the fields `split` and `step`, into a run's folder.

    The file is named by split, step and a digest of all settings: the same evaluation replaces its
    file, and another one gets a file of its own.
    """
    whole = json.loads(json.dumps(finite_or_null(document)))
    settings = {key: value for key, value in whole.items() if key not in _RESULTS}
    passes = [[one["statistics"], one.get("contaminated")] for one in whole.get("figures", ())]
    text = json.dumps([settings, passes], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    path = folder / f"evaluation-{whole['split']}-step{whole['step']}-{digest}.json"
    write_sealed(path, whole)
    return path
