"""Prints, as JSON, what the losses of images and texts are on 4 virtual devices whose chunks are
rounds of a loop, by kind: the relative difference from the formula in fp64, with padding and
without; the loops in the graph; and how many graphs a second step compiles."""

import json

import torch
import torch_xla
import torch_xla.debug.metrics as met

from data.batch import PADDING
from features.image_text.loss import Pairs, contrast, rows_of_chunk
from tests.support.resolved import on_xla
from tests.unit.features.test_image_text_loss import PLAIN, WIDTH, drawn, expected
from xla_fsdp.launch_xla import launch

REPLICAS, EACH, ROWS = 4, 13, 3
"""Four chunks and a smaller one."""
CHUNK_BYTES = 8 * REPLICAS * (EACH + WIDTH) * ROWS


def measure(_, backend) -> None:
    assert rows_of_chunk(REPLICAS, EACH, WIDTH, CHUNK_BYTES) == ROWS
    print(json.dumps({kind: compared(kind, backend) for kind in PLAIN}))


def compared(kind, backend) -> dict[str, object]:
    pairs = drawn(REPLICAS, EACH, 10.0, -2.0)
    ids = torch.arange(REPLICAS * EACH, dtype=torch.int32).view(REPLICAS, EACH)
    whole, loops, _ = on_devices(kind, backend, pairs, ids, padded=False)
    again = Pairs(pairs.texts, pairs.images, *pairs[2:])
    second, _, compiled = on_devices(kind, backend, again, ids, padded=False)
    ids[-1, 10:] = PADDING
    padded, _, _ = on_devices(kind, backend, pairs, ids, padded=True)
    present = Pairs(*(x.flatten(0, 1)[None, :-3] for x in pairs))
    return {
        "differences": [
            difference(kind, *each) for each in ((pairs, whole), (again, second), (present, padded))
        ],
        "loops": loops,
        "compiled again": compiled,
    }


def on_devices(kind, backend, pairs, ids, *, padded):
    """Return the contrast on the host, the loops in its graph, and how many graphs it compiled."""
    before = compiled_graphs()
    placed = backend.put({**pairs._asdict(), "ids": ids}, {})
    count = int((ids != PADDING).sum())
    ids = placed.pop("ids")
    flags = {"padded": padded, "chunk_bytes": CHUNK_BYTES}
    found = contrast(kind, Pairs(**placed), ids, count, backend, **flags)
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([found.loss, *found.gradients])
    torch_xla.sync()
    on_host = found.loss.cpu(), *(each.cpu() for each in found.gradients)
    return on_host, hlo.count(" while("), compiled_graphs() - before


def compiled_graphs() -> int:
    return met.counter_value("UncachedCompile") or 0


def difference(kind, pairs, found) -> float:
    """The largest relative one of the loss and its gradients, beside fp64."""
    loss, parts = expected(kind, pairs)
    images, texts, scale, bias = (each.double() for each in found[1:])
    here = [x.flatten(0, 1)[: len(parts[0])] for x in (images, texts)]
    given = found[0].double(), *here, scale.sum(), bias.sum()
    wanted = loss, *parts
    # CLIP's loss does not depend on the bias.
    return max(
        ((a - b).norm() / b.norm().clamp(min=0.1)).item()
        for a, b in zip(given, wanted, strict=True)
    )


if __name__ == "__main__":
    launch(measure, on_xla("--cpu_devices 4 --fake_data --batch_size 8"))
