"""A run's checkpoints: their files on a disk (format, disk), how a run saves (save, async_save) and loads (load) them.
The part of a tensor that a rank writes and reads is boxes.py's."""
