"""`python -m hf_grpo_ext explain`."""

from .explain import main

main()
