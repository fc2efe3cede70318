"""Retrieval and zero-shot classification in plain PyTorch and NumPy, with the towers of timm and
transformers: a reference."""

import csv
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torchvision.transforms import v2

from features.image_text.config import ImageTextConfig
from tests.references.text_towers import text_tower


class PlainTowers:
    """The embeddings of a checkpoint's towers."""

    def __init__(self, run, weights):
        spec, flags = run.model, run.config.of(ImageTextConfig)
        self.length = flags.text.length
        self.image = VisionTransformer(**spec.arguments | {"num_classes": 0}).eval()
        names = self.image.state_dict()
        self.image.load_state_dict({name: weights[name] for name in names})
        self.text, self.projection = text_tower(flags.text, weights)
        self.text.eval()
        self.scale, self.bias = weights["logit_scale"].exp().item(), weights["logit_bias"].item()
        size = spec.sizes.input_shape[1:]
        self.read = v2.Compose([
            v2.Resize([round(side / 0.875) for side in size], v2.InterpolationMode.BICUBIC),
            v2.CenterCrop(size),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ])  # fmt: skip

    @torch.no_grad()
    def images(self, paths):
        """The embeddings of images."""
        pixels = torch.stack([self.read(Image.open(path).convert("RGB")) for path in paths])
        return F.normalize(self.image(pixels), dim=-1).double().numpy()

    @torch.no_grad()
    def texts(self, texts):
        """The embeddings of texts, by their bytes in UTF-8 and the number 256."""
        tokens = torch.full((len(texts), self.length), 256)
        for row, text in zip(tokens, texts, strict=True):
            content = list(text.encode())[: self.length - 1]
            row[: len(content)] = torch.tensor(content)
        return F.normalize(self.projection(self.text(tokens)), dim=-1).double().numpy()


def captions_of(table, root):
    """The captions of the validation images of a table, by path, in its order."""
    found = {}
    with open(table, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["split"] == "val":
                found.setdefault(Path(root) / row["path"], []).append(row["caption"])
    return found


def recalls(images, captions, embedded):
    """By direction, recall@k over all different texts. ``captions``: by image; ``embedded``: of
    each text."""
    similar = {text: images @ values for text, values in embedded.items()}
    ranks = {"image_to_text": [], "text_to_image": []}
    for row, own in enumerate(captions):
        best = max(similar[text][row] for text in own)
        ranks["image_to_text"].append(sum(similar[t][row] > best for t in similar if t not in own))
    for text, values in similar.items():
        right = np.array([text in own for own in captions])
        ranks["text_to_image"].append(int((values[~right] > values[right].max()).sum()))
    return {
        f"val_{direction}_r{k}": 100 * float(np.mean(np.array(found) < k))
        for direction, found in ranks.items()
        for k in (1, 5, 10)
    }


def siglip_loss(images, texts, scale, bias):
    """As in the paper's algorithm 1, in fp64."""
    logits = scale * images @ texts.T + bias
    labels = 2 * np.eye(len(images)) - 1
    return float(np.logaddexp(0, -labels * logits).sum() / len(images))


def classes_of(towers, names, prompts):
    """The embedding of each class: the mean over the prompts, normalized again."""
    means = [towers.texts([p.replace("{}", name) for p in prompts]).mean(0) for name in names]
    return np.stack([mean / np.linalg.norm(mean) for mean in means])
