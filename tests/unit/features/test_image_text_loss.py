"""The losses of images and texts: equal to plain formulas in fp64, whatever the chunks; memory."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.batch import PADDING
from features.image_text.loss import Pairs, contrast, loss_by_chance, rows_of_chunk
from training.backend import scan_eagerly

pytestmark = pytest.mark.fast

WIDTH = 24
SAME = SimpleNamespace(all_gather=lambda x: x, scan=scan_eagerly)
"""All replicas in one process."""


def plain_siglip(images, texts, scale, bias):
    """As in the paper's algorithm 1."""
    logits = scale * images @ texts.T + bias
    labels = 2 * torch.eye(len(images), dtype=logits.dtype) - 1
    return -F.logsigmoid(labels * logits).sum() / len(images)


def plain_clip(images, texts, scale, bias):
    """As in the paper's figure 3."""
    logits = scale * images @ texts.T + bias
    labels = torch.arange(len(images))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


PLAIN = {"siglip": plain_siglip, "clip": plain_clip}


def drawn(replicas, each, scale, bias):
    torch.manual_seed(0)
    shape = replicas, each, WIDTH
    images, noise = F.normalize(torch.randn(shape), dim=-1), torch.randn(shape)
    texts = F.normalize(images + noise, dim=-1)
    ones = torch.ones(replicas, each)
    return Pairs(images, texts, scale * ones, bias * ones)


def expected(kind, pairs, factor=1.0):
    """The loss, and its gradients, in fp64."""
    images, texts = (x.flatten(0, 1).double().requires_grad_() for x in pairs[:2])
    scale, bias = (x.flatten()[0].double().requires_grad_() for x in pairs[2:])
    loss = PLAIN[kind](images, texts, scale, bias)
    (factor * loss).backward()
    return loss.detach(), [x.grad for x in (images, texts, scale, bias)]


