"""What the training loop in `train.py` is made of: the step, data, faults, devices, recovery.

Nothing here asks a question; the files beside `train.py` do.
"""
