"""What an evaluation of pairs found, image by image: the report of ``--eval_report``, pictures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from data.batch import PADDING
from data.files import BrokenImageError, DataFolderError
from data.source import Split
from features.image_text.captions import read_captions
from features.image_text.measures import PairRetrieval
from features.image_text.pictures import (
    SIDE,
    NearTexts,
    nearest_figure,
    pixels_of,
    similarity_figure,
    without_glyph_warnings,
)
from features.image_text.retrieval import (
    RANKS,
    EmbeddedPairs,
    Items,
    Links,
    PairEvaluation,
    chunks_of,
    gathered,
    ranks,
)
from training.evaluation.report import PageTable, Report, Rows, number
from training.logs.figures import drawing, save_figure, spread
from training.logs.records import Evaluation
from training.loop import Hook, Session
from training.processes import exchange
from training.schedule import Position

if TYPE_CHECKING:
    from PIL import Image

    from features.image_text.objective import ImageTextPairs

TABLE, SIMILARITY, NEAREST = "retrieval.csv", "similarity", "nearest_texts"
_NEAREST = 5
"""How many of the texts most similar to an image are shown."""
_IN_MATRIX, _IN_PICTURE = 10, 8
"""The largest numbers of images in the two pictures."""

FOUND = np.dtype(
    [
        ("index", np.int64),
        ("rank", np.int64),
        ("own", np.int64),
        ("own_similarity", np.float32),
        ("of_image", np.int64, (_NEAREST,)),
        ("place", np.int64, (_NEAREST,)),
        ("similarity", np.float32, (_NEAREST,)),
    ]
)
"""What one image is most similar to: its number in its split; how many wrong texts are at least as
similar as its most similar own one; the place of that one among its texts, and its similarity; and
the nearest texts, each by the number of an image that has it (PADDING: there are not so many) and
its place among the texts of that image, with its similarity."""


# -- what is known of each image -------------------------------------------------------------------


def found_by_image(mine: EmbeddedPairs, only: Sequence[int] | None = None) -> np.ndarray:
    """Return what this process's images are most similar to, (images,), of dtype FOUND, in their
    order; all processes must call it. ``only``: the numbers of some images; None: all."""
    links, order = Links.of(mine), mine.numbers.argsort()
    images = links.images
    if only is not None:
        chosen = torch.isin(mine.numbers[order], torch.tensor(only))
        images, order = Items(*(x[chosen] for x in images)), order[chosen]
    found = np.empty(len(order), FOUND)
    found["index"] = mine.numbers[order]
    found["rank"] = ranks(images, links.texts, links.pairs)
    similarities = torch.einsum("iw,itw->it", mine.images[order], mine.texts[order])
    best = similarities.where(mine.exists[order], -torch.inf).max(1)
    found["own"], found["own_similarity"] = best.indices, best.values
    values, numbers = nearest(images, links.texts, _NEAREST)
    of_image, place = links.shown_by[:, numbers.clamp(min=0)].masked_fill(numbers < 0, PADDING)
    found["of_image"], found["place"], found["similarity"] = of_image, place, values
    return found


def nearest(queries: Items, candidates: Items, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the similarities and the numbers of the candidates of all processes that are most
    similar to this process's queries, both (queries, count); -inf and PADDING where there are
    fewer. All processes must call it."""
    values = torch.full((len(queries.numbers), count), -torch.inf)
    numbers = torch.full((len(queries.numbers), count), PADDING)
    for part in chunks_of(candidates, len(queries.numbers)):
        here = (queries.embeddings @ part.embeddings.T).masked_fill(
            part.numbers == PADDING, -torch.inf
        )
        values, places = torch.cat([values, here], dim=1).topk(count)
        known = torch.cat([numbers, part.numbers.expand(len(numbers), -1)], dim=1)
        numbers = known.gather(1, places)
    return values, numbers


def texts_of(split: Split, index: int) -> list[str]:
    """Return the texts of an image; of a source that gives tokens alone, what stands for them."""
    try:
        return read_captions(split, index)
    except (BrokenImageError, DataFolderError):
        return [f"text of {split.name_of(index)}"]


