"""Recording a target's hidden states in worker processes, one a backend: prompts in, traces out."""
