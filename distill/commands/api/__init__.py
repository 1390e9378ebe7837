"""Use from Python: runs from a script or a notebook, and the parts of a distillation without configuration files."""