def text_at(split: Split, index: int, place: int) -> str:
    texts = texts_of(split, index)
    return texts[min(place, len(texts) - 1)]


def own_text(split: Split, row: np.void) -> str:
    """Return the most similar own text of the image of a row of dtype FOUND."""
    return text_at(split, int(row["index"]), int(row["own"]))


def near_texts(split: Split, row: np.void) -> Iterator[tuple[str, float, bool]]:
    """Yield the texts nearest to the image of a row of dtype FOUND: each with its similarity, and
    whether it is one of the image's own."""
    own = texts_of(split, int(row["index"]))
    columns = (row[name].tolist() for name in ("of_image", "place", "similarity"))
    for of_image, place, similarity in zip(*columns, strict=True):
        if of_image != PADDING:
            text = text_at(split, of_image, place)
            yield text, similarity, text in own


# -- the report ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RetrievalReport(Report):
    """The texts that are most similar to each image. ``errors`` and ``found`` are of dtype FOUND;
    errors are the images that a wrong text is nearest to."""

    found: np.ndarray
    matrix: tuple[np.ndarray, Sequence[int]]
    """Similarities of some images and their first texts, and the numbers of these images."""
    result: PairEvaluation

    definitions = (
        "recall@k: the share of images that have one of their own texts among the k most similar "
        "of all different texts, and of texts likewise. Of equally similar ones, wrong ones count "
        "first."
    )
    pictured = "Similarities"
    mistake = ("image", "nearest to a text of others")
    listed_in = TABLE
    hint = "Each is shown with the text nearest to it."

    @property
    def title(self) -> str:
        return f"report on {len(self.found):,} images with texts"

    def _row(self, row: np.void) -> dict[str, Any]:
        near = near_texts(self.split, row)
        return {
            "path": self.path_of(row),
            "texts": texts_of(self.split, int(row["index"])),
            "own": own_text(self.split, row),
            "rank": int(row["rank"]) + 1,
            "similarity": number(row["own_similarity"]),
            "nearest": [{"text": text, "similarity": number(value)} for text, value, _ in near],
        }

    @property
    def values(self) -> dict[str, Any]:
        return {"texts": self.result.texts, "errors": [self._row(row) for row in self.errors]}

    def tables(self) -> Mapping[str, Rows]:
        header = ["path", "texts", "rank", "similarity"]
        for place in range(1, _NEAREST + 1):
            header += [f"nearest_{place}", f"similarity_{place}"]
        rows: Rows = [header]
        for row in map(self._row, self.found):
            cells = [row["path"], " | ".join(row["texts"]), row["rank"], _shown(row["similarity"])]
            for near in row["nearest"]:
                cells += [near["text"], _shown(near["similarity"])]
            rows.append(cells + [""] * (len(header) - len(cells)))
        return {TABLE: rows}

    def pictures(self) -> Mapping[str, Callable[[Path], None]]:
        def save(name: str, path: Path) -> None:
            with without_glyph_warnings():
                save_figure(figures_of(self.split, self.found, self.matrix)[name](), path)

        return {f"{name}.png": functools.partial(save, name) for name in (SIMILARITY, NEAREST)}

    def summary(self, result: Evaluation) -> Mapping[str, str]:
        recalls = {
            f"{direction.replace('_', ' ')}, recall@{k}": f"{by_rank[k]:.2f} %"
            for direction, by_rank in self.result.recalls.items()
            for k in RANKS
        }
        middle = f"{np.median(self.found['rank']) + 1:g}"
        return {
            "different texts": f"{self.result.texts:,}",
            **recalls,
            "median rank of an image's own text": middle,
            "loss of all pairs": f"{result.loss:.4f}",
        }

    def page_table(self) -> PageTable:
        drawn = [self.found[place] for place in spread(_IN_PICTURE, len(self.found))]
        rows = []
        for row in map(self._row, drawn):
            near = row["nearest"][0]
            rows.append([
                row["path"], row["own"], f"{row['rank']:,}", _shown(row["similarity"]),
                near["text"], _shown(near["similarity"]),
            ])  # fmt: skip
        header = "image|its text|rank of its text|similarity|nearest text|similarity"
        note = f"{len(rows)} of {len(self.found):,} images: {TABLE} has all."
        return PageTable("Images and texts", header.split("|"), rows, (1, 2, 5), note)

    def caption(self, error: np.void) -> tuple[str, str, str, str]:
        text, similarity, _ = next(near_texts(self.split, error))
        rank = f"(rank {int(error['rank']) + 1:,}); nearest:"
        return own_text(self.split, error), rank, text, f", {similarity:.2f}"


