"""From files of many formats to batches: sources, formats, chat templates, tokens, order, packing."""
