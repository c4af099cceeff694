"""Families of drafters, by the name that `recipe.method` gives them.

A family is one line here: `module:attribute` of a `parity.model.family.DrafterFamily`, imported when it is first used,
so that a training file is read without torch.
"""

METHODS: dict[str, str] = {
    "dflash": "parity.model.dflash.family:DFLASH",
}
"""Name -> where the family is."""
DEFAULT_METHOD = "dflash"
"""What a recipe without `method` means; it is no part of such a recipe's hash."""
