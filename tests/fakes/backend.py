"""A backend without devices: what the start of a training asks of one, in one process."""

from dataclasses import dataclass

from data.source import FILES


@dataclass
class FakeBackend:
    is_main: bool = True
    batch_shard: int = 0
    batch_shards: int = 1
    image_rows: range = range(0)
    shards: tuple[int, ...] = (0,)
    device_count: int = 1
    teacher: None = None
    compiles: bool = False


@dataclass
class FakeData:
    """A source of images, as far as a checkpoint is compared with one."""

    images: int = 1438
    classes: list[str] | None = None
    files: str = "0123456789abcdef"
    name: str = "fake"

    def steps_of_epoch(self, batch_size: int) -> int:
        return self.images // batch_size

    def order(self) -> dict[str, object]:
        return {"the number of training images": self.images, FILES: self.files}
