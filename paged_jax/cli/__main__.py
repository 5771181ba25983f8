"""`python -m paged_jax.cli`."""

from paged_jax.cli import main

raise SystemExit(main())