def _shown(similarity: float | None) -> str:
    return "" if similarity is None else f"{similarity:.4f}"


def gather_report(measure: PairRetrieval, split: Split) -> RetrievalReport | None:
    """Return the report in the first process, None in the others; all must call it."""
    mine, result = measure.pairs(), measure.result()
    found, matrix = in_order(found_by_image(mine)), matrix_of(mine, len(split))
    if exchange.rank():
        return None
    errors = found[found["rank"] > 0]
    errors = errors[np.lexsort((errors["index"], -errors["rank"]))]
    return RetrievalReport((), split, errors, found, matrix, result)


def in_order(found: np.ndarray) -> np.ndarray:
    """Return, in the first process, what was found by all processes, in the order of the images;
    all must call it."""
    rows = exchange.gather_rows(found)
    return rows[rows["index"].argsort()]


def matrix_of(mine: EmbeddedPairs, count: int) -> tuple[np.ndarray, Sequence[int]]:
    """Return the similarities of a few of the ``count`` images of a split and their first texts,
    (images, images), and the numbers of these images; all processes must call it."""
    is_chosen = torch.isin(mine.numbers, torch.tensor(spread(_IN_MATRIX, count)))
    parts = (mine.numbers, mine.images, mine.texts[:, 0])
    numbers, images, texts = (torch.cat(gathered(part[is_chosen])) for part in parts)
    order = numbers.argsort()
    return (images[order] @ texts[order].T).numpy(), numbers[order].tolist()


# -- pictures --------------------------------------------------------------------------------------


def figures_of(
    split: Split, found: np.ndarray, matrix: tuple[np.ndarray, Sequence[int]]
) -> dict[str, Callable[[], Any]]:
    """Return the functions that draw the two figures, by name."""
    similarities, numbers = matrix

    def draw_matrix() -> Any:
        texts = [texts_of(split, index)[0] for index in numbers]
        return similarity_figure(similarities, [_image(split, index) for index in numbers], texts)

    def draw_nearest() -> Any:
        drawn = (found[place] for place in spread(_IN_PICTURE, len(found)))
        return nearest_figure([
            NearTexts(
                _image(split, int(row["index"])),
                own_text(split, row),
                int(row["rank"]) + 1,
                list(near_texts(split, row)),
            )
            for row in drawn
        ])  # fmt: skip

    return {SIMILARITY: draw_matrix, NEAREST: draw_nearest}


def _image(split: Split, index: int) -> Image.Image:
    return split.thumbnail(index, SIDE)


@dataclass
class PairPictures(Hook):
    """Draws the two pictures after each evaluation; called after the hook that evaluates."""

    session: Session
    objective: ImageTextPairs
    split: Split

    def reached(self, at: Position) -> None:
        measure, self.objective.measured_last = self.objective.measured_last, None
        if measure is None or not measure.is_complete:
            return
        mine, count = measure.pairs(), len(self.split)
        found = in_order(found_by_image(mine, spread(_IN_PICTURE, count)))
        matrix = matrix_of(mine, count)
        reports = self.session.reports
        if not self.session.backend.is_main or not len(found):
            return
        for name, draw in figures_of(self.split, found, matrix).items():
            with drawing(Path(f"{name}.png"), reports.say), without_glyph_warnings():
                reports.picture(name, pixels_of(draw()), at.step)
