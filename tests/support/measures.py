"""Evaluate without a backend."""

from training.objectives.base import OF_IMAGES, without_padding


def add_batch(measure, model, batch):
    """Add what ``measure`` finds in a batch on the host."""
    values = measure.of_batch(model, batch)
    of_images = values.pop(OF_IMAGES, None)
    read = {name: value.flatten().tolist() for name, value in values.items()}
    if of_images:
        read[OF_IMAGES] = without_padding(of_images)
    measure.add(read)
