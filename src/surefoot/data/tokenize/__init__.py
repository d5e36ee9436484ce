"""From conversations to token ids with a label mask, on disk and in memory."""
