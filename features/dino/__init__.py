"""Self-distillation: DINO, iBOT, KoLeo, and DINOv3's Gram loss (``--objective dino``)."""
