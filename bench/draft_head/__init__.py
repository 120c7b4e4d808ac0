"""Training of an EAGLE-style draft head on text that its target writes; `bench/train_draft_head.py` is the command."""
