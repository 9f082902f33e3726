"""Every flag of every verb, defined once: its name, type, default and help.

    settings = SearchSettings.of(num_pairs=4, parents=3)    # flags by their names, whichever group they are in
    settings = settings.replace(limit=20)
    settings.ga.parents                                     # 3; `settings.ga` is what the genetic algorithm is given

A verb's settings are a tree: a frozen dataclass of groups (`task`, `prompt`, `ga`, ...), each a frozen dataclass of flags.
`groups.py` has the groups that several verbs share, `search.py`, `evaluate.py`, `compare.py`, `export.py`, `profile.py` and
`doctor.py` have the trees and each verb's own groups. `tree.py` finds a flag in a tree by its name.

No module here imports JAX or NumPy, so that `--help` and the complaint about a wrong flag come at once.
"""

from lpes_jax.settings.tree import Settings as Settings
