"""Image-text models of the program with weights that another program saved, and their logits."""

import torch
from safetensors.torch import save_file

import run_vit_training
from tests.fakes.filled import filled
from training.checkpoints.format import SavedRun
from training.flags import flat
from training.resolve import resolve_common, resolve_model
from training.schedule import Position
from training.weights.adapt import adapt
from training.weights.describe import take_over_described
from training.weights.files import run_as_metadata
from training.weights.find import find


def configured(path, *flags, unchanged=False):
    """The configuration with what files next to weights say, and the weights."""
    words = ["--fake_data", "--init_from", path, "--batch_size", 4, *flags]
    config = run_vit_training.read_flags([*map(str, words)]).run
    config, source = take_over_described(config, find(path, "--init_from"), keeps_head=unchanged)
    config, spec = resolve_model(resolve_common(config))
    return config, spec, source


def loaded(path, *flags, unchanged=False):
    """The spec, and the model filled as before a training."""
    _, spec, source = configured(path, *flags, unchanged=unchanged)
    adapter = adapt(source, spec, unchanged=unchanged)
    model = spec.build()
    for name, unit in spec.units(model):
        adapter.initialize(unit, name)
    return spec, model.eval(), adapter


def drawn(spec, texts=3, images=4):
    """Images and texts, each with an end of text, the largest number."""
    generator = torch.Generator().manual_seed(1)
    text = spec.config.text
    tokens = torch.randint(text.vocab_size - 1, (texts, text.length), generator=generator)
    ends = torch.randint(1, text.length, (texts,), generator=generator)
    tokens[torch.arange(texts), ends] = text.vocab_size - 1
    return torch.randn(images, *spec.sizes.input_shape, generator=generator), tokens


@torch.no_grad()
def logits(model, images, tokens):
    """The logits of each image, (images, texts)."""
    count = max(len(images), len(tokens))
    rows = [torch.arange(count) % len(each) for each in (images, tokens)]
    found = model((images[rows[0]], tokens[rows[1]].int()))
    products = found.images[: len(images)] @ found.texts[: len(tokens)].T
    return found.scale[0] * products + found.bias[0]


def randomize(model, seed=0):
    """Give a model weights that let every setting matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("logit_scale", "logit_bias")):
                parameter.fill_(2.0)
            elif parameter.dim() > 1:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
                )
            else:
                is_norm = ("norm" in name or "ln_" in name) and name.endswith("weight")
                values = 0.2 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(values + is_norm)
    return model.eval()


def of_flags(*flags):
    """A configuration, and the model with random weights."""
    words = ["--fake_data", "--batch_size", "4", *flags]
    config = resolve_common(run_vit_training.read_flags(words).run)
    config, spec = resolve_model(config)
    return config, spec, randomize(filled(spec))


def write_run(path, *flags):
    """Save a model with random weights, as ``as_run``."""
    config, _, model = of_flags(*flags)
    return as_run(config, model, path)


def as_run(config, model, path):
    """Save a model as a .safetensors file of a run with this configuration."""
    run = SavedRun(path, Position(), flat(config))
    save_file(model.state_dict(), path, {"format": "pt"} | run_as_metadata(run))
    return path
