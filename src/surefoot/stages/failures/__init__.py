"""What a run keeps of a step that went wrong, and `surefoot replay`, which takes that step again."""
