"""The target model (verifier): loading, backends, capture of its hidden states, prompts."""
