"""Count how often an update of a trainer updates the statistics of its model."""

import pytest

from acmoe.routing.statistics import ClusterStatistics
from acmoe.train.trainer import Trainer


def statistics_updated(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> list[ClusterStatistics]:
    """Take the first update; return the model's statistics, each as often as it was updated.

    Models of other tests that no optimizer holds may be updated, too. They are left out.
    """
    updated = []
    update = ClusterStatistics.update

    def counted(self: ClusterStatistics) -> None:
        updated.append(self)
        update(self)

    monkeypatch.setattr(ClusterStatistics, "update", counted)
    trainer.update(1, record=False)
    own = set(trainer.model.modules())
    return [statistics for statistics in updated if statistics in own]
