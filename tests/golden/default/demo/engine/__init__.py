"""Engine: what must stay true, one module each; `train.py` decides when it happens."""
