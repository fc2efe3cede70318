"""Tools around training: they import the program, which imports none of them."""
