"""Image-text pre-training: SigLIP and CLIP (``--objective siglip``, ``clip``)."""
