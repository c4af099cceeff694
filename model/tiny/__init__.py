"""The embedded tiny targets, the corpus they were trained on, and the script that trained them."""
