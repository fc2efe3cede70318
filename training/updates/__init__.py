"""How weights are changed by a step: rules, learning rates, averages, steps left out."""
