"""How fast an attention is and what it takes: time, memory, the traffic of a model, and the deviation beside them."""
