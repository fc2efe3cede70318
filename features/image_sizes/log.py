"""The hook that logs the sizes of ``--image_size_schedule``."""

from dataclasses import dataclass, field

from features.image_sizes.schedule import SizeSchedule
from training.loop import Hook, Session
from training.schedule import Position
from training.step import TrainBatches


@dataclass
class SizeLog(Hook):
    """Logs the step at which the image size changes, or the sizes that are drawn."""

    session: Session
    batches: TrainBatches
    sizes: SizeSchedule
    _side: int | None = field(default=None, init=False)

    def reached(self, at: Position) -> None:
        sizes, say = self.sizes, self.session.reports.say
        if at.step >= self.session.last_step:
            return
        side = sizes.side(self.batches.number(at))
        if sizes.shares and side != self._side:
            say(f"image size {side} x {side} from step {at.step + 1:,}")
        elif self._side is None:
            sides = ", ".join(f"{side} x {side}" for side in sorted({*sizes.sides}))
            say(f"image size of each step drawn at random from {sides}")
        self._side = side
