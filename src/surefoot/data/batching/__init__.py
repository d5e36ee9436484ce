"""From tokenized examples to the micro-batches of each optimizer step: order, packing, loading."""
