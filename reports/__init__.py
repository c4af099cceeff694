"""The answers: records (`record`), their JSON form (`schema`) and the painters (`to_*`).

Importing this package loads nothing; a painter loads what it needs (only `to_html` needs altair).
"""
