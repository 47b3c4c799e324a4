"""Progress of an attack on several batches, which may take minutes for each."""

from acmoe.attacks.attack import work_of
from acmoe.config.images.attack import AnyAttack, eps_text
from acmoe.data.progress import Progress


class AttackProgress:
    """A function to give to `perturb` as `advance`: it reports the progress over all batches.

    `done` of the `batches` were attacked before.
    """

    def __init__(
        self, report: Progress, attack: AnyAttack, eps: float, *, batches: int, done: int = 0
    ) -> None:
        amount, unit = work_of(attack)
        self._report = report
        self._stage = f"{attack.name}, eps {eps_text(eps)}, {unit}"
        self._done, self._total = done * amount, batches * amount
        self(0)

    def __call__(self, amount: int) -> None:
        self._done += amount
        self._report(self._stage, self._done, self._total)
