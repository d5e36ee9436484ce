"""From files of many formats to batches; a record passes sources, formats, chat, tokenize and batching in order."""
