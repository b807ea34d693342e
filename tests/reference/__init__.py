"""Slow references for the mathematics: no line of them is shared with `hf_grpo_ext`.

| file | road | gradient |
| --- | --- | --- |
| `loss.py` | float64, one loop over rows and one over tokens | derived by hand, token by token |
| `loss_jax.py` | JAX, float64, whole arrays | `jax.grad` with `stop_gradient` |
| `advantages.py` | float64, one loop over rows | none |
| `compare.py` | calls the package and compares; the only file here that imports it | |

They were written from the papers and the project's design, before its code was read. What was then taken over from the
code, where both are silent, is the list of choices at the head of each file.
"""
