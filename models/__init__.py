"""Vision Transformers as plain ``nn.Module``s; no backend, no trainer."""