def assert_same(kind, pairs, found):
    loss, gradients, nearest = found
    whole, parts = expected(kind, pairs)
    similar = (pairs.images.flatten(0, 1) @ pairs.texts.flatten(0, 1).T).double()
    own = torch.arange(len(similar))
    shares = torch.stack([(similar.argmax(side) == own).float().mean() for side in (1, 0)])
    torch.testing.assert_close(nearest, shares, rtol=1e-6, atol=0)
    # Logits near 100 have a spacing of 8e-6.
    tolerance = 1e-6 if pairs.scale.max() < 64 else 4e-6
    torch.testing.assert_close(loss.double(), whole, rtol=tolerance, atol=0)
    images, texts, scale, bias = (x.double() for x in gradients)
    for given, wanted in ((images.flatten(0, 1), parts[0]), (texts.flatten(0, 1), parts[1])):
        assert (given - wanted).norm() < tolerance * wanted.norm()
    torch.testing.assert_close(scale.sum(), parts[2], rtol=2e-6, atol=1e-9)
    torch.testing.assert_close(bias.sum(), parts[3], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize(("scale", "bias"), [(10.0, -10.0), (1 / 0.07, 0.0), (100.0, 3.0)])
@pytest.mark.parametrize(
    ("replicas", "each", "rows"), [(1, 1, 1), (1, 37, 5), (4, 9, 9), (4, 9, 2), (8, 1, 1)]
)
def test_equal_to_the_formula(kind, scale, bias, replicas, each, rows):
    if replicas * each == 1 and kind == "clip":
        pytest.skip("its gradient is zero")
    pairs = drawn(replicas, each, scale, bias)
    ids = torch.randperm(replicas * each, dtype=torch.int32).view(replicas, each)
    chunk_bytes = 8 * replicas * (each + WIDTH) * rows
    assert rows_of_chunk(replicas, each, WIDTH, chunk_bytes) <= rows
    found = contrast(kind, pairs, ids, replicas * each, SAME, chunk_bytes=chunk_bytes)
    assert_same(kind, pairs, found)


@pytest.mark.parametrize("kind", PLAIN)
def test_padding_counts_for_nothing(kind):
    pairs = drawn(2, 6, 10.0, -2.0)
    ids = torch.arange(12, dtype=torch.int32).view(2, 6)
    ids[1, 4:] = PADDING
    for values in pairs[:2]:
        values[1, 4:] = 7.0
    loss, gradients, nearest = contrast(kind, pairs, ids, torch.tensor(10), SAME, padded=True)
    present = Pairs(*(x.flatten(0, 1)[None, :10] for x in pairs))
    ids = torch.arange(10, dtype=torch.int32)[None]
    assert nearest.equal(contrast(kind, present, ids, 10, SAME).nearest)
    whole, parts = expected(kind, present)
    torch.testing.assert_close(loss.double(), whole, rtol=1e-6, atol=0)
    for given, wanted in zip(gradients[:2], parts[:2], strict=True):
        assert not given[1, 4:].any()
        torch.testing.assert_close(given.flatten(0, 1)[:10].double(), wanted, rtol=0, atol=1e-6)
    ids = torch.cat([ids, ids.new_full((1, 2), PADDING)], dim=1).view(2, 6)
    how = {"padded": True, "gradients": False}
    assert contrast(kind, pairs, ids, torch.tensor(10), SAME, **how).loss == loss


@pytest.mark.parametrize("kind", PLAIN)
def test_a_collapsed_model_finds_nothing(kind):
    pairs, ids = drawn(1, 40, 10.0, -10.0), torch.arange(40, dtype=torch.int32)[None]
    same = pairs._replace(images=torch.ones_like(pairs.images), texts=torch.ones_like(pairs.texts))
    chunks = 8 * (40 + WIDTH) * 16
    assert not contrast(kind, same, ids, 40, SAME, chunk_bytes=chunks).nearest.any()


def test_chunks_stay_small_for_any_batch():
    for replicas in (1, 8, 256, 4096):
        for each in (1, 7, 128, 4096, 4099, 2**16):
            rows = rows_of_chunk(replicas, each, 1152)
            held = 8 * replicas * rows * (each + 1152)
            assert held <= 24 * 2**20 or rows == 1
            assert 1 <= rows <= each


class Held(TorchDispatchMode):
    """Counts the bytes of tensors that exist at the same time, of those made inside."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self._add(each.untyped_storage())
        return result

    def _add(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._drop(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def _drop(self, key, size):
        del self._alive[key]
        self.now -= size


def held(kind, replicas, each, chunk_bytes):
    """The peak bytes of a loss in a process with one of several replicas."""
    pairs = drawn(1, each, 10.0, -10.0)
    ids = torch.arange(each, dtype=torch.int32)[None]
    one_of = SimpleNamespace(
        all_gather=lambda x: x.expand(replicas, *x.shape[1:]).contiguous(), scan=scan_eagerly
    )
    count = replicas * each
    with Held() as mode:
        contrast(kind, pairs, ids, count, one_of, chunk_bytes=chunk_bytes)
    return mode.peak


@pytest.mark.parametrize("kind", PLAIN)
def test_nothing_but_the_result_is_kept(kind):
    """Not until Python's next collection either: XLA would compute it as part of the next step."""
    pairs, ids = drawn(1, 8, 10.0, -10.0), torch.arange(8, dtype=torch.int32)[None]
    gc.disable()
    try:
        with Held() as mode:
            contrast(kind, pairs, ids, 8, SAME)
        given = sum(each.nbytes for each in (*pairs, ids))  # of which there are views
        assert mode.now <= given < mode.peak
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("pairs", [2, 128])
def test_the_loss_by_chance_is_the_least_without_similarities(pairs, kind):
    nothing = torch.zeros(pairs, WIDTH, dtype=torch.float64)
    biases = torch.linspace(-10, 5, 3001, dtype=torch.float64)
    least = min(PLAIN[kind](nothing, nothing, 1.0, bias) for bias in biases)
    assert loss_by_chance(kind, pairs) == pytest.approx(least.item(), rel=1e-5)


@pytest.mark.parametrize("kind", PLAIN)
def test_memory_grows_with_the_pairs_of_a_replica(kind):
    """And with neither their square, nor the pairs of all replicas."""
    chunk = 2**18
    few, more, most = (held(kind, 4, each, chunk) for each in (256, 512, 1024))
    assert more < 2.1 * few
    assert most < 2.1 * more
    among_many, logits = held(kind, 32, 1024, chunk), 4 * 1024 * 32 * 1024
    # Numbers of pairs and sums are those of all texts, 4 bytes each.
    assert among_many < most + 2 * chunk + 4 * 4 * 32 * 1024
    assert among_many < logits / 32
