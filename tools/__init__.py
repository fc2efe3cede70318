"""Tools around training. They import the training code, which never imports them."""
