"""Training objectives: the interface, classification, and the flags that others read, too."""
