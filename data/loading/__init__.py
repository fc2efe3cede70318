"""How images become batches: their order, who loads which, and the processes that load them."""
