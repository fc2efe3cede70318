"""Recall over all pairs: as open_clip ranks them, with several texts an image, in chunks."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from features.image_text.report import found_by_image
from features.image_text.retrieval import (
    EmbeddedPairs,
    Items,
    Links,
    PairEvaluation,
    evaluate_pairs,
    ids_of_texts,
    ranks,
)
from tests.unit.features.test_image_text_loss import PLAIN

pytestmark = pytest.mark.fast

WIDTH = 16


def pairs(images, texts, ids, counts=None, noise=2.0):
    """Random pairs: ``ids`` (images, texts) says which texts are the same one."""
    torch.manual_seed(3)
    of_id = torch.randn(int(ids.max()) + 1, WIDTH)
    text = of_id[ids] if texts is None else texts
    image = text[:, 0] + noise * torch.randn(images, WIDTH)
    counts = torch.full((images,), ids.shape[1]) if counts is None else counts
    exists = torch.arange(ids.shape[1]) < counts[:, None]
    numbers = torch.randperm(images)
    normalized = (F.normalize(x, dim=-1) for x in (image, text))
    return EmbeddedPairs(numbers, *normalized, ids, exists)


def by_open_clip(pairs):
    """The ranks of its ``get_clip_metrics``: the place of each own one in the sorted row."""
    logits = (pairs.images @ pairs.texts[:, 0].T).numpy()
    found = {}
    for direction, rows in (("image_to_text", logits), ("text_to_image", logits.T)):
        order = np.argsort(-rows, axis=1)
        place = np.where(order == np.arange(len(rows))[:, None])[1]
        found[direction] = {k: 100 * np.mean(place < k) for k in (1, 5, 10)}
    return found


def by_hand(pairs):
    """Image by image and text by text, over the different texts."""
    texts, own = {}, []
    for row, ids in enumerate(pairs.text_ids.tolist()):
        here = [n for place, n in enumerate(ids) if pairs.exists[row, place]]
        own.append(set(here))
        for place, number in enumerate(here):
            texts.setdefault(number, pairs.texts[row, place].numpy())
    images = pairs.images.numpy()
    similar = {n: images @ text for n, text in texts.items()}
    ranks = {"image_to_text": [], "text_to_image": []}
    for row, mine in enumerate(own):
        best = max(similar[n][row] for n in mine)
        ranks["image_to_text"].append(sum(similar[n][row] >= best for n in texts if n not in mine))
    for number, values in similar.items():
        right = np.array([number in mine for mine in own])
        ranks["text_to_image"].append(int((values[~right] >= values[right].max()).sum()))
    return {
        direction: {k: 100 * np.mean(np.array(found) < k) for k in (1, 5, 10)}
        for direction, found in ranks.items()
    }


def same_recalls(found, expected):
    for direction, by_rank in expected.items():
        assert found.recalls[direction] == pytest.approx(by_rank)


@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_one_text_an_image_is_as_in_open_clip(noise):
    drawn = pairs(57, None, torch.arange(57)[:, None], noise=noise)
    found = evaluate_pairs(drawn, "siglip", 10.0, -10.0)
    same_recalls(found, by_open_clip(drawn))
    same_recalls(found, by_hand(drawn))
    assert (found.images, found.texts) == (57, 57)
    assert 0 < found.values["val_recall_at_1"] < 100
    first = [found.recalls[name][1] for name in found.recalls]
    assert found.values["val_recall_at_1"] == pytest.approx(sum(first) / 2)
    assert found.values["val_text_to_image_r5"] == found.recalls["text_to_image"][5]
    assert f"recall@1/5/10 {first[0]:.2f}/" in str(found)


def test_several_texts_an_image_and_texts_of_several_images():
    torch.manual_seed(0)
    ids, counts = torch.randint(30, (41, 3)), torch.randint(1, 4, (41,))
    drawn = pairs(41, None, ids, counts)
    drawn.texts[~drawn.exists] = 9.0  # padding counts for nothing
    found = evaluate_pairs(drawn, "clip", 10.0, 0.0)
    same_recalls(found, by_hand(drawn))
    assert found.texts == len(
        {n for row, c in zip(ids, counts, strict=True) for n in row[:c].tolist()}
    )
    # Shuffled, as over other devices, it is the same.
    order = torch.randperm(41)
    again = evaluate_pairs(EmbeddedPairs(*(x[order] for x in drawn)), "clip", 10.0, 0.0)
    assert again.recalls == found.recalls
    assert again.loss == pytest.approx(found.loss, rel=1e-6)


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_a_collapsed_or_diverged_model_is_never_right(value):
    drawn = pairs(30, None, torch.arange(30)[:, None])
    drawn.images[:], drawn.texts[:] = value, value
    found = evaluate_pairs(drawn, "siglip", 1.0, 0.0)
    assert {*found.recalls["image_to_text"].values()} == {0.0}
    assert {*found.recalls["text_to_image"].values()} == {0.0}


@pytest.mark.parametrize("kind", PLAIN)
def test_the_loss_is_that_of_all_pairs(kind):
    drawn = pairs(75, None, torch.arange(75)[:, None])
    found = evaluate_pairs(drawn, kind, 12.0, -3.0).loss
    wide = (x.double() for x in (drawn.images, drawn.texts[:, 0]))
    assert found == pytest.approx(PLAIN[kind](*wide, 12.0, -3.0).item(), rel=1e-6)


def test_no_pairs():
    none = EmbeddedPairs(*(x[:0] for x in pairs(3, None, torch.arange(3)[:, None])))
    found = evaluate_pairs(none, "siglip", 10.0, -10.0)
    assert not found.images
    assert "val_recall_at_1" not in found.values
    assert isinstance(found, PairEvaluation)


def test_padding_between_candidates_is_none():
    """As that of processes with fewer texts than the others."""
    drawn = pairs(40, None, torch.arange(40)[:, None])
    links = Links.of(drawn)
    texts = Items(*(torch.cat([x[:1], x[:1], x[1:25], x[:3], x[25:]]) for x in links.texts))
    texts.numbers[1], texts.numbers[26:29] = -1, -1
    expected = ranks(links.images, links.texts, links.pairs)
    assert len({*expected.tolist()}) > 5
    assert torch.equal(ranks(links.images, texts, links.pairs), expected)


def test_no_tensor_is_as_large_as_the_matrix():
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.elements = max(self.elements, result.numel())
            return result

    images = 4000
    drawn = pairs(images, None, torch.arange(images)[:, None])
    with Largest() as largest:
        evaluate_pairs(drawn, "siglip", 10.0, -10.0)
    assert images * 100 < largest.elements < images**2 / 4


def test_equal_tokens_are_one_text():
    tokens = np.array([[[1, 2, 3], [1, 2, 4]], [[1, 2, 3], [3, 2, 1]]], np.int32)
    ids = ids_of_texts(tokens)
    assert ids.shape == (2, 2)
    assert ids[0, 0] == ids[1, 0]
    assert len({*ids.flatten().tolist()}) == 3


def test_the_nearest_texts_of_each_image():
    ids = torch.tensor([[0, 1], [2, 0], [3, 4], [5, 6], [1, 7], [8, 9]])
    drawn = pairs(6, None, ids, torch.tensor([2, 2, 1, 2, 2, 2]))
    found = found_by_image(drawn)
    assert found["index"].tolist() == list(range(6))
    assert found_by_image(drawn, [1, 4, 9]).tobytes() == found[[1, 4]].tobytes()
    for row in found:
        (place,) = (drawn.numbers == int(row["index"])).nonzero()[0].tolist()
        similarities = {}
        for image in range(6):
            for column in range(2):
                if drawn.exists[image, column]:
                    text = drawn.texts[image, column]
                    similarities[int(ids[image, column])] = float(text @ drawn.images[place])
        own = drawn.texts[place][drawn.exists[place]] @ drawn.images[place]
        assert row["own"] == own.argmax()
        assert row["own_similarity"] == pytest.approx(own.max().item(), abs=1e-6)
        nearest = sorted(similarities, key=similarities.get, reverse=True)[:5]
        shown = []
        for image, column in zip(row["of_image"], row["place"], strict=True):
            (there,) = (drawn.numbers == int(image)).nonzero()[0].tolist()
            shown.append(int(ids[there, column]))
        assert shown == nearest
        expected = [similarities[n] for n in nearest]
        assert row["similarity"].tolist() == pytest.approx(expected, abs=1e-6)
